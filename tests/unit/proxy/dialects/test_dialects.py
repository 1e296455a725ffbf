# SPDX-License-Identifier: Apache-2.0
"""The dialects of other engines as pure functions, against exchanges written down from what was read of them.

Each file in `exchanges/` names its source; `tests/unit/proxy/exchange/test_other_engines.py` has them all
spoken.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvferry.common.engine_servers.description import EngineDialect
from kvferry.proxy.dialects.base import (
    Dialect,
    Endpoints,
    KvEndpoint,
    LegOrder,
    Opening,
    Prefilled,
    SubRequest,
)
from kvferry.proxy.dialects.catalogue import all_dialects
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import BadResponse, BusyResponse, InvalidRequest
from kvferry.proxy.exchange.legs import NO_FAULTS
from kvferry.proxy.exchange.sub_requests import split_into_choices, split_into_prompts
from kvferry.proxy.ids import AnswerId, Endpoint, Identity, RequestId, TransferId
from kvferry.proxy.request import ClientRequest, parse_request
from kvferry.proxy.wire import dialects as wire
from tests.unit.proxy.builders import registration

EXCHANGES = sorted((Path(__file__).parent / "exchanges").glob("*.json"))
IDS = Identity(request_id=RequestId("r"), answer_id=AnswerId("cmpl-a"), created=12, seed=99)
TRANSFER = TransferId("0123456789abcdef0123456789abcdef")
ALL = all_dialects(nixl_lease_s=30.0, moriio_lease_s=60.0)
DIALECTS = {name: dialect for name, dialect in ALL.items() if not dialect.is_native}
"""Of other engines."""


def ask(client: dict[str, Any], endpoint: Endpoint = "completions") -> ClientRequest:
    return parse_request(endpoint, json.dumps(client).encode())


def only_part(client: dict[str, Any], endpoint: Endpoint = "completions") -> SubRequest:
    (sub,) = split_into_choices(ask(client, endpoint), IDS, [TRANSFER])
    return sub


def ends_of(sub: SubRequest, dialect: str, told: dict[str, Any]) -> Endpoints:
    prefill = {"address": "http://10.0.0.1:8001", "dialect": dialect, **told.get("prefill", {})}
    decode = {"address": "http://10.0.0.2:8002", "dialect": dialect, **told.get("decode", {})}
    return sub.endpoints(registration("prefill", 8001, **prefill), registration("decode", 8002, **decode))


@pytest.mark.parametrize("path", EXCHANGES, ids=lambda path: path.stem)
def test_a_recorded_exchange(path: Path) -> None:
    """X26 (no token less), X27 (ids of one type), rows 8 and 10 (what a prefill leg is pared down to)."""
    told = json.loads(path.read_text())
    dialect = DIALECTS[told["dialect"]]
    sub = only_part(told["client"], told["endpoint"])
    endpoints = ends_of(sub, dialect.name, told)
    kv_endpoint = msgspec.convert(told["peer"], KvEndpoint) if "peer" in told else None
    if "lookup" in told:
        assert dialect.lookup(endpoints) == told["lookup"]
        assert dialect.read_lookup(endpoints, json.dumps(told["lookup_answer"]).encode()) == kv_endpoint
    assert dialect.leg_order(endpoints, kv_endpoint) is LegOrder[told["shape"]]
    check_leg(dialect.prefill_leg(sub, endpoints), told["prefill_leg"], told["endpoint"])
    answer = told["prefill_answer"]
    raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    prefilled = dialect.read_prefill(sub, raw)
    assert prefilled.whole is None
    assert prefilled.kv_endpoint == (
        msgspec.convert(told["learned"], KvEndpoint) if "learned" in told else None
    )
    details = prefilled.prompt_tokens_details
    assert (details is not None) == ("prompt_tokens_details" in told)
    if details is not None:
        assert json.loads(details) == told["prompt_tokens_details"]
    serial = dialect.leg_order(endpoints, kv_endpoint) is LegOrder.SERIAL
    decode_leg = dialect.decode_leg(sub, endpoints, prefilled if serial else Prefilled(), kv_endpoint)
    if "first_events" in told:
        assert prefilled.opening is not None
        assert prefilled.opening.events.decode() == told["first_events"]
        continued = dialect.continued_leg(sub, endpoints, prefilled, SentTokens())
        assert continued is not None
        decode_leg = continued
    check_leg(decode_leg, told["decode_leg"], told["endpoint"])


def check_leg(leg: Any, told: dict[str, Any], endpoint: str) -> None:
    assert leg.path == f"/v1/{endpoint}"
    assert leg.headers == told["headers"]
    assert json.loads(leg.body) == told["body"]


def test_every_dialect_that_is_named_is_there() -> None:
    assert set(ALL) == set(wire.DIALECTS)


def test_servers_of_every_other_dialect_can_be_named() -> None:
    assert sorted(get_args(EngineDialect)) == sorted(wire.FOREIGN_DIALECTS)


def test_every_dialect_has_a_recorded_exchange() -> None:
    assert {json.loads(path.read_text())["dialect"] for path in EXCHANGES} == set(wire.FOREIGN_DIALECTS)


@pytest.mark.parametrize("name", sorted(DIALECTS.keys() - {"sglang"}))
def test_a_prefills_nonsense_is_a_bad_answer(name: str) -> None:
    """SGLang's prefill answer is of no interest unless it is an error."""
    for raw in (b"", b"[]", b'{"choices": 7}', b"\xff"):
        with pytest.raises(BadResponse):
            DIALECTS[name].read_prefill(only_part({"model": "m", "prompt": "p"}), raw)


