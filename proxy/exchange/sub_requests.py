# SPDX-License-Identifier: Apache-2.0
"""A client's request split into sub-requests, and their responses put together.

Most engines sample one choice of one prompt per transfer (`proxy.dialects.base`): a sub-request is one
choice, sampled with the seed that one server would have used: the client's, plus the choice's place among
those of its prompt (vLLM's own rule for n > 1). Where an engine samples all choices of a prompt from one
transfer, a sub-request is one prompt. With the client's seed each prompt gets the answer that it gets by
itself; without one, each has another seed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from kvferry.common.exceptions import leaves
from kvferry.proxy import sse
from kvferry.proxy.dialects.base import Dialect, Prefilled, SubRequest
from kvferry.proxy.errors import AgentRejected, ProxyError, TooManyResponses
from kvferry.proxy.http.pool import MAX_BODY_BYTES
from kvferry.proxy.http.upstream_connection import ResponseBounds
from kvferry.proxy.ids import Identity, TransferId, new_transfer_id
from kvferry.proxy.request import ClientRequest, split_prompts

T = TypeVar("T")


def whole_request(request: ClientRequest, ids: Identity, transfer_id: TransferId) -> SubRequest:
    """All of the request: the only prompt, or what one server serves alone."""
    return SubRequest(
        request=request,
        ids=ids,
        body=request.body,
        choices=range(request.sequences),
        prompt=0,
        transfer_id=transfer_id,
    )


def split_into_choices(
    request: ClientRequest, ids: Identity, transfer_ids: Sequence[TransferId]
) -> tuple[SubRequest, ...]:
    """One sub-request for each choice of each prompt. The transfer ids, one for each, must be fresh."""
    prompts = [None] if request.chat else split_prompts(request.prompt)
    return tuple(
        SubRequest(
            request=request,
            ids=ids,
            body=_narrowed(request, prompts[index // request.n], index % request.n),
            choices=range(index, index + 1),
            prompt=index // request.n,
            transfer_id=transfer_id,
        )
        for index, transfer_id in enumerate(transfer_ids)
    )


def split_into_prompts(
    request: ClientRequest, ids: Identity, transfer_ids: Sequence[TransferId], *, is_native: bool = False
) -> tuple[SubRequest, ...]:
    """One sub-request for each prompt, with its choices. The transfer ids, one for each, must be fresh."""
    prompts = [None] if request.chat else split_prompts(request.prompt)
    body = request.body if is_native else _without(request.body, "best_of")
    return tuple(
        SubRequest(
            request=request,
            ids=ids if request.seed is not None or not index else _reseeded(ids, index),
            body=body if request.chat else body | {"prompt": prompt},
            choices=range(index * request.n, (index + 1) * request.n),
            prompt=index,
            transfer_id=transfer_id,
        )
        for index, (prompt, transfer_id) in enumerate(zip(prompts, transfer_ids, strict=True))
    )


def split(dialect: Dialect, request: ClientRequest, ids: Identity, *, alone: bool) -> tuple[SubRequest, ...]:
    """The sub-requests for servers of a dialect, or for one server `alone`; each has a transfer id."""
    is_one = dialect.forks and request.prompts == 1 and (dialect.is_native or "best_of" not in request.body)
    if is_one or (alone and not dialect.is_native):
        return (whole_request(request, ids, new_transfer_id()),)
    if dialect.forks:
        transfer_ids = [new_transfer_id() for _ in range(request.prompts)]
        return split_into_prompts(request, ids, transfer_ids, is_native=dialect.is_native)
    return split_into_choices(request, ids, [new_transfer_id() for _ in range(request.sequences)])


def _narrowed(request: ClientRequest, prompt: Any, choice: int) -> dict[str, Any]:
    body = _without(request.body, "n", "best_of")
    if not request.chat:
        body["prompt"] = prompt
    if request.seed is not None:
        seed = request.seed + choice
        body["seed"] = seed if seed < 2**63 else seed - 2**63
    return body


def _without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def _reseeded(ids: Identity, index: int) -> Identity:
    return msgspec.structs.replace(ids, seed=(ids.seed + index) % 2**63)


class SubResponse(ABC):
    """The response to a sub-request, as it becomes the client's.

    `choices` and `envelope`, the members around them, are those of a response that is not streamed; of a
    stream, `envelope` is what is around its usage. `size` is in bytes. `whole` is the client's response where
    that is the server's to the byte.
    """

    def __init__(self, sub: SubRequest) -> None:
        self.sub = sub
        self.whole: bytes | None = None
        self.choices: list[dict[str, msgspec.Raw]] = []
        self.envelope: dict[str, Any] = {}
        self.size = 0
        self._usage: dict[str, Any] | None = None
        """As the server reported it."""
        self.has_answered = False
        """Whether the server has answered anything that shows that it has read its KV."""
        self.has_done = False
        """Whether the client has been sent `[DONE]`."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether every choice has ended."""

    @property
    def usage(self) -> dict[str, Any] | None:
        """None when the server reported none."""
        return None if self._usage is None else self._client_usage(self._usage)

    @abstractmethod
    def reader(self, on_done: Callable[[], None]) -> sse.EventReader:
        """What reads the stream. `on_done` is called once, when `[DONE]` has been read."""

    @abstractmethod
    def read_whole(self, raw: bytes) -> None:
        """Read a response that is not streamed. Raises `AgentLost`, `AgentRejected` or `BadResponse`."""

    @abstractmethod
    def read_prefilled(self, prefilled: Prefilled) -> bytes:
        """Read a response that ended with its first token, at the prefill server; returns the events that a
        streaming client is to be shown.
        """

    @abstractmethod
    def show(self, events: bytes) -> None:
        """Send the client whole events."""

    @abstractmethod
    def show_opening(self, events: bytes) -> None:
        """Send the client a first token that the prefill server has sampled (`Dialect.opening_events`)."""

    @abstractmethod
    def end_without_server(self, prefilled: Prefilled | None) -> None:
        """The server was lost when the client had the end of every choice: do without what is missing."""

    def _client_usage(self, reported: dict[str, Any]) -> dict[str, Any]:
        """A server's usage as the client's."""
        return reported


