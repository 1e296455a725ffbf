# SPDX-License-Identifier: Apache-2.0
"""The transfer plane's interface for one rank: a thread that owns the rank's backends.

The thread carries out the engine process's commands and reports back; the rank's own work never waits for it.
It sleeps on descriptors, and polls, at most every millisecond, only while a backend without one has work.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvferry.transfer.control.messages import EngineDescription
from kvferry.transfer.engine import (
    BackendUnavailable,
    EngineOptions,
    TransferEngine,
    candidates,
    open_engine,
    parse_backend_options,
)
from kvferry.transfer.memory import KVPool
from kvferry.transfer.options import BACKENDS
from kvferry.transfer.plane import RankAddress
from kvferry.transfer.ranks import messages as wire
from kvferry.transfer.ranks.channel import RankEnd, RankSocket
from kvferry.transfer.ranks.checksums import RankSums
from kvferry.transfer.ranks.reads import RankReader
from kvferry.transfer.ranks.tunnel import RemoteRankSocket

_OPEN_S = 60.0
_CLOSE_S = 5.0
_SWITCH_S = 0.0005
"""Longest that the rank's own Python may keep the interpreter from this thread (5 ms by default)."""

_log = logging.getLogger(__name__)


class EngineGone(ConnectionError):
    """Nothing else ends a rank on another host than its engine process's (I8)."""


