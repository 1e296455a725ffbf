# SPDX-License-Identifier: Apache-2.0
"""Responses of sub-requests, merged and cleared of what is not the client's. `test_dialects.py` splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.proxy import sse
from kvferry.proxy.dialects.atom import Atom
from kvferry.proxy.dialects.base import Dialect, Opening, Prefilled
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.dialects.sglang import Sglang
from kvferry.proxy.dialects.vllm_kvferry import VllmKvferry
from kvferry.proxy.errors import AgentLost, AgentRejected, BadResponse
from kvferry.proxy.exchange.rewrite import RewrittenResponse, as_events
from kvferry.proxy.exchange.sub_requests import closing_events, merge, split_into_choices
from kvferry.proxy.ids import AnswerId, Endpoint, Identity, RequestId, TransferId
from kvferry.proxy.request import parse_request
from tests.unit.proxy.builders import registration

IDS = Identity(request_id=RequestId("r"), answer_id=AnswerId("cmpl-a"), created=12, seed=99)
SERVER = registration("decode", 1)


RECORDED = sorted((Path(__file__).parents[1] / "dialects/exchanges/atom").glob("*.json"))
DECODED = [path for path in RECORDED if not path.stem.endswith("ended")]
"""Those that did not end at the prefill server."""


def answers(
    endpoint: Endpoint = "completions", dialect: Dialect | None = None, **fields: Any
) -> list[RewrittenResponse]:
    """Fresh answers of a request's parts."""
    asked = {"messages": [{"role": "user", "content": "p"}]} if "chat" in endpoint else {"prompt": "p"}
    request = parse_request(endpoint, json.dumps({"model": "m", **asked, **fields}).encode())
    ids = [TransferId(f"{number:032x}") for number in range(request.sequences)]
    return [
        RewrittenResponse(sub, SERVER, dialect or Sglang()) for sub in split_into_choices(request, IDS, ids)
    ]


def choice(reason: str | None = "stop", **members: Any) -> dict[str, Any]:
    return {"index": 0, "text": "x", "finish_reason": reason, **members}


def raw(**members: Any) -> bytes:
    return json.dumps({"id": "theirs", "created": 1, "choices": [choice()], **members}).encode()


def test_every_prompt_is_counted_once_and_every_choices_tokens() -> None:
    """Row 9: the counts of n parts are one answer's; what is no count is the first part's."""
    subs = answers(prompt=["a", "b"], n=2)
    for number, sub in enumerate(subs):
        details = {"cached_tokens": number, "audio_tokens": None}
        usage = {
            "prompt_tokens": 10 * (1 + number // 2), "completion_tokens": number, "total_tokens": 7,
            "prompt_tokens_details": details, "completion_tokens_details": {"reasoning_tokens": 1},
        }  # fmt: skip
        sub.read_whole(raw(usage=usage))
    whole = json.loads(merge(subs))
    assert [each["index"] for each in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"] == {
        "prompt_tokens": 30, "completion_tokens": 6, "total_tokens": 36,
        "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": None},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }  # fmt: skip


def test_members_of_a_chunk_pass_to_the_byte() -> None:
    """No number is read and written again: 1e2 stays 1e2."""
    (sub,) = answers(stream=True)
    event = (
        b'data: {"id":"x","choices":[{"index":0,"text":"\\u00e9","p":1e2,"finish_reason":null}],"q":1e2}\n\n'
    )
    shown = sub.rewrite(event)
    assert b'"text":"\\u00e9"' in shown and shown.count(b"1e2") == 2
    assert json.loads(shown.removeprefix(b"data: "))["id"] == "cmpl-a"


def test_usage_is_told_once_and_last() -> None:
    """A running count of one part would be wrong for the whole."""
    subs = answers(stream=True, n=2, stream_options={"include_usage": True})
    for sub in subs:
        shown = sub.rewrite(sse.event({"choices": [choice()], "usage": {"prompt_tokens": 1}}))
        assert json.loads(shown.removeprefix(b"data: "))["usage"] is None
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert sub.rewrite(sse.event({"id": "theirs", "choices": [], "usage": usage}) + sse.DONE) == b""
    told, done = closing_events(subs).split(sse.END_OF_EVENT)[:2]
    last = json.loads(told.removeprefix(b"data: "))
    assert (last["id"], last["choices"]) == ("cmpl-a", [])
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert done == b"data: [DONE]"


