# SPDX-License-Identifier: Apache-2.0
"""The systemd units: verified by systemd itself; what they start serves with the example settings.

The commands of the page about them are executed on a host that has booted.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.deploy.conftest import FOLDER
from tests.deploy.containers import Containers
from tests.deploy.hosts import Host, hosts
from tests.deploy.pages import scripts
from tests.deploy.ray_nodes import own_network
from tests.helpers.client import complete, session
from tests.helpers.waiting import patient

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


def kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


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
            stack.callback(kill, process)
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


UNIT_NAMES = ("kvferry-agent@prefill", "kvferry-agent@decode", "kvferry-proxy")


class Units:
    """Those that run on a host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def shown(self, name: str, what: str) -> str:
        return self._host.type(f"systemctl show --property={what} --value {name}").strip()

    def program(self, name: str) -> str:
        """What the first process of a unit is: the interpreter of an environment."""
        return self._host.type(
            f"tr '\\0' '\\n' < /proc/{self.shown(name, 'MainPID')}/cmdline | head -n 1"
        ).strip()

    def until(self, name: str, what: str, wanted: str) -> None:
        """Wait until a unit has a property. Raises AssertionError."""
        deadline = time.monotonic() + patient(60)
        while (found := self.shown(name, what)) != wanted:
            assert time.monotonic() < deadline, f"{name}: {what} is {found}"
            time.sleep(0.2)


@pytest.mark.timeout(3600)
def test_the_commands_of_the_page_do_what_it_says(containers: Containers, tmp_path: Path) -> None:
    """As they stand, on a host whose systemd has booted."""
    with hosts(containers, FOLDER, tmp_path, {"host": "198.51.100.1"}) as [host]:
        units = Units(host)
        for script in scripts("systemd.md", "Install"):
            host.type(script)
        start, ask, read_log = scripts("systemd.md", "Start")
        started = host.type(start)
        assert len(re.findall(r"http://127\.0\.0\.1:800[01] +(?:prefill|decode) +ready ", started)) == 2, (
            started
        )
        assert '"text":"469"' in host.type(ask)
        assert "starting -> ready" in host.type(read_log)

        def until_answered() -> None:
            """Meanwhile requests get 503 `no_agent`."""
            deadline = time.monotonic() + patient(90)
            while '"text":"469"' not in (said := host.type(f"{ask.rstrip()} || true")):
                assert time.monotonic() < deadline, said
                time.sleep(0.5)

        host.type(f"kill -KILL {units.shown('kvferry-agent@decode', 'MainPID')}")
        units.until("kvferry-agent@decode", "NRestarts", "1")
        until_answered()

        install, upgrade, roll_back = scripts("systemd.md", "Upgrade and roll back")
        host.type(install)
        for script, environment in ((upgrade, "/opt/kvferry-new"), (roll_back, "/opt/kvferry")):
            began = host.type("date '+%F %T'").strip()
            host.type(script)
            until_answered()
            assert {units.program(name) for name in UNIT_NAMES} == {f"{environment}/bin/python3"}
            for name in UNIT_NAMES:
                # What systemd has to kill, or ends otherwise, has failed.
                said = host.type(f"journalctl --quiet --since '{began}' --unit {name}")
                assert "Deactivated successfully" in said and "Failed with result" not in said, said

        host.type("echo 'no_such_option: 1' >> /etc/kvferry/decode.yaml")
        host.type("systemctl restart kvferry-agent@decode")
        units.until("kvferry-agent@decode", "ActiveState", "failed")
        assert units.shown("kvferry-agent@decode", "ExecMainStatus") == "2"
        assert "no_such_option" in host.type(read_log)

        [end] = scripts("systemd.md", "End")
        host.type(end)
        for name in ("kvferry-agent@prefill", "kvferry-proxy"):
            units.until(name, "ActiveState", "inactive")  # the target waits for none of its parts
            assert units.shown(name, "Result") == "success"
