# SPDX-License-Identifier: Apache-2.0
"""Work in threads, which may decode the same struct for the first time at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.common import work_pool
from kvferry.common.work_pool import WorkPool

RACE = """
import sys, threading
from typing import Annotated, Literal
import msgspec
from kvferry.common.work_pool import build_struct_types

sys.setswitchinterval(1e-6)
raw = msgspec.json.encode({"number": 1, "word": "a"})
for number in range(400):
    class Part(msgspec.Struct, frozen=True):
        number: Annotated[int, msgspec.Meta(ge=0, le=2**62 - number)]
        word: Literal["a", f"b{number}"]

    if sys.argv[1] == "built":
        build_struct_types()
    barrier = threading.Barrier(4)

    def decode():
        barrier.wait()
        msgspec.json.decode(raw, type=Part)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_a_struct_that_is_built_before_can_be_decoded_by_threads_at_once() -> None:
    """With any other argument the process nearly always dies of SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", RACE, "built"], capture_output=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_work_pool_builds_them_before_it_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(work_pool, "build_struct_types", lambda: calls.append(1))
    WorkPool("test", short_bytes=1, max_bytes=1, timeout_s=1.0, busy=ValueError)
    assert calls == [1]
