# SPDX-License-Identifier: Apache-2.0
"""The plainest relay that Quart, uvicorn and aiohttp make: what the proxy's cost is compared with.

It forwards to one engine and does nothing else: no discovery, no pairing, no deadlines, no metrics, no retry.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
import uvloop
from quart import Quart, Response, request


async def main(engine: str) -> None:
    """Relay to `engine` until killed."""
    connector = aiohttp.TCPConnector(limit=0)  # 100 connections would hold back every later stream
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        app = Quart("plain_relay")
        app.config["RESPONSE_TIMEOUT"] = None

        @app.post("/v1/completions")
        async def relay() -> Response:
            upstream = await session.post(
                f"{engine}/v1/completions",
                data=await request.get_data(),
                headers={"Content-Type": "application/json"},
            )

            async def chunks() -> AsyncIterator[bytes]:
                async with upstream:
                    async for chunk in upstream.content.iter_any():
                        yield chunk

            return Response(chunks(), upstream.status, content_type=upstream.headers["Content-Type"])

        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        print(json.dumps({"listening": {"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}}), flush=True)
        config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False)
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1])) if len(sys.argv) == 2 else sys.exit("usage: plain_relay ENGINE_URL")
