# SPDX-License-Identifier: Apache-2.0
"""Messages between the API process and the engine process of one agent.

Two one-to-one ZMQ sockets over ipc in a private directory; msgspec's msgpack, typed unions, no pickle.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.proxy.wire.registration import Capacity, WorkReport
from kvferry.transfer.events import PlaneStats, RankRead
from kvferry.transfer.plane import RemotePrompt

FinishReason = Literal["stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. Already validated and defaulted by the API process.

    `max_tokens` is the client's own limit (never the 1 of a prefill leg), resolved against the context.
    `logprobs` is the number of alternatives to report per position, or None for no logprobs at all;
    `prompt_logprobs` the same of the prompt's tokens, which are then all computed, whatever is cached.
    `max_tokens` is 0 where only the prompt is to be computed.
    `bad_words` are sequences of token ids that the output must not contain; of `allowed_token_ids` it
    consists, if there are any. `grammar`, in llguidance's JSON form, is what the output must match, if it is
    not empty.
    """

    seed: int
    n: int = 1
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    grammar: str = ""


class ResumedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens that a choice already has when the request arrives (from the prefill leg, or a resume).

    A finished choice gets no sequence and no tokens.
    """

    index: int
    token_ids: tuple[int, ...]
    finished: bool


class RemoteKV(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's KV to pull: under which transfer, and from where.

    `streamed`: its prefill may still run, or not have begun; token 1 of every choice comes with the KV.
    """

    transfer_id: str
    source: RemotePrompt
    streamed: bool = False


