# SPDX-License-Identifier: Apache-2.0
"""The tables in `docs/dialects/README.md`: what becomes of each request field in each dialect, which fields
clients may send to the servers of each engine, and which streams of vLLM servers with our connector begin
with the prefill's token and outlive their decode server.

They are worked out by asking the code, so they cannot say what is not so. `python -m
tests.unit.proxy.dialects.dialect_table --write` puts them into the page; `test_dialect_table.py` fails when
the page says something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvferry.agent.api.openai_schema import ChatBody, CompletionBody, decode_body
from kvferry.agent.errors import ApiError
from kvferry.proxy.dialects.base import Dialect, LegOrder, Prefilled
from kvferry.proxy.dialects.catalogue import all_dialects
from kvferry.proxy.dialects.fields import ATOM_FIELDS, SGLANG_FIELDS, VLLM_FIELDS
from kvferry.proxy.errors import BadResponse, InvalidRequest
from kvferry.proxy.exchange.sub_requests import split_into_choices, split_into_prompts
from kvferry.proxy.ids import AnswerId, Endpoint, Identity, RequestId, TransferId
from kvferry.proxy.request import ClientRequest, parse_request
from kvferry.proxy.wire.dialects import ATOM, NATIVE_DIALECT, VLLM_KVFERRY, serves_alone
from tests.unit.proxy.builders import registration

PAGE = Path(__file__).parents[4] / "docs/dialects/README.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
FIELDS_BEGIN, FIELDS_END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"
STREAMS_BEGIN, STREAMS_END = "<!-- streams: begin -->\n", "<!-- streams: end -->\n"
IDS = Identity(request_id=RequestId("r"), answer_id=AnswerId("cmpl-a"), created=12, seed=99)
TRANSFER = TransferId("0123456789abcdef0123456789abcdef")
ALL = all_dialects(nixl_lease_s=30.0, moriio_lease_s=60.0)
DIALECTS = {name: dialect for name, dialect in ALL.items() if not dialect.is_native}
"""Of other engines."""
CHAT: Endpoint = "chat/completions"
ENDPOINTS: tuple[Endpoint, Endpoint] = ("completions", CHAT)

BOTH, DECODE, REFUSED = "both legs", "decode leg", "**400**"
WHOLE = "prefill's answer is the whole"

Row = tuple[str, dict[str, Any], Endpoint]
ROWS: tuple[Row, ...] = (
    ("`n: 2`", {"n": 2}, "completions"),
    ("several prompts", {"prompt": ["a", "b"]}, "completions"),
    ("`best_of` equal to `n`", {"n": 2, "best_of": 2}, "completions"),
    ("`best_of` beyond `n`", {"best_of": 2}, "completions"),
    ("`use_beam_search`", {"use_beam_search": True}, "completions"),
    ("`logprobs` (completions)", {"logprobs": 2}, "completions"),
    ("`logprobs`, `top_logprobs` (chat)", {"logprobs": True, "top_logprobs": 2}, CHAT),
    ("`prompt_logprobs`", {"prompt_logprobs": 1}, "completions"),
    ("`echo`", {"echo": True}, "completions"),
    ("`echo` with `logprobs`", {"echo": True, "logprobs": 1}, "completions"),
    ("`min_tokens: 3`", {"min_tokens": 3}, "completions"),
    ("`stop`", {"stop": ["x"]}, "completions"),
    ("`stop_token_ids`", {"stop_token_ids": [2]}, "completions"),
    ("`ignore_eos`", {"ignore_eos": True}, "completions"),
    (
        "`tools`, `tool_choice`",
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        CHAT,
    ),
    ("`response_format`", {"response_format": {"type": "json_object"}}, CHAT),
    ("`max_tokens: 1`", {"max_tokens": 1}, "completions"),
    ("`max_completion_tokens: 9`", {"max_completion_tokens": 9}, CHAT),
    ("`seed`", {"seed": 3}, "completions"),
    ("`stream_options`", {"stream": True, "stream_options": {"include_usage": True}}, "completions"),
    ("an engine's own field: `lora_path`", {"lora_path": "x"}, "completions"),
    ("an unknown field", {"of_the_future": 1}, "completions"),
)


STREAMS: tuple[Row, ...] = (
    ("text, and temperature 0", {"temperature": 0, "seed": 3}, "completions"),
    ("text, and no seed", {"temperature": 0.7, "top_p": 0.9, "top_k": 5}, CHAT),
    ("a seed and another temperature", {"temperature": 0.7, "seed": 3}, "completions"),
    ("`repetition_penalty`", {"repetition_penalty": 1.1}, "completions"),
    ("`presence_penalty`, `frequency_penalty`", {"presence_penalty": 0.5}, "completions"),
    ("`min_tokens`, `ignore_eos`, `stop_token_ids`", {"min_tokens": 2, "stop_token_ids": [2]}, "completions"),
    ("`stop`", {"stop": ["x"]}, "completions"),
    ("`n` over 1", {"n": 2}, "completions"),
    ("several prompts", {"prompt": ["a", "b"]}, "completions"),
    ("`logprobs`, `prompt_logprobs`", {"logprobs": 1}, "completions"),
    ("`echo`", {"echo": True}, "completions"),
    ("`tools`", {"tools": [{"type": "function", "function": {"name": "f"}}]}, CHAT),
    ("`response_format`, `structured_outputs`", {"response_format": {"type": "json_object"}}, CHAT),
    ("`bad_words`", {"bad_words": ["x"]}, "completions"),
    ("`return_token_ids`", {"return_token_ids": True}, "completions"),
    ("`continuous_usage_stats`", {"stream_options": {"continuous_usage_stats": True}}, "completions"),
)


def streams() -> str:
    """The table of streams in Markdown."""
    lines = ["| a stream with | begins with the token of | when its decode server is lost |", "|---|---|---|"]
    for label, fields, endpoint in STREAMS:
        request = _ask({"stream": True} | fields, endpoint)
        (sub, *_) = split_into_prompts(request, IDS, [TRANSFER] * request.prompts)
        able = {name for name, dialect in DIALECTS.items() if dialect.may_continue(sub)}
        assert able <= {VLLM_KVFERRY}
        first, lost = ("prefill", "continues") if able else ("decode", "`stream_broken`")
        lines.append(f"| {label} | {first} | {lost} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """The table of fields in Markdown."""
    names = [NATIVE_DIALECT, *sorted(DIALECTS)]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for label, fields, endpoint in ROWS:
        request = _ask(fields, endpoint)
        cells = [
            _native(request),
            *(_treatment(DIALECTS[name], request, fields) for name in sorted(DIALECTS)),
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    ended = [_ended(DIALECTS[name]) for name in sorted(DIALECTS)]
    lines.append("| EOS or stop at token 1 | " + " | ".join([WHOLE, *ended]) + " |")
    cached = [_cached(DIALECTS[name]) for name in sorted(DIALECTS)]
    lines.append("| cached tokens in `usage` | " + " | ".join(["decode's answer", *cached]) + " |")
    return "\n".join(lines) + "\n"


def client_fields() -> str:
    """The catalogues of the engines in Markdown: the fields of all of them first."""
    catalogues = (VLLM_FIELDS, SGLANG_FIELDS, ATOM_FIELDS)
    shared = {each: frozenset.intersection(*(fields[each] for fields in catalogues)) for each in ENDPOINTS}
    lines = ["| servers of | fields of both endpoints | of completions | of chats |", "|---|---|---|---|"]
    for name, fields in zip(("all engines", "vLLM", "SGLang", "ATOM"), (shared, *catalogues), strict=True):
        known = {each: frozenset() if fields is shared else shared[each] for each in ENDPOINTS}
        completion, chat = (fields[each] - known[each] for each in ENDPOINTS)
        cells = (completion & chat, completion - chat, chat - completion)
        shown = (", ".join(f"`{field}`" for field in sorted(cell)) for cell in cells)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _ask(fields: dict[str, Any], endpoint: Endpoint) -> ClientRequest:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == CHAT else {"prompt": "a b"}
    return parse_request(endpoint, json.dumps({"model": "m", "max_tokens": 9, **asked, **fields}).encode())


def _native(request: ClientRequest) -> str:
    """What our own agents do. Which legs a field goes to is not asked: they sample all choices at once."""
    try:
        ALL[NATIVE_DIALECT].check(request)
        decode_body(msgspec.json.encode(request.body), ChatBody if request.chat else CompletionBody)
        if request.prompts > 1:
            return "a transfer per prompt"
        if request.undivided:
            return "one agent alone"
    except (InvalidRequest, ApiError):
        return REFUSED
    if request.max_tokens == 1:
        return "one prefill agent alone"
    return "one transfer" if request.sequences > 1 else BOTH


def _treatment(dialect: Dialect, request: ClientRequest, fields: dict[str, Any]) -> str:
    try:
        dialect.check(request)
    except InvalidRequest:
        return REFUSED
    if serves_alone(dialect.name, "prefill") and request.max_tokens == 1:
        return "one prefill server alone"
    if serves_alone(dialect.name, "decode") and request.undivided:
        return "one decode server alone"
    if request.sequences > 1:
        if dialect.forks:
            return "a transfer per prompt" if request.prompts > 1 else "one transfer"
        return "a transfer per choice"
    if request.max_tokens == 1 and _is_whole(dialect, request, "length"):
        return WHOLE
    prefill, decode = _bodies(dialect, request)
    (shown,) = {_compare(prefill.get(name), decode.get(name), name, fields) for name in _told(fields)}
    return shown


def _told(fields: dict[str, Any]) -> list[str]:
    return [name for name in fields if name != "stream"]


def _compare(prefill: Any, decode: Any, name: str, fields: dict[str, Any]) -> str:
    assert decode == fields[name], f"{name} does not reach the decode leg as it is"
    if prefill == decode:
        return BOTH
    return DECODE if prefill is None else f"{DECODE} ({prefill} for prefill)"


def _bodies(dialect: Dialect, request: ClientRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    (sub,) = split_into_choices(request, IDS, [TRANSFER])
    endpoints = sub.endpoints(
        registration("prefill", 1, dialect=dialect.name, control="http://h:1"),
        registration("decode", 2, dialect=dialect.name, control="http://h:2"),
    )
    kv_endpoint = None
    if dialect.leg_order(endpoints, None) is LegOrder.CONCURRENT and dialect.lookup(endpoints) is not None:
        kv_endpoint = dialect.read_lookup(endpoints, b'{"0": {"engine_id": "e"}}')
    prefilled = Prefilled(params={})
    legs = (dialect.prefill_leg(sub, endpoints), dialect.decode_leg(sub, endpoints, prefilled, kv_endpoint))
    return json.loads(legs[0].body), json.loads(legs[1].body)


def _ended(dialect: Dialect) -> str:
    """What happens when the first token is the last."""
    request = _ask({}, "completions")
    if _bodies(dialect, request)[0].get("min_tokens") == 1:
        return "decode samples it; prefill cannot end"
    return WHOLE if _is_whole(dialect, request, "stop") else "decode's answer"


def _is_whole(dialect: Dialect, request: ClientRequest, reason: str) -> bool:
    """Whether a prefill's answer that ended so is the client's."""
    (sub,) = split_into_choices(request, IDS, [TRANSFER])
    return dialect.read_prefill(sub, _prefill_answer(dialect, reason)).whole is not None


def _prefill_answer(dialect: Dialect, reason: str) -> bytes:
    if dialect.name == ATOM:
        params = {"transfer_id": 1, "remote_block_ids": [4], "dp_rank": 0}
    elif dialect.name == VLLM_KVFERRY:
        params = {
            "do_remote_prefill": True,
            "transfer_id": TRANSFER,
            "remote_engine_id": "e",
            "remote_host": "h",
            "remote_port": 1,
            "remote_num_tokens": 1,
            "remote_tp_size": 1,
        }
    else:
        params = {"transfer_id": f"tx-{TRANSFER}"}
    usage = {"prompt_tokens_details": {"cached_tokens": 1}}
    return json.dumps(
        {"choices": [{"finish_reason": reason}], "usage": usage, "kv_transfer_params": params}
    ).encode()


def _cached(dialect: Dialect) -> str:
    """Whose count of cached tokens the client is told."""
    (sub,) = split_into_choices(_ask({}, "completions"), IDS, [TRANSFER])
    try:
        merged = (
            dialect.read_prefill(sub, _prefill_answer(dialect, "length")).prompt_tokens_details is not None
        )
    except BadResponse:  # NIXL params say more, the prefill's count among them
        return "decode's answer (push: prefill's)"
    return "prefill's, put in by the proxy" if merged else "decode's answer"


def page() -> str:
    """The page with these tables in it."""
    text = PAGE.read_text()
    for begin, made, end in (
        (BEGIN, table(), END),
        (FIELDS_BEGIN, client_fields(), FIELDS_END),
        (STREAMS_BEGIN, streams(), STREAMS_END),
    ):
        before, _, rest = text.partition(begin)
        text = before + begin + made + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(table(), client_fields(), streams(), sep="\n")
