# SPDX-License-Identifier: Apache-2.0
"""`kvferry up`: run a proxy and its agents until Ctrl-C, and restart those that exit.

The proxy runs on this machine; the agents do too, or with `--on ray` where Ray places them.

`kvferry serve MODEL` is the same with one agent that serves both legs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from kvferry.agent.cli import checked as check_agent_config
from kvferry.agent.config import AgentConfig, Engine
from kvferry.agent.plugin.launch import START_S, CannotStart, EngineServerOptions
from kvferry.agent.sglang.launch import SglangEngineConfig
from kvferry.agent.vllm.launch import VllmEngineConfig, choose_engine
from kvferry.common.exceptions import message_of
from kvferry.common.http.tls import BadCertificate, pinned_context
from kvferry.common.options import Source, collect, exit_with, make, read_settings
from kvferry.common.roles import Role
from kvferry.common.shared_options import TraceOptions
from kvferry.common.stop import INTERRUPT_DRAIN_S
from kvferry.common.telemetry.logs import LogFormat
from kvferry.deploy.doctor.machine import count_gpus
from kvferry.deploy.http_client import StatusFailed, client_session, fetch_nodes
from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec, LaunchError, listen_error
from kvferry.deploy.ray.down import DEFAULT_NAMESPACE
from kvferry.deploy.ray.fleet import RayUnusable, bundle_of, connected
from kvferry.deploy.ray.serving import serve_on_ray
from kvferry.deploy.status import WATCH_INTERVAL_S, summary
from kvferry.proxy.api.auth import BadKeyFile, admin_key
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.config import checked as check_proxy_config
from kvferry.transfer.options import TransferChoice

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
ENGINES: Mapping[str, type[EngineServerOptions]] = MappingProxyType(
    {"vllm": VllmEngineConfig, "sglang": SglangEngineConfig}
)
"""Other engines than ours: each is a part too, by which its own options are given."""
PARTS = ("agent", *ROLES, "proxy", *ENGINES)
_AGENTS_CHOSEN = frozenset(
    {
        *("config", "model", "engine", "engine-python", "role", "name"),
        *("host", "port", "control-port", "proxy", "advertise-host"),
    }
)
CHOSEN: dict[str, frozenset[str]] = {
    **dict.fromkeys(("agent", "prefill", "decode", "both"), _AGENTS_CHOSEN),
    "proxy": frozenset({"config", "host", "port", "discovery-port"}),
    "vllm": frozenset({"model", "host", "port", "tensor-parallel-size", "kv-transfer-config"}),
    "sglang": frozenset(
        {
            *("model-path", "model", "host", "port", "tp-size", "tensor-parallel-size", "device"),
            *(f"disaggregation-{name}" for name in ("mode", "transfer-backend", "bootstrap-port")),
        }
    ),
}
"""Options of each part that `kvferry up` sets itself."""
_OF_PARTS = (
    "To set an option of a process, prefix it with the name of a part: --agent.lease-s 5 is for all "
    "agents, --decode.kv-blocks 500 for those of a role, "
    "--proxy.decode-policy session for the proxy. With --engine vllm, --vllm.max-model-len 8192 is for "
    "vLLM itself, in all servers; --sglang.page-size 16 is for SGLang. In the YAML file of --config, parts "
    "are sections: `agent: {lease-s: 5}`; a role's `count` is its number of agents."
)
UP = (
    "Start a proxy and its agents, and restart those that exit: on this machine, or with --on ray the "
    f"agents on the nodes of a Ray cluster to which this machine belongs. {_OF_PARTS}"
)
SERVE = (
    "Serve a model on this machine: start a proxy and one agent, which both prefills and decodes, and "
    f"restart those that exit. It is kvferry up with other numbers of agents. {_OF_PARTS}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig(TraceOptions):
    """The options of `kvferry up`. Those of the processes follow a part's name: see `PartOptions`.

    Model:
        model: Checkpoint directory, or the name of a bundled model; for vLLM and SGLang, a name on Hugging
            Face too.

    Engine:
        engine: Engine of the agents: kvferry's own; vllm, vLLM servers with kvferry's connector; sglang,
            SGLang servers with kvferry's plug-in; or auto, which uses vllm if it is installed and finds a
            GPU, and prints the reason.
        engine_python: Python of the environment in which vLLM or SGLang and kvferry are installed. Default:
            the Python that runs this command.
        device: Where the model runs: cpu, or cuda, with separate GPUs for each agent if there are enough.
            Default: cpu; for vLLM and SGLang, cuda if they find a GPU.
        tp: Tensor-parallel ranks of every agent.

    Processes:
        prefill: Number of prefill agents.
        decode: Number of decode agents.
        both: Number of agents that both prefill and decode.
        on: Where agents run: on this machine, or on the nodes of a Ray cluster, where Ray restarts them
            elsewhere if their node dies. kvferry down stops them.
        ray_address: HOST:PORT of the Ray cluster's head. Default: the cluster of this host.
        ray_namespace: Ray namespace of these agents; each fleet in a Ray cluster needs another one.
        ray_resources: Resources that an agent uses on its node, NAME=AMOUNT, besides a CPU and, with device
            cuda, a GPU per rank; CPU=AMOUNT sets another number of CPUs.

    Network:
        host: Address that the proxy binds, and the agents too unless it means all addresses.
        port: HTTP port of the proxy.
        discovery_port: Port at which agents register with the proxy.

    KV transfer:
        transfer: KV transfer backend; auto uses the best that works between two agents.

    Logs:
        log_dir: Folder for one log file per process.
        log_format: Format of these logs: text, or json for one JSON object per line.
        otlp_endpoint: Base URL of an OpenTelemetry collector to which all processes send traces, except
            vLLM's and SGLang's, which have their own options.
    """

    model: str = "ferry-tiny"
    engine: Engine = "kvferry"
    engine_python: str = sys.executable
    prefill: int = 1
    decode: int = 1
    both: int = 0
    tp: int = 1
    transfer: TransferChoice = "auto"
    device: Literal["cpu", "cuda"] | None = None
    host: str = "127.0.0.1"
    port: int = 10001
    discovery_port: int = 36367
    log_dir: Path = Path("logs")
    log_format: LogFormat = "text"
    on: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    ray_namespace: str = DEFAULT_NAMESPACE
    ray_resources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("tp", 1), ("prefill", 0), ("decode", 0), ("both", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.both and not (self.prefill and self.decode):
            name = "decode" if self.prefill else "prefill"
            raise ValueError(f"{name} must be at least 1 where --both is 0, got 0")
        if self.on == "ray":
            if self.engine == "auto":
                raise ValueError("engine must be named with --on ray: its nodes may differ; got auto")
            if self.engine == "sglang":
                raise ValueError("engine must not be sglang with --on ray: it was never tried")
            bundle_of(self.tp, self.device, self.ray_resources)
            if not re.fullmatch(r"[\w.-]+", self.ray_namespace):
                raise ValueError(
                    f"ray_namespace must be of letters, digits, . _ and -: {self.ray_namespace!r}"
                )
        elif self.ray_address or self.ray_resources or self.ray_namespace != DEFAULT_NAMESPACE:
            raise ValueError("ray_address, ray_namespace and ray_resources are for --on ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(UpConfig):
    """The options of `kvferry serve`: those of `kvferry up`, with one agent for both legs."""

    prefill: int = 0
    decode: int = 0
    both: int = 1


class PartOptions:
    """Options for the processes that `kvferry up` starts: `--agent.lease-s 5` is every agent's `--lease-s 5`.

    The parts are agent (all agents), prefill, decode, both, proxy, and vllm and sglang (the engine's own
    options, of all servers). A file that `--config` names stands for its settings: what follows it on the
    command line wins.

    Raises:
        SystemExit: as `parse_flags` does, for an option that the part does not have, or a bad file.
    """

    def __init__(self, prog: str, argv: Sequence[str]) -> None:
        self._prog = prog
        self._sources: dict[str, list[Source]] = {part: [] for part in ("", *PARTS)}
        """What is given for each part, in order; by "" for `kvferry up` itself."""
        words, part = list(argv), ""
        while words:
            word = words.pop(0)
            flag, equals, value = word.partition("=")
            if flag == "--config":
                if not equals and not words:
                    exit_with(prog, "--config: its value is missing, a file")
                self._take_file(read_settings(value if equals else words.pop(0), prog))
                continue
            if word.startswith("--"):
                name, dot, option = word.removeprefix("--").partition(".")
                part = name if dot and name in PARTS else ""
                if part:
                    self._check_not_chosen(part, option.partition("=")[0], "--")
                    word = f"--{option}"
            self._add_word(part, word)

    @property
    def own(self) -> Sequence[Source]:
        """What is for `kvferry up` itself."""
        return self._sources[""]

    def put_before(self, data: Mapping[str, Any], *parts: str) -> None:
        """Have these parts get options too; one that is given for a part wins."""
        for part in parts:
            self._sources[part].insert(0, data)

    def proxy(self) -> tuple[dict[str, Any], ProxyConfig]:
        """Return the proxy's options, as values and as it reads them."""
        values = self._collected(ProxyConfig, "proxy")
        return values, make(ProxyConfig, values, prog=self._prog, check=check_proxy_config)

    def check_unused(self, part: str, why: str) -> None:
        """Exit with status 2 if there are options for a part that is not started."""
        for source in self._sources[part]:
            option = next(iter(source)).removeprefix("--").partition("=")[0]
            exit_with(self._prog, f"--{part}.{option}: {why}")

    def agent(
        self, role: Role, model: str, chosen: Mapping[str, Any], *, is_here: bool = True
    ) -> dict[str, Any]:
        """Return the options of the agents of one role, which compute with our engine: those `chosen`, and
        those that were given.

        `is_here`: they run on this machine, so the model and the files that are named must be here too.
        """
        values = self._collected(AgentConfig, "agent") | self._collected(AgentConfig, role)
        values = {**chosen, **values}
        check = check_agent_config if is_here else None
        make(AgentConfig, {"model": model, "role": role} | values, prog=self._prog, check=check)
        return values

    def server(self, engine: str, role: Role, model: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of another engine's servers of one role: those `chosen`, and those given."""
        settings = ENGINES[engine]
        values = {**chosen, **self._collected(settings, "agent"), **self._collected(settings, role)}
        make(settings, {"model": model, "role": role} | values, prog=self._prog)
        return values

    def engine_words(self, engine: str) -> tuple[str, ...]:
        """Return the options of another engine itself, as words of its command line."""
        words: list[str] = []
        for source in self._sources[engine]:
            if isinstance(source, Mapping):
                for name, value in source.items():
                    words += _flag_words(name, value, ENGINES[engine].has_off_flags)
            else:
                words += source
        return tuple(words)

    def _collected(self, settings: type[Any], part: str) -> dict[str, Any]:
        return collect(settings, self._sources[part], prog=self._prog, part=part)

    def _add_word(self, part: str, word: str) -> None:
        sources = self._sources[part]
        if not sources or isinstance(sources[-1], Mapping):
            sources.append([])
        words = sources[-1]
        assert isinstance(words, list)
        words.append(word)

    def _take_file(self, settings: Mapping[str, Any]) -> None:
        own: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in PARTS or not isinstance(value, Mapping):
                own[name] = value
                continue
            section = dict(value)
            if name in ROLES and "count" in section:
                own[name] = section.pop("count")
            for option in section:
                self._check_not_chosen(name, str(option).replace("_", "-"), "--config: ")
            self._sources[name].append(section)
        self._sources[""].append(own)

    def _check_not_chosen(self, part: str, option: str, where: str) -> None:
        if option in CHOSEN[part]:
            exit_with(self._prog, f"{where}{part}.{option}: {self._prog} chooses this")


def _flag_words(name: str, value: Any, has_off_flags: bool) -> list[str]:
    """Return another engine's option as words. Where what is off has no flag of its own, nothing is on by
    default.
    """
    name = name.replace("_", "-")
    if value is False:
        return [f"--no-{name}"] if has_off_flags else []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}"]