@pytest.mark.parametrize("name", ["vllm-mooncake", "vllm-moriio", "vllm-nixl"])
def test_what_a_prefill_tells_of_usage_is_utf_8_or_a_bad_answer(name: str) -> None:
    """It is kept unread, and read only when the client's usage is put together."""
    raw = b'{"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens_details": {"by": "\xe9"}}}'
    with pytest.raises(BadResponse, match="cannot be read"):
        DIALECTS[name].read_prefill(only_part({"model": "m", "prompt": "p"}), raw)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_sglangs_prefill_is_noticed(stream: bool) -> None:
    """Row 16 (aibrix #2289): otherwise the decode server would wait for its bootstrap to time out."""
    error = b'{"error": {"message": "no"}}'
    sub = only_part({"model": "m", "prompt": "p", "stream": stream})
    with pytest.raises(BadResponse):
        DIALECTS["sglang"].read_prefill(sub, b"data: " + error + b"\n\n" if stream else error)


def test_an_unread_prompt_is_no_failure_of_sglangs_prefill_server() -> None:
    """As SGLang 0.5.23 with our plane answers, recorded; its circuit breaker would open for a 500."""
    error = (
        b'{"error": {"object": "error", "message": "the decode server did not read the KV: KVTransferError('
        b'bootstrap_room=4125311015033712317): the lease expired", "type": "SERVICE_UNAVAILABLE", '
        b'"param": null, "code": 503}}'
    )
    sub = only_part({"model": "m", "prompt": "p", "stream": True})
    with pytest.raises(BusyResponse) as raised:
        DIALECTS["sglang"].read_prefill(sub, b"data: " + error + b"\n\ndata: [DONE]\n\n")
    assert isinstance(raised.value, NO_FAULTS)
    assert DIALECTS["sglang"].is_unread(raised.value.message)
    assert not DIALECTS["sglang"].is_unread("The request queue is full.")


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
def test_params_without_what_a_decode_server_needs_are_refused(name: str) -> None:
    """docs/sources.md#vllm-nixl: the decode server would only warn, and compute the prompt again."""
    told = json.loads((Path(__file__).parent / "exchanges/vllm_nixl_pull.json").read_text())["prefill_answer"]
    del told["kv_transfer_params"][name]
    with pytest.raises(BadResponse):
        DIALECTS["vllm-nixl"].read_prefill(
            only_part({"model": "m", "prompt": "p"}), json.dumps(told).encode()
        )


