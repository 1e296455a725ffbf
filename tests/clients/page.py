# SPDX-License-Identifier: Apache-2.0
"""What docs/clients.md says to install and to run, client by client."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
_SECTION = re.compile(r"^## (\S+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Client:
    """One section: what is installed, then what is run. One that Debian has is named as its program."""

    name: str
    installer: str
    """`pip` or `apt-get`."""
    packages: tuple[str, ...]
    scripts: tuple[str, ...]
    """Programs in Python, or in Java for it; what each of their lines prints is a comment behind it."""
    commands: tuple[tuple[str, ...], ...]
    """Command lines, in words."""


def clients() -> dict[str, Client]:
    """Read the page. Raises ValueError for a section that does not begin with its installation."""
    _, *parts = _SECTION.split(PAGE.read_text())
    return {
        name: _client(name, _BLOCK.findall(text)) for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def printed(script: str) -> list[str]:
    """What the script is to print, line by line."""
    return re.findall(
        r"^ *(?:print\(.*\)  #|System.out.println\(.*\);  //) (.*)$", script, flags=re.MULTILINE
    )


def _client(name: str, blocks: list[tuple[str, str]]) -> Client:
    (_, install), *rest = blocks
    installer, verb, *packages = shlex.split(install)
    if installer not in ("pip", "apt-get") or verb != "install":
        raise ValueError(f"{name}: the first block installs it")
    lines = "".join(text for language, text in rest if not language).replace("\\\n", " ").splitlines()
    return Client(
        name,
        installer,
        tuple(packages),
        tuple(text for language, text in rest if language in ("python", "java")),
        tuple(tuple(shlex.split(line)) for line in lines),
    )