def cluster_spec(config: UpConfig, parts: PartOptions) -> ClusterSpec:
    """Return the processes to start. Cores are divided evenly among the ranks, and GPUs among the agents.

    An agent's name is a word of its command line, so that `ps` shows it.

    Raises:
        CannotStart: the engine cannot be started here.
        BadKeyFile, BadCertificate: a file of the proxy's is none.
    """
    for role in ROLES:
        if not getattr(config, role):
            parts.check_unused(role, "no agent of this role is started")
    names = [(role, f"{role}-{index}") for role in ROLES for index in range(getattr(config, role))]
    if config.otlp_endpoint is not None:
        traced = ("proxy",) if config.engine in ENGINES else ("proxy", "agent")
        parts.put_before({"otlp_endpoint": config.otlp_endpoint}, *traced)
    if config.log_format != "text":
        parts.put_before({"log_format": config.log_format}, "proxy", "agent")
    for name, engine in ENGINES.items():
        if name != config.engine:
            why = f"no {engine.engine_name} server is started, as --engine {name} does"
            parts.check_unused(name, why)
    agents = (_other_servers if config.engine in ENGINES else _own_agents)(config, parts, names)
    proxy_settings, proxy = parts.proxy()
    return ClusterSpec(
        model=config.model,
        agents=agents,
        log_dir=config.log_dir,
        host=config.host,
        port=config.port,
        discovery_port=config.discovery_port,
        proxy_settings=proxy_settings,
        trust=None if proxy.tls_cert is None else pinned_context(Path(proxy.tls_cert)),
        admin_key=None if proxy.api_keys is None else admin_key(proxy.api_keys),
    )


