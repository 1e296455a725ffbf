# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvferry.agent.api.grammar import checker as checker_module
from kvferry.agent.api.grammar.checker import GrammarChecker
from kvferry.agent.api.grammar.constraint import Constraint
from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.errors import ApiError

MODEL = BUNDLED_MODELS / "ferry-tiny"
NEVER_ENDS = {"type": "string", "allOf": [{"pattern": f"a{number}.*b"} for number in range(300)]}


def lark(text: str) -> Constraint:
    return Constraint("field", json.dumps({"grammars": [{"lark_grammar": text}]}))


def schema(wanted: object) -> Constraint:
    return Constraint("field", json.dumps({"grammars": [{"json_schema": wanted}]}))


async def refusal(checker: GrammarChecker, constraint: Constraint) -> str:
    with pytest.raises(ApiError) as info:
        await checker.check(constraint)
    assert (info.value.status, info.value.param) == (400, "field")
    return info.value.message


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(MODEL, timeout_s=2.0)
    yield made
    await made.close()


async def test_a_bad_grammar_is_refused_and_says_why(checker: GrammarChecker) -> None:
    await checker.check(lark('start: "a"'))
    assert "strin" in await refusal(checker, schema({"type": "strin"}))
    assert "not" in await refusal(checker, schema({"not": {}}))
    assert "nothing" in await refusal(checker, lark("start: nothing"))
    assert "look-around" in await refusal(checker, lark("start: /a(?=b)/"))
    assert "\n" not in await refusal(checker, lark("start: /(/"))


async def test_one_that_compiles_for_ever_is_refused_and_the_next_is_tried(checker: GrammarChecker) -> None:
    await checker.check(lark('start: "a"'))
    assert "too long" in await refusal(checker, schema(NEVER_ENDS))
    assert checker._child is None
    # At once: the verdict is known.
    async with asyncio.timeout(1):
        assert "too long" in await refusal(checker, schema(NEVER_ENDS))
    await checker.check(lark('start: "b"'))


async def test_a_client_that_goes_leaves_no_answer_to_the_next(checker: GrammarChecker) -> None:
    await checker.check(lark('start: "a"'))
    gone = asyncio.ensure_future(checker.check(schema({"type": "strin"})))
    await asyncio.sleep(0)  # it has been asked, and is not answered yet
    gone.cancel()
    await asyncio.wait([gone])
    await checker.check(lark('start: "b"'))


async def test_the_same_grammar_is_compiled_once_and_few_verdicts_are_kept(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_VERDICTS", 4)
    await asyncio.gather(*(checker.check(lark(f'start: "{number % 2}"')) for number in range(40)))
    assert len(checker._verdicts) == 2
    for number in range(20):
        await checker.check(lark(f'start: "{number}"'))
    assert len(checker._verdicts) == 4
    await checker.close()
    await checker.check(lark('start: "19"'))
    assert checker._child is None


async def test_too_many_that_wait_are_refused(checker: GrammarChecker) -> None:
    waits = [asyncio.ensure_future(checker.check(lark(f'start: "{number}"'))) for number in range(200)]
    results = await asyncio.gather(*waits, return_exceptions=True)
    refused = [each for each in results if isinstance(each, ApiError)]
    assert refused
    assert {each.status for each in refused} == {503}
    assert results.count(None) == len(results) - len(refused) > 0


async def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = GrammarChecker(tmp_path)
    assert "tokenizer" in await refusal(checker, lark('start: "a"'))
    await checker.close()
