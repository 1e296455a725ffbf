# SPDX-License-Identifier: Apache-2.0
"""Constrained output: every answer is valid, and apart, together and after a death it is the same (I4)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import jsonschema_rs
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import Answer, complete_all, heldout, session
from tests.helpers.metrics import scrape, total, wait_one_running
from tests.helpers.waiting import patient
from tests.system.conftest import StartAgent, StartCluster
from tests.system.test_migration import kill_api, kill_rank

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CONCURRENCY = 16
TOKENS = 400
RUNNING_BEFORE = 4
LEASE_S = 2.0
LOGPROB_GAP = 1e-4
LONG_FORM = (pytest.mark.full, pytest.mark.timeout(patient(900)))

BYTE = {"type": "integer", "minimum": 0, "maximum": 255}
WORD = {"type": "string", "pattern": "^[a-z]{2,6}$"}
TEXT = {"type": "string", "maxLength": 12}


def obj(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


SCHEMAS: Mapping[str, Any] = {
    "an object": obj(name=WORD, age=BYTE),
    "an optional member": {**obj(name=WORD, age=BYTE), "required": ["name"]},
    "objects in an object": obj(a=obj(b=obj(c=BYTE)), d=WORD),
    "a list of integers": {"type": "array", "items": BYTE, "minItems": 3, "maxItems": 8},
    "a list of objects": {"type": "array", "items": obj(x=BYTE, y=BYTE), "minItems": 1, "maxItems": 3},
    "a tuple": {"type": "array", "prefixItems": [BYTE, WORD], "items": False, "minItems": 2},
    "an enumeration": {"enum": ["red", "green", 7, None, {"a": [1]}]},
    "a constant": {"const": {"kind": "point", "at": [1, 2]}},
    "one of several types": {"type": ["boolean", "null", "integer"], "minimum": 10, "maximum": 99},
    "any of": {"anyOf": [obj(circle=BYTE), obj(square=WORD)]},
    "all of": {"allOf": [{"type": "integer", "minimum": 40}, {"maximum": 60}]},
    "a reference": {"$defs": {"byte": BYTE}, **obj(a={"$ref": "#/$defs/byte"}, b={"$ref": "#/$defs/byte"})},
    "a list in itself": {
        "$defs": {"node": {**obj(next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}, v=BYTE)}},
        "$ref": "#/$defs/node",
    },
    "a short text": obj(text=TEXT),
    "a text of two to four": {"type": "string", "minLength": 2, "maxLength": 4},
    "a date": obj(on={"type": "string", "format": "date"}),
    "an id": {"type": "string", "pattern": "^[A-F0-9]{4}-[A-F0-9]{4}$"},
    "a number": {"type": "number", "minimum": -1, "maximum": 1},
    "a yes or no": obj(ok={"type": "boolean"}),
    "named by pattern": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": BYTE},
        "additionalProperties": False,
        "maxProperties": 3,
    },
}  # fmt: skip
REGEXES = [r"\d{3}-\d{4}", r"(yes|no|maybe), (yes|no)!", r"[a-f]{10,20}", r"é+ü{2}€"]
CHOICES = [["positive", "negative"], ["a", "ab", "abc"], ['"quoted"\n', "\\", "日本語"]]
LARK = 'start: "(" digits ")"\ndigits: DIGIT | digits "," DIGIT\nDIGIT: /[0-9]/'
LIST_OF_DIGITS = re.compile(r"\(\d(,\d)*\)")


@dataclass(frozen=True)
class Wanted:
    """Fields of a body, and whether a text is what they ask for."""

    fields: dict[str, Any]
    is_valid: Callable[[str], bool]


def by_schema(schema: Any, field: str) -> Wanted:
    validator = jsonschema_rs.validator_for(schema)

    def is_valid(text: str) -> bool:
        return validator.is_valid(json.loads(text))

    fields: Mapping[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "structured_outputs": {"json": schema},
        "guided_json": json.dumps(schema),
    }
    return Wanted({field: fields[field]}, is_valid)


def by_regex(pattern: str, field: str) -> Wanted:
    fields: Mapping[str, Any] = {"guided_regex": pattern, "structured_outputs": {"regex": pattern}}
    return Wanted({field: fields[field]}, lambda text: re.fullmatch(pattern, text) is not None)


def by_choice(choice: Sequence[str], field: str) -> Wanted:
    fields: Mapping[str, Any] = {"guided_choice": choice, "structured_outputs": {"choice": choice}}
    return Wanted({field: fields[field]}, lambda text: text in choice)


def by_lark(field: str) -> Wanted:
    fields: Mapping[str, Any] = {"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}}
    return Wanted({field: fields[field]}, lambda text: LIST_OF_DIGITS.fullmatch(text) is not None)


KINDS = [
    *(
        by_schema(schema, ("response_format", "structured_outputs", "guided_json")[number % 3])
        for number, schema in enumerate(SCHEMAS.values())
    ),
    *(by_regex(pattern, ("guided_regex", "structured_outputs")[n % 2]) for n, pattern in enumerate(REGEXES)),
    *(by_choice(choice, ("structured_outputs", "guided_choice")[n % 2]) for n, choice in enumerate(CHOICES)),
    by_lark("structured_outputs"),
    by_lark("guided_grammar"),
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.0, "n": 3, "frequency_penalty": 1.0},
    {"temperature": 1.5, "top_p": 0.9, "min_tokens": 4, "stream": True},
    {"temperature": 1.0, "n": 3, "stream": True, "logprobs": 0},
]


def requests(count: int) -> list[tuple[dict[str, Any], Wanted]]:
    """`count` bodies; every kind of constraint comes with every kind of settings in 29 × 6 of them."""
    prompts = heldout(24)
    made = []
    for number in range(count):
        wanted = KINDS[number % len(KINDS)]
        body = {
            "model": "ferry-tiny",
            "prompt": prompts[number % len(prompts)].prompt,
            "max_tokens": TOKENS,
            "seed": 100 + number,
            **SETTINGS[(number + number // len(KINDS)) % len(SETTINGS)],
            **wanted.fields,
        }
        made.append((body, wanted))
    return made


def check_valid(asked: Sequence[tuple[dict[str, Any], Wanted]], answers: Sequence[object]) -> None:
    for (body, wanted), answer in zip(asked, answers, strict=True):
        assert isinstance(answer, Answer), (body, answer)
        assert len(answer.choices) == body.get("n", 1)
        for choice in answer.choices.values():
            assert choice.finish_reason == "stop", (body, choice)
            assert wanted.is_valid(choice.text), (body, choice.text)


@dataclass(frozen=True)
class Servers:
    """A pair behind a proxy, and one agent that does everything, on two ranks."""

    apart: str
    together: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(shared_cluster: Cluster, start_agent: StartAgent) -> AsyncIterator[Servers]:
    async with start_agent("--tp", "2") as agent:
        yield Servers(shared_cluster.url, agent.url)


@pytest.mark.parametrize(
    "count", [pytest.param(len(KINDS), id="each"), pytest.param(300, id="300", marks=LONG_FORM)]
)
async def test_answers_are_valid_and_equal_apart_and_together(servers: Servers, count: int) -> None:
    asked = requests(count)
    bodies = [body for body, _ in asked]
    apart = await complete_all(servers.apart, bodies, concurrency=CONCURRENCY)
    together = await complete_all(servers.together, bodies, concurrency=CONCURRENCY)
    check_valid(asked, apart)
    for body, ours, theirs in zip(bodies, apart, together, strict=True):
        assert isinstance(ours, Answer)
        assert isinstance(theirs, Answer), (body, theirs)
        assert_same(ours, theirs, body)


def assert_same(ours: Answer, theirs: Answer, body: dict[str, Any]) -> None:
    """Equal, but for the last digits of logprobs: two ranks sum in another order than one (I4), which some
    processors show.
    """
    assert without_logprobs(ours).same() == without_logprobs(theirs).same(), body
    for index, choice in ours.choices.items():
        assert choice.logprobs == pytest.approx(theirs.choices[index].logprobs, abs=LOGPROB_GAP), body


def without_logprobs(answer: Answer) -> Answer:
    choices = {index: replace(choice, logprobs=[]) for index, choice in answer.choices.items()}
    return replace(answer, choices=choices)


LONG_LIST = {"type": "array", "items": BYTE, "minItems": 60, "maxItems": 64}
LONG = [by_schema(LONG_LIST, "guided_json"), by_regex(r"([a-h]{2,5} ){60,64}\.", "guided_regex")]
LONG[0].fields["guided_whitespace_pattern"] = " ?"  # or it may go on with white space to its last token


def long_requests(count: int) -> list[tuple[dict[str, Any], Wanted]]:
    """Streams that are under way for long enough to be cut."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "n": 3},
    ]
    return [
        (
            {
                "model": "ferry-tiny",
                "prompt": prompt.prompt,
                "max_tokens": TOKENS,
                "seed": number,
                "stream": True,
                **settings[number // 2 % len(settings)],
                **LONG[number % len(LONG)].fields,
            },
            LONG[number % len(LONG)],
        )
        for number, prompt in enumerate(heldout(count))
    ]


def with_long_ones(count: int, every: int = 5) -> list[tuple[dict[str, Any], Wanted]]:
    """`count` streams of all kinds, each `every`th of them long."""
    long = long_requests(-(-count // every))
    return [
        long[number // every] if number % every == 0 else ({**body, "stream": True}, wanted)
        for number, (body, wanted) in enumerate(requests(count))
    ]


@pytest.mark.parametrize(
    ("asked", "kill"),
    [
        pytest.param(long_requests(12), kill_rank, id="12-rank"),
        pytest.param(long_requests(60), kill_api, id="60-api", marks=LONG_FORM),
        pytest.param(with_long_ones(300), kill_rank, id="300-rank", marks=LONG_FORM),
    ],
)
async def test_streams_go_on_elsewhere_and_stay_valid(
    start_cluster: StartCluster, asked: list[tuple[dict[str, Any], Wanted]], kill: Any
) -> None:
    bodies = [body for body, _ in asked]
    async with start_cluster(decode=2, args=("--lease-s", str(LEASE_S))) as cluster:
        undisturbed = await complete_all(cluster.url, bodies, concurrency=CONCURRENCY)
        running = asyncio.ensure_future(complete_all(cluster.url, bodies, concurrency=CONCURRENCY))
        doomed = cluster.agents[await wait_one_running(cluster.agents, RUNNING_BEFORE)]
        kill(doomed)
        await doomed.process.wait()
        results = await running
        migrations = total(await scrape(cluster.url), "kvferry_proxy_migrations_total")
    assert migrations >= 1
    check_valid(asked, results)
    for body, ours, theirs in zip(bodies, results, undisturbed, strict=True):
        assert isinstance(ours, Answer)
        assert isinstance(theirs, Answer), (body, theirs)
        assert ours.same() == theirs.same(), body


HANGS = {"type": "string", "allOf": [{"pattern": f"a{number}.*b"} for number in range(300)]}
"""llguidance compiles this for minutes."""
BAD: Mapping[str, tuple[dict[str, Any], str]] = {
    "schema": ({"guided_json": {"type": "strin"}}, "guided_json"),
    "keyword": ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    "regex": ({"guided_regex": "a(?=b)"}, "guided_regex"),
    "lark": ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    "costly": ({"guided_json": HANGS}, "guided_json"),
    "large": ({"guided_choice": ["x" * 70_000]}, "guided_choice"),
    "two": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    "to the limit": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
}


async def test_what_cannot_be_honoured_is_refused_and_ends_no_other_answer(servers: Servers) -> None:
    base = {"model": "ferry-tiny", "prompt": "a", "max_tokens": 20}
    async with session() as http:
        for name, (fields, param) in BAD.items():
            status, error = await ask(http, servers.apart, {**base, **fields})
            assert (status, error["error"]["param"]) == (400, param), (name, error)
        status, error = await ask(
            http,
            servers.apart,
            {**base, "guided_regex": "[xyz]+", "allowed_token_ids": [97]},
        )
        assert (status, error["error"]["code"]) == (400, "nothing_allowed")
        status, answer = await ask(http, servers.apart, {**base, "guided_regex": "q?", "min_tokens": 9})
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "stop"
        status, answer = await ask(http, servers.apart, {**base, "guided_json_object": True})
        assert status == 200
        assert answer["choices"][0]["text"].startswith("{")


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with http.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.json()