def _own_agents(
    config: UpConfig, parts: PartOptions, names: Sequence[tuple[Role, str]]
) -> tuple[AgentSpec, ...]:
    is_here, threads = config.on == "local", _threads(config)
    device = config.device or "cpu"
    chosen = {"tp": config.tp, "transfer": config.transfer, "device": device, "threads": threads}
    own = {role: parts.agent(role, config.model, chosen, is_here=is_here) for role, _ in names}
    num_gpus = count_gpus() if is_here and config.device == "cuda" and len(names) > 1 else 0

    def agent(number: int, role: Role, name: str) -> AgentSpec:
        first, settings = _first_gpu(number, config.tp, num_gpus), own[role]
        if first and settings["device"] == device:
            settings = settings | {"device": f"cuda:{first}"}
        return AgentSpec(name=name, role=role, settings=settings, args=("--name", name))

    return tuple(agent(number, *each) for number, each in enumerate(names))


def _other_servers(
    config: UpConfig, parts: PartOptions, names: Sequence[tuple[Role, str]]
) -> tuple[AgentSpec, ...]:
    """Raises `CannotStart`."""
    is_here, engine = config.on == "local", ENGINES[config.engine]
    num_gpus = engine.inspect(config.engine_python, count_gpus=True).gpus if is_here else 0
    device = config.device or ("cuda" if num_gpus else "cpu")
    if is_here and (device == "cuda") != (num_gpus > 0):
        found = f"{num_gpus} GPUs" if num_gpus else "no GPU"
        raise CannotStart(f"--device {device}: the PyTorch of {config.engine_python} sees {found}")
    chosen = {"tp": config.tp, "transfer": config.transfer, "engine_python": config.engine_python}
    own = {role: parts.server(config.engine, role, config.model, chosen) for role, _ in names}
    words = (*(engine.cpu_words() if device == "cpu" else ()), *parts.engine_words(config.engine))
    option, first = engine.bootstrap_port or ("", 0)
    ports = (port for port in range(first, 65536) if listen_error(config.host, port) is None)
    on_cpu = engine.cpu_environment(_threads(config))
    environment = {name: value for name, value in on_cpu.items() if name not in os.environ}

    def server(number: int, role: Role, name: str) -> AgentSpec:
        gpus = {"CUDA_VISIBLE_DEVICES": _visible_gpus(number, config.tp, num_gpus)} if num_gpus else {}
        bootstrap = (option, str(next(ports))) if option and role == "prefill" else ()
        return AgentSpec(
            name=name,
            role=role,
            settings=own[role],
            args=("--name", name, "--", *bootstrap, *words),
            module=engine.__module__,
            environment=environment if device == "cpu" else gpus,
            listening_timeout_s=START_S,
        )

    return tuple(server(number, *each) for number, each in enumerate(names))


