# SPDX-License-Identifier: Apache-2.0
"""A model with MLA, whose latents every rank has: pairs of SGLang servers answer as one plain server does
(`make test-sglang`).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers.client import session
from tests.system.sglang.servers import MARKS, PYTHON, ROOT, sglang_server
from tests.system.sglang.test_kvferry import bodies_of, started
from tests.system.vllm.test_kvferry import Answer, answers, assert_all_equal

KIND = "deepseek_v3"
PROMPTS = 20
SETTINGS = {"KVFERRY_TEST_MLA": "1"}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
"""SGLang has no other positions for MLA on CPUs."""
NEEDED = {
    "rope_parameters": YARN, "moe_layer_freq": 1, "scoring_func": "sigmoid", "ep_size": 1,
    "aux_loss_alpha": 0.001, "seq_aux": True,
}  # fmt: skip
"""What SGLang expects in a config, and transformers does not write."""

pytestmark = MARKS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    words = [str(PYTHON), "-m", "tests.system.vllm.models", str(directory), KIND]
    subprocess.run(words, cwd=ROOT, check=True, timeout=600)
    config = directory / KIND / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | NEEDED))
    return directory / KIND


@pytest.fixture(scope="module")
def wanted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Answer]]:
    """What one plain server answers, by whether it is a chat."""

    async def ask() -> dict[bool, list[Answer]]:
        log_dir = tmp_path_factory.mktemp("plain")
        async with (
            sglang_server("plain", None, log_dir, model=model, settings=SETTINGS) as plain,
            session() as http,
        ):
            return {
                chat: await answers(http, plain.url, bodies_of(PROMPTS, chat=chat)) for chat in (False, True)
            }

    found = asyncio.run(ask())
    assert all(len({str(answer.texts) for answer in each}) > len(each) // 2 for each in found.values())
    return found


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 2), (2, 1)], ids="{0[0]}-{0[1]}".format)
async def test_a_model_with_mla(
    ranks: tuple[int, int], model: Path, wanted: dict[bool, list[Answer]], tmp_path: Path
) -> None:
    async with started(tmp_path, ranks=ranks, model=model, settings=SETTINGS) as stack:
        for chat, expected in wanted.items():
            found = await answers(stack.http, stack.proxy_url, bodies_of(PROMPTS, chat=chat))
            assert_all_equal(found, expected)
        await stack.settled()
        assert "cannot be used" not in stack.decode.log.read_text(errors="replace")