def test_a_stream_whose_servers_tell_no_usage_just_ends() -> None:
    (sub,) = answers(stream=True)
    sub.rewrite(sse.event({"choices": [choice()]}))
    assert closing_events([sub]) == sse.DONE


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (b"{", BadResponse),
        (b'{"choices": 7}', BadResponse),
        (b'{"choices": [{"text": "x"}]}', BadResponse),
        (raw(choices=[]), BadResponse),
        (raw(choices=[choice(None)]), BadResponse),
        (raw(choices=[choice(index=1)]), BadResponse),
        (raw(usage=7), BadResponse),
        (raw(text="\xe9").replace(b"\\u00e9", b"\xe9"), BadResponse),
        (raw(usage={"told_by": "\xe9"}).replace(b"\\u00e9", b"\xe9"), BadResponse),
        (b'{"error": {"message": "\xe9", "code": 400}}', BadResponse),
        (raw(choices=[choice("error")]), AgentLost),
        (raw(choices=[choice("abort")]), AgentLost),
        (b'{"error": {"message": "no", "code": 500}}', AgentLost),
        (b'{"error": {"message": "no", "code": "gone"}}', AgentLost),
        (b'{"error": {"message": "no", "code": 400}}', AgentRejected),
    ],
)
def test_what_is_no_answer_is_never_passed_on(told: bytes, error: type[Exception]) -> None:
    """I5, row 5. An error that is the request's own is the last word on it; any other may be tried again."""
    (sub,) = answers()
    with pytest.raises(error):
        sub.read_whole(told)


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_whole_answer_as_a_stream(endpoint: Endpoint) -> None:
    """ATOM: an answer that ended at the prefill server, for a client that streams."""
    (sub,) = answers(endpoint, stream=True, stream_options={"include_usage": True})
    said = {"text": "x"} if endpoint == "completions" else {"message": {"role": "assistant", "content": "x"}}
    whole = {"id": "t", "object": "o", "choices": [{"index": 0, **said, "finish_reason": "stop"}]}
    events = sub.rewrite(as_events(json.dumps(whole | {"usage": {"completion_tokens": 1}}).encode(), sub.sub))
    (shown,) = json.loads(events.removeprefix(b"data: "))["choices"]
    assert shown.get("text", (shown.get("delta") or {}).get("content")) == "x"
    assert sub.complete and sub.usage is not None
    with pytest.raises(BadResponse):
        as_events(b"{}", sub.sub)


@pytest.mark.parametrize("path", DECODED, ids=lambda path: path.stem)
def test_what_atoms_own_decode_answered_ends_once_and_well(path: Path) -> None:
    """Recorded from ATOM's code (`make test-atom`): a streamed choice ends twice, the second time empty."""
    told = json.loads(path.read_text())
    raw = told["decode_answer"]
    (sub,) = answers(told["endpoint"], Atom(), stream=bool(told["client"].get("stream")))
    if told["client"].get("stream"):
        events = sub.rewrite(raw.encode()).decode().split("\n\n")[:-1]
        choices = [each for event in events for each in json.loads(event.removeprefix("data: "))["choices"]]
        end = json.loads(closing_events([sub]).decode().split("\n\n")[0].removeprefix("data: "))
        assert end["choices"] == [] and end["usage"]["completion_tokens"] == 4
    else:
        sub.read_whole(raw.encode())
        choices = json.loads(merge([sub]))["choices"]
    assert sub.complete
    # ATOM's streamed chat says `stop` whatever it was.
    expected = "stop" if path.stem.endswith("chat_stream") else "length"
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == [expected]
    texts = [
        each.get("text") or (each.get("message") or each.get("delta") or {}).get("content")
        for each in choices
    ]
    assert "".join(text or "" for text in texts).count(" ") in (3, 4)


@pytest.mark.parametrize("reason", ["aborted", "unschedulable: input tokens=9 > max_model_len=8"])
def test_atoms_words_for_a_failure_are_a_lost_server(reason: str) -> None:
    """Row 5: both come under HTTP 200."""
    (sub,) = answers(dialect=Atom())
    with pytest.raises(AgentLost):
        sub.read_whole(raw(choices=[choice(reason)]))


def test_a_choice_that_goes_on_after_its_end_is_no_answer() -> None:
    (sub,) = answers(dialect=Atom(), stream=True)
    sub.rewrite(sse.event({"choices": [choice("max_tokens")]}))
    assert sub.rewrite(sse.event({"choices": [choice("stop", text="")]})) == b""
    with pytest.raises(BadResponse):
        sub.rewrite(sse.event({"choices": [choice("stop", text="more")]}))


def test_usage_of_a_stream_whose_server_was_lost_at_its_end_counts_tokens_without_a_text() -> None:
    """As the server would have: half a character, or the end of sequence, is a token too."""
    (sub,) = answers(stream=True, stream_options={"include_usage": True})
    sent = SentTokens()
    response = RewrittenResponse(sub.sub, SERVER, VllmKvferry(), sent)
    response.rewrite(sse.event({"choices": [choice(None, token_ids=[5])]}))
    response.rewrite(sse.event({"choices": [choice("stop", text="", token_ids=[6, 7])]}))
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5, "prompt_tokens_details": None}
    opening = Opening(prompt_ids=b"[1]", first_id=b"5", events=b"x", has_ended=False, usage=usage)
    response.end_without_server(Prefilled(opening=opening))
    assert response.usage == usage | {"completion_tokens": 3, "total_tokens": 7}
