# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine over two nodes: its ranks are at two addresses of this host (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvferry.deploy.launcher import start_process
from tests.helpers.client import heldout, session
from tests.helpers.commands import PROXY
from tests.helpers.servers import descendants, free_port
from tests.helpers.waiting import patient
from tests.system.vllm.servers import (
    ENVIRONMENT,
    MARKS,
    MODEL_DIR,
    PYTHON,
    ROOT,
    VllmServer,
    engine_words,
    our_connector,
    together,
    vllm_server,
)
from tests.system.vllm.test_data_parallel import ready, runs
from tests.system.vllm.test_kvferry import (
    ENDED,
    FAILED,
    Stack,
    answers,
    assert_all_equal,
    body,
    salted,
)

PROMPTS = 30
GONE_S = patient(60.0)
HEAD, SECOND = "127.0.0.2", "127.0.0.3"
HEADLESS = """
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    args.api_server_count = 0
    run_headless(args)
"""
"""`vllm serve --headless`; the command `vllm` fails here."""

pytestmark = MARKS


def node_words(node: int, master_port: int) -> tuple[str, ...]:
    return (
        *("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
        *("--nnodes", "2", "--node-rank", str(node)),
        *("--master-addr", HEAD, "--master-port", str(master_port)),
    )


@asynccontextmanager
async def second_node(role: str, master_port: int, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The ranks of an engine that are on its second node. Their address is not in their settings."""
    told = our_connector("", "", "tcp", {}) | {"kv_role": role}
    told["kv_connector_extra_config"] = {"transfer": "tcp"}
    words = (
        *("--model", str(MODEL_DIR), "--headless", *engine_words(4), "--enable-prefix-caching"),
        *node_words(1, master_port),
        *("--kv-transfer-config", json.dumps(told)),
    )
    environment = {**os.environ, **ENVIRONMENT, "VLLM_HOST_IP": SECOND, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(PYTHON), "-c", HEADLESS, *words, env=environment, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("spread", ["prefill", "decode"])
async def test_an_engine_over_two_nodes_answers_as_one_on_one_host(spread: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as resources:
        proxy = await start_process("proxy", PROXY, tmp_path)
        resources.push_async_callback(proxy.stop)
        discovery, master_port = f"127.0.0.1:{proxy.listening['discovery_port']}", free_port()
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        second = await resources.enter_async_context(
            second_node(roles[spread], master_port, tmp_path / "second-node.log")
        )
        servers = [
            vllm_server(
                name,
                role,
                tmp_path,
                lease_s=60,
                proxy=discovery,
                words=node_words(0, master_port) if name == spread else (),
                connector={"settings": {"advertise_host": HEAD}} if name == spread else {},
            )
            for name, role in roles.items()
        ]
        prefill, decode = await together(resources, *servers)
        http = await resources.enter_async_context(session())
        async with asyncio.timeout(60):
            while True:
                async with http.get(f"{proxy.url}/ready") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)
        stack = Stack(prefill, decode, proxy.url, http)
        bodies = [body(prompt.prompt, chat=False) | {"temperature": 0} for prompt in heldout(PROMPTS)]
        wanted = await answers(http, prefill.url, [salted(each) for each in bodies])
        assert len({str(answer.texts) for answer in wanted}) > PROMPTS // 2
        assert_all_equal(await answers(http, proxy.url, [salted(each) for each in bodies]), wanted)
        assert await stack.moved() == (PROMPTS, 0)
        assert await prefill.sample(http, ENDED, 'reason="released"') == PROMPTS
        assert await decode.sample(http, FAILED) == 0
        await nodes_end_together(stack, prefill if spread == "prefill" else decode, second, spread)


async def nodes_end_together(
    stack: Stack, head: VllmServer, second: asyncio.subprocess.Process, spread: str
) -> None:
    """The second node is killed, or the first one is, while the other goes on by itself."""
    ranks = descendants(second.pid)
    assert ranks
    if spread == "prefill":
        for pid in (second.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
    else:
        head.kill()
    begun = time.monotonic()
    async with asyncio.timeout(GONE_S):
        while any(map(runs, (head.pid, second.pid, *ranks))):
            await asyncio.sleep(0.1)
        while (await ready(stack.http, stack.proxy_url))[spread]:
            await asyncio.sleep(0.1)
    print(f"{spread}: all of both nodes has ended after {time.monotonic() - begun:.1f} s", flush=True)
