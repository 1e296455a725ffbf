# SPDX-License-Identifier: Apache-2.0
"""The table in `docs/dialects/README.md`: what becomes of each request field in each dialect.

It is worked out by asking the code, so it cannot say what is not so. `python -m
tests.unit.proxy.dialects.dialect_table --write` puts it into the page; `test_dialect_table.py` fails when
the page says something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvferry.agent.api.openai_schema import ChatBody, CompletionBody, decode_body
from kvferry.agent.errors import ApiError
from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import Dialect, LegOrder, Prefilled
from kvferry.proxy.dialects.catalogue import other_dialects
from kvferry.proxy.errors import BadResponse, InvalidRequest
from kvferry.proxy.exchange.sub_requests import split
from kvferry.proxy.ids import AnswerId, Endpoint, Identity, RequestId, TransferId
from kvferry.proxy.request import ClientRequest, parse_request
from kvferry.proxy.wire.messages import NATIVE_DIALECT
from tests.unit.proxy.builders import registration

PAGE = Path(__file__).parents[4] / "docs/dialects/README.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
IDS = Identity(request_id=RequestId("r"), answer_id=AnswerId("cmpl-a"), created=12, seed=99)
TRANSFER = TransferId("0123456789abcdef0123456789abcdef")
DIALECTS = other_dialects(nixl_lease_s=30.0, moriio_lease_s=60.0)
CHAT: Endpoint = "chat/completions"

BOTH, DECODE, REFUSED = "both legs", "decode leg", "**400**"

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
    ("`tools`, `tool_choice`", {"tools": [{}], "tool_choice": "auto"}, CHAT),
    ("`response_format`", {"response_format": {"type": "json_object"}}, CHAT),
    ("`max_tokens: 1`", {"max_tokens": 1}, "completions"),
    ("`max_completion_tokens: 9`", {"max_completion_tokens": 9}, CHAT),
    ("`seed`", {"seed": 3}, "completions"),
    ("`stream_options`", {"stream": True, "stream_options": {"include_usage": True}}, "completions"),
    ("an unknown field", {"of_the_future": 1}, "completions"),
)


def table() -> str:
    """The table in Markdown."""
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
    lines.append("| EOS or stop at token 1 | " + " | ".join(["prefill's answer is the whole", *ended]) + " |")
    cached = [_cached(DIALECTS[name]) for name in sorted(DIALECTS)]
    lines.append("| cached tokens in `usage` | " + " | ".join(["decode's answer", *cached]) + " |")
    return "\n".join(lines) + "\n"


def _ask(fields: dict[str, Any], endpoint: Endpoint) -> ClientRequest:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == CHAT else {"prompt": "a b"}
    return parse_request(endpoint, json.dumps({"model": "m", "max_tokens": 9, **asked, **fields}).encode())


def _native(request: ClientRequest) -> str:
    """What our own agents do. Which legs a field goes to is not asked: they sample all choices at once."""
    try:
        native.check(request)
        decode_body(json.dumps(request.body).encode(), ChatBody if request.chat else CompletionBody)
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
    if dialect.serves_alone and request.max_tokens == 1:
        return "one prefill server alone"
    if dialect.serves_alone and request.undivided:
        return "one decode server alone"
    if request.sequences > 1:
        return "a transfer per choice"
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
    (sub,) = split(request, IDS, [TRANSFER])
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
    (sub,) = split(request, IDS, [TRANSFER])
    if _bodies(dialect, request)[0].get("min_tokens") == 1:
        return "decode samples it; prefill cannot end"
    raw = b'{"choices": [{"finish_reason": "stop"}], "kv_transfer_params": {"transfer_id": 1}}'
    whole = dialect.read_prefill(sub, raw).whole is not None
    return "prefill's answer is the whole" if whole else "decode's answer"


def _cached(dialect: Dialect) -> str:
    """Whose count of cached tokens the client is told."""
    (sub,) = split(_ask({}, "completions"), IDS, [TRANSFER])
    raw = json.dumps(
        {
            "choices": [{"finish_reason": "length"}],
            "usage": {"prompt_tokens_details": {"cached_tokens": 1}},
            "kv_transfer_params": {"transfer_id": f"tx-{TRANSFER}"},
        }
    ).encode()
    try:
        merged = dialect.read_prefill(sub, raw).prompt_tokens_details is not None
    except BadResponse:  # NIXL params say more, the prefill's count among them
        return "decode's answer (push: prefill's)"
    return "prefill's, put in by the proxy" if merged else "decode's answer"


def page_with(made: str) -> str:
    """The page with this table in it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + made + END + after


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page_with(table()))
    else:
        print(table())
