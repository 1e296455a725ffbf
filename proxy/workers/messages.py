# SPDX-License-Identifier: Apache-2.0
"""What the supervisor and a worker send each other, and the channel between them.

A channel is a socket pair that only these two processes hold. Frames are a length (4 bytes, big-endian) and
that many bytes of msgpack, typed by msgspec. Either end sees the other process end as the end of the stream.
`seq` ties a response to its request.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import msgspec
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.proxy.api.operator.commands import PageName
from kvferry.proxy.api.operator.pages import Page
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.fleet.circuit_breaker import BreakerState
from kvferry.proxy.fleet.snapshot import NodeState
from kvferry.proxy.telemetry.event_log import FleetEvent
from kvferry.proxy.telemetry.history import FailureCount
from kvferry.proxy.telemetry.metrics import Totals
from kvferry.proxy.wire.registration import Incarnation, Register, Role

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_UNSENT_BYTES = 16 * 1024 * 1024
HEARTBEAT_INTERVAL_S = 0.5


class Registration(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A registration that the supervisor has accepted. `heard_at`: monotonic seconds of this host."""

    info: Register
    heard_at: float


class Departure(msgspec.Struct, frozen=True, tag=True):
    """An agent has said goodbye."""

    agent: Incarnation


class SetCordoned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take an agent out of rotation, or put it back."""

    agent: Incarnation
    cordoned: bool


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to a worker: its settings, the port to listen on, and the agents known by now."""

    config: ProxyConfig
    port: int
    agents: tuple[Registration, ...]
    cordoned: tuple[Incarnation, ...]
    settled_at: float = float("-inf")
    """By when every agent that lives has announced itself, in monotonic seconds of this host."""


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Ask for a `Report`. It shows the effect of every message sent before."""

    seq: int


class FindTimeline(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ask for a request that the worker may have served; it answers `FoundTimeline`."""

    seq: int
    request_id: str


class PageResponse(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    seq: int
    page: Page


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Accept nothing new, let running requests finish for so many seconds, and end. A second one: at once."""

    limit_s: float


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The worker takes requests."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The worker's event loop runs. Sent every `HEARTBEAT_INTERVAL_S`."""


class AgentStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one worker makes of an agent. `in_flight`: its sequences there."""

    state: NodeState
    breaker: BreakerState
    in_flight: int


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """One metric with all its samples, to be sent to another process. `kind`: Prometheus' type."""

    name: str
    kind: str
    help: str
    samples: list[MetricSample]

    @classmethod
    def all_of(cls, collector: Collector) -> list[MetricFamily]:
        """Return the collector's metrics as they are now."""
        return [
            cls(
                metric.name,
                metric.type,
                metric.documentation,
                [MetricSample(each.name, dict(each.labels), each.value) for each in metric.samples],
            )
            for metric in collector.collect()
        ]


class Report(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a worker has counted since it started, and the agents as it sees them."""

    seq: int
    families: list[MetricFamily]
    totals: Totals
    models: dict[str, Totals]
    """By model, as `Metrics.model_totals` returns them."""
    phases: dict[str, int]
    """Requests now in each phase."""
    failures: list[FailureCount]
    events: list[FleetEvent]
    agents: dict[Incarnation, AgentStatus]


class FoundTimeline(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`timeline`: what the page shows, as JSON; None if the worker has not served the request."""

    seq: int
    timeline: bytes | None


class TimelineRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask all workers for a request that this one has not served; the response is its page."""

    request_id: str


class PageRequest(msgspec.Struct, frozen=True, tag=True):
    """`model`: of the dashboard, the model that it is to show; empty for all."""

    name: PageName
    model: str


class AgentRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for what is known of an agent; the response is its page."""

    agent: Incarnation


class CordonRequest(msgspec.Struct, frozen=True, tag=True):
    """Cordon an agent in every worker, or undo that; the response is its entry in `/nodes`."""

    agent: Incarnation
    cordoned: bool


class RoleRequest(msgspec.Struct, frozen=True, tag=True):
    """Use an agent for a role; the response is that of `POST /nodes/INCARNATION/role/ROLE`."""

    agent: Incarnation
    role: Role


class DrainRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask an agent to drain; the response is that of `POST /nodes/INCARNATION/drain`."""

    agent: Incarnation


OperatorRequest = TimelineRequest | PageRequest | AgentRequest | CordonRequest | RoleRequest | DrainRequest


class Forwarded(msgspec.Struct, frozen=True, tag=True):
    """A request that a worker got from an operator; the supervisor answers it with a `PageResponse`."""

    seq: int
    request: OperatorRequest


ToWorker = Start | Registration | Departure | SetCordoned | Collect | FindTimeline | PageResponse | Stop
ToSupervisor = Listening | Heartbeat | Report | FoundTimeline | Forwarded

Out = TypeVar("Out")
In = TypeVar("In")


class ChannelClosed(ConnectionError):
    """The other process has ended, does not keep up, or has sent what is no message."""


class ProcessChannel(Generic[Out, In]):
    """One end. `send` from anywhere in the loop; `receive` from one task."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder(enc_hook=str)
        # What msgspec does not know, paths, is sent as its string.
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=lambda kind, value: kind(value))

    @classmethod
    async def open(cls, end: socket.socket, incoming: Any) -> ProcessChannel[Out, In]:
        """Take over one end of a connected pair. `incoming`: the union of the messages to be received."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, incoming)

    def send(self, message: Out) -> None:
        """Queue one message; never waits or raises, as `receive` raises when the other end is gone.

        A peer that does not keep up, with `MAX_UNSENT_BYTES` queued for it, is cut off.
        """
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()
            return
        payload = self._encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> In:
        """Return the next message. Raises `ChannelClosed`."""
        length: int | None = None
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ChannelClosed(f"a frame of {length} bytes")
            message: In = self._decoder.decode(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError as error:
            between = length is None and not error.partial
            raise ChannelClosed("it closed the channel" + ("" if between else " within a message")) from error
        except ConnectionResetError as error:  # it had not read all that was sent
            raise ChannelClosed("it closed the channel") from error
        except OSError as error:
            raise ChannelClosed(str(error) or type(error).__name__) from error
        except msgspec.DecodeError as error:
            raise ChannelClosed(f"not a message: {error}") from error
        return message

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._writer.close()


# Of several processes the first start, the lowest limit, and one and the same build.
_NO_SUMS = ("process_start_time_seconds", "process_max_fds", "_build_info")


def sum_families(groups: Iterable[Sequence[MetricFamily]]) -> list[MetricFamily]:
    """Add up samples of the same name and labels, of several processes.

    Of counters and buckets that is what all have counted, of gauges what all hold. Of what cannot be added it
    is the least.
    """
    first: dict[str, MetricFamily] = {}
    sums: dict[str, dict[Hashable, MetricSample]] = {}
    for family in chain.from_iterable(groups):
        first.setdefault(family.name, family)
        samples = sums.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            samples[key] = _sum(samples.get(key), sample)
    return [
        MetricFamily(name, family.kind, family.help, list(sums[name].values()))
        for name, family in first.items()
    ]


def exposition(families: Iterable[MetricFamily]) -> bytes:
    """Return the families in Prometheus' text format."""
    return generate_latest(_Families(families))


class _Families(Collector):
    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def _sum(one: MetricSample | None, other: MetricSample) -> MetricSample:
    if one is None:
        return other
    if one.name.endswith(_NO_SUMS):
        return MetricSample(one.name, one.labels, min(one.value, other.value))
    return MetricSample(one.name, one.labels, one.value + other.value)