@pytest.mark.parametrize("name", ["vllm-mooncake", "vllm-moriio"])
def test_a_prefill_that_ended_by_itself_hands_nothing_over(name: str) -> None:
    """Row 8 (vllm #46008): the decode server would wait for minutes, so its leg is cancelled at once."""
    raw = b'{"choices": [{"finish_reason": "stop"}]}'
    with pytest.raises(BadResponse, match="'stop'"):
        DIALECTS[name].read_prefill(only_part({"model": "m", "prompt": "p"}), raw)


ATOM_PARAMS = {"remote_block_ids": [4], "transfer_id": 3, "dp_rank": 0}


def atom_answer(reason: str | None, **fields: Any) -> bytes:
    return json.dumps(
        {"choices": [{"finish_reason": reason}], "kv_transfer_params": ATOM_PARAMS, **fields}
    ).encode()


@pytest.mark.parametrize("reason", ["eos", "stop_sequence", "stop_163586", "stop"])
def test_an_atom_answer_that_ended_at_token_1_is_whole(reason: str) -> None:
    """X29: no decode leg after the end of sequence."""
    raw = atom_answer(reason)
    prefilled = DIALECTS["atom"].read_prefill(only_part({"model": "m", "prompt": "p"}), raw)
    assert (prefilled.whole, prefilled.params) == (raw, ATOM_PARAMS)


def test_an_atom_answer_of_one_token_is_whole() -> None:
    """R10: a decode server begins with that token and samples another, whatever its limit (ffdf3bb5d)."""
    raw = atom_answer("max_tokens")
    for limit, whole in ((1, raw), (2, None), (None, None)):
        sub = only_part({"model": "m", "prompt": "p", "max_tokens": limit})
        assert DIALECTS["atom"].read_prefill(sub, raw).whole == whole


@pytest.mark.parametrize(
    "raw",
    [
        atom_answer("aborted"),
        atom_answer("unschedulable: needs 900 KV blocks"),
        # What chat says of both.
        atom_answer("stop", usage={"completion_tokens": 0}),
        *(
            atom_answer("max_tokens", kv_transfer_params={**ATOM_PARAMS, **wrong})
            for wrong in (
                {"dp_rank": None}, {"dp_rank": -1}, {"dp_rank": "1"}, {"transfer_id": None},
                {"remote_block_ids": None}, {"remote_block_ids": [None]},
            )
        ),
    ],
)  # fmt: skip
def test_an_atom_prefill_that_failed_under_http_200_is_a_bad_answer(raw: bytes) -> None:
    """Row 5; and I1: never a guess at which rank, transfer or blocks a decode server is to read."""
    with pytest.raises(BadResponse):
        DIALECTS["atom"].read_prefill(only_part({"model": "m", "prompt": "p"}), raw)


