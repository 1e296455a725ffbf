# SPDX-License-Identifier: Apache-2.0
"""Schemathesis against a proxy's own OpenAPI document, with stand-in agents behind it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.server import running_proxy
from tests.standins.agents import StandInAgent

CASES = 20_000
ROOT = Path(__file__).parents[2]
OPERATIONS = 4
"""That take input, and so share the cases."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "positive_data_acceptance",
)


async def fuzz(cases: int, seed: int, phases: str = "coverage,fuzzing") -> int:
    """Run about so many cases. Returns schemathesis' exit status: 0 when nothing was found."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy(ProxyConfig(port=0, discovery_port=0)))
        for role in ("prefill", "decode", "both"):
            agent = StandInAgent(role, (f"127.0.0.1:{proxy.discovery_port}",), keep_requests=False)
            await stack.enter_async_context(agent)
            await agent.until(lambda agent=agent: agent.acks)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        document = folder / "openapi.json"
        document.write_text(json.dumps(await _document(proxy.url)))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", proxy.url,
            "--phases", phases, "--checks", ",".join(CHECKS), "--seed", str(seed),
            "--max-examples", str(max(1, cases // OPERATIONS)), "--exclude-path", "/ui/events",
            "--generation-database", "none", "--max-failures", "10", "--no-color",
            "--suppress-health-check", "all",
            cwd=folder, env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.fuzz.hooks", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return await process.wait()


async def _document(url: str) -> dict[str, Any]:
    """The proxy's document, narrowed to what its agents do: their model, short answers, one prompt each."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/openapi.json") as response:
        document: dict[str, Any] = await response.json()
    schemas = document["components"]["schemas"]
    _, _, *batches = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    for batch in batches:
        batch["maxItems"] = 1
    for name in ("CompletionRequest", "ChatRequest"):
        properties = schemas[name]["properties"]
        properties["model"] = {"enum": ["stand-in", "nobody's"]}
        for limit in ("max_tokens", "max_completion_tokens"):
            properties[limit]["anyOf"][0]["maximum"] = 32
    return document
