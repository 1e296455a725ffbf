# SPDX-License-Identifier: Apache-2.0
"""Make an environment for each client of docs/clients.md, as the page says. Used by `make test-clients`.

`python -m tests.clients.install DIRECTORY [NAME…]` leaves those alone that are there. One that cannot be
installed is left out, with pip's reason in DIRECTORY/NAME.failed, which the tests show. Where the variable
`TORCH_INDEX` names a package index, torch comes from there.
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
VLLM = ROOT / ".venv-vllm"
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
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reason = (error.stderr or str(error))[-SHOWN_CHARS:]
            failed.write_text(reason)
            print(f"left out: {client.name} cannot be installed here: {reason}", flush=True)
        else:
            failed.unlink(missing_ok=True)
    return 0


def _install(client: Client, environment: Path) -> None:
    """Raises `CalledProcessError` or `TimeoutExpired` when pip fails."""
    if client.name == "vllm":
        vllm_install.main(VLLM)
        environment.parent.mkdir(parents=True, exist_ok=True)
        environment.symlink_to(VLLM)
        return
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True)
    if client.name in WITH_TORCH and os.environ.get("TORCH_INDEX"):
        _pip(environment, "--index-url", os.environ["TORCH_INDEX"], "torch")
    _pip(environment, *client.packages)
    (environment / DONE).touch()


def _pip(environment: Path, *words: str) -> None:
    subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "install", "--quiet", *words],
        stderr=subprocess.PIPE, text=True, timeout=INSTALL_TIMEOUT_S, check=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
