# SPDX-License-Identifier: Apache-2.0
"""What is not the same has not the same hash: every hash by which agents and proxies tell things apart, over
pairs of inputs that a hash of joined fields, or one hash for two purposes, would mistake for each other.
"""

from __future__ import annotations

import json
import shutil
from array import array
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec import Raw, structs

from kvferry.agent.api.message.message_parser import call_id
from kvferry.agent.api.text.tokenizer import Tokenizer
from kvferry.agent.block_hashes import hash_blocks, hash_prompt
from kvferry.agent.checkpoint import weights_fingerprint
from kvferry.agent.ids import AnswerId
from kvferry.agent.vllm.identity import adapter_of, prompt_hash, tokenizer_of, weights_of
from kvferry.proxy.fleet.routing.routing_request import BYTES_PER_TOKEN, CHUNK_TOKENS, RoutingRequest
from kvferry.transfer.layout import KVGeometry
from tests.standins.vllm_scheduler import VllmRequest

BUNDLED = Path(__file__).parents[2] / "deploy" / "models" / "ferry-tiny"
IDS = list(b"An ordinary prompt of three blocks, that others send as well.")[:48]
SALTS = ("", "a", "b", "ab", "\0", "a\0", "16", "\N{GRINNING FACE}", "\ud83d\ude00", "\udcff")
GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=2, head_dim=3, dtype="float32", block_size=16, rope="x")


def spelled(ids: list[int]) -> str:
    """A salt whose UTF-8 is what token ids are in memory."""
    return array("q", ids).tobytes().decode(errors="surrogatepass")


def all_differ(hashes: list[Any]) -> None:
    same = [pair for pair in combinations(range(len(hashes)), 2) if hashes[pair[0]] == hashes[pair[1]]]
    assert not same


def test_no_salt_makes_a_prefix_of_another_one() -> None:
    """N2: with the bytes of a prompt's first block as salt, one got, and gave, the KV of others' prompts."""
    for start, size in product((8, 16, 32), (8, 16)):
        others = hash_blocks(IDS, size)
        for salt in (spelled(IDS[:start]), spelled(IDS[:size]), spelled(IDS), *SALTS[1:]):
            assert not {*hash_blocks(IDS[start:], size, salt=salt)} & {*others}, (start, size, salt)


def test_no_two_prefixes_have_one_hash() -> None:
    """By ids, beginning, salt, and size of the blocks; nor does a whole prompt have a prefix's."""
    prompts = [IDS, IDS[16:], IDS[:16] * 3, [0] * 48, [-1] * 48, [2**62] * 48, [-(2**63)] * 48, [255] * 48]
    salts = [*SALTS, spelled(IDS[:16]), spelled(IDS[:32])]
    found: dict[Any, tuple[Any, ...]] = {}
    for ids, salt, size in product(prompts, salts, (4, 8, 16)):
        for end, block_hash in enumerate(hash_blocks(ids, size, salt=salt), start=1):
            what = (salt, size, tuple(ids[: end * size]))
            assert found.setdefault(block_hash.hex(), what) == what
    for ids, end in product(prompts, range(49)):
        what = ("a whole prompt", tuple(ids[:end]))
        assert found.setdefault(hash_prompt(ids[:end]), what) == what


def test_a_chain_goes_on_as_it_would_have_been_made_at_once() -> None:
    for salt, done in product(SALTS, range(4)):
        whole = hash_blocks(IDS, 16, salt=salt)
        assert hash_blocks(IDS, 16, whole[:done], salt) == whole
        assert hash_blocks(IDS[: done * 16 + 15], 16, salt=salt) == whole[:done]


def test_prompts_of_vllm_differ_by_ids_adapter_and_images() -> None:
    """An image may be named by its sender."""

    def named(*names: str) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(identifier=name) for name in names)

    adapters = [SimpleNamespace(lora_name=name, lora_path="/nowhere") for name in ("a", "b")]
    images = [(), named("a"), named("b"), named("a", "b"), named("b", "a"), named("ab"), named("a", "")]
    images += [named("a|mm b"), named("a\0b"), named(f"a{spelled([1])}b"), named("|mm a"), named("lora")]
    requests = [
        (VllmRequest("x", ids, lora_request=adapter, mm_features=each), len(ids))
        for ids, adapter, each in product(([1, 2], [1], [1, 0]), (None, *adapters), images)
    ]
    all_differ([prompt_hash(request, count) for request, count in requests] + [hash_prompt([1, 2])])


