# SPDX-License-Identifier: Apache-2.0
"""Several prompts in one request, and what is said of a prompt itself: through a proxy and a pair (I4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import heldout

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

EOS_ID = "935"
PROMPTS = [each.prompt for each in heldout(task="recall")[:3]]
BODY: dict[str, Any] = {
    "model": "ferry-tiny",
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 8,
    "logprobs": 2,
    "return_token_ids": True,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(shared_cluster: Cluster) -> AsyncIterator[Ask]:
    async with aiohttp.ClientSession() as http:
        yield Ask(shared_cluster.url, http)


class Ask:
    """Asks a pair behind its proxy."""

    def __init__(self, proxy: str, http: aiohttp.ClientSession) -> None:
        self._proxy = proxy
        self._url = f"{proxy}/v1/completions"
        self._http = http

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self._http.get(f"{self._proxy}{path}") as response:
            return response.status, await response.json()

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self._http.post(f"{self._proxy}{path}", json=body) as response:
            return response.status, await response.json()

    async def __call__(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.status(**body)
        assert status == 200, answer
        return answer

    async def status(self, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self._http.post(self._url, json={**BODY, **body}) as response:
            return response.status, await response.json()


async def test_several_prompts_get_the_answers_that_each_gets_by_itself(apart: Ask) -> None:
    for sampled in ({}, {"temperature": 0.0}):
        alone = [await apart(prompt=prompt, n=2, **sampled) for prompt in PROMPTS]
        together = await apart(prompt=PROMPTS, n=2, **sampled)
        expected = [choice for answer in alone for choice in answer["choices"]]
        assert together["choices"] == [{**each, "index": index} for index, each in enumerate(expected)]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)


async def test_a_prompt_is_scored_as_its_continuation_was_when_it_was_sampled(apart: Ask) -> None:
    prompt = PROMPTS[0]
    scored = await apart(prompt=prompt, max_tokens=0, echo=True)
    (choice,) = scored["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (prompt, [], "length")
    assert scored["usage"]["completion_tokens"] == 0
    ids = len(choice["logprobs"]["tokens"])
    assert scored["usage"]["prompt_tokens"] == ids
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"]).endswith(prompt)

    (sampled,) = (await apart(prompt=prompt, echo=True, prompt_logprobs=1, logit_bias={EOS_ID: -100}))[
        "choices"
    ]
    assert sampled["text"].startswith(prompt)
    assert sampled["logprobs"]["token_logprobs"][:ids] == choice["logprobs"]["token_logprobs"]
    again = (await apart(prompt=sampled["text"], echo=True, max_tokens=0))["choices"][0]["logprobs"]
    assert again["tokens"] == sampled["logprobs"]["tokens"]
    assert again["token_logprobs"][1:] == pytest.approx(sampled["logprobs"]["token_logprobs"][1:], abs=1e-4)
    assert again["text_offset"] == sampled["logprobs"]["text_offset"]
    first, *rest = sampled["prompt_logprobs"]
    assert first is None and len(rest) == ids - 1
    for shown, logprob in zip(rest, sampled["logprobs"]["token_logprobs"][1:ids], strict=True):
        assert logprob in [each["logprob"] for each in shown.values()]
        assert min(each["rank"] for each in shown.values()) == 1


async def test_scores_are_the_same_in_a_batch_and_after_the_prompt_was_cached(apart: Ask) -> None:
    """As lm-eval asks: lists of ids, echo, one token."""
    bodies = [{"prompt": [[5, 6, 7, 8] * 20, [9, 10, 11] * 9], "max_tokens": 1, "echo": True}] * 2
    answers = [await apart(**body, logprobs=1, temperature=0.0) for body in bodies]
    assert answers[0]["choices"] == answers[1]["choices"]
    for choice, length in zip(answers[0]["choices"], (80, 27), strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == length + 1


async def test_echo_alone_is_served_by_a_pair(apart: Ask) -> None:
    plain = await apart(prompt=PROMPTS[0], logprobs=None, n=2)
    echoed = await apart(prompt=PROMPTS[0], logprobs=None, n=2, echo=True)
    for before, after in zip(plain["choices"], echoed["choices"], strict=True):
        assert after["text"] == PROMPTS[0] + before["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"kvferry_first_choice": 1}, "kvferry_first_choice"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(apart: Ask, body: dict[str, Any], param: str) -> None:
    status, error = await apart.status(**{"prompt": PROMPTS[0], **body})
    assert (status, error["error"]["param"]) == (400, param)


async def test_a_text_becomes_tokens_and_they_become_the_text(apart: Ask) -> None:
    prompt = PROMPTS[0]
    _, answer = await apart.post("/tokenize", model="ferry-tiny", prompt=prompt, return_token_strs=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert (await apart(prompt=answer["tokens"]))["choices"] == (await apart(prompt=prompt))["choices"]
    _, text = await apart.post("/detokenize", model="ferry-tiny", tokens=answer["tokens"])
    assert text == {"prompt": prompt}
    messages = [{"role": "user", "content": prompt}]
    _, chat = await apart.post("/tokenize", messages=messages)
    assert chat["count"] > answer["count"] and chat["token_strs"] is None
    bare = await apart.post("/tokenize", messages=messages, add_generation_prompt=False)
    assert bare[1]["count"] < chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"model": "ferry-tiny"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, 400, "promt"),
        ("/tokenize", {"model": "m" * 1025}, 400, "model"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 300_000}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(
    apart: Ask, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    given, error = await apart.post(path, **body)
    assert (given, error["error"]["param"]) == (status, param)


async def test_one_model_and_the_version(apart: Ask) -> None:
    _, models = await apart.get("/v1/models")
    assert await apart.get("/v1/models/ferry-tiny") == (200, models["data"][0])
    status, error = await apart.get("/v1/models/gpt-9")
    assert (status, error["error"]["code"]) == (404, "model_not_found")
    assert await apart.get("/version") == (200, {"version": version("kvferry")})
