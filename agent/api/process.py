# SPDX-License-Identifier: Apache-2.0
"""The API process: starts an agent, supervises its parts, and stops it in order.

HTTP listens first, so that health checks see a live agent that is not ready yet. The engine process and this
one end together (I8): the death of either ends the other at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import time
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvferry.agent.announce.membership import Membership
from kvferry.agent.api.engine_client import BadEngineMessage, EngineClient
from kvferry.agent.api.frontend import Frontend
from kvferry.agent.api.grammar.checker import GrammarChecker
from kvferry.agent.api.message.response_form import ResponseForm, read_response_form
from kvferry.agent.api.metrics import AgentMetrics
from kvferry.agent.api.openai_schema import SamplingDefaults, read_sampling_defaults
from kvferry.agent.api.server import create_app, create_server, listen_http
from kvferry.agent.api.text.tokenizer import Tokenizer
from kvferry.agent.architectures import REFUSED_STATUS
from kvferry.agent.config import START_TIMEOUT_S, AgentConfig
from kvferry.agent.errors import ApiError, unavailable
from kvferry.agent.ids import host_id, mint_incarnation
from kvferry.agent.messages.requests import EngineReady
from kvferry.agent.process.run_dir import private_run_dir
from kvferry.common.addresses import host_port
from kvferry.common.child_process import ChildProcess
from kvferry.common.curve import ClusterKey
from kvferry.common.hashing import Purpose, digest
from kvferry.common.http.browser_guard import AllowedHosts
from kvferry.common.http.server import HttpServer
from kvferry.common.http.tls import server_context
from kvferry.common.stop import StopRequest
from kvferry.common.telemetry.tracing import FLUSH_TIMEOUT_S, open_tracing
from kvferry.common.telemetry.version import VERSION
from kvferry.proxy.wire.dialects import NATIVE_DIALECT
from kvferry.proxy.wire.registration import (
    MAX_TEXT_CHARS,
    Incarnation,
    Load,
    NodeState,
    Register,
)
from kvferry.transfer.control.endpoints import CONTROL_CHANNEL
from kvferry.transfer.control.messages import VERSIONS as CONTROL_VERSIONS
from kvferry.transfer.net import check_can_bind

log = logging.getLogger(__name__)

_HTTP_STOP_TIMEOUT_S = 1.0
# A dead engine must end the agent within a second, with all its processes (I8).
_ERROR_RESPONSES_TIMEOUT_S = 0.3
_HANG_UP_TIMEOUT_S = 0.1
_LAST_SPANS_TIMEOUT_S = 0.2
_ENGINE_STOP_GRACE_S = 5.0


class EngineDied(RuntimeError):
    """The engine process exited, was not ready in time, or sent an invalid message.

    `status` is what the agent exits with.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


