# SPDX-License-Identifier: Apache-2.0
"""The systemd units: verified by systemd itself, and what they start serves with the example settings."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.deploy.ray_nodes import own_network
from tests.patience import patient
from tests.system.client import complete, session

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
KVFERRY = Path(sys.executable).with_name("kvferry")
INSTALLED = "/opt/kvferry/bin/kvferry"
STARTED = {
    "proxy": "kvferry-proxy.service",
    "prefill": "kvferry-agent@.service",
    "decode": "kvferry-agent@.service",
}

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd here: Debian's package has it"
)


def verify(folder: Path) -> str:
    """What systemd has against the units of a folder."""
    units = [folder / name for name in ("kvferry.target", "kvferry-proxy.service")]
    # A template is verified by an instance.
    instance = folder / "kvferry-agent@decode.service"
    instance.write_text((folder / "kvferry-agent@.service").read_text())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units, instance],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stderr + ("" if done.returncode == 0 else f"status {done.returncode}")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, with the command that is here."""
    for path in UNITS.iterdir():
        if path.is_file():
            text = path.read_text()
            assert path.suffix == ".target" or INSTALLED in text
            (tmp_path / path.name).write_text(text.replace(INSTALLED, str(KVFERRY)))
    return tmp_path


def test_systemd_has_nothing_against_them(installed: Path) -> None:
    assert verify(installed) == ""


def test_a_misspelt_setting_is_seen(installed: Path) -> None:
    unit = installed / "kvferry-proxy.service"
    unit.write_text(unit.read_text().replace("KillMode=", "KilMode="))
    assert "KilMode" in verify(installed)


def command(name: str) -> list[str]:
    """What the unit of a part starts, with the example in place of the settings in /etc."""
    text = (UNITS / STARTED[name]).read_text()
    [started] = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
    words = started.replace("%i", name).replace("/etc/kvferry/", f"{UNITS}/examples/").split()
    assert words[0] == INSTALLED
    return [str(KVFERRY), *words[1:]]


@pytest.mark.timeout(240)
async def test_what_they_start_serves_and_ends_with_sigterm(tmp_path: Path) -> None:
    try:
        network = own_network()  # the ports of the examples are taken elsewhere
        network.__enter__()
    except PermissionError:
        pytest.skip("a network namespace cannot be made here")
    async with AsyncExitStack() as stack:
        stack.callback(network.__exit__, None, None, None)
        processes = []
        for name in STARTED:
            log = stack.enter_context((tmp_path / f"{name}.log").open("wb"))
            process = await asyncio.create_subprocess_exec(*command(name), stdout=log, stderr=log)
            stack.callback(lambda process=process: process.returncode is None and process.kill())
            processes.append(process)
        http = await stack.enter_async_context(session())
        async with asyncio.timeout(patient(90)):
            while True:
                try:
                    async with http.get("http://127.0.0.1:10001/ready") as response:
                        if response.status == 200:
                            break
                except OSError:
                    pass
                await asyncio.sleep(0.2)
        body = {"model": "ferry-tiny", "prompt": "417+52=", "temperature": 0, "max_tokens": 8, "stream": True}
        answer = await complete(http, "http://127.0.0.1:10001", body)
        assert answer.choices[0].text == "469"
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            assert await asyncio.wait_for(process.wait(), patient(30)) == 0
