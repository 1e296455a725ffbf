# SPDX-License-Identifier: Apache-2.0
"""Settings are read from the environment, and what is not served is refused by the name of its setting."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.sglang import BACKEND, _kv_class
from kvferry.agent.sglang.settings import check_served, read_settings


def args(**changes: Any) -> Any:
    return SimpleNamespace(**({"model_path": "m", "tp_size": 2} | changes))


def read(**environ: str) -> Any:
    return read_settings(environ, host="0.0.0.0", port=30000, own_ip="10.0.0.1")


def test_what_is_served_passes() -> None:
    check_served(args(enable_lora=None, dp_size=1, speculative_algorithm=None), defers_release=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pp_size", 2),
        ("dp_size", 2),
        ("nnodes", 2),
        ("speculative_algorithm", "EAGLE"),
        ("enable_lora", True),
        ("enable_memory_saver", True),
        ("tokenizer_worker_num", 2),
    ],
)
def test_what_is_not_served_is_named(name: str, value: object) -> None:
    with pytest.raises(NotServed, match=f"--{name.replace('_', '-')} is not served as {value!r}"):
        check_served(args(**{name: value}), defers_release=True)


def test_what_a_model_keeps_beside_its_kv_is_named() -> None:
    with pytest.raises(NotServed, match=r"m keeps more than KV \(mamba\)"):
        check_served(args(), defers_release=True, state_types=[SimpleNamespace(value="mamba")])


def test_pages_that_are_freed_at_once_are_refused() -> None:
    with pytest.raises(NotServed, match="DEFERRED_DECODE_KV_RELEASE"):
        check_served(args(), defers_release=False)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.22", "0.5.24"])
def test_another_version_is_named_before_our_classes_are_made_of_its(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SGLang only its version is there: the import of our classes would fail."""
    module = ModuleType("sglang")
    module.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "sglang", module)
    with pytest.raises(NotServed, match=f"SGLang {re.escape(version)} is not served; 0.5.23 is"):
        _kv_class(pytest.fail, SimpleNamespace(value=BACKEND), SimpleNamespace(value="manager"))


def test_defaults_are_the_servers_own_address_and_any_port() -> None:
    settings = read()
    assert (settings.advertise_url, settings.advertised_host) == ("http://10.0.0.1:30000", "10.0.0.1")
    assert (settings.control_port, settings.proxy, settings.lease_s) == (0, (), 10.0)


def test_settings_are_read() -> None:
    settings = read(
        KVFERRY_PROXY="10.0.0.9:36367,dns:proxies",
        KVFERRY_LEASE_S="2.5",
        KVFERRY_TRANSFER="nixl",
        KVFERRY_VERIFY_KV="0.05",
        KVFERRY_PORT="x",
    )
    assert settings.proxy == ("10.0.0.9:36367", "dns:proxies")
    assert (settings.lease_s, settings.transfer, settings.verify_kv) == (2.5, "nixl", 0.05)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("LEASE_S", "0", "lease_s"),
        ("VERIFY_KV", "2", "verify_kv"),
        ("TRANSFER", "cuda_ipc", "never tried"),
        ("CONTROL_PORT", "many", "control_port"),
    ],
)
def test_an_invalid_setting_is_named(name: str, value: str, named: str) -> None:
    with pytest.raises(NotServed, match=named):
        read(**{f"KVFERRY_{name}": value})