async def run_agent(config: AgentConfig, *, engine_module: str) -> int:
    """Run one agent until it is asked to end and has drained (returns 0), or a part of it dies (returns 1).

    Returns `REFUSED_STATUS` when a rank refused the model.

    `config` names a checkpoint directory (`cli.with_model_directory`). Prints one JSON line on stdout once
    HTTP listens: `{"listening": {"url", "incarnation"}}`.

    Raises:
        OSError: HTTP or the control channel cannot be bound, or the cluster key cannot be read.
        BadClusterKey, BadCertificate: the file is none.
    """
    # The engine binds it, after the model is loaded.
    check_can_bind(CONTROL_CHANNEL, config.host, config.control_port)
    tokenizer = Tokenizer(Path(config.model))
    form = _response_form(Path(config.model), tokenizer)
    defaults = read_sampling_defaults(Path(config.model), config.generation_config)
    key = ClusterKey.read(Path(config.cluster_key)) if config.cluster_key is not None else None
    tls = server_context(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
    with listen_http(config.host, config.port) as listener, private_run_dir() as run_dir:
        agent = _Agent(config, tokenizer, form, defaults, key, tls, run_dir, listener.getsockname()[1])
        try:
            return await agent.run(listener, engine_module)
        finally:
            agent.close()


class _Agent:
    """The parts of one agent: `run()` until it ends, then `close()`."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: Tokenizer,
        form: ResponseForm | None,
        defaults: SamplingDefaults,
        key: ClusterKey | None,
        tls: ssl.SSLContext | None,
        run_dir: Path,
        port: int,
    ) -> None:
        self._key = key
        self._tls = tls
        self._config = config
        self._tokenizer = tokenizer
        self._form = form
        self._defaults = defaults
        self._run_dir = run_dir
        self._url = _url("http" if tls is None else "https", config.advertised_host, port)
        self._incarnation = mint_incarnation()
        self._version = VERSION
        self._started_at = time.monotonic()
        self._stop = StopRequest(config.drain_s)
        about = {
            "service.name": "kvferry-agent",
            "kvferry.role": config.role,
            "kvferry.incarnation": self._incarnation,
            "kvferry.agent": self._url,
            "kvferry.agent.name": config.name,
        }
        self._tracing = open_tracing(config.otlp_endpoint, about)
        self._context = zmq.asyncio.Context()
        self._engine = EngineClient(self._context, run_dir)
        self._grammars = GrammarChecker(Path(config.model))
        self._metrics = AgentMetrics(
            lambda: self._engine.stats,
            lambda: self._engine.ready.transfers if self._engine.ready else (),
            config.model_name,
        )
        self._membership = Membership(
            config.proxy, self._registration, key=key, asked_to_drain=self._stop.make
        )

    async def run(self, listener: socket.socket, engine_module: str) -> int:
        server = self._create_server()
        code = 1
        try:
            async with asyncio.TaskGroup() as tasks:
                self._stop.on_signals()
                serving = tasks.create_task(server.serve(sockets=[listener]))
                pinging = tasks.create_task(self._membership.run())
                running = tasks.create_task(self._run_engine(engine_module))
                self._print_listening()
                code = await running
                if code == 0:
                    await _stop_server(server, serving)
                else:
                    await _abort_server(server, serving)
                pinging.cancel()
            return code
        finally:
            await self._grammars.close()
            if self._tracing is not None:
                limit_s = FLUSH_TIMEOUT_S if code == 0 else _LAST_SPANS_TIMEOUT_S
                await self._tracing.close(limit_s, self._stop.at_once)

    def close(self) -> None:
        """Close the engine's sockets."""
        self._engine.close()
        self._context.term()

    def _print_listening(self) -> None:
        print(json.dumps({"listening": {"url": self._url, "incarnation": self._incarnation}}), flush=True)

    async def _run_engine(self, engine_module: str) -> int:
        """Run the engine until it or the agent ends; returns the agent's exit status."""
        status = 1
        stdin = {
            "config": self._config,
            "incarnation": self._incarnation,
            "curve_secret": None if self._key is None else self._key.secret.decode(),
        }
        argv = ("-m", engine_module, "--run-dir", str(self._run_dir))
        child = await ChildProcess.start(argv, "engine", stdin=msgspec.json.encode(stdin))
        log.info("engine process %d started; waiting for it to load %s", child.pid, self._config.model)
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = [tasks.create_task(self._engine.run()), tasks.create_task(_watch(child))]
                starting = tasks.create_task(self._become_ready())
                await self._stop.made.wait()
                await self._drain()
                for task in (starting, *watches):
                    task.cancel()
            return 0
        except* (EngineDied, BadEngineMessage) as died:
            cause = died.exceptions[0]
            status = cause.status if isinstance(cause, EngineDied) else 1
            log.error("stopping: %s", cause)
            self._refuse_all(ApiError(500, "engine_died", "the engine of this agent died"))
            self._membership.start_draining()
        finally:
            await child.stop(_ENGINE_STOP_GRACE_S if self._stop.made.is_set() else 0.0)
        return status

    async def _become_ready(self) -> None:
        try:
            ready = await self._engine.wait_ready(START_TIMEOUT_S)
        except TimeoutError:
            raise EngineDied(f"the engine was not ready within {START_TIMEOUT_S:.0f} s") from None
        facts = {
            "url": self._url,
            "control": _url("tcp", self._config.advertised_host, ready.control_port),
            "incarnation": self._incarnation,
            "max_model_len": ready.max_model_len,
            "kv_blocks": ready.kv_blocks_total,
            "transfers": ready.transfers,
        }
        log.info("ready %s", json.dumps(facts))
        self._membership.become_ready()

    async def _drain(self) -> None:
        """Finish everything that counts on this agent, within the limit; then fail the rest."""
        self._membership.start_draining()
        if not await self._stop.drain(self._wait_drained()):
            stats = self._engine.stats
            log.warning(
                "not drained: %d requests are aborted, %d KV blocks are still leased",
                self._engine.in_flight,
                stats.blocks_leased if stats else 0,
            )
        self._refuse_all(_leaving())

    async def _wait_drained(self) -> None:
        """Wait until no proxy has a request for this agent, none runs, and no KV is leased."""
        await self._membership.wait_released()
        self._engine.refuse(_leaving())
        await self._engine.wait_idle()
        if self._engine.ready is not None:
            await self._engine.wait_drained()

    def _refuse_all(self, error: ApiError) -> None:
        self._engine.refuse(error)
        self._engine.fail_all(error)

    def _create_server(self) -> HttpServer:
        config, hosts = self._config, None
        if self._key is None:
            hosts = AllowedHosts(config.allowed_hosts, [config.host, config.advertised_host])
        return create_server(
            create_app(
                config=self._config,
                incarnation=self._incarnation,
                frontend=Frontend(
                    self._config,
                    self._tokenizer,
                    self._engine,
                    self._membership,
                    self._defaults,
                    self._grammars,
                    self._form,
                ),
                engine=self._engine,
                membership=self._membership,
                metrics=self._metrics,
                drain=self._stop.make,
                bearer=None if self._key is None else self._key.bearer,
                tracing=self._tracing,
            ),
            self._tls,
            hosts,
        )

    def _registration(self, index: int, state: NodeState) -> Register:
        config, stats = self._config, self._engine.stats
        ready = self._engine.ready or _not_ready(self._incarnation)
        return Register(
            role=config.role,
            incarnation=self._incarnation,
            index=index,
            address=self._url,
            control=_url("tcp", config.advertised_host, ready.control_port),
            dialect=NATIVE_DIALECT,
            model=config.model_name,
            max_model_len=ready.max_model_len,
            tp_size=config.tp,
            dp_size=1,
            transfers=ready.transfers,
            host_id=ready.host_id,
            geometry=ready.geometry,
            layout=ready.layout,
            weights=ready.weights,
            tokenizer=_text_fingerprint(self._tokenizer, self._defaults),
            transfer_mode="read",
            version=self._version,
            state=state,
            refusals={
                agent: why[:MAX_TEXT_CHARS] for agent, why in (stats.plane.refusals if stats else {}).items()
            },
            steps=stats.steps if stats else 0,
            load=Load(
                running=stats.running if stats else 0,
                waiting=stats.waiting if stats else 0,
                kv_blocks_free=stats.blocks_free if stats else ready.kv_blocks_total,
                kv_blocks_total=ready.kv_blocks_total,
                kv_blocks_leased=stats.blocks_leased if stats else 0,
                max_running=config.max_num_seqs,
            ),
            prefill_chunk=config.prefill_chunk,
            control_versions=CONTROL_VERSIONS,
            work=stats.work if stats else None,
            capacity=stats.capacity if stats else None,
            name=config.name,
            device=ready.device,
            uptime_s=time.monotonic() - self._started_at,
        )


async def _watch(child: ChildProcess) -> None:
    status = await child.wait()
    message = f"the engine process exited with status {status}"
    raise EngineDied(message, REFUSED_STATUS if status == REFUSED_STATUS else 1)


async def _stop_server(server: HttpServer, serving: asyncio.Task[None]) -> None:
    """Stop accepting, let responses and connections end within the timeout, then close the rest."""
    server.should_exit = True
    _, late = await asyncio.wait({serving}, timeout=_HTTP_STOP_TIMEOUT_S)
    if late:
        await _hang_up(server)
        serving.cancel()


async def _abort_server(server: HttpServer, serving: asyncio.Task[None]) -> None:
    """Send the error responses and close the rest: uvicorn's own shutdown takes longer than I8 allows."""
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=_ERROR_RESPONSES_TIMEOUT_S)
    await _hang_up(server)
    serving.cancel()


async def _hang_up(server: HttpServer) -> None:
    """Close every connection, and give the handlers behind them time to notice."""
    server.close_connections()
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=_HANG_UP_TIMEOUT_S)


def _leaving() -> ApiError:
    return unavailable("draining", "this agent is shutting down")


def _response_form(directory: Path, tokenizer: Tokenizer) -> ResponseForm | None:
    template = tokenizer.chat_template
    return None if template is None else read_response_form(directory, template.source)


def _text_fingerprint(tokenizer: Tokenizer, defaults: SamplingDefaults) -> str:
    """Fingerprint how a request is read: agents that differ in it are not paired."""
    if defaults == SamplingDefaults():
        return tokenizer.fingerprint
    return digest(Purpose.READING, tokenizer.fingerprint, msgspec.json.encode(defaults), size=8).hex()


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host_port(host, port)}"


def _not_ready(incarnation: Incarnation) -> EngineReady:
    """Stand in for the first message of an engine in registrations."""
    return EngineReady(
        incarnation=incarnation,
        control_port=0,
        transfers=(),
        geometry={},
        layout="",
        weights="",
        host_id=host_id(),
        device="",
        max_model_len=0,
        kv_blocks_total=0,
    )
