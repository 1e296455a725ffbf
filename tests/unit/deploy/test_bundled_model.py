# SPDX-License-Identifier: Apache-2.0
"""The bundled model ferry-tiny answers its tasks, and answers them from the KV cache of the whole prompt."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

from tools.train.tasks import held_out_prompts

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "deploy" / "models" / "ferry-tiny"
LARGEST_WEIGHTS = 4_000_000
LEAST_EXACT_MATCH = 0.97
LEAST_CHANGED = 0.95
BLOCK_SIZE = 16
SAMPLE = 60


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def held_out(every: int = 1) -> list[dict]:
    lines = (ROOT / "tests" / "data" / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[::-every]]  # from the end: the longest recall prompts too


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str, form: str) -> torch.Tensor:
    if form == "chat":
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(prompt, return_tensors="pt").input_ids


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, form: str) -> str:
    """The greedy continuation as text, its end marker included."""
    ids = prompt_ids(tokenizer, prompt, form)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    return tokenizer.decode(output[0, ids.shape[1] :])


def exact_match(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: str, every: int, form: str
) -> float:
    prompts = [prompt for prompt in held_out(every) if prompt["task"] == task]
    right = [generate(model, tokenizer, p["prompt"], form) == p["answer"] + "<|end|>" for p in prompts]
    return sum(right) / len(right)


@dataclass(frozen=True)
class Computed:
    """A recall prompt of the sample, computed up to its last token."""

    last: torch.Tensor
    cache: DynamicCache
    num_tokens: int
    answer: list[int]
    asked_block: int
    """The block of the asked value's first digit, two tokens after the pair's start."""


@pytest.fixture(scope="module")
@torch.inference_mode()
def computed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> list[Computed]:
    made = []
    for prompt in held_out(len(held_out()) // SAMPLE):
        if prompt["task"] == "recall":
            ids, cache = prompt_ids(tokenizer, prompt["prompt"], "raw"), DynamicCache()
            model(ids[:, :-1], past_key_values=cache)
            answer = tokenizer(prompt["answer"]).input_ids
            asked_block = (prompt["asked_pair_token"] + 2) // BLOCK_SIZE
            made.append(Computed(ids[:, -1:], cache, prompt["prompt_tokens"], answer, asked_block))
    return made


@torch.inference_mode()
def answer_from_damaged_cache(model: PreTrainedModel, prompt: Computed, block: int, damage: str) -> list[int]:
    """Greedy tokens after the prompt, when one KV block of it is damaged before the last prompt token."""
    cache = copy.deepcopy(prompt.cache)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            span = tensor[:, :, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            if damage == "flip":
                span.view(torch.int32).bitwise_xor_(0x40 << 24)
            elif damage == "zero":
                span.zero_()
    output: list[int] = []
    token = prompt.last
    while len(output) < len(prompt.answer):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        output.append(token.item())
    return output


def test_weights_are_small_float32_and_shard_over_four_ranks(model: PreTrainedModel) -> None:
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= LARGEST_WEIGHTS
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    for divided in ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size"):
        assert config[divided] % 4 == 0
    assert config["tie_word_embeddings"] is True


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_key_is_one_token_wherever_it_stands(tokenizer: PreTrainedTokenizerFast) -> None:
    (key,) = tokenizer("ab").input_ids
    for text in ("ab=1;", ";ab=1", "?ab=", " ab", "\nab"):
        assert tokenizer(text).input_ids.count(key) == 1


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer("0123456789").input_ids) == 10


def test_chat_template_opens_and_closes_every_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "3+4="},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|user|>s<|end|><|user|>1+2=<|end|><|assistant|>3<|end|><|user|>3+4=<|end|><|assistant|>"
    )
    assert tokenizer.eos_token == "<|end|>"


def test_held_out_prompts_state_their_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = held_out()
    assert len(prompts) >= 500
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        ids = tokenizer(prompt["prompt"]).input_ids
        assert len(ids) == prompt["prompt_tokens"]
        if prompt["asked_pair_token"] is not None:
            key = prompt["prompt"][-3:-1]
            pair = tokenizer.decode(ids[prompt["asked_pair_token"] :])
            assert pair.startswith(f"{key}={prompt['answer']};")


def test_held_out_file_is_what_the_script_writes() -> None:
    assert held_out()[::-1] == [asdict(prompt) for prompt in held_out_prompts()]


def test_held_out_prompts_differ_within_their_first_block(tokenizer: PreTrainedTokenizerFast) -> None:
    openings = [tuple(tokenizer(prompt["prompt"]).input_ids[:BLOCK_SIZE]) for prompt in held_out()]
    assert len(set(openings)) == len(openings)


@pytest.mark.parametrize("form", ["raw", "chat"])
def test_a_sample_of_held_out_prompts_is_answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, form: str
) -> None:
    every = len(held_out()) // SAMPLE
    for task in ("recall", "addition"):
        assert exact_match(model, tokenizer, task, every, form) >= LEAST_EXACT_MATCH


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["raw", "chat"])
@pytest.mark.parametrize("task", ["recall", "addition"])
def test_all_held_out_prompts_are_answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: str, form: str
) -> None:
    assert exact_match(model, tokenizer, task, 1, form) >= LEAST_EXACT_MATCH


@pytest.mark.parametrize("damage", ["flip", "zero"])
def test_damage_to_the_block_of_the_asked_pair_changes_the_answer(
    model: PreTrainedModel, computed: list[Computed], damage: str
) -> None:
    assert changed_answers(model, computed, damage, distance=0) >= LEAST_CHANGED


def test_erasing_another_block_leaves_the_answer(model: PreTrainedModel, computed: list[Computed]) -> None:
    """The answer rests on the asked pair alone, so the damage test above measures what it says."""
    assert changed_answers(model, computed, "zero", distance=2) <= 1 - LEAST_CHANGED


def changed_answers(model: PreTrainedModel, computed: list[Computed], damage: str, *, distance: int) -> float:
    """The part of a sample of recall prompts whose answer changes when the block `distance` blocks after
    the asked value's is damaged. Each prompt is its own control: untouched, the same cache answers right."""
    changed = asked = 0
    for prompt in computed:
        block = prompt.asked_block + distance
        if (block + 1) * BLOCK_SIZE >= prompt.num_tokens and distance:
            continue  # the query itself, or nothing, is there
        assert answer_from_damaged_cache(model, prompt, block, "none") == prompt.answer
        changed += answer_from_damaged_cache(model, prompt, block, damage) != prompt.answer
        asked += 1
    assert asked >= SAMPLE // 2
    return changed / asked
