# SPDX-License-Identifier: Apache-2.0
"""Takes the link of a prefill host down under eight clients, and prints how each of their requests ended.

`test_link_down.py` runs it in namespaces of its own: `… python -m tests.system.link_down PREFILL_HOSTS`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec

from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec
from tests.helpers.client import RequestFailed, complete, session
from tests.standins.agent_at_host import HOST_VARIABLE
from tests.standins.network import BRIDGE_ADDRESS, Network
from tests.system.conftest import COMMON_ARGS, MODEL

CLIENTS = 8
PROMPT = [5] * 400
AGENT_ARGS = (*COMMON_ARGS, "--transfer", "tcp", "--prefill-chunk", "64")
BEFORE_S = 3.0
AFTER_S = 13.0
GIVEN_UP_S = 40.0


class Request(msgspec.Struct, frozen=True):
    """How a request ended: `answered`, with an error's code, or given up.

    Times are seconds since the link went down. `waited_s`: the longest that its client got nothing, be it for
    a stream's next event.
    """

    began: float
    ended: float
    end: str
    waited_s: float


async def ask_on(http: aiohttp.ClientSession, url: str, number: int, down_at: float) -> list[Request]:
    """Send one request after the other, until long after the link went down."""
    body = {
        "model": MODEL,
        "prompt": [*PROMPT, number],
        "max_tokens": 24,
        "ignore_eos": True,
        "seed": number,
        "stream": number % 2 == 0,
    }
    requests = []
    while (began := time.monotonic()) < down_at + AFTER_S:
        waited_s = None
        try:
            async with asyncio.timeout(GIVEN_UP_S):
                waited_s = max((await complete(http, url, body)).gaps, default=None)
                end = "answered"
        except TimeoutError:
            end = "given up"
        except RequestFailed as error:
            end = str(error.error["code"])
            await asyncio.sleep(0.1)
        ended = time.monotonic()
        requests.append(Request(began - down_at, ended - down_at, end, waited_s or ended - began))
    return requests


async def main(num_prefill: int) -> None:
    network = Network()
    hosts = [f"prefill-{number}" for number in range(num_prefill)]
    agents = [
        AgentSpec(
            name=name,
            role="prefill",
            settings={"host": network.add_host(name)},
            args=AGENT_ARGS,
            module="tests.standins.agent_at_host",
            environment={HOST_VARIABLE: name},
        )
        for name in hosts
    ]
    agents.append(AgentSpec(name="decode", role="decode", args=AGENT_ARGS))
    with tempfile.TemporaryDirectory() as logs:
        spec = ClusterSpec(model=MODEL, agents=tuple(agents), log_dir=Path(logs), host=BRIDGE_ADDRESS)
        async with Cluster(spec) as cluster, session() as http:
            await cluster.wait_ready()
            down_at = time.monotonic() + BEFORE_S
            asking = [
                asyncio.ensure_future(ask_on(http, cluster.url, number, down_at)) for number in range(CLIENTS)
            ]
            await asyncio.sleep(BEFORE_S)
            network.take_down(hosts[0])
            requests = [request for each in await asyncio.gather(*asking) for request in each]
            print(msgspec.json.encode(requests).decode())


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
