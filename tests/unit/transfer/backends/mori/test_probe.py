# SPDX-License-Identifier: Apache-2.0
"""Trying MORI-IO where it cannot hurt: the real library ends its process when something is missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.transfer.backends.mori import probe as mori_probe
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, open_engine, usable
from kvferry.transfer.rdma_devices import RdmaDevice
from tests.standins import mori_io
from tests.unit.transfer.backends.mori.rig import fault

ROOT = Path(__file__).parents[5]


@pytest.fixture
def standin() -> Iterator[None]:
    with mori_io.on_path():
        yield


def test_where_it_is_not_installed_it_says_so() -> None:
    if "mori" in sys.modules:
        pytest.skip("it is installed here")
    reason = usable("mori").reason
    assert reason.startswith("mori: not installed: "), reason
    assert "Python 3.12 (this is " in reason or sys.version_info[:2] == (3, 12)


@pytest.mark.parametrize(
    ("python", "libc", "version", "reason"),
    [
        ((3, 12), "glibc", "2.39", "pip install 'kvferry[mori]'"),
        ((3, 12), "glibc", "2.41", "pip install 'kvferry[mori]'"),
        ((3, 12), "glibc", "2.9", "amd-mori's wheel needs glibc 2.39 (this is glibc 2.9)"),
        ((3, 13), "glibc", "2.41", "amd-mori's wheel needs Python 3.12 (this is 3.13)"),
        (
            (3, 11),
            "glibc",
            "2.36",
            "amd-mori's wheel needs Python 3.12 (this is 3.11) and glibc 2.39 (this is glibc 2.36)",
        ),
        ((3, 12), "", "", "amd-mori's wheel needs glibc 2.39 (this is another C library)"),
    ],
)
def test_what_the_wheel_lacks_is_named(python: tuple[int, int], libc: str, version: str, reason: str) -> None:
    assert mori_probe._how_to_install(python, libc, version) == reason


def test_the_extra_is_for_the_python_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [mori] = [line for line in project["optional-dependencies"]["mori"] if line.startswith("amd-mori")]
    assert "python_version == '{}.{}'".format(*mori_probe._WHEEL_PYTHON) in mori


def test_a_shared_library_that_is_missing_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the real library loads those of ROCm: by ctypes, whose error is no ImportError."""
    (tmp_path / "mori").mkdir()
    (tmp_path / "mori" / "__init__.py").touch()
    (tmp_path / "mori" / "io.py").write_text("import ctypes\nctypes.CDLL('libpci.so.0')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert usable("mori").reason.startswith("mori: libpci.so.0: cannot open shared object file")


def test_where_it_works_there_is_no_reason(standin: None) -> None:
    assert usable("mori").ok


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            "topology",
            "mori: child exited with -1: [ROCm-SMI] rsmi_num_monitor_devices reported 0 GPUs "
            "(it needs ROCm SMI and a GPU, also to move host memory)",
        ),
        ("registration:above=0", "mori: child was ended by SIGABRT: RegisterRdmaMemoryRegion failed!"),
        ("die:after=0", "mori: child was ended by SIGKILL: no output"),
        ("no_device", "mori: no active RDMA device on this host"),
        ("fail:after=0", "mori: a first read ended as"),
    ],
)
def test_whatever_ends_the_child_is_the_reason_and_we_live_on(standin: None, spec: str, reason: str) -> None:
    with fault(spec):
        verdict = usable("mori")
        assert verdict.reason.startswith(reason)
        options = EngineOptions(name="n", bind_host="127.0.0.1", advertise_host="127.0.0.1")
        with pytest.raises(BackendUnavailable, match="mori: "):
            open_engine("mori", options)


@pytest.mark.parametrize("spec", ["delay:seconds=30", "no_pci_address"])
def test_a_child_that_hangs_is_given_up(standin: None, spec: str) -> None:
    with fault(spec):
        assert usable("mori", {"probe_s": "1"}).reason == "mori: the probe did not end within 1 s"


def test_a_device_without_a_pci_address_is_named_and_can_be_left_out(
    standin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would look for its address without end; it does not look at one that is left out."""
    devices = [
        RdmaDevice(name, address, None, ()) for name, address in (("rxe0", None), ("mlx5_0", "0000:01:00.0"))
    ]
    monkeypatch.setattr(mori_probe, "list_rdma_devices", lambda: devices)
    reason = usable("mori").reason
    assert reason.startswith("mori: it would look for the PCI address of rxe0 without end")
    assert "mori.devices=^rxe0" in reason
    assert usable("mori", {"devices": "^rxe0"}).ok
    assert usable("mori", {"devices": "mlx5_0"}).ok
    assert not usable("mori", {"devices": "mlx5_0+rxe0"}).ok


def test_without_a_probe_the_backend_opens_at_once(standin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For hosts that are known to work: the child imports torch once more."""
    monkeypatch.setattr(subprocess, "run", None)
    options = EngineOptions(
        name="n", bind_host="127.0.0.1", advertise_host="127.0.0.1", backend_options={"probe_s": "0"}
    )
    open_engine("mori", options).close()


def test_a_library_that_does_not_load_gives_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host without ROCm the wheel installs and does not import."""
    (tmp_path / "mori").mkdir()
    (tmp_path / "mori" / "__init__.py").write_text(
        "raise ImportError('libamdhip64.so.7: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert usable("mori").reason == "mori: libamdhip64.so.7: cannot open shared object file"


def test_a_host_that_does_not_resolve_is_named(standin: None) -> None:
    options = EngineOptions(name="n", bind_host="127.0.0.1", advertise_host="no-such-host.invalid")
    with pytest.raises(BackendUnavailable, match=r"no-such-host\.invalid"):
        open_engine("mori", options)