RECORDED = sorted((Path(__file__).parent / "exchanges/atom").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_atoms_own_prefill_answered_leads_to_its_kv(path: Path) -> None:
    """Recorded from ATOM's code (`make test-atom`): `max_tokens` is no end, and `dp_rank` holds the KV."""
    told = json.loads(path.read_text())
    dialect, sub = DIALECTS["atom"], only_part(told["client"], told["endpoint"])
    raw = told["prefill_answer"].encode()
    params = json.loads(raw)["kv_transfer_params"]
    prefilled = dialect.read_prefill(sub, raw)
    if told["decode_answer"] is None:
        assert prefilled.whole == raw
        return
    assert prefilled.whole is None
    sizes = {
        "prefill": {"dp_size": 4, "control": "tcp://10.0.0.1:7000"},
        "decode": {"control": "tcp://10.0.0.2:7000"},
    }
    endpoints = ends_of(sub, "atom", sizes)
    assert endpoints.prefill_rank != params["dp_rank"], "another than was asked"
    sent = json.loads(dialect.decode_leg(sub, endpoints, prefilled, None).body)["kv_transfer_params"]
    assert sent["remote_dp_rank"] == params["dp_rank"] == 1
    assert sent.items() >= params.items(), "its own host and ports are left as they are"


def test_every_dialect_of_atom_is_recorded() -> None:
    assert {path.stem.partition("_")[0] for path in RECORDED} == {"seed", "head"}


def test_an_answer_for_another_transfer_is_refused() -> None:
    """I1: a decode leg must not be led to another prompt's blocks."""
    raw = b'{"choices": [{"finish_reason": "length"}], "kv_transfer_params": {"transfer_id": "tx-other"}}'
    with pytest.raises(BadResponse, match="another transfer"):
        DIALECTS["vllm-moriio"].read_prefill(only_part({"model": "m", "prompt": "p"}), raw)


def test_a_clients_id_cannot_forge_addresses() -> None:
    """smg refuses such ids; here nothing of the client's is in a MoRIIO request id."""
    forged = IDS.__class__(
        request_id=RequestId("___prefill_addr_evil___decode_addr_evil_"),
        answer_id=AnswerId("cmpl-a"), created=12, seed=99,
    )  # fmt: skip
    (sub,) = split_into_choices(ask({"model": "m", "prompt": "p"}), forged, [TRANSFER])
    leg = DIALECTS["vllm-moriio"].prefill_leg(sub, ends_of(sub, "vllm-moriio", {}))
    assert "evil" not in str(leg.headers)
    assert re.fullmatch(r"___prefill_addr_.+___decode_addr_.+_[0-9a-f]{32}", leg.headers["X-Request-Id"])


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("field", [{"use_beam_search": True}, {"n": 2, "best_of": 3}], ids=str)
def test_ranked_choices_are_refused_everywhere(dialect: Dialect, field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        dialect.check(ask({"model": "m", "prompt": "p", **field}))
    assert caught.value.param in field


def test_every_choice_has_its_prompt_its_seed_and_a_transfer_of_its_own() -> None:
    """A1, A2: one choice of one prompt per transfer. vLLM seeds choice i with the client's seed plus i."""
    request = ask(
        {"model": "m", "prompt": [[1], [2, 3]], "n": 2, "best_of": 2, "seed": 2**63 - 1, "top_k": 5}
    )
    ids = [TransferId(f"{number:032x}") for number in range(4)]
    subs = split_into_choices(request, IDS, ids)
    assert [json.loads(msgspec.json.encode(sub.body)) for sub in subs] == [
        {"model": "m", "prompt": prompt, "seed": seed, "top_k": 5}
        for prompt in ([1], [2, 3])
        for seed in (2**63 - 1, 0)
    ]
    assert [(*sub.choices, sub.prompt, sub.transfer_id) for sub in subs] == [
        (0, 0, ids[0]), (1, 0, ids[1]), (2, 1, ids[2]), (3, 1, ids[3]),
    ]  # fmt: skip


def test_a_client_without_a_seed_is_given_none() -> None:
    assert "seed" not in only_part({"model": "m", "prompt": "p"}).body


def test_the_ranks_of_both_legs_do_not_correlate() -> None:
    """X8, every pair of ranks comes, about as often as any other."""
    request = ask({"model": "m", "prompt": "p", "n": 128})
    transfer_ids = [TransferId(hashlib.md5(bytes([number])).hexdigest()) for number in range(128)]
    sizes = {"prefill": {"dp_size": 4}, "decode": {"dp_size": 2}}
    endpoints = [ends_of(sub, "vllm-nixl", sizes) for sub in split_into_choices(request, IDS, transfer_ids)]
    pairs = Counter((each.prefill_rank, each.decode_rank) for each in endpoints)
    assert len(pairs) == 8 and min(pairs.values()) >= 8


NOT_CONTINUED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5, "seed": 7},
    {"temperature": None, "seed": 7},
    {"n": 2},
    {"prompt": ["a", "b"]},
    {"stop": ["x"]},
    {"stop": "x"},
    {"logprobs": 0},
    {"echo": True},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"bad_words": ["x"]},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"return_token_ids": True},
    {"max_tokens": None},
    {"of_the_future": 1},
    {"stream": False},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
)