def _threads(config: UpConfig) -> int:
    """Return how many cores a rank has."""
    if config.on == "ray":
        cores, ranks = int(bundle_of(config.tp, config.device, config.ray_resources)["CPU"]), config.tp
    else:
        cores, ranks = os.cpu_count() or 1, (config.prefill + config.decode + config.both) * config.tp
    return max(1, cores // ranks)


def _first_gpu(number: int, tp: int, num_gpus: int) -> int:
    """Return the first of the `tp` GPUs of agent `number`. Where there are too few, agents share them."""
    return number % max(1, num_gpus // tp) * tp


def _visible_gpus(number: int, tp: int, num_gpus: int) -> str:
    """Return `CUDA_VISIBLE_DEVICES` for agent `number`, out of the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(gpu) for gpu in range(num_gpus)] if named is None else named.split(",")
    first = _first_gpu(number, tp, num_gpus)
    return ",".join(gpus[first : first + tp])


async def run(
    serving: Coroutine[Any, Any, None],
    prog: str,
    log_dir: Path,
    show: Callable[[str], None],
    end_at_once: Callable[[], None] | None = None,
) -> int:
    """Serve until a signal or the end of `serving` (returns 0); returns 1 if it does not start.

    `show` is called with what happens, and `end_at_once` for a second signal.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        again = "" if end_at_once is None else "; Ctrl-C again stops at once"
        if not stop.is_set():
            show(f"stopping: what runs has {INTERRUPT_DRAIN_S:g} s to finish{again}")
        elif end_at_once is not None:
            show("stopping at once")
            end_at_once()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    stopped = asyncio.ensure_future(stop.wait())
    served = asyncio.ensure_future(serving)
    try:
        await asyncio.wait({stopped, served}, return_when=asyncio.FIRST_COMPLETED)
        if served.done():
            await served
        return 0
    except LaunchError as error:
        print(f"{prog}: {error}; the logs are in {log_dir}", file=sys.stderr)
        return 1
    except OSError as error:  # no log can be written, or no process be made
        print(f"{prog}: {message_of(error)}", file=sys.stderr)
        return 1
    finally:
        stopped.cancel()
        served.cancel()
        with contextlib.suppress(asyncio.CancelledError, LaunchError, OSError):
            await served


async def _serve(cluster: Cluster, console: Console, show: Callable[[str], None]) -> None:
    spec = cluster.spec
    async with cluster:
        model = await cluster.wait_ready()
        show(f"serving {model} at {cluster.url}/v1; logs in {spec.log_dir}; Ctrl-C ends it")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_status_line(console, cluster))
            await cluster.keep_running()


async def keep_status_line(console: Console, cluster: Cluster) -> None:
    """Keep a line about the fleet below what is printed, until cancelled; on a terminal only."""
    if not console.is_terminal:
        return
    with console.status("") as line:
        async with client_session(cluster.spec.trust, cluster.spec.admin_key) as http:
            while True:
                try:
                    words = summary(await fetch_nodes(http, cluster.url))
                except StatusFailed as error:
                    words = str(error)
                line.update(Text(words, overflow="ellipsis", no_wrap=True))
                await asyncio.sleep(WATCH_INTERVAL_S)


def serve(argv: list[str]) -> int:
    """Entry point of `kvferry serve [MODEL]`: `kvferry up` with one agent for both legs."""
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    return _main("kvferry serve", argv, ServeConfig, SERVE, "[MODEL]")


def main(argv: list[str]) -> int:
    """Entry point of `kvferry up`; returns the exit status."""
    return _main("kvferry up", argv, UpConfig, UP)


def _main(prog: str, argv: list[str], settings: type[UpConfig], description: str, arguments: str = "") -> int:
    parts = PartOptions(prog, argv)
    values = collect(settings, parts.own, prog=prog, description=description, arguments=arguments)
    config = make(settings, values, prog=prog)
    console = Console(soft_wrap=True)

    def show(words: str) -> None:
        console.print(words, highlight=False, markup=False)

    if config.engine == "auto":
        engine, why = choose_engine(config.engine_python)
        show(f"--engine auto takes {engine}: {why}")
        config = replace(config, engine=engine)
    try:
        spec = cluster_spec(config, parts)
    except (BadKeyFile, BadCertificate) as error:
        exit_with(prog, f"--proxy: {error}")
    except CannotStart as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    if config.on == "local":
        cluster = Cluster(spec, show)
        return asyncio.run(run(_serve(cluster, console, show), prog, spec.log_dir, show, cluster.kill))
    bundle = bundle_of(config.tp, config.device, config.ray_resources)
    try:
        with connected(config.ray_address, config.ray_namespace):
            line = partial(keep_status_line, console)
            serving = serve_on_ray(spec, config.ray_namespace, bundle, show, line)
            return asyncio.run(run(serving, prog, spec.log_dir, show))
    except RayUnusable as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
