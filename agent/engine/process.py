# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.agent.engine.process`: the process that schedules, started by the API process.

One loop: handle what arrived (requests, transfer events) → schedule → run on the ranks → commit → send. It
only awaits the ranks, so the control channel, lease renewals and outputs never wait for a model step; and it
sleeps until something arrives when there is nothing to compute.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvferry.agent.config import START_TIMEOUT_S, AgentConfig
from kvferry.agent.engine.admission import Limits
from kvferry.agent.engine.blocks import BlockAllocator, IntegrityError
from kvferry.agent.engine.executor import RANK_MODULE, BrokenRank, Executor
from kvferry.agent.engine.masks import MaskProcess
from kvferry.agent.engine.scheduler import Scheduler
from kvferry.agent.ids import host_id
from kvferry.agent.messages.masks import MasksBoot
from kvferry.agent.messages.requests import (
    Abort,
    Drain,
    Drained,
    DropTransfer,
    EngineReady,
    FromEngine,
    Output,
    Outputs,
    RequestFailed,
    Stats,
    StopChoice,
    Submit,
    ToEngine,
)
from kvferry.agent.messages.steps import Boot, RankReady, transfer_address
from kvferry.common.child_process import die_with_parent
from kvferry.common.exceptions import leaves
from kvferry.common.telemetry.logs import configure_logging
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.layout import KVGeometry
from kvferry.transfer.net import CannotBind
from kvferry.transfer.plane import PlaneConfig

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 30.0
_STOP_GRACE_S = 3.0
_INBOX_LIMIT = 1024
_WAITING_PER_SEQUENCE = 4
_STATS_INTERVAL_S = 1.0
_STATS_PAUSE_S = 0.1
_MASKS_WAIT_PER_STEP, _MASKS_WAIT_S = 0.5, 0.01
"""How long a step waits at most for masks of the tokens before: as a part of the step before, and at all.
Most come within that. Those that do not are waited for once, and their sequences miss the step.
"""


class ApiGone(RuntimeError):
    """The API process reads no more messages."""