class PrefixSource(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that may have the KV of the prompt's beginning in its prefix cache, and where it is asked.

    Fewer than `min_tokens` that are missing here are not worth asking for.
    """

    engine_id: str
    host: str
    port: int
    tp_size: int
    min_tokens: int = 1

    def agent(self, num_tokens: int) -> RemotePrompt:
        """Return how the transfer plane addresses it, for so many tokens at most."""
        return RemotePrompt(
            engine_id=self.engine_id,
            host=self.host,
            port=self.port,
            num_tokens=num_tokens,
            tp_size=self.tp_size,
        )


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One request. `produce` names the transfer under which the prompt's KV is to be leased after one token;
    `remote` says where to pull the prompt's KV from. At most one of the two; neither means a local request.
    Prefixes are shared only among requests with one `cache_salt`. `prefix_source` is whom to ask for the
    beginning of a prompt that is produced.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float
    produce: str | None = None
    remote: RemoteKV | None = None
    resumed: tuple[ResumedChoice, ...] = ()
    cache_salt: str = ""
    prefix_source: PrefixSource | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End the whole request in any state. The engine sends no more output of it."""

    request_id: str


class StopChoice(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End one choice: a stop string was found, which only the API process looks for."""

    request_id: str
    index: int


class DropTransfer(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """Unpin a transfer's blocks now: its reader will not come. Idempotent."""

    transfer_id: str


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Ask for `Drained` as soon as nothing runs and no KV is leased. What is submitted later still runs."""


ToEngine = Submit | Abort | StopChoice | DropTransfer | Drain


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log probability of the sampled token, and of the likeliest ones, best first, before temperature.

    `margin` is how far the sampled token's decision score (logit ÷ T, plus noise) lay above the second best.
    """

    logprob: float
    margin: float = float("inf")
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log probability of a prompt's token, and of the likeliest ones at its position, best first.

    `rank` counts from 1, the likeliest token's.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One output token of one choice; `finish` is set on the choice's last."""

    index: int
    token_id: int
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


class FailedPull(msgspec.Struct, frozen=True, kw_only=True):
    """A pull of the prompt's KV that came to nothing, from when to when by the monotonic clock.

    `reason` is one of `PULL_FAILURE_REASONS`, or `no_first_tokens` of a streamed pull that came without them.
    `backend` is empty if it failed before it had one.
    """

    reason: str
    backend: str
    began_at: float
    ended_at: float


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request's time went, in seconds, and what its KV transfer moved.

    `prefix_pull_s` was spent on getting `prefix_tokens` of the prompt's beginning from another agent's prefix
    cache, before it was computed; `prefix_failure` is why that came to nothing. `pull_tail_s` is the part of
    `pull_s` after the prefill had ended; `pull_early_blocks` were here before that, and `rank_reads` is what
    each rank has read. `arrived_at`, `pull_began_at` (its first read), `prompt_done_at` (when its KV was
    computed or pulled) and `first_step_at` are readings of the monotonic clock, which all processes of a host
    share.
    """

    queue_s: float = 0.0
    prefix_pull_s: float = 0.0
    prefill_s: float = 0.0
    pull_wait_s: float = 0.0
    pull_s: float = 0.0
    pull_tail_s: float = 0.0
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0
    pull_bytes: int = 0
    pull_descriptors: int = 0
    pull_early_blocks: int = 0
    prefix_pull_bytes: int = 0
    prefix_tokens: int = 0
    prefix_failure: str | None = None
    rank_reads: tuple[RankRead, ...] = ()
    arrived_at: float | None = None
    pull_began_at: float | None = None
    prompt_done_at: float | None = None
    first_step_at: float | None = None
    backend: str | None = None
    recomputed: bool = False
    failed_pull: FailedPull | None = None

    def phases(self) -> dict[str, float]:
        """Seconds by phase, as metrics, logs and the `Server-Timing` header name them.

        Only those that the leg had: a pull's where there was one, its tail where blocks came before the
        prefill ended, the prefill's where the prompt was computed here, the rest where tokens were decoded.
        """
        seconds = {
            "queue": self.queue_s,
            "prefix_pull": self.prefix_pull_s,
            "prefill": self.prefill_s,
            "pull_wait": self.pull_wait_s,
            "pull": self.pull_s,
            "pull_tail": self.pull_tail_s,
            "decode_queue": self.decode_queue_s,
            "first_step": self.first_step_s,
        }
        if not self.prefix_pull_s:
            del seconds["prefix_pull"]
        if not self.prefill_s:
            del seconds["prefill"]
        if self.first_step_at is None:
            del seconds["decode_queue"]
        if not self.first_step_s:
            del seconds["first_step"]
        if self.backend is None:
            del seconds["pull_wait"], seconds["pull"]
        if not self.pull_early_blocks:
            del seconds["pull_tail"]
        return seconds


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request. `done` is the last message about it.

    A produced request (`Submit.produce`) sends exactly one Output with one token per choice. `leased` is true
    when some choice wants more tokens: its prompt's blocks are then pinned under the transfer id.
    `prompt_logprobs`, in the first one of a request that wants them, are those of the prompt's second token
    and of all after it.
    """

    request_id: str
    tokens: tuple[Token, ...]
    done: bool = False
    leased: bool = False
    cached_tokens: int = 0
    timing: Timing | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """All outputs of one engine step."""

    items: tuple[Output, ...]


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request failed. `status` is the HTTP status that fits, `code` a stable word."""

    request_id: str
    status: int
    code: str
    message: str
    failed_pull: FailedPull | None = None


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine accepts requests. Sent once."""

    incarnation: str
    control_port: int
    transfers: tuple[str, ...]
    geometry: dict[str, str]
    layout: str
    weights: str
    host_id: str
    device: str
    max_model_len: int
    kv_blocks_total: int


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """A snapshot for pings and metrics, sent on change and at least every second while anything runs.

    Counters only grow.
    """

    steps: int
    running: int
    waiting: int
    blocks_free: int
    blocks_used: int
    blocks_leased: int
    blocks_quarantined: int
    blocks_total: int
    preemptions: int
    recomputes: int
    prompt_tokens: dict[str, int] = {}
    """Prompt tokens by where their KV came from (`SchedulerCounters.prompt_tokens`)."""
    integrity_errors: int
    plane: PlaneStats
    work: WorkReport | None = None
    capacity: Capacity | None = None
    """Both as pings carry them."""


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """Every request has ended, and every lease: all readers have what they came for, or do not come."""


FromEngine = EngineReady | Outputs | RequestFailed | Stats | Drained
