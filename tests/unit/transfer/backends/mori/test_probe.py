# SPDX-License-Identifier: Apache-2.0
"""Trying MORI-IO where it cannot hurt: the real library ends its process when something is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.transfer.backends.mori import probe as mori_probe
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, open_engine, usable
from tests.standins import mori_io
from tests.unit.transfer.backends.mori.rig import fault


@pytest.fixture
def standin() -> Iterator[None]:
    with mori_io.on_path():
        yield


def test_where_it_is_not_installed_it_says_so() -> None:
    if "mori" in sys.modules:
        pytest.skip("it is installed here")
    assert usable("mori").reason == "mori: not installed (distribution amd-mori)"


def test_where_it_works_there_is_no_reason(standin: None) -> None:
    assert usable("mori").ok


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("topology", "mori: child exited with -1: TopoSystem: no monitored GPU"),
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


def test_a_child_that_hangs_is_given_up(standin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori_probe, "_TIMEOUT_S", 1.0)
    with fault("delay:seconds=30"):
        assert usable("mori").reason == "mori: the probe did not end within 1 s"


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
