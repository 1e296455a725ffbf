# SPDX-License-Identifier: Apache-2.0
"""What a read over NIXL ends with when NIXL raises, which a machine without GPUs cannot make it do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import pytest

from kvferry.transfer.backends.nixl.engine import NixlTransfer
from kvferry.transfer.engine import Status


class NixlInvalidParamError(Exception):
    """Named like the one of NIXL's bindings."""


class NixlRemoteDisconnectError(Exception):
    """Named like the one of NIXL's bindings."""


class StandInApi:
    """An API whose agent cannot post, and keeps the handles that were released."""

    errors = (NixlInvalidParamError, NixlRemoteDisconnectError)

    def __init__(self, error: Exception | None = None) -> None:
        self.agent = self
        self.failed = False
        self.released: list[str] = []
        self._error = error

    def transfer(self, handle: str) -> str:
        if self._error is not None:
            raise self._error
        return "PROC"

    def release_xfer_handle(self, handle: str) -> None:
        self.released.append(handle)


def read_over(api: StandInApi) -> NixlTransfer:
    return NixlTransfer(cast(Any, api), nbytes=64, descriptors=1, deadline=100.0)


@pytest.mark.parametrize("error", [NixlInvalidParamError(), NixlRemoteDisconnectError()])
def test_a_read_that_cannot_be_posted_has_lost_its_peer(error: Exception) -> None:
    api = StandInApi(error)
    read = read_over(api)
    read.post(lambda: "handle")
    assert (read.poll(), read.reason, read.quiescent) == (Status.FAILED, "peer_lost", True)
    assert api.released == ["handle"]
    assert api.failed


@pytest.mark.parametrize(
    ("error", "reason"), [(NixlInvalidParamError(), "refused"), (NixlRemoteDisconnectError(), "peer_lost")]
)
def test_a_read_that_cannot_be_made_was_refused_unless_its_peer_is_known_to_be_gone(
    error: Exception, reason: str
) -> None:
    def make() -> str:
        raise error

    api = StandInApi()
    read = read_over(api)
    read.post(make)
    assert (read.poll(), read.reason, read.quiescent) == (Status.FAILED, reason, True)
    assert api.released == []


def test_a_process_that_used_it_exits_well() -> None:
    """It crashed at its very end, where libibverbs's providers are installed and no EFA device is."""
    code = "from kvferry.transfer.engine import usable; usable('nixl')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 0, ended.stderr
