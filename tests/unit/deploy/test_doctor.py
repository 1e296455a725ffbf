# SPDX-License-Identifier: Apache-2.0
"""What `kvferry doctor` says of a machine; of a fleet, `system/test_up.py` sees it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvferry.agent.config import BUNDLED_MODELS
from kvferry.deploy.doctor import command, machine
from kvferry.deploy.doctor.fleet import clock_error
from kvferry.deploy.doctor.machine import (
    RDMA_BACKENDS,
    describe_model,
    describe_ports,
    describe_rdma,
    describe_sglang,
    describe_vllm,
)
from kvferry.proxy.config import ProxyConfig
from kvferry.transfer.engine import Usability
from kvferry.transfer.options import BACKENDS
from kvferry.transfer.rdma_devices import RdmaDevice, RdmaPort
from tests.standins.checkpoint import write_weights

PORT = RdmaPort(1, "ACTIVE", "Ethernet", "100 Gb/sec")
VERDICTS = {name: Usability(name == "nixl", "") for name in RDMA_BACKENDS}


def test_without_a_device_it_is_one_line() -> None:
    assert describe_rdma([], VERDICTS) == ["RDMA: no device"]


def test_a_device_is_named_with_its_state_and_who_can_use_it(tmp_path: Path) -> None:
    node = tmp_path / "uverbs0"
    node.touch()
    devices = [
        RdmaDevice("mlx5_0", "0000:8c:00.0", node, (PORT,)),
        RdmaDevice("mlx5_1", "0000:8d:00.0", tmp_path / "uverbs1", ()),
        RdmaDevice("rxe0", None, None, (PORT,)),
    ]
    nic, closed, soft, memory = describe_rdma(devices, VERDICTS)
    assert nic.startswith("RDMA: mlx5_0 (0000:8c:00.0): port 1 ACTIVE, Ethernet, 100 Gb/sec; ")
    assert nic.endswith("open to this user; usable by nixl")
    assert "no port" in closed and closed.endswith("is missing, closed to this user; usable by no backend")
    assert "rxe0 (no PCI address)" in soft and "ib_uverbs is not loaded; usable by no backend" in soft
    assert "may lock" in memory


@pytest.mark.parametrize(
    ("version", "line"),
    [
        (None, "vLLM: not in this environment"),
        ("0.32.0+cpu", "vLLM: 0.32.0+cpu, served"),
        ("0.20.1", "vLLM: vLLM 0.20.1 is outside of the served range 0.24–0.33"),
    ],
)
def test_vllm_is_named_with_whether_it_is_served(version: str | None, line: str) -> None:
    assert describe_vllm(version).startswith(line)


@pytest.mark.parametrize(
    ("version", "line"),
    [
        (None, "SGLang: not in this environment"),
        ("0.5.23", "SGLang: 0.5.23, served"),
        ("0.5.17", "SGLang: SGLang 0.5.17 is not served; 0.5.23 is"),
    ],
)
def test_sglang_is_named_with_whether_it_is_served(version: str | None, line: str) -> None:
    assert describe_sglang(version) == line


def test_it_takes_the_options_of_an_agent_and_refuses_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}

    def usable(name: str, options: object = None) -> Usability:
        asked[name] = options
        return Usability(name == "tcp", "" if name == "tcp" else "not here")

    monkeypatch.setattr(command, "usable", usable)
    monkeypatch.setattr(command, "list_rdma_devices", list)
    assert command.main(["--transfer-options", "mori.devices=^rxe0"]) == 0
    assert asked.keys() == BACKENDS.keys()
    assert asked["mori"] == {"devices": "^rxe0"}
    assert "RDMA: no device" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--transfer-options", "nonsense"])


def test_what_libraries_write_is_shown_of_those_that_are_not_usable(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Mooncake writes an error to descriptor 2 when its engine ends well."""

    def usable(name: str, options: object = None) -> Usability:
        os.write(2, f"E1125 {name}.cpp:1] no descriptor\n".encode())
        return Usability(name != "nixl", "not here" if name == "nixl" else "")

    monkeypatch.setattr(command, "usable", usable)
    monkeypatch.setattr(command, "list_rdma_devices", list)
    assert command.main([]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if ".cpp" in line] == [
        "nixl wrote: E1125 nixl.cpp:1] no descriptor"
    ]
    os.write(2, b"later")
    assert capfd.readouterr().err == "later"


def test_a_port_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine, "ProxyConfig", lambda: ProxyConfig(port=port, discovery_port=port + 1))
        lines = describe_ports()
    assert lines[0] == f"port: {port}, the proxy's HTTP: Address already in use"


def test_a_model_is_named_with_whether_it_is_served(tmp_path: Path) -> None:
    assert describe_model("ferry-tiny", 2) == (
        True,
        f"model: ferry-tiny, Qwen3ForCausalLM, {BUNDLED_MODELS / 'ferry-tiny'}: served",
    )
    is_served, line = describe_model("ferry-tiny", 3)
    assert not is_served and "cannot be split evenly over 3 ranks" in line
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text('{"architectures": ["MambaForCausalLM"]}')
    write_weights(tmp_path / "model.safetensors")
    is_served, line = describe_model(str(tmp_path), 1)
    assert not is_served and "not supported: layers that keep a state" in line
    is_served, line = describe_model("no", 1)
    assert not is_served and line.startswith("model: 'no' is no directory, no bundled model (ferry-tiny)")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (100.2, 100.3, None),
        (100.9, 101.1, None),
        (99.9, 100.1, None),
        (104.9, 105.2, None),
        (111.2, 111.9, "its clock is 6 s behind this host's"),
        (90.0, 95.5, "its clock is 4 s ahead of this host's"),
    ],
)
def test_clocks_are_compared_as_far_as_a_date_tells(before: float, after: float, said: str | None) -> None:
    assert clock_error("Thu, 01 Jan 1970 00:01:40 GMT", before, after) == said
