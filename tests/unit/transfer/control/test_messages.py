# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.transfer.control import messages as wire
from kvferry.transfer.control.messages import BadControlFrame, EngineDescription
from kvferry.transfer.sampled_tokens import MAX_ALTERNATIVES, MAX_CHOICES, SampledToken, SampledTokens
from tests.unit.transfer.plans import pool_placement
from tests.unit.transfer.rig import GEOMETRY

DESCRIPTION = EngineDescription(engine=b"\x00e", regions=(b"\xffr",))
HEAD = {"seq": 7, "incarnation": "0123456789abcdef"}
REQUESTS = [
    wire.Hello(
        **HEAD,
        consumer="c",
        geometry=GEOMETRY,
        layout="l",
        weights="w",
        transfers=("nixl", "tcp"),
        host_id="h",
        verify_kv=0.5,
        ranks=({"tcp": DESCRIPTION},),
        versions=wire.VERSIONS,
    ),
    wire.Open(**HEAD, transfer_id="t", consumer="c", have=3, wait_s=0.5),
    wire.Lend(**HEAD, transfer_id="t", consumer="c", hashes=(b"one", b"two"), limit_s=5.0),
    wire.Renew(**HEAD, consumer="c", transfer_ids=("a", "b")),
    wire.Release(**HEAD, transfer_id="t", consumer="c", read_ok=True),
    wire.Drop(**HEAD, transfer_id="t"),
]
ANSWERS = [
    wire.HelloOk(
        **HEAD,
        transfer="tcp",
        num_blocks=4,
        ranks=(DESCRIPTION,),
        placements=(pool_placement(GEOMETRY, 4, range(2)),),
        token=b"\x01",
    ),
    wire.RequestRefused(**HEAD, field="dtype", ours="a", theirs="b"),
    wire.Opened(
        **HEAD,
        transfer_id="t",
        state="ready",
        first_block=0,
        block_ids=(4, 9),
        num_tokens=30,
        lease_s=10.0,
        ids_hash="x",
        checksums=b"\xff" * 64,
    ),
    wire.Opened(
        **HEAD,
        transfer_id="t",
        state="ready",
        first_block=0,
        block_ids=tuple(range(wire.max_blocks(0))),  # with first tokens of every kind it still fits
        num_tokens=1 << 21,
        lease_s=10.0,
        ids_hash="x",
        checksums=b"",
        first_tokens=SampledTokens(
            choices=tuple(
                SampledToken(id=token, logprob=-0.1, top=((token, -0.1),) * MAX_ALTERNATIVES)
                for token in range(MAX_CHOICES)
            ),
            cached_tokens=16,
        ),
    ),
    wire.Pending(**HEAD, transfer_id="t"),
    wire.Gone(**HEAD, transfer_id="t", reason="expired"),
    wire.Lent(**HEAD, transfer_id="t", num_blocks=2),
    wire.Renewed(**HEAD, alive=("a",), gone=("b",)),
    wire.Released(**HEAD, transfer_id="t", valid=False),
    wire.Dropped(**HEAD, transfer_id="t"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_requests_survive_the_wire(request_: wire.Request) -> None:
    assert wire.decode_request(wire.encode(request_)) == request_


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda each: type(each).__name__)
def test_answers_survive_the_wire(answer: wire.Response) -> None:
    assert wire.decode_response(wire.encode(answer)) == answer


def plain(frame: wire.Request) -> dict[str, object]:
    body: dict[str, object] = msgpack.unpackb(wire.encode(frame))
    return body


def test_a_hello_of_another_version_is_read_as_far_as_all_versions_are_alike() -> None:
    """So that it can be refused by name. In our own version a field that is not known stays a mistake."""
    hello = REQUESTS[0]
    body = {**plain(hello), "v": 9, "versions": [9, 11], "news": {}}
    del body["geometry"]
    assert wire.decode_request(msgpack.packb(body)) == wire.OtherHello(
        v=9, seq=hello.seq, incarnation=hello.incarnation
    )
    refused({**body, "type": "open"})
    refused({**body, "v": wire.VERSIONS[0]})


def test_the_highest_version_that_both_speak_is_found() -> None:
    hello = REQUESTS[0]
    assert isinstance(hello, wire.Hello)
    ranges = (((3, 3), 3), ((1, 4), 3), ((2, 2), None), ((4, 5), None))
    for versions, common in ranges:
        said = msgspec.structs.replace(hello, versions=versions)
        assert wire.common_version(said) == common
        assert wire.decode_request(wire.encode(said)) == said


def refused(body: object) -> None:
    with pytest.raises(BadControlFrame):
        wire.decode_request(msgpack.packb(body))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_every_field_is_needed_and_none_may_be_added(request_: wire.Request) -> None:
    body = plain(request_)
    for field in body.keys() - {"v"}:
        refused({name: value for name, value in body.items() if name != field})
    refused({**body, "extra": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("v", 4),
        ("v", 2),
        ("v", "1"),
        ("type", "opened"),
        ("type", None),
        ("seq", -1),
        ("seq", True),
        ("seq", 1 << 63),
        ("incarnation", ""),
        ("transfer_id", 7),
        ("transfer_id", "x" * 129),
        ("have", -1),
        ("wait_s", -0.1),
        ("wait_s", math.nan),
        ("wait_s", math.inf),
        ("wait_s", 1e9),
    ],
)
def test_a_field_out_of_its_range_is_a_bad_frame(field: str, value: object) -> None:
    """X16: nothing that a peer sends ends the listener. R15: ids are strings, numbers are refused."""
    refused({**plain(REQUESTS[1]), field: value})


def test_lists_and_frames_are_limited() -> None:
    refused({**plain(REQUESTS[2]), "transfer_ids": ["t"] * (wire.MAX_IDS + 1)})
    hello = plain(REQUESTS[0])
    geometry = msgspec.structs.asdict(GEOMETRY)
    refused({**hello, "geometry": {**geometry, "rope": "x" * 5000}})
    refused({**hello, "geometry": {**geometry, "order": "x" * 5000}})
    engine = {"engine": b"e", "regions": [b"r"]}
    refused({**hello, "ranks": [{f"backend {number}": engine for number in range(70)}]})
    with pytest.raises(BadControlFrame):
        wire.decode_request(b"\xc4" + bytes(wire.MAX_FRAME_BYTES))
    with pytest.raises(BadControlFrame):
        wire.encode(wire.Renew(**HEAD, consumer="c", transfer_ids=("x" * 300,) * 4000))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 2000)
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc7\x08\x01" + b"\x00" * 8)
def test_no_bytes_raise_anything_but_bad_frame(frame: bytes) -> None:
    """X3, X16, L12: nothing is unpickled, and garbage is a counted frame, not a dead thread."""
    for decode in (wire.decode_request, wire.decode_response):
        with pytest.raises(BadControlFrame):
            decode(frame)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(REQUESTS), st.data())
def test_a_frame_with_any_value_in_any_field_is_typed_or_bad(
    request_: wire.Request, data: st.DataObject
) -> None:
    body = plain(request_)
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = data.draw(VALUES)
    try:
        decoded = wire.decode_request(msgpack.packb(body))
    except BadControlFrame:
        return
    assert wire.decode_request(wire.encode(decoded)) == decoded