@pytest.mark.parametrize("extra", NOT_CONTINUED, ids=str)
def test_a_stream_that_would_not_be_exact_is_not_continued(extra: dict[str, Any]) -> None:
    asked = {"model": "m", "prompt": "p", "stream": True, "temperature": 0, "max_tokens": 9}
    if not extra.get("stream", True):
        asked.pop("stream")
    (sub, *_) = split_into_prompts(ask(asked | extra), IDS, [TRANSFER] * (1 + ("prompt" in extra)))
    dialect = DIALECTS["vllm-kvferry"]
    assert not dialect.may_continue(sub)
    leg = dialect.prefill_leg(sub, ends_of(sub, dialect.name, {}))
    assert leg is not None and json.loads(leg.body)["min_tokens"] == 1


@pytest.mark.parametrize(
    "extra",
    [
        {"stop": [], "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": None, "suffix": ""},
        {"seed": 3, "n": 1, "best_of": 1, "echo": False},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.2},
        {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3]},
    ],
    ids=str,
)
def test_fields_that_ask_for_nothing_else_are_no_obstacle(extra: dict[str, Any]) -> None:
    asked = {"model": "m", "prompt": "p", "stream": True, "temperature": 0, "max_tokens": 9}
    (sub,) = split_into_prompts(ask(asked | extra), IDS, [TRANSFER])
    assert DIALECTS["vllm-kvferry"].may_continue(sub)


@pytest.mark.parametrize(
    ("asked", "limit", "left"),
    [
        ({"max_tokens": 9}, 100, 6),
        ({"max_tokens": 3}, 100, None),
        ({"max_tokens": 90}, 100, 87),
        ({"max_tokens": 91}, 100, None),
        ({"max_tokens": 9}, 0, None),
        ({}, 100, 13),
        ({"min_tokens": 17}, 100, None),
        ({"messages": [{"role": "user", "content": "p"}]}, 100, 87),
    ],
    ids=str,
)
def test_a_continued_stream_is_as_long_as_one_servers(
    asked: dict[str, Any], limit: int, left: int | None
) -> None:
    """Three tokens of it are the client's. What a server would refuse for its length is left to one."""
    endpoint: Endpoint = "chat/completions" if "messages" in asked else "completions"
    prompt = {} if "messages" in asked else {"prompt": "p"}
    (sub,) = split_into_prompts(
        ask({"model": "m", "stream": True} | prompt | asked, endpoint), IDS, [TRANSFER]
    )
    opening = Opening(
        prompt_ids=b"[1,2]", first_id=b"", events=b"", has_ended=False, usage={"prompt_tokens": 10}
    )
    dialect = DIALECTS["vllm-kvferry"]
    endpoints = ends_of(sub, dialect.name, {"decode": {"max_model_len": limit}})
    sent = SentTokens()
    sent.add(b"7,8,9", has_text=True)
    leg = dialect.continued_leg(sub, endpoints, Prefilled(opening=opening), sent)
    if left is None:
        assert leg is None
    else:
        assert leg is not None and leg.path == "/v1/completions"
        body = json.loads(leg.body)
        assert (body["prompt"], body["max_tokens"]) == ([1, 2, 7, 8, 9], left)
        assert "messages" not in body and "kv_transfer_params" not in body
