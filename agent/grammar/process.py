# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.agent.grammar.process`: computes masks, started by the engine process.

What a client's grammar takes is taken here, with less priority than the model has: not from the steps of
others. A mask that ends this process, by its processor time or its memory, fails its request alone.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import resource
import select
import signal
import sys
from pathlib import Path

import msgspec

from kvferry.agent.grammar.process_limits import limit_this_process
from kvferry.agent.messages.masks import (
    FromMasks,
    MasksBoot,
    MasksReady,
    ToMasks,
    current_ticket_path,
    masks_address,
)
from kvferry.common.child_process import die_with_parent
from kvferry.common.telemetry.logs import configure_logging
from kvferry.transfer.ranks.channel import RankEnd, connect_at_once

MAX_SINGLE_CPU_S = 5.0
"""What one mask may take, the compilation of its grammar included. SIGPROF ends the process then."""
MAX_COMPILED_BYTES = 512 << 20
"""By which the process may grow before it drops what it has compiled."""

log = logging.getLogger(__name__)


class MaskServer:
    """The loop between the engine's socket and the queue."""

    def __init__(self, end: RankEnd, boot: MasksBoot, run_dir: Path) -> None:
        """Raises OSError or ValueError if llguidance cannot use the tokenizer."""
        # Not at the top: docs and tests that read the bounds need no llguidance.
        from kvferry.agent.grammar.compiler import GrammarCompiler
        from kvferry.agent.grammar.mask_queue import MaskQueue

        self._end = end
        self._queue = MaskQueue(
            GrammarCompiler(Path(boot.config.model), vocab_size=boot.vocab_size, eos_ids=boot.eos_ids)
        )
        self._decoder = msgspec.msgpack.Decoder(ToMasks)
        self._current = os.open(current_ticket_path(run_dir), os.O_RDWR | os.O_CREAT, 0o600)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        self._usual_bytes = _resident_bytes()

    def serve(self) -> None:
        """Compute masks until the engine process has gone."""
        _send(self._end, MasksReady())
        poller = select.poll()
        poller.register(self._end.fileno(), select.POLLIN)
        is_idle = True
        while not self._end.gone:
            if poller.poll(None if is_idle else 0):
                for frame in self._end.receive():
                    self._queue.handle(self._decoder.decode(frame))
            is_idle = not self._compute_next()

    def _compute_next(self) -> bool:
        wanted = self._queue.next()
        if wanted is None:
            return False
        self._note(wanted.ticket)
        signal.setitimer(signal.ITIMER_PROF, MAX_SINGLE_CPU_S)
        answer = self._queue.compute(wanted)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(self._end, answer)
        self._note(0)
        if _resident_bytes() - self._usual_bytes > MAX_COMPILED_BYTES:
            self._queue.drop_compiled()
            if self._trim is not None:
                self._trim(0)
        return True

    def _note(self, ticket: int) -> None:
        os.pwrite(self._current, ticket.to_bytes(8, "little"), 0)


def _send(end: RankEnd, message: FromMasks) -> None:
    end.send(msgspec.msgpack.encode(message))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    parent = os.getppid()
    parser = argparse.ArgumentParser(description="Computes the masks of constrained answers.")
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = parser.parse_args().run_dir
    die_with_parent(parent)
    limit_this_process()
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=MasksBoot)
    configure_logging("masks", boot.config.log_level, boot.config.log_format)
    end = connect_at_once(masks_address(run_dir))
    try:
        server = MaskServer(end, boot, run_dir)
    except (OSError, ValueError) as error:
        _send(end, MasksReady(refusal=str(error)))
        return 1
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
