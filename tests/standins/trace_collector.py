# SPDX-License-Identifier: Apache-2.0
"""Stands in for an OpenTelemetry collector: takes what is exported by OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

KINDS = {
    Span.SPAN_KIND_SERVER: "server",
    Span.SPAN_KIND_CLIENT: "client",
    Span.SPAN_KIND_INTERNAL: "internal",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSpan:
    """One span as it was exported. Times are in Unix seconds; `links` are span ids with attributes."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    failed: bool
    attributes: dict[str, Any]
    events: list[str]
    links: dict[str, dict[str, Any]]
    resource: dict[str, Any]


@dataclass(slots=True)
class TraceCollector:
    """`url` is the endpoint of exporters. With `is_stuck` it answers none of them before it has `ended`."""

    url: str = ""
    is_stuck: bool = False
    spans: list[CollectedSpan] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def of_trace(self, trace_id: str) -> list[CollectedSpan]:
        """All spans of one trace, by their begin."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)

    def children(self, parent: CollectedSpan) -> list[CollectedSpan]:
        return [span for span in self.of_trace(parent.trace_id) if span.parent_id == parent.span_id]

    async def until(self, claim: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Wait until what has arrived makes this true."""
        async with asyncio.timeout(timeout_s):
            while not claim():
                self._arrived.clear()
                await self._arrived.wait()

    async def export(self, request: web.Request) -> web.Response:
        exported = ExportTraceServiceRequest.FromString(await request.read())
        for group in exported.resource_spans:
            resource = attributes_of(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [collected(span, resource) for span in scope.spans]
        self._arrived.set()
        if self.is_stuck:
            await self.ended.wait()
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")


def collected(span: Span, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        service=resource["service.name"],
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=attributes_of(span.attributes),
        events=[event.name for event in span.events],
        links={link.span_id.hex(): attributes_of(link.attributes) for link in span.links},
        resource=resource,
    )


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


@asynccontextmanager
async def trace_collector() -> AsyncIterator[TraceCollector]:
    """A collector on a free port."""
    collector = TraceCollector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.export)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        collector.url = f"http://{host}:{port}"
        yield collector
    finally:
        collector.ended.set()
        await runner.cleanup()