def test_vllms_adapters_weights_and_tokenizers_differ_by_each_of_their_parts(tmp_path: Path) -> None:
    def config(**changes: Any) -> Any:
        text = SimpleNamespace(to_dict=lambda: {"rope": changes.get("rope", 1)})
        model = {
            "model": "m", "revision": "r", "tokenizer": "m", "tokenizer_revision": "r", "quantization": None,
            "dtype": "float32", "seed": 0, "hf_config": SimpleNamespace(_commit_hash=None),
        }  # fmt: skip
        load = SimpleNamespace(load_format=changes.pop("load_format", "auto"))
        method, draft = changes.pop("drafts", (None, None))
        named = None if draft is None else SimpleNamespace(**model | {"model": draft}, hf_text_config=text)
        return SimpleNamespace(
            model_config=SimpleNamespace(**model | changes, hf_text_config=text),
            load_config=load,
            speculative_config=method
            and SimpleNamespace(method=method, draft_model_config=named, draft_load_config=None),
        )

    apart = [{}, {"model": "m\0r"}, {"model": "m\0r", "revision": ""}, {"revision": "r\0None"}, {"rope": 2}]
    apart += [{"load_format": "dummy"}, {"load_format": "dummy", "seed": 1}, {"quantization": "fp8"}]
    apart += [{"drafts": drafts} for drafts in (("eagle", "d"), ("eagle", "e"), ("mtp", "d"))]
    weights = [weights_of(config(**each)) for each in apart]
    assert weights_of(config(drafts=("ngram", None))) == weights_of(config()), "it has no KV of its own"
    names = [("m", "r"), ("m\0r", ""), ("m", "\0r"), ("m\0", "r"), ("by name", "m")]
    tokenizers = [tokenizer_of(config(tokenizer=name, tokenizer_revision=at)) for name, at in names]
    adapters = [
        adapter_of(*each) for each in (("a", "b"), ("a\0b", ""), ("a", "\0b"), ("by name", "m"), ("a", ""))
    ]
    for number, files in enumerate(
        ({"vocab.json": "a"}, {"merges.txt": "a"}, {"vocab.json": "a", "merges.txt": ""})
    ):
        (tmp_path / str(number)).mkdir()
        for name, content in files.items():
            (tmp_path / str(number) / name).write_text(content)
        tokenizers.append(tokenizer_of(config(tokenizer=str(tmp_path / str(number)))))
        adapters.append(adapter_of("a", str(tmp_path / str(number))))
    all_differ([*weights, *tokenizers, *adapters])


def test_tokenizers_differ_by_every_file(tmp_path: Path) -> None:
    def tokenizer(name: str, **files: str) -> str:
        shutil.copytree(BUNDLED, tmp_path / name)
        for each, content in files.items():
            (tmp_path / name / each.replace("_jinja", ".jinja")).write_text(content)
        return Tokenizer(tmp_path / name).fingerprint

    assert not (BUNDLED / "chat_template.jinja").exists()
    all_differ(
        [tokenizer("a"), tokenizer("b", chat_template_jinja=""), tokenizer("c", chat_template_jinja=" ")]
    )


def test_weights_differ_by_their_files_headers_and_bytes(tmp_path: Path) -> None:
    def weights(*files: tuple[str, bytes]) -> str:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        for number, (header, body) in enumerate(files):
            raw = len(header).to_bytes(8, "little") + header.encode() + body
            (directory / f"{number}.safetensors").write_bytes(raw)
        names = {str(number): f"{number}.safetensors" for number in range(len(files))}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        return weights_fingerprint(directory)

    one, two = ("{}", b"a"), ("{}", b"b")
    cases = [
        (one,),
        (two,),
        (one, two),
        (two, one),
        (one, one),
        (("{} ", b"a"),),
        (("{}", b" a"),),
        (("{}a", b""),),
    ]
    cases += [(("{}", b"a" * 5000),), (("{}", b"a" * 4999 + b"b"),), (("{}", b"b" + b"a" * 4999),)]
    all_differ([weights(*case) for case in cases])


def test_layouts_differ_by_every_field() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"num_layers": 11}, {"num_kv_heads": 1}, {"head_dim": 31}, {"dtype": "float16"}, {"mla": True},
        {"rope": "y"}, {"rope": 'x","order":"o'}, {"order": "o"}, {"rope": "", "order": "x"},
    ]  # fmt: skip
    all_differ([structs.replace(GEOMETRY, **each).fingerprint() for each in changes])


def test_routing_never_takes_one_models_or_salts_prompt_for_anothers() -> None:
    """A model's name may hold any character, and so may a salt."""
    chunk = "c" * CHUNK_TOKENS * BYTES_PER_TOKEN
    ids = [1] * CHUNK_TOKENS
    prompts = [
        Raw(json.dumps(each).encode()) for each in (chunk, "d" + chunk[1:], chunk * 2, ids, [2, *ids[1:]])
    ]
    models = ["m", "m\0", 'm\0"s"', "m\0text", "", "\0", 'm\0"s"\0']
    salts = [b"", b'"s"', b'"t"', b'\0"s"', b"\0"]
    requests = [
        RoutingRequest(model=model, prompt=prompt, cache_salt=salt)
        for model, prompt, salt in product(models, prompts, salts)
    ]
    found: dict[bytes, tuple[Any, ...]] = {}
    for request in requests:
        for end, each in enumerate(request.chunks, start=1):
            what = (request.model, request.cache_salt, bytes(request.prompt)[: end * len(chunk)])
            assert found.setdefault(each, what) == what


def test_calls_differ_by_answer_choice_and_place() -> None:
    answers = ["a", "a:1", "a:1:1", ""]
    all_differ(
        [call_id(AnswerId(answer), *at) for answer, at in product(answers, product((0, 1, 11), repeat=2))]
    )