class ApiChannel:
    """The engine's end of the two sockets to the API process."""

    def __init__(self, run_dir: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._from_api = self._context.socket(zmq.PULL)
        self._from_api.bind(f"ipc://{run_dir}/to-engine")
        self._to_api = self._context.socket(zmq.PUSH)
        self._to_api.setsockopt(zmq.LINGER, 0)
        self._to_api.connect(f"ipc://{run_dir}/from-engine")
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    async def receive(self) -> ToEngine:
        message: ToEngine = self._decoder.decode(await self._from_api.recv())
        return message

    async def send(self, message: FromEngine) -> None:
        """Queue a message. Raises `ApiGone` when the API process has not read for long."""
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await self._to_api.send(self._encoder.encode(message))
        except TimeoutError as error:
            raise ApiGone("the API process does not read its socket") from error

    def close(self) -> None:
        self._from_api.close()
        self._to_api.close()
        self._context.term()


class Engine:
    """The scheduler's loop, between the API process, the ranks and the transfer plane.

    All state changes happen between steps, in this one task; only readers may be notified during one.
    """

    def __init__(
        self,
        channel: ApiChannel,
        executor: Executor,
        connector: SchedulerConnector,
        scheduler: Scheduler,
        allocator: BlockAllocator,
        masks: MaskProcess,
        wake: asyncio.Event,
    ) -> None:
        self._channel = channel
        self._executor = executor
        self._connector = connector
        self._scheduler = scheduler
        self._allocator = allocator
        self._masks = masks
        self._wake = wake
        self._clock = asyncio.get_running_loop().time
        self._inbox: asyncio.Queue[ToEngine] = asyncio.Queue(_INBOX_LIMIT)
        self._integrity_errors = 0
        self._audited = True
        self._is_draining = False
        self._last_stats: Stats | None = None
        self._stats_sent_at = 0.0

    async def receive(self) -> None:
        """Move the API's messages to the inbox; a full inbox stops reading until the loop has caught up."""
        while True:
            await self._inbox.put(await self._channel.receive())
            self._wake.set()

    async def loop(self) -> None:
        """Receive → schedule → run → commit → send, until cancelled."""
        while True:
            self._wake.clear()
            self._handle_arrivals()
            step = self._scheduler.schedule(self._clock())
            await self._send(self._scheduler.take_messages())
            if step is None:
                self._audit()
                await self._publish_stats()
                await self._tell_drained()
                await self._sleep()
                continue
            began = self._clock()
            outputs = await self._executor.run(step, self._scheduler.written)
            ended = self._clock()
            self._scheduler.commit(outputs, ended)
            await self._send(self._scheduler.take_messages())
            await self._publish_stats()
            await self._masks.settle(min(_MASKS_WAIT_S, (ended - began) * _MASKS_WAIT_PER_STEP))

    def _handle_arrivals(self) -> None:
        """Pass everything that has arrived to the scheduler."""
        now = self._clock()
        for event in self._connector.take_events():
            self._scheduler.handle_event(event, now)
            self._audited = False
        while not self._inbox.empty():
            self._handle(self._inbox.get_nowait(), now)
            self._audited = False
        for result in self._masks.take_results():
            self._scheduler.handle_mask(result)
        self._scheduler.expire(now)

    def _handle(self, message: ToEngine, now: float) -> None:
        match message:
            case Submit():
                self._scheduler.submit(message, now)
            case Abort():
                self._scheduler.abort(message.request_id)
            case StopChoice():
                self._scheduler.stop_choice(message.request_id, message.index)
            case DropTransfer():
                self._scheduler.drop_transfer(message.transfer_id)
            case Drain():
                self._is_draining = True

    async def _send(self, messages: Iterable[Output | RequestFailed]) -> None:
        """Send what a step produced: all outputs in one message."""
        outputs = []
        for message in messages:
            if isinstance(message, Output):
                outputs.append(message)
            else:
                await self._channel.send(message)
        if outputs:
            await self._channel.send(Outputs(items=tuple(outputs)))

    async def _sleep(self) -> None:
        """Wait for a message or an event, but not past a request's deadline."""
        deadline = self._scheduler.next_deadline()
        try:
            async with asyncio.timeout_at(deadline):
                await self._wake.wait()
        except TimeoutError:
            return

    def _audit(self) -> None:
        """Recount all blocks once the agent is idle; not while a reader would wait for these milliseconds."""
        if self._audited or not self._scheduler.is_idle or self._allocator.counts().leased:
            return
        self._audited = True
        try:
            self._scheduler.check_integrity()
            self._connector.check_integrity()
        except (IntegrityError, AssertionError):
            self._integrity_errors += 1
            log.exception("block accounting is wrong")

    async def _tell_drained(self) -> None:
        """Answer a `Drain`, once it can be answered."""
        if self._is_draining and self._scheduler.is_idle and not self._allocator.counts().leased:
            self._is_draining = False
            await self._channel.send(Drained())

    async def _publish_stats(self) -> None:
        """Send a snapshot when it has changed; while steps run, at most every `_STATS_PAUSE_S`."""
        now = self._clock()
        busy = self._scheduler.num_running > 0
        if busy and now - self._stats_sent_at < _STATS_PAUSE_S:
            return
        stats = self._stats()
        if stats != self._last_stats or now - self._stats_sent_at >= _STATS_INTERVAL_S:
            await self._channel.send(stats)
            self._last_stats, self._stats_sent_at = stats, now

    def _stats(self) -> Stats:
        counters, blocks, plane = self._scheduler.counters, self._allocator.counts(), self._connector.stats()
        return Stats(
            steps=counters.steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            blocks_free=blocks.free,
            blocks_used=blocks.used,
            blocks_leased=blocks.leased,
            blocks_quarantined=blocks.quarantined,
            blocks_total=self._allocator.num_blocks,
            preemptions=counters.preemptions,
            recomputes=counters.recomputes,
            prompt_tokens=dict(counters.prompt_tokens),
            integrity_errors=self._integrity_errors,
            plane=plane,
            work=self._scheduler.work.work(plane.leases_ended.get("expired", 0)),
            capacity=self._scheduler.capacity(),
        )


def make_limits(config: AgentConfig, ready: RankReady) -> Limits:
    """The scheduler's settings. The context is cut to what the pool holds: one sequence always fits."""
    return Limits(
        block_size=config.block_size,
        prefill_chunk=config.prefill_chunk,
        max_batch_tokens=config.max_batch_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(ready.max_model_len, ready.num_blocks * config.block_size),
        vocab_size=ready.vocab_size,
        max_waiting=_WAITING_PER_SEQUENCE * config.max_num_seqs,
        prefix_cache=config.prefix_cache,
        recompute_on_pull_failure=config.on_pull_failure == "recompute",
        pull_timeout_s=config.pull_timeout_s,
        eos_ids=frozenset(ready.eos_ids),
    )


def make_plane_config(boot: Boot, ready: RankReady, run_dir: Path) -> PlaneConfig:
    config = boot.config
    return PlaneConfig(
        incarnation=boot.incarnation,
        bind_host=config.host,
        control_port=config.control_port,
        advertise_host=config.advertised_host,
        transfer=config.transfer,
        lease_s=config.lease_s,
        geometry=msgspec.convert(ready.geometry, KVGeometry),
        num_blocks=ready.num_blocks,
        weights=ready.weights,
        host_id=host_id(),
        rank_addresses=tuple(transfer_address(run_dir, rank) for rank in range(config.tp)),
        verify_kv=float(config.verify_kv),
        lends_prefixes=config.prefix_cache,
        curve_secret=boot.curve_secret,
    )


def make_masks_boot(boot: Boot, ready: RankReady) -> MasksBoot:
    return MasksBoot(config=boot.config, vocab_size=ready.vocab_size, eos_ids=ready.eos_ids)


class _Stopped(Exception):
    """SIGTERM arrived."""


async def run_engine(boot: Boot, run_dir: Path, rank_module: str) -> None:
    """Start the ranks and the transfer plane, serve until SIGTERM, and take everything down again.

    Raises:
        BrokenRank, ApiGone: another process of the agent failed, so this one must end too (in a group).
        CannotBind: the port of the control channel is taken (in a group).
    """
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_raise_stopped(stop))
            tasks.create_task(_run_until_cancelled(boot, run_dir, rank_module, stop))
    except* _Stopped:
        log.info("stopped")


