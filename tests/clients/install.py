# SPDX-License-Identifier: Apache-2.0
"""Make an environment for each client of docs/clients.md, as the page says. Used by `make test-clients`.

`python -m tests.clients.install DIRECTORY [NAME…]` leaves those alone that are there. One that cannot be
installed is left out, with the reason in DIRECTORY/NAME.failed, which the tests show. Programs of Debian are
linked to; one that is missing is installed by apt-get, which only root can. Where the variable `TORCH_INDEX`
names a package index, torch comes from there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.clients.page import ROOT, Client, clients
from tests.system.vllm import install as vllm_install

INSTALL_TIMEOUT_S = 1800.0
SHOWN_CHARS = 2000
DONE = ".installed"
WITH_TORCH = ("guidellm",)
VLLM, VLLM_VERSION = ROOT / ".venv-vllm", "0.32.0"
"""vLLM's environment is that of `make test-vllm`: its wheel does not go with every build of what it names."""


def main(directory: Path, names: list[str]) -> int:
    known = clients()
    for client in [known[name] for name in names] if names else known.values():
        environment, failed = directory / client.name, directory / f"{client.name}.failed"
        if (environment / DONE).exists():
            continue
        print(f"installing {client.name}", flush=True)
        try:
            _install(client, environment)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            reason = (getattr(error, "stderr", None) or str(error))[-SHOWN_CHARS:]
            failed.write_text(reason)
            print(f"left out: {client.name} cannot be installed here: {reason}", flush=True)
        else:
            failed.unlink(missing_ok=True)
    return 0


def _install(client: Client, environment: Path) -> None:
    """Raises `CalledProcessError`, `TimeoutExpired` or `OSError` when pip or apt-get fails."""
    if client.name == "vllm":
        vllm_install.main(VLLM, VLLM_VERSION)
        environment.parent.mkdir(parents=True, exist_ok=True)
        environment.symlink_to(VLLM)
        return
    shutil.rmtree(environment, ignore_errors=True)
    if client.installer == "apt-get":
        if shutil.which(client.name) is None:
            _run("apt-get", "install", "--yes", "--no-install-recommends", *client.packages)
        program = shutil.which(client.name)
        assert program is not None
        (environment / "bin").mkdir(parents=True)
        (environment / "bin" / client.name).symlink_to(program)
        (environment / DONE).touch()
        return
    venv.create(environment, with_pip=True)
    if client.name in WITH_TORCH and os.environ.get("TORCH_INDEX"):
        _pip(environment, "--index-url", os.environ["TORCH_INDEX"], "torch")
    _pip(environment, *client.packages)
    (environment / DONE).touch()


def _pip(environment: Path, *words: str) -> None:
    _run(environment / "bin" / "python", "-m", "pip", "install", "--quiet", *words)


def _run(*words: str | Path) -> None:
    subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=INSTALL_TIMEOUT_S, check=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
