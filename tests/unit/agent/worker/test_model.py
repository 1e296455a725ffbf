# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, Qwen2Config

from kvferry.agent.messages.requests import SamplingParams
from kvferry.agent.messages.steps import Chunk, SampleOutput, SamplingRow, SamplingSetup, Step
from kvferry.agent.worker.attention import PagedBatch
from kvferry.agent.worker.model import (
    ModelShard,
    ModelSpec,
    RotaryTable,
    TiledActivation,
    UnsupportedModel,
    check_supported,
    eos_ids,
)
from kvferry.agent.worker.runner import StepRunner
from kvferry.agent.worker.sampler import sample_tokens
from kvferry.agent.worker.shm_allgather import RankExchange
from kvferry.agent.worker.tensor_parallel import Group, splits_of
from kvferry.agent.worker.weights import CheckpointWeights
from tests.gpu import needs_gpus
from tests.unit.agent.worker.tiny_models import (
    BLOCK_SIZE,
    CONFIGS,
    VOCAB_SIZE,
    greedy_tokens,
    load_model,
    make_runner,
    reference_tokens,
    save_checkpoint,
)

PROMPT = random.Random(5).choices(range(VOCAB_SIZE), k=53)
COUNT = 24
NUM_BLOCKS = 8
TABLE = (5, 2, 7, 0, 3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    shards = {"llama": "40KB"}  # several files and an index
    return {
        name: save_checkpoint(name, directory, max_shard_size=shards.get(name, "5GB")) for name in CONFIGS
    }


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, Path]) -> dict[str, list[int]]:
    return {name: reference_tokens(path, PROMPT, COUNT) for name, path in checkpoints.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers_generate(
    name: str, checkpoints: dict[str, Path], references: dict[str, list[int]]
) -> None:
    runner = make_runner(load_model(checkpoints[name]), NUM_BLOCKS)
    tokens = greedy_tokens(runner, TABLE, PROMPT, COUNT)
    assert len(set(references[name])) > 3, "a constant answer would prove nothing"
    assert tokens == references[name]


def test_a_step_says_that_its_kv_is_written_before_it_draws(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(checkpoints["qwen3"])
    pool = torch.full(model.geometry(BLOCK_SIZE).pool_shape(NUM_BLOCKS, 2), torch.nan)
    runner = StepRunner(model, pool, (), is_sampler=True)
    events: list[object] = []

    def noted(*arguments: Any) -> list[SampleOutput]:
        events.append("sampled")
        return sample_tokens(*arguments)

    monkeypatch.setattr("kvferry.agent.worker.sampler.sample_tokens", noted)
    greedy = SamplingRow(key=0, choice=0, position=0)
    setup = SamplingSetup(key=0, sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0))
    chunk = Chunk(token_ids=tuple(PROMPT), start=0, blocks=TABLE[:4], samples=(greedy,))
    step = Step(number=1, copies=(), chunks=(chunk,), setups=(setup,), report_written=True)
    runner.run(step, lambda: events.append(pool[list(chunk.blocks)]))
    written, sampled = events
    assert sampled == "sampled"
    assert isinstance(written, torch.Tensor)
    assert not written.isnan().any()
    assert written.equal(pool[list(chunk.blocks)])
    runner.run(msgspec.structs.replace(step, report_written=False), pytest.fail)


class SlowModel:
    """A stand-in whose KV is written long after the host has gone on."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool

    def hidden_states(self, batch: PagedBatch) -> torch.Tensor:
        torch.cuda._sleep(200_000_000)  # cycles, a tenth of a second
        self._pool.fill_(1.0)
        return torch.zeros(len(batch.positions), 1, device=self._pool.device)

    def logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return hidden[: len(rows)]


@pytest.mark.gpu
@needs_gpus(1)
def test_on_a_gpu_kv_is_written_when_a_step_says_so() -> None:
    """I1: not when it was launched. Another stream looks, as a reader of another process would."""
    pool = torch.zeros(2, 1, 1, 2, BLOCK_SIZE, 8, device="cuda")
    runner = StepRunner(cast(ModelShard, SlowModel(pool)), pool, (), is_sampler=False)
    seen: list[torch.Tensor] = []

    def look() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            seen.append(pool.cpu())

    chunk = Chunk(token_ids=(1, 2, 3), start=0, blocks=(1,))
    runner.run(Step(number=1, copies=(), chunks=(chunk,), report_written=True), look)
    assert seen[0].eq(1.0).all()


RankAnswer = dict[str, tuple[list[int], str, str]]


def _answers_of_rank(rank: int, rendezvous: Path, paths: dict[str, Path]) -> RankAnswer:
    """One of two ranks, in a process of its own: greedy tokens, weights hash and layout of every model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    answers = {}
    with RankExchange(rendezvous.parent, rank, 2, barrier=dist.barrier, timeout_s=60.0) as exchange:
        group = Group(rank, 2, exchange)
        for name, path in paths.items():
            model = load_model(path, group)
            tokens = greedy_tokens(make_runner(model, NUM_BLOCKS, group), TABLE, PROMPT, COUNT)
            answers[name] = (tokens, model.weights_hash, model.geometry(16).fingerprint())
    dist.destroy_process_group()
    return answers


@pytest.mark.timeout(180)  # two processes import torch and transformers; on a busy host that is most of it
def test_two_ranks_give_the_tokens_of_transformers_generate(
    checkpoints: dict[str, Path],
    references: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as ranks:
        futures = [
            ranks.submit(_answers_of_rank, rank, tmp_path / "rendezvous", checkpoints) for rank in range(2)
        ]
        results = [future.result(timeout=150) for future in futures]
    for name, path in checkpoints.items():
        single = load_model(path)
        expected = (references[name], single.weights_hash, single.geometry(16).fingerprint())
        assert [result[name] for result in results] == [expected, expected]


def test_weights_hash_tells_checkpoints_apart(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = checkpoints["qwen3"]
    same = CheckpointWeights(path).fingerprint()
    assert same == CheckpointWeights(path).fingerprint()
    (file,) = path.glob("*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    (tmp_path / file.name).write_bytes(damaged)
    assert CheckpointWeights(tmp_path).fingerprint() != same


def _dummy(path: Path, group: Group) -> ModelShard:
    return ModelShard(
        ModelSpec(
            directory=path,
            device=torch.device("cpu"),
            dtype="auto",
            load_format="dummy",
            max_model_len=64,
            group=group,
        )
    )


def test_dummy_weights_need_only_a_config_and_do_not_depend_on_the_split(tmp_path: Path) -> None:
    CONFIGS["qwen2"].save_pretrained(tmp_path)
    whole = _dummy(tmp_path, Group(0, 1))
    halves = [_dummy(tmp_path, Group(rank, 2)) for rank in range(2)]
    parameters = dict(whole._causal.named_parameters())
    for name, dimension in (
        ("model.layers.1.self_attn.q_proj.weight", 0),
        ("model.layers.0.mlp.down_proj.weight", 1),
    ):
        split = [dict(half._causal.named_parameters())[name] for half in halves]
        assert torch.equal(torch.cat(split, dim=dimension), parameters[name])
    assert {half.weights_hash for half in halves} == {whole.weights_hash}
    assert whole.weights_hash == _dummy(tmp_path, Group(0, 1)).weights_hash
    assert whole.max_model_len == 64


def test_a_missing_parameter_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for file in checkpoints["qwen2"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ValueError, match=r"no parameter model\.layers\.2\."):
        load_model(tmp_path)


def test_sliding_window_is_refused() -> None:
    config = Qwen2Config(
        use_sliding_window=True, sliding_window=128, max_window_layers=2, num_hidden_layers=4
    )
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        check_supported(config, Group(0, 1))


def test_rope_that_changes_with_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        check_supported(LlamaConfig(rope_parameters=rope), Group(0, 1))


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_attention_heads"):
        check_supported(CONFIGS["llama"], Group(0, 3))


def test_an_unknown_style_in_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_parallel"):
        splits_of(["norm"], {"norm": "sequence_parallel"})


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert eos_ids(tmp_path, CONFIGS["llama"]) == (VOCAB_SIZE - 1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert eos_ids(tmp_path, CONFIGS["llama"]) == (7, 9)


def test_a_position_has_the_same_rotation_whatever_the_table_s_length() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    tables = [
        RotaryTable(LlamaRotaryEmbedding, CONFIGS["llama"], length, torch.float32, torch.device("cpu"))
        for length in (40, 5000)
    ]
    assert torch.equal(tables[0].cos[:40], tables[1].cos[:40])
    assert torch.equal(tables[0].sin[:40], tables[1].sin[:40])


def test_an_activation_s_bits_do_not_depend_on_the_rows_around() -> None:
    activation = TiledActivation(torch.nn.SiLU())
    rows = torch.randn(1, 2640, 80, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(7)  # seven equal parts would leave remainders to the scalar path
        together = activation(rows)
    finally:
        torch.set_num_threads(threads)
    apart = torch.cat([activation(part) for part in rows.split(16, dim=1)], dim=1)
    assert torch.equal(together, apart)