class KeptResponses:
    """The responses to the parts of one request that are complete, until all are; it outlives attempts.

    They are counted (`HeldResponse`): beyond `bounds`, which are those of all responses of the proxy, if
    these hold most, they are forgotten, and the tasks that are joined, or are to be joined next, end.
    """

    def __init__(self, bounds: ResponseBounds) -> None:
        self._bounds = bounds
        self._responses: dict[range, SubResponse] = {}
        self._size = 0
        self._tasks: Sequence[asyncio.Future[Any]] = ()
        self._error: ProxyError | None = None

    def find(self, sub: SubRequest) -> SubResponse | None:
        """Return the response that has the sub-request's choices."""
        return self._responses.get(sub.choices)

    def add(self, response: SubResponse) -> None:
        """Keep a response. Raises `TooManyResponses` once they are too large, for one or for the proxy."""
        self._responses[response.sub.choices] = response
        self._size += response.size
        if self._size > MAX_BODY_BYTES:
            raise TooManyResponses(f"the responses to all parts of the request exceed {MAX_BODY_BYTES} bytes")
        if self._size:
            self._bounds.hold(self, self._size)
        if self._error is not None:
            raise self._error

    async def join(self, tasks: Sequence[asyncio.Future[T]]) -> list[T]:
        """`join`; also raises what this was ended with."""
        self._tasks = tasks
        try:
            if self._error is not None:
                self.fail(self._error)
            return await join(tasks)
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._tasks = ()

    def fail(self, error: ProxyError) -> None:
        """See `HeldResponse`."""
        self._error = error
        self._responses.clear()
        for task in self._tasks:
            task.cancel()

    def release(self) -> None:
        """Count all as gone. Idempotent."""
        self._responses.clear()
        if self._size:
            self._size = 0
            self._bounds.release(self)


async def join(tasks: Sequence[asyncio.Future[T]]) -> list[T]:
    """Wait for all and return their results, in order. When one fails, or the caller is cancelled, the others
    are cancelled; all have ended when this returns.

    Raises a `BaseExceptionGroup` of the failures, or CancelledError if the caller was cancelled, whatever
    failed. (`asyncio.TaskGroup` loses a cancellation that comes while it cancels the others.)
    """
    cancelled: asyncio.CancelledError | None = None
    is_ending = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            cancelled = error
        pending = [task for task in tasks if not task.done()]
        if pending and not is_ending:
            is_ending = True
            for task in pending:
                task.cancel()
    ended = [None if task.cancelled() else task.exception() for task in tasks]
    failures = [each for each in ended if each is not None]
    if cancelled is not None:
        raise cancelled
    if failures:
        raise BaseExceptionGroup("of several legs", failures)
    return [task.result() for task in tasks]


def raise_one(failures: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the one failure that the client gets: an agent's rejection of the request, else the first.

    An internal error is raised as it is, in its group.
    """
    ours, others = failures.split(ProxyError)
    if others is not None or ours is None:
        raise failures
    rejections = ours.subgroup(AgentRejected)
    raise next(leaves(rejections or ours)) from None


def merge(responses: Sequence[SubResponse]) -> bytes:
    """The client's response, not streamed."""
    whole: dict[str, Any] = dict(responses[0].envelope)
    whole["choices"] = [choice for response in responses for choice in response.choices]
    whole["usage"] = sum_usage(responses)
    return msgspec.json.encode(whole)


def closing_events(responses: Sequence[SubResponse]) -> bytes:
    """The end of the client's stream: usage, if the servers sent any, and `[DONE]`, unless that was sent."""
    first = responses[0]
    if first.has_done:
        return b""
    usage = sum_usage(responses)
    if usage is None and "kvferry_timing" not in first.envelope:
        return sse.DONE
    last = first.envelope if usage is None else first.envelope | {"usage": usage}
    return sse.event(last) + sse.DONE


def sum_usage(responses: Sequence[SubResponse]) -> dict[str, Any] | None:
    """The usage of the whole response: every prompt counted once, every choice's tokens added."""
    reported = [(response.sub.prompt, response.usage) for response in responses]
    usages = [(prompt, usage) for prompt, usage in reported if usage is not None]
    if len(usages) <= 1:
        return usages[0][1] if usages else None
    added = _add_counts([usage for _, usage in usages])
    firsts: dict[int, dict[str, Any]] = {}
    for prompt, usage in usages:
        firsts.setdefault(prompt, usage)
    prompts = _add_counts(list(firsts.values()))
    added |= {name: value for name, value in prompts.items() if name.startswith("prompt_")}
    added["total_tokens"] = added.get("prompt_tokens", 0) + added.get("completion_tokens", 0)
    return added


def _add_counts(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up dictionaries of counts, member by member; what is not a count is the first one's."""
    added: dict[str, Any] = {}
    for name, first in counts[0].items():
        values = [each.get(name) for each in counts]
        if all(isinstance(value, int) for value in values):
            added[name] = sum(value for value in values if isinstance(value, int))
        elif all(isinstance(value, dict) for value in values):
            added[name] = _add_counts([value for value in values if isinstance(value, dict)])
        else:
            added[name] = first
    return added
