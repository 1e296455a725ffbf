# SPDX-License-Identifier: Apache-2.0
"""The methods of SGLang's classes that ours are made of or replace, version by version, and their parameters.

`python -m tests.unit.agent.sglang.hooks WHEEL…` reads them out of SGLang's wheels, of which nothing is run,
and puts them into `hooks.json`; `test_hooks.py` compares ours with them.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import msgspec

from tests.unit.agent.vllm.hooks import hooks_of

RECORDED = Path(__file__).with_name("hooks.json")
_SRT = "sglang/srt/disaggregation"
CLASSES = {
    "CommonKVManager": f"{_SRT}/common/conn.py",
    "CommonKVSender": f"{_SRT}/common/conn.py",
    "CommonKVReceiver": f"{_SRT}/common/conn.py",
    "PrefillBootstrapQueue": f"{_SRT}/prefill.py",
    "DecodePreallocQueue": f"{_SRT}/decode.py",
}
Parameters = dict[str, dict[str, tuple[str, ...]]]
"""By class and method."""


def recorded() -> dict[str, Parameters]:
    """Per version."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=dict[str, Parameters])


def main(wheels: list[str]) -> None:
    """Record the wheels' versions, besides those that are recorded."""
    versions = recorded() if RECORDED.exists() else {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            versions[Path(wheel).name.split("-")[1]] = {
                name: _parameters(archive.read(path).decode(), name) for name, path in CLASSES.items()
            }
    lines = [
        f"{json.dumps(version)}: {msgspec.json.encode(each).decode()}"
        for version, each in sorted(versions.items())
    ]
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")


def _parameters(source: str, name: str) -> dict[str, tuple[str, ...]]:
    return {method: hook.parameters for method, hook in hooks_of(source, name).items()}


if __name__ == "__main__":
    main(sys.argv[1:])
