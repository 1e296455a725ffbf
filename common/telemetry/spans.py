# SPDX-License-Identifier: Apache-2.0
"""Spans of a process, by OpenTelemetry's SDK; imported only where traces are on (`common.telemetry.tracing`).

Times are readings of the monotonic clock, in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.common.telemetry.version import VERSION

MAX_HEADER_CHARS = 512
"""Longest `traceparent` and `tracestate`: as much as W3C Trace Context would have passed on. A longer one is
left out, since some versions of the SDK take the square of its length to read it.
"""
_TRACES_PATH = "/v1/traces"
_KINDS = {"internal": trace.SpanKind.INTERNAL, "client": trace.SpanKind.CLIENT}

Attributes = Mapping[str, str | bool | int | float]

_log = logging.getLogger(__name__)


class Span:
    """One span. `end` is to be called once, and nothing after that.

    Args:
        clock_offset: Added to readings of the monotonic clock, in ns, for those of the wall clock. The spans
            of a request keep one within a process, so that they fit together even where the clock is set.
    """

    def __init__(self, span: trace.Span, tracer: trace.Tracer, clock_offset: int) -> None:
        self._span = span
        self._tracer = tracer
        self._clock_offset = clock_offset

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def headers(self) -> dict[str, str]:
        """Headers that make what another server does a child of this span (W3C Trace Context)."""
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, self._context())
        return headers

    def child(
        self,
        name: str,
        at: float,
        attributes: Attributes | None = None,
        *,
        kind: Literal["internal", "client"] = "internal",
        links: Sequence[tuple[Span, Attributes]] = (),
    ) -> Span:
        """Begin a span within this one; `links` are other spans, each with what the link says."""
        span = self._tracer.start_span(
            name,
            context=self._context(),
            kind=_KINDS[kind],
            attributes=attributes,
            links=[trace.Link(other._span.get_span_context(), about) for other, about in links],
            start_time=self._wall(at),
        )
        return Span(span, self._tracer, self._clock_offset)

    def add_event(self, name: str, at: float) -> None:
        """Record that something happened."""
        self._span.add_event(name, timestamp=self._wall(at))

    def set_attributes(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, kind: str) -> None:
        """Mark the span as failed. `kind` is a short word."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(trace.StatusCode.ERROR, kind)

    def end(self, at: float) -> None:
        self._span.end(self._wall(at))

    def _context(self) -> Context:
        return trace.set_span_in_context(self._span, Context())

    def _wall(self, at: float) -> int:
        return int(at * 1e9) + self._clock_offset


class Tracing:
    """Makes the spans of one process and exports them, by OTLP over HTTP.

    The SDK samples, bounds and exports as its environment variables say. Spans that have ended wait in a
    queue of `OTEL_BSP_MAX_QUEUE_SIZE`, which a thread exports; what does not fit is dropped.

    Args:
        endpoint: Base URL of the collector; as the environment says where it is None.
        about: Attributes of the process; those of the environment win.
    """

    def __init__(self, endpoint: str | None, about: Attributes) -> None:
        url = None if endpoint is None else endpoint.rstrip("/") + _TRACES_PATH
        resource = Resource.create({**about, "service.version": VERSION})
        resource = resource.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("kvferry", VERSION)

    def serve(self, name: str, at: float, headers: Mapping[str, str], attributes: Attributes) -> Span:
        """Begin the span of a request that came at `at`; it continues the trace that the headers name."""
        offset = time.time_ns() - time.monotonic_ns()
        carrier = {name: value for name, value in headers.items() if len(value) <= MAX_HEADER_CHARS}
        span = self._tracer.start_span(
            name,
            context=TraceContextTextMapPropagator().extract(carrier, Context()),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=int(at * 1e9) + offset,
        )
        return Span(span, self._tracer, offset)

    async def close(self, timeout_s: float, at_once: asyncio.Event) -> None:
        """Export the spans that have ended; those that are not exported by then, or `at_once`, are lost.

        The SDK's own shutdown has no deadline; a thread in which it hangs does not keep the process alive.
        """
        loop, flushed = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(flushed.set)

        threading.Thread(target=flush, name="flush-traces", daemon=True).start()
        waits = [asyncio.ensure_future(event.wait()) for event in (flushed, at_once)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not flushed.is_set():
            _log.warning("the last spans were not exported in time")
