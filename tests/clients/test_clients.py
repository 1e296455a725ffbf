# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/clients.md, each with its client, against a proxy and a pair of agents."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.clients.page import ROOT, Client, clients, printed
from tests.standins.chat_templates import HERMES
from tests.system.conftest import MODEL, StartCluster, log_dir, start_cluster

__all__ = ["log_dir", "start_cluster"]

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="module")]

ENVIRONMENTS = ROOT / "build" / "clients"
PRINTED_ADDRESS = "http://127.0.0.1:10001"
RUN_TIMEOUT_S = 300.0
SCRIPTS = [(client.name, number) for client in clients().values() for number in range(len(client.scripts))]
# Nothing is to be downloaded, and nothing kept in anybody's home.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    async with start_cluster() as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_tools(
    start_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """The bundled model with a chat template that has tools."""
    model = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(ROOT / "deploy/models" / MODEL, model)
    (model / "chat_template.jinja").write_text(HERMES)
    async with start_cluster(model=str(model)) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands are run: they name files of the repository, and write some of their own."""
    for name in ("deploy", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def installed(name: str) -> Client:
    """The client; skips the test, with the reason, where it is not installed."""
    if (failed := ENVIRONMENTS / f"{name}.failed").exists():
        pytest.skip(f"{name} cannot be installed here: {failed.read_text()[-300:]}")
    if not (ENVIRONMENTS / name / ".installed").exists():
        pytest.skip(f"{name} is not installed: make test-clients installs it")
    return clients()[name]


async def run(client: Client, words: list[str], address: str, folder: Path, **more: str) -> str:
    """Run a command of the client's environment to its end, and return what it printed."""
    program, *rest = [word.replace(PRINTED_ADDRESS, address) for word in words]
    log = folder / "errors.log"
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(folder / "hf"), **more}
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            str(ENVIRONMENTS / client.name / "bin" / program), *rest,
            cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, output.decode()[-3000:] + log.read_text()[-3000:]
    return output.decode()


@pytest.mark.parametrize(("name", "number"), SCRIPTS)
async def test_a_script_prints_what_the_page_says(
    cluster: Cluster, with_tools: Cluster, folder: Path, name: str, number: int
) -> None:
    client = installed(name)
    script = client.scripts[number]
    expected = printed(script)
    assert expected
    address = with_tools.url if "tool" in script else cluster.url
    words = ["python", "-c", script]
    if client.name == "java":
        (folder / "Ask.java").write_text(script.replace(PRINTED_ADDRESS, address))
        words = ["java", "Ask.java"]
    output = await run(client, words, address, folder)
    assert output.splitlines() == expected


async def test_curl(cluster: Cluster, folder: Path) -> None:
    """An offer of HTTP/2, and HTTP/1.0, which would show the sizes of chunks as text: whole and streamed."""
    client = installed("curl")
    assert len(client.commands) == 4
    for command in client.commands:
        output = await run(client, list(command), cluster.url, folder)
        if '"stream"' in command[-1]:
            *events, done, end = output.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            answers = [json.loads(event.removeprefix("data: ")) for event in events]
        else:
            answers = [json.loads(output)]
        assert "".join(answer["choices"][0]["text"] for answer in answers) == "469"


async def evaluate(client: Client, address: str, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The scores of lm-eval's command, and what the model answered for each sample."""
    (command,) = client.commands
    await run(client, list(command), address, folder)
    (results,) = folder.glob("results/**/results_*.json")
    scores = json.loads(results.read_text())["results"]
    samples = [
        {name: sample[name] for name in ("doc_id", "resps", "filtered_resps", "target")}
        for path in sorted(folder.glob("results/**/samples_*.jsonl"))
        for sample in map(json.loads, path.read_text().splitlines())
    ]
    return scores, samples


async def test_lm_eval_scores_are_those_of_one_agent(
    cluster: Cluster, start_cluster: StartCluster, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """lm-eval: `generate_until` in batches of 4, and multiple choice by loglikelihood, to the last digit."""
    client = installed("lm-eval")
    apart = await evaluate(client, cluster.url, folder)
    alone = tmp_path_factory.mktemp("alone")
    for name in ("deploy", "tests"):
        (alone / name).symlink_to(ROOT / name)
    async with start_cluster(prefill=0, decode=0, both=1) as one:
        together = await evaluate(client, one.url, alone)
    scores, samples = apart
    assert len(samples) == 20
    assert apart == together
    assert 0 < scores["kvferry_sums"]["exact_match,none"] <= 1
    assert 0 < scores["kvferry_choices"]["acc,none"] <= 1


async def test_guidellm(cluster: Cluster, folder: Path) -> None:
    client = installed("guidellm")
    (command,) = client.commands
    await run(client, list(command), cluster.url, folder)
    (benchmark,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (8, 0)


async def test_aiperf(cluster: Cluster, folder: Path) -> None:
    """Chats and responses. A local tokenizer is looked for on a hub first, unless there is none."""
    client = installed("aiperf")
    assert len(client.commands) == 2
    for command in client.commands:
        await run(client, list(command), cluster.url, folder, HF_HUB_OFFLINE="")
        (report,) = folder.glob(f"{command[-1]}/**/profile_export_aiperf.json")
        metrics = json.loads(report.read_text())
        assert metrics["request_count"]["avg"] == 8
        assert "error_request_count" not in metrics
        assert metrics["output_sequence_length"]["avg"] > 1


async def test_vllm(cluster: Cluster, folder: Path) -> None:
    """vLLM's own benchmark: completions and chats."""
    client = installed("vllm")
    assert len(client.commands) == 2
    for command in client.commands:
        await run(client, list(command), cluster.url, folder)
        result = json.loads((folder / command[-1]).read_text())
        assert (result["completed"], result["failed"]) == (8, 0)
        assert result["total_output_tokens"] == 8 * 16
