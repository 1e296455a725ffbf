# SPDX-License-Identifier: Apache-2.0
"""What `kvferry bench` is to send, to which servers, and what it is to write."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kvferry.common.exceptions import message_of
from kvferry.common.options import check_files, is_server_url, parse_flags, read_key

PROG = "kvferry bench"
DEFAULT_SERVER = "http://127.0.0.1:10001"
DEFAULT_CONCURRENCY = 8
MAX_REQUESTS = 1_000_000
"""To each server at each level: all that is observed of them is held in memory."""
PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Target:
    """A server that the load is sent to. `url` has no path of the API: `/v1/…` is added."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Level:
    """How much load: requests per second that arrive at random times, requests in flight, or a trace that is
    replayed so many times as fast as it was recorded.
    """

    kind: Literal["rate", "concurrency", "speed"]
    value: float

    def __str__(self) -> str:
        if self.kind == "speed":
            return f"trace at speed {self.value:g}"
        return f"{self.value:g} {'requests/s' if self.kind == 'rate' else 'in flight'}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens to choose from with equal probability; each is a range, both ends included."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, name: str, words: str) -> Lengths:
        """Read `256`, `16:512` or `256,8192`. Raises ValueError that begins with the name of the setting."""
        try:
            ends = [[int(end) for end in word.split(":")] for word in words.split(",")]
        except ValueError:
            ends = []
        if not ends or not all(1 <= pair[0] <= pair[-1] and len(pair) <= 2 for pair in ends):
            raise ValueError(f"{name} must be N, LOW:HIGH or several of these with commas, got {words!r}")
        return cls(tuple((pair[0], pair[-1]) for pair in ends))

    @property
    def longest(self) -> int:
        return max(high for _, high in self.ranges)

    def choose(self, rng: random.Random) -> int:
        return rng.randint(*rng.choice(self.ranges))


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to count for goodput, in ms; None where no bound is set."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None

    def __bool__(self) -> bool:
        return (self.ttft_ms, self.tpot_ms, self.e2e_ms) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The options of `kvferry bench`.

    Load:
        server: Server to send the load to, as URL or NAME=URL; may be repeated, or given without
            --server. All get the same load in turn. Default: http://127.0.0.1:10001.
        model: Name of the model to request. Default: the first that each server lists.
        api: Endpoint: /v1/completions or /v1/chat/completions.
        rate: Requests per second, which arrive at random times (a Poisson process); several levels with
            commas, such as 1,2,4.
        concurrency: Requests in flight at any time, in place of a rate; several levels with commas.
            Default: 8.
        trace: Trace to replay, in place of a rate: CSV with TIMESTAMP, ContextTokens and GeneratedTokens, as
            Azure's, or JSONL with timestamp (ms), input_length and output_length, as Mooncake's; gzipped or
            not. Lengths and arrival times are the trace's; words are random, so prompts share no prefix.
        speed: How many times faster to replay the trace; several levels with commas. Default: 1.
        requests: Number of requests to each server at each level, divided among the rounds. Of a trace, the
            first ones are sent, and each round replays the next part of them.
        rounds: In each round every server gets its part of the requests, one server after the other; the next
            round begins with the next server. There are no more rounds than requests.
        warmup: Requests to each server before anything is measured.
        prompt_tokens: Length of the prompts: N, LOW:HIGH (any length between, equally often), or several of
            these with commas. Prompts are random words, no two alike.
        output_tokens: Length of the answers, in the same form.
        ignore_eos: Make answers exactly that long, by a field that OpenAI's API does not have. Use false for
            a server that rejects it.
        seed: Seed of lengths and arrival times. The words differ in every run, so that no prefix cache has
            them.

    Timeouts:
        timeout_s: Deadline of a request, in seconds; after it the request counts as failed.

    Security:
        key: File that holds the API key, if the servers need one.
        ca: PEM file of the authority that signed the servers' certificates.

    Results:
        ttft_ms: Objective for goodput: longest time to the first token, in ms.
        tpot_ms: Objective for goodput: longest mean time per token after the first, in ms.
        e2e_ms: Objective for goodput: longest time to the end of the answer, in ms.
        json: File for all results, with every request.
        plot: File for a chart, .png, .svg or .pdf; needs the extra bench.
    """

    server: tuple[str, ...] = ()
    model: str | None = None
    api: Literal["completions", "chat"] = "completions"
    rate: str | None = None
    concurrency: str | None = None
    trace: Path | None = None
    speed: str | None = None
    requests: int = 100
    rounds: int = 2
    warmup: int = 2
    prompt_tokens: str = "256"
    output_tokens: str = "64"
    ignore_eos: bool = True
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    timeout_s: float = 120.0
    seed: int = 1
    key: Path | None = None
    ca: Path | None = None
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        targets = self.targets
        if len({target.name for target in targets}) < len(targets):
            raise ValueError("server: two servers have the same name; give others as NAME=URL")
        if sum(each is not None for each in (self.rate, self.concurrency, self.trace)) > 1:
            raise ValueError("rate, --concurrency and --trace exclude each other")
        if self.speed is not None and self.trace is None:
            raise ValueError("speed needs --trace")
        _ = self.levels, self.prompt_lengths, self.output_lengths  # they raise
        for name in ("ttft_ms", "tpot_ms", "e2e_ms", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be greater than 0, got {value}")
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise ValueError(f"requests must be 1 to {MAX_REQUESTS}, got {self.requests}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")
        check_files(self, ("key", "ca", "trace"))
        self._check_key()
        self._check_outputs()

    def _check_key(self) -> None:
        if self.key is None:
            return
        try:
            read_key(self.key)
        except (OSError, ValueError) as error:
            raise ValueError(f"key: {message_of(error)}") from error

    def _check_outputs(self) -> None:
        for name in ("json", "plot"):
            path: Path | None = getattr(self, name)
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ValueError(f"{name}: {str(path)!r} cannot be written: no such folder, or it is one")
        if self.plot is not None and self.plot.suffix not in PLOT_FORMATS:
            raise ValueError(f"plot must end with {', '.join(PLOT_FORMATS)}, got {str(self.plot)!r}")

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(_target(words) for words in self.server or (DEFAULT_SERVER,))

    @property
    def num_rounds(self) -> int:
        return min(self.rounds, self.requests)

    @property
    def levels(self) -> tuple[Level, ...]:
        if self.rate is not None:
            return tuple(Level("rate", value) for value in _numbers("rate", self.rate, float))
        if self.trace is not None:
            return tuple(Level("speed", value) for value in _numbers("speed", self.speed or "1", float))
        given = self.concurrency or str(DEFAULT_CONCURRENCY)
        return tuple(Level("concurrency", value) for value in _numbers("concurrency", given, int))

    @property
    def prompt_lengths(self) -> Lengths:
        return Lengths.parse("prompt_tokens", self.prompt_tokens)

    @property
    def output_lengths(self) -> Lengths:
        return Lengths.parse("output_tokens", self.output_tokens)

    @property
    def objectives(self) -> Objectives:
        return Objectives(self.ttft_ms, self.tpot_ms, self.e2e_ms)


def parse_config(argv: Sequence[str]) -> BenchConfig:
    """Read a command line, in which URLs, and all words before the first option, are servers.

    Exits as `parse_flags` does.
    """
    words: list[str] = []
    options_began = False
    for word in argv:
        is_option = word.startswith("-")
        options_began = options_began or is_option
        if not is_option and ("://" in word or not options_began) and words[-1:] != ["--server"]:
            words.append("--server")
        words.append(word)
    return parse_flags(BenchConfig, words, prog=PROG, description=DESCRIPTION, arguments="[SERVER...]")


DESCRIPTION = (
    "Send a load to one server of OpenAI's API, or the same load to several in turn, and show times to the "
    "first token (TTFT), per token (TPOT), between events (ITL) and to the end, and goodput: the requests "
    "per second that keep all objectives."
)


def _target(words: str) -> Target:
    """Read URL or NAME=URL. Raises ValueError."""
    name, separator, url = words.partition("=")
    if not separator or "/" in name:
        name, url = "", words
    url = url.rstrip("/").removesuffix("/v1")
    if not is_server_url(url):
        raise ValueError(f"server must be http://HOST:PORT or NAME=http://HOST:PORT, got {words!r}")
    return Target(name or urlsplit(url).netloc, url)


def _numbers(name: str, words: str, kind: type[int] | type[float]) -> tuple[float, ...]:
    try:
        numbers = tuple(kind(word) for word in words.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < 1e6 for number in numbers):
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{name} must be {what} greater than 0 with commas between, got {words!r}")
    return numbers