class WorkerConnector:
    """This rank's part of the transfer plane.

    Args:
        address: Where this rank listens for the engine process's SchedulerConnector, from `start` on: in a
            private directory; None: at a free port of `bind_host`, for an engine process on another host.
        pool: This rank's KV pool, allocated and touched.
        transfer: A backend's name, or auto for every one that works here; two agents use the best that
            both have and that works between them.
        auto: The backends that auto tries, best first.
        transfer_options: Options of backends, `BACKEND.NAME=VALUE,…`.
        computing: Set by the rank while its model computes, so that a pull may then take less of the device.
    """

    def __init__(
        self,
        *,
        address: Path | None,
        rank: int,
        pool: KVPool,
        transfer: str,
        bind_host: str,
        advertise_host: str,
        auto: Sequence[str] = tuple(BACKENDS),
        transfer_options: str = "",
        computing: threading.Event | None = None,
    ) -> None:
        self._address = address
        self._rank = rank
        self._pool = pool
        self._names = candidates(transfer, auto)
        self._options = EngineOptions(
            name=f"{secrets.token_hex(8)}-{rank}",
            bind_host=bind_host,
            advertise_host=advertise_host,
            explicit=transfer != "auto",
            computing=computing or threading.Event(),
        )
        self._backend_options = parse_backend_options(transfer_options)
        self._lives = itertools.count()
        self._opened = threading.Event()
        self._error: Exception | None = None
        self._listener: RankSocket | RemoteRankSocket | None = None
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"transfer-{rank}", daemon=True)

    def start(self) -> None:
        """Open the backends, and listen for the engine process, which may connect from the return on.

        Raises `BackendUnavailable` with the reason, ValueError for an invalid backend option, and OSError if
        the address is taken or invalid.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        if self._address is None:
            self._listener = RemoteRankSocket(self._options.bind_host, self._options.advertise_host)
        else:
            self._listener = RankSocket(self._address)
        self._thread.start()
        if not self._opened.wait(_OPEN_S):
            raise BackendUnavailable(f"transfer backends did not open within {_OPEN_S:.0f} s")
        if self._error is not None:
            raise self._error

    @property
    def address(self) -> RankAddress:
        """Where this rank listens, after `start`."""
        if isinstance(self._listener, RemoteRankSocket):
            return self._listener.address
        assert self._address is not None, "only those on other hosts have none"
        return self._address

    def close(self) -> None:
        """End the thread and everything it owns; afterwards nothing writes into the pool. Idempotent."""
        self._stop.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the transfer thread did not end within {_CLOSE_S:.0f} s")
        if self._listener is not None:
            self._listener.close()
        self._stopped.close()

    def _run(self) -> None:
        try:
            engines = self._open_engines()
        except (BackendUnavailable, ValueError) as error:
            self._error = error
            return
        finally:
            self._opened.set()
        stopped = False
        try:
            self._serve(engines)
            stopped = True
        finally:
            if not stopped:
                # A rank without its transfer thread would strand every pull; agents share one fate (I8).
                _log.critical("the transfer thread broke", exc_info=sys.exc_info())
                os._exit(1)

    def _open_engines(self) -> dict[str, tuple[TransferEngine, EngineDescription]]:
        engines: dict[str, tuple[TransferEngine, EngineDescription]] = {}
        left_out = []
        for name in self._names:
            try:
                engines[name] = self._open_engine(name)
            except BackendUnavailable as error:
                if self._options.explicit:
                    raise
                left_out.append(str(error))
        if not engines:
            raise BackendUnavailable(f"no transfer backend works here: {'; '.join(left_out)}")
        why = f"; left out: {'; '.join(left_out)}" if left_out else ""
        _log.info("transfer backends, best first: %s%s", ", ".join(engines), why)
        return engines

    def _options_of(self, name: str) -> EngineOptions:
        return replace(
            self._options,
            name=f"{self._options.name}-{next(self._lives)}",
            backend_options=self._backend_options.get(name, {}),
        )

    def _open_engine(self, name: str) -> tuple[TransferEngine, EngineDescription]:
        engine = open_engine(name, self._options_of(name))
        try:
            regions = engine.register(self._pool.regions)
        except BackendUnavailable:
            engine.close()
            raise
        described = tuple(region.describe() for region in regions)
        return engine, EngineDescription(engine=engine.describe(), regions=described)

    def _serve(self, opened: dict[str, tuple[TransferEngine, EngineDescription]]) -> None:
        engines = {name: engine for name, (engine, _) in opened.items()}
        descriptions = {name: description for name, (_, description) in opened.items()}
        channel: RankEnd | None = None
        try:
            poller = select.poll()
            poller.register(self._stopped, select.POLLIN)
            for engine in engines.values():
                _watch(poller, engine)
            channel = self._listener.accept(self._stopped) if self._listener is not None else None
            if channel is not None:
                self._send_hello(channel, descriptions)
                self._loop(channel, poller, engines, descriptions)
        finally:
            for engine in engines.values():
                engine.close()
            if channel is not None:
                channel.close()

    def _send_hello(self, channel: RankEnd, descriptions: Mapping[str, EngineDescription]) -> None:
        hello = wire.RankHello(
            rank=self._rank,
            placement=self._pool.placement,
            engines=dict(descriptions),
        )
        channel.send(wire.encode(hello))

    def _loop(
        self,
        channel: RankEnd,
        poller: select.poll,
        engines: dict[str, TransferEngine],
        descriptions: dict[str, EngineDescription],
    ) -> None:
        reader = RankReader(self._rank, engines, lambda report: channel.send(wire.encode(report)))
        sums = RankSums(self._rank, self._pool, lambda report: channel.send(wire.encode(report)))
        poller.register(channel, select.POLLIN)
        while True:
            ready = dict(poller.poll(0 if sums.busy else _wait_ms(reader, list(engines.values()))))
            if self._stopped.fileno() in ready:
                return
            if channel.gone and channel.fileno() in ready:
                if self._address is None:
                    raise EngineGone("the engine process, or its host, has gone")
                poller.unregister(channel)
            for frame in channel.receive() if channel.fileno() in ready else ():
                command = wire.decode_command(frame)
                if isinstance(command, wire.Rebuild):
                    _unwatch(poller, engines[command.transfer])
                    descriptions[command.transfer] = self._rebuild(command.transfer, reader, engines)
                    _watch(poller, engines[command.transfer])
                    self._send_hello(channel, descriptions)
                elif isinstance(command, wire.SumBlocks):
                    sums.add(command)
                else:
                    reader.handle(command)
            for engine in engines.values():
                engine.progress()
                reader.collect()  # without waiting for the other engines
            sums.advance()

    def _rebuild(
        self, name: str, reader: RankReader, engines: dict[str, TransferEngine]
    ) -> EngineDescription:
        """Close an engine, which ends everything that it could still write, and open it again.

        Raises `BackendUnavailable` if it does not open again, which ends the rank.
        """
        destroyed = engines[name]
        destroyed.close()
        reader.engine_destroyed(destroyed)
        engines[name], description = self._open_engine(name)
        _log.info("%s engine rebuilt", name)
        return description


def _watch(poller: select.poll, engine: TransferEngine) -> None:
    descriptor = engine.fileno()
    if descriptor is not None:
        poller.register(descriptor, select.POLLIN)


def _unwatch(poller: select.poll, engine: TransferEngine) -> None:
    descriptor = engine.fileno()
    if descriptor is not None:
        poller.unregister(descriptor)


def _wait_ms(reader: RankReader, engines: list[TransferEngine]) -> int | None:
    """How long the thread may sleep on its descriptors; None: until one of them is ready."""
    poll_ms = reader.poll_ms
    if poll_ms is not None:
        return poll_ms
    deadlines = [each for each in (engine.next_deadline() for engine in engines) if each is not None]
    finite = [each for each in deadlines if each != float("inf")]
    if not finite:
        return None
    return max(0, int((min(finite) - time.monotonic()) * 1000) + 1)
