# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from kvferry.agent.architectures import TESTED, UnsupportedModel
from kvferry.agent.checkpoint import BadCheckpoint
from kvferry.agent.messages.requests import SamplingParams
from kvferry.agent.messages.steps import Chunk, SampleOutput, SamplingRow, SamplingSetup, Step
from kvferry.agent.worker.attention import PagedBatch
from kvferry.agent.worker.model import (
    ModelShard,
    RotaryTable,
    TiledActivation,
    check_supported,
    eos_ids,
)
from kvferry.agent.worker.reference import TOLERANCE
from kvferry.agent.worker.runner import StepRunner
from kvferry.agent.worker.sampler import sample_tokens
from kvferry.agent.worker.shm_allgather import RankExchange
from kvferry.agent.worker.tensor_parallel import Group, TensorParallelPlan
from kvferry.agent.worker.weights import CheckpointWeights
from tests.helpers.gpu import needs_gpus
from tests.unit.agent.worker.tiny_models import (
    BLOCK_SIZE,
    CONFIGS,
    VOCAB_SIZE,
    Answer,
    greedy_answer,
    load_model,
    make_pool,
    make_runner,
    reference_answer,
    save_checkpoint,
)

PROMPT = random.Random(5).choices(range(VOCAB_SIZE), k=53)
COUNT = 24
NUM_BLOCKS = 8
TABLE, OTHER_TABLE = (5, 2, 7, 0, 3), (1, 6, 0, 2, 4)
DUMMY = "Qwen2ForCausalLM"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    shards = {"LlamaForCausalLM": "40KB"}  # several files and an index
    return {
        name: save_checkpoint(name, directory, max_shard_size=shards.get(name, "5GB")) for name in CONFIGS
    }


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, Path]) -> dict[str, Answer]:
    return {name: reference_answer(path, PROMPT, COUNT) for name, path in checkpoints.items()}


def assert_same_answer(answer: Answer, reference: Answer) -> None:
    assert [token for token, _ in answer] == [token for token, _ in reference]
    worst = max(abs(own - other) for (_, own), (_, other) in zip(answer, reference, strict=True))
    assert worst <= TOLERANCE