async def _raise_stopped(stop: asyncio.Event) -> None:
    await stop.wait()
    raise _Stopped


async def _run_until_cancelled(boot: Boot, run_dir: Path, rank_module: str, stop: asyncio.Event) -> None:
    """Start everything, run the loop until cancelled, and close everything."""
    executor, channel = Executor(boot, run_dir, rank_module), ApiChannel(run_dir)
    try:
        ready = await executor.start(START_TIMEOUT_S)
        plane, wake = make_plane_config(boot, ready, run_dir), asyncio.Event()
        connector = SchedulerConnector(plane, wake.set)
        try:
            await connector.start(START_TIMEOUT_S)
            limits, allocator = make_limits(boot.config, ready), BlockAllocator(ready.num_blocks)
            masks = MaskProcess(make_masks_boot(boot, ready), run_dir, wake.set)
            scheduler = Scheduler(limits, allocator, connector, masks)
            engine = Engine(channel, executor, connector, scheduler, allocator, masks, wake)
            await channel.send(make_announcement(plane, ready.device, connector, limits))
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(engine.receive())
                    tasks.create_task(engine.loop())
                    tasks.create_task(executor.watch())
                    tasks.create_task(masks.run())
            finally:
                await masks.close()
        finally:
            await connector.close()
    finally:
        # After a failure nothing is worth waiting for: the agent's other processes end within a second.
        await executor.close(grace_s=_STOP_GRACE_S if stop.is_set() else 0.0)
        channel.close()


def make_announcement(
    plane: PlaneConfig, device: str, connector: SchedulerConnector, limits: Limits
) -> EngineReady:
    return EngineReady(
        incarnation=plane.incarnation,
        control_port=connector.control_port,
        transfers=connector.transfers,
        geometry={name: str(value) for name, value in msgspec.structs.asdict(plane.geometry).items()},
        layout=plane.geometry.fingerprint(),
        weights=plane.weights,
        host_id=plane.host_id,
        device=device,
        max_model_len=limits.max_model_len,
        kv_blocks_total=plane.num_blocks,
    )


def main(*, rank_module: str = RANK_MODULE) -> int:
    """Run the engine process; `rank_module` is run as each of its ranks."""
    parent = os.getppid()
    parser = argparse.ArgumentParser(description="The engine process of an agent.")
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = parser.parse_args().run_dir
    die_with_parent(parent)
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=Boot)
    configure_logging("engine", boot.config.log_level, boot.config.log_format)
    status = 0
    try:
        asyncio.run(run_engine(boot, run_dir, rank_module))
    except* (BrokenRank, ApiGone, CannotBind) as errors:
        log.error("%s", " and ".join(map(str, leaves(errors))))
        status = max(error.status if isinstance(error, BrokenRank) else 1 for error in leaves(errors))
    return status


if __name__ == "__main__":
    sys.exit(main())
