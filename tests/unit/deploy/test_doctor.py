# SPDX-License-Identifier: Apache-2.0
"""What `kvferry doctor` says of RDMA."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.deploy import doctor
from kvferry.deploy.doctor import RDMA_BACKENDS, describe_rdma, describe_vllm
from kvferry.transfer.engine import BACKENDS, Usability
from kvferry.transfer.rdma_devices import RdmaDevice, RdmaPort

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


def test_it_takes_the_options_of_an_agent_and_refuses_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}

    def usable(name: str, options: object = None) -> Usability:
        asked[name] = options
        return Usability(name == "tcp", "" if name == "tcp" else "not here")

    monkeypatch.setattr(doctor, "usable", usable)
    monkeypatch.setattr(doctor, "list_rdma_devices", list)
    assert doctor.main(["--transfer-options", "mori.devices=^rxe0"]) == 0
    assert asked.keys() == BACKENDS.keys()
    assert asked["mori"] == {"devices": "^rxe0"}
    assert "RDMA: no device" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        doctor.main(["--transfer-options", "nonsense"])