def answers(model: ModelShard, group: Group | None = None) -> tuple[Answer, Answer]:
    """The answer of one agent's rank, and that of two agents' ranks, the second with the first one's KV of
    the prompt in other blocks.
    """
    ours, theirs = (make_pool(model, NUM_BLOCKS, group) for _ in range(2))
    first = greedy_answer(make_runner(model, NUM_BLOCKS, group, pool=theirs), TABLE, PROMPT, 1)
    held = -(-len(PROMPT) // BLOCK_SIZE)
    ours[list(OTHER_TABLE[:held])] = theirs[list(TABLE[:held])]
    apart = greedy_answer(make_runner(model, NUM_BLOCKS, group, pool=ours), OTHER_TABLE, PROMPT, COUNT, first)
    return greedy_answer(make_runner(model, NUM_BLOCKS, group), TABLE, PROMPT, COUNT), apart


def test_the_table_of_models_is_what_is_tested() -> None:
    assert set(CONFIGS) == set(TESTED)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_and_logprobs_equal_transformers_generate(
    name: str, checkpoints: dict[str, Path], references: dict[str, Answer]
) -> None:
    """By one agent, and by two: then all after the first token comes of KV that was moved to other blocks."""
    assert len({token for token, _ in references[name]}) > 3, "a constant answer would prove nothing"
    together, apart = answers(load_model(checkpoints[name]))
    assert_same_answer(together, references[name])
    assert apart == together


def test_a_step_says_that_its_kv_is_written_before_it_draws(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(checkpoints["Qwen3ForCausalLM"])
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

    def forward(self, batch: PagedBatch, rows: list[int], on_written: Callable[[], None]) -> None:
        torch.cuda._sleep(200_000_000)  # cycles, a tenth of a second
        self._pool.fill_(1.0)
        on_written()


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


RankAnswer = dict[str, tuple[tuple[Answer, Answer], str, str]]


def _answers_of_rank(rank: int, rendezvous: Path, paths: dict[str, Path]) -> RankAnswer:
    """One of two ranks, in a process of its own: what `two_ranks` returns, of every model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found = {}
    with RankExchange(rendezvous.parent, rank, 2, barrier=dist.barrier, timeout_s=60.0) as exchange:
        group = Group(rank, 2, exchange)
        for name, path in paths.items():
            model = load_model(path, group)
            found[name] = (answers(model, group), model.weights_hash, model.geometry(16).fingerprint())
        model = load_model(paths[DUMMY], group, load_format="dummy")
        found["dummy"] = (answers(model, group), model.weights_hash, model.geometry(16).fingerprint())
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(180)  # two processes import torch and transformers; on a busy host that is most of it
def test_two_ranks_give_the_tokens_and_logprobs_of_transformers_generate(
    checkpoints: dict[str, Path],
    references: dict[str, Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    shared = {name: path for name, path in checkpoints.items() if TESTED[name]}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as ranks:
        futures = [ranks.submit(_answers_of_rank, rank, tmp_path / "rendezvous", shared) for rank in range(2)]
        results = [future.result(timeout=150) for future in futures]
    for name, path in shared.items():
        single = load_model(path)
        for (together, apart), weights_hash, layout in (result[name] for result in results):
            assert_same_answer(together, references[name])
            assert apart == together
            assert (weights_hash, layout) == (single.weights_hash, single.geometry(16).fingerprint())
    # Random weights do not depend on how they are split.
    whole = load_model(checkpoints[DUMMY], load_format="dummy")
    reference = greedy_answer(make_runner(whole, NUM_BLOCKS), TABLE, PROMPT, COUNT)
    for (together, _), weights_hash, _ in (result["dummy"] for result in results):
        assert_same_answer(together, reference)
        assert weights_hash == whole.weights_hash


def test_weights_hash_tells_checkpoints_apart(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = checkpoints["Qwen3ForCausalLM"]
    same = CheckpointWeights(path).fingerprint()
    assert same == CheckpointWeights(path).fingerprint()
    (file,) = path.glob("*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    (tmp_path / file.name).write_bytes(damaged)
    assert CheckpointWeights(tmp_path).fingerprint() != same


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    CONFIGS["Qwen2ForCausalLM"].save_pretrained(tmp_path)
    model, same = (load_model(tmp_path, load_format="dummy") for _ in range(2))
    assert model.weights_hash == same.weights_hash
    answers = [greedy_answer(make_runner(each, NUM_BLOCKS), TABLE, PROMPT, COUNT) for each in (model, same)]
    assert answers[0] == answers[1]


def test_a_missing_parameter_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for file in checkpoints["Qwen2ForCausalLM"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ValueError, match=r"no parameter model\.layers\.2\."):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_attention"),
    ],
)
def test_what_would_give_wrong_tokens_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        check_supported(LlamaConfig(**changes), Group(0, 1))


def test_an_architecture_that_was_never_split_is_not_split() -> None:
    with pytest.raises(UnsupportedModel, match="--tp 1"):
        check_supported(CONFIGS["GPT2LMHeadModel"], Group(0, 2))


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads .* --tp may be 1, 2$"):
        check_supported(CONFIGS["LlamaForCausalLM"], Group(0, 3))


def test_an_unknown_style_in_a_plan_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["LlamaForCausalLM"])
    model.tp_plan = {**model.tp_plan, "model.norm": "sequence_parallel"}
    with pytest.raises(UnsupportedModel, match="sequence_parallel"):
        TensorParallelPlan(model, Group(0, 2))


def test_a_tensor_that_no_parameter_takes_ends_the_start(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = checkpoints["Qwen3ForCausalLM"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight_scale_inv"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"no parameter .*weight_scale_inv"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (
            lambda weights: weights.pop("model.norm.weight"),
            "the checkpoint has no parameter model.norm.weight",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight has shape \[3\], the model expects",
        ),
    ],
)
def test_a_tensor_that_lacks_or_has_another_shape_is_named(
    spoil: Callable[[dict[str, torch.Tensor]], object],
    named: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    """The checkpoint is not whole; another engine would not load it either."""
    path = checkpoints["Qwen3ForCausalLM"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    spoil(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=named):
        load_model(tmp_path)


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert eos_ids(tmp_path, CONFIGS["LlamaForCausalLM"]) == (VOCAB_SIZE - 1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert eos_ids(tmp_path, CONFIGS["LlamaForCausalLM"]) == (7, 9)


def test_a_position_has_the_same_rotation_whatever_the_table_s_length() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config=CONFIGS["LlamaForCausalLM"])
    positions = torch.arange(40)[None]
    short, long = (
        RotaryTable(rotary, length, torch.float32, torch.device("cpu"))(torch.empty(0), positions)
        for length in (40, 5000)
    )
    assert all(torch.equal(one, other) for one, other in zip(short, long, strict=True))


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
