# SPDX-License-Identifier: Apache-2.0
"""What one request costs the two engine processes on the control channel: open, renew and release."""

from __future__ import annotations

import time

from benchmarks.transfer.plane import LendingProcess, Puller
from benchmarks.transfer.plane_agent import PlaneAgent
from benchmarks.transfer.report import Report
from kvferry.transfer.layout import KVGeometry

GEOMETRY = KVGeometry(
    num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=16, rope="default:10000"
)
NUM_BLOCKS = 64
REQUEST_BLOCKS = 16
REQUESTS = 400
LIMIT_US = 300.0


async def run(report: Report) -> None:
    """CPU time of each whole process, ZMQ's threads too; the handshake and the leasing come before.

    The reader has everything cached already, so the ranks have nothing to do; and once more with all to read.
    """
    blocks = list(range(REQUEST_BLOCKS))
    with LendingProcess("tcp", GEOMETRY, NUM_BLOCKS, "cpu", seed=3) as lender:
        async with PlaneAgent("tcp", GEOMETRY, NUM_BLOCKS, "cpu", seed=None) as agent:
            puller = Puller(lender, agent, lender.address())
            await puller.check(REQUEST_BLOCKS)
            for first_block, what, limit in (
                (REQUEST_BLOCKS, "control channel", LIMIT_US),
                (0, f"control channel, ranks and {REQUEST_BLOCKS} blocks over tcp", None),
            ):
                lent = lender.lend([blocks] * REQUESTS)
                theirs, ours = lender.cpu_seconds(), time.process_time()
                for transfer_id in lent:
                    await puller.pull_lent(transfer_id, blocks, first_block)
                ours, theirs = time.process_time() - ours, lender.cpu_seconds() - theirs
                for side, seconds in (("reading", ours), ("lending", theirs)):
                    microseconds = seconds / REQUESTS * 1e6
                    report.add(
                        f"{what}: CPU per request, {side} side", microseconds, "µs", limit, at_least=False
                    )
