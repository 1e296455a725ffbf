# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.proxy.workers.worker FD`: one process of those that serve the clients with `--workers`.

Started by `proxy.workers.supervisor` alone. `FD` is this worker's end of the link to the hub, over which it
is told everything, its settings included. It ends when the hub says so, or when the hub ends.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence

import msgspec
import uvloop

from kvferry.proxy.config import ProxyConfig, config_from_json
from kvferry.proxy.server import Keys, listening_socket, serving
from kvferry.proxy.telemetry.history import History
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.workers import reports
from kvferry.proxy.workers.link import Link
from kvferry.proxy.workers.link_messages import Begin, Listening, Spent, ToWorker
from kvferry.proxy.workers.remote_fleet import HubLink, RemoteFleet
from kvferry.proxy.workers.reports import Report

BEGIN_TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop (returns 0) or until the hub is lost (returns 1)."""
    # Ctrl-C and a service manager's SIGTERM are for the hub, which tells its workers to stop.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    return uvloop.run(_work(socket.socket(fileno=int(argv[0]))))


async def _work(end: socket.socket) -> int:
    link: HubLink = await Link.over(end, msgspec.msgpack.Decoder(ToWorker))
    try:
        async with asyncio.timeout(BEGIN_TIMEOUT_S):
            begin = await link.receive()
        assert isinstance(begin, Begin), "the hub's first message is another"
        config = config_from_json(begin.config)
        logging.basicConfig(
            level=config.log_level.upper(),
            format="%(asctime)s %(levelname)s worker-%(process)d %(message)s",
            force=True,
        )
        return await _serve(link, config, begin.port)
    finally:
        link.close()


async def _serve(link: HubLink, config: ProxyConfig, port: int) -> int:
    metrics, history = Metrics(), History()

    def report() -> Report:
        return Report(families=reports.families_of(metrics.collect()), history=history.state())

    keys = Keys.read(config)

    def tell(key: bytes, requests: int, tokens: int) -> None:
        link.send(Spent(key=key, requests=requests, tokens=tokens))

    def hear(spent: Spent) -> None:
        if keys.clients is not None:
            keys.clients.taken(spent.key, spent.requests, spent.tokens, time.monotonic())

    if keys.clients is not None:
        keys.clients.share(tell)
    chunks = "prefix_aware" in (config.prefill_policy, config.decode_policy)
    fleet = RemoteFleet(link, report, chunks=chunks, spent=hear)
    with listening_socket(config.host, port, shared=True) as listener:
        async with asyncio.TaskGroup() as tasks:
            hearing = tasks.create_task(fleet.listen())
            async with serving(config, keys, fleet, metrics, history, listener):
                link.send(Listening())
                await fleet.stopped.wait()
            hearing.cancel()
    return 1 if fleet.lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
