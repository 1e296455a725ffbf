# SPDX-License-Identifier: Apache-2.0
"""The proxy's settings: parsed and validated once, here, into a frozen dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from kvferry.common.engine_servers.description import (
    EngineDialect,
    StaticNode,
    check_distinct,
    server_from_words,
)
from kvferry.common.http.browser_guard import AllowedHosts
from kvferry.common.options import check_files, parse_flags
from kvferry.common.shared_options import (
    HttpOptions,
    LogOptions,
    TraceOptions,
    check_at_least_1,
    check_not_negative,
    check_ports,
    check_positive,
)
from kvferry.proxy.dialects.fields import allowed_fields
from kvferry.proxy.fleet.address_rules import AddressRules
from kvferry.proxy.fleet.routing.policy import PolicyName
from kvferry.proxy.http.cors import CorsPolicy
from kvferry.proxy.objectives import ModelObjectives, Objective
from kvferry.proxy.wire.dialects import MAX_KEEP_S
from kvferry.proxy.wire.registration import DEFAULT_DISCOVERY_PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig(HttpOptions, TraceOptions, LogOptions):
    """Settings of one proxy.

    Processes:
        workers: Processes that serve clients on the port, each with its own queues and limits; with 1, one
            process does everything.
        cluster_name: Name of this cluster, in the title of `/ui`. Default: this machine's name.

    Network:
        host: Address that the HTTP server and discovery bind.
        port: HTTP port; 0 lets the OS choose.
        discovery_port: Port that agents register at; 0 lets the OS choose.
        prefill: Prefill server of another engine, as URL[,OPTION=VALUE...]; may be repeated.
        decode: Decode server of another engine, in the same form.
        dialect: Dialect of the servers for which none is given.
        nodes: YAML file that lists servers of other engines.
        cors_origins: Origins whose web pages may call the API, such as https://chat.example.com, or * for
            all. Default: only the proxy's own.
        allow_fields: Fields of requests that clients may send to servers of other engines besides those that
            docs/dialects/README.md lists, such as priority. An engine may read ranks, ids and code from
            fields.
        max_connections: Maximum number of open connections to all agents.

    Routing:
        retries: How often a request is retried on another pair when an agent is lost before its first event;
            2 covers the loss of a prefill and then of a decode agent.
        migrations: How often a stream that breaks later is continued on another pair.
        prefill_policy: Policy for choosing among prefill agents; least_work chooses the agent where a request
            and those that it delays take the least time, as measured by the agents, and equals in turn.
        decode_policy: Policy for choosing among decode agents.
        split_min_tokens: Requests with fewer uncached prompt tokens than this (an estimate) are served by one
            decode agent alone; 0 splits every request. With auto and the policies least_work, an agent of
            role both serves a request alone if that takes less time.
        ttft_objective_s: Objective for the time to the first token, in seconds, of requests without the
            header x-slo-ttft-ms. least_work chooses agents that are predicted to keep it, if there are any.
            Slower streams are counted, and the alerts of deploy/monitoring use this count. Requests with
            x-slo-reject: true that would miss it are rejected with 429.
        tpot_objective_s: The same for the mean time per token; the header is x-slo-tpot-ms.
        model_objectives: Both for one model, MODEL=TTFT/TPOT in seconds.
        stream_pull_min_tokens: The KV of prompts with at least this many uncached tokens (an estimate) is
            pulled while the prefill runs; 0 disables this. Default: prompts of more than one prefill chunk.
        prefix_pull_min_tokens: A prefill agent that lacks at least this many tokens of a prompt's beginning
            pulls their KV from an agent that has decoded them (the earlier turns of a conversation), rather
            than compute them again; 0 disables this. Default: as many as take longer to compute than to pull,
            by what agents have measured, and 128 at least.
        keep_turns_s: Seconds for which a vLLM decode server (with kvferry's connector) keeps the KV of a
            prompt and its answer, in at most a quarter of its memory, so that the prefill server of the
            conversation's next turn can pull it; 3600 at most. Default: nothing is kept.
        decode_only_fallback: While no prefill agent of a model is ready, let its decode agents serve requests
            alone and compute the prompts too, if their engine can; without it such requests fail with 503.
        breaker_failures: Consecutive failures that open an agent's circuit breaker.
        breaker_pause_s: Seconds before the first probe request to it; doubled after each probe that fails.

    Canary:
        canary_interval_s: Seconds between two probes, which compare the answer of a pair with that of its
            decode agent alone. Pairs that differ get no more requests. Default: no probes but those of
            `kvferry canary`.
        canary_max_share: Maximum number of tokens of probes, as a share of the tokens of clients' requests;
            the first 100,000 tokens do not count.

    KV transfer:
        nixl_lease_s: Seconds that vLLM prefill servers with NixlConnector keep KV for its reader: their
            `kv_lease_duration`. It proves nothing: decode requests that take longer are cancelled.
        moriio_lease_s: The same with MoRIIOConnector in READ mode: their `defer_timeout`. They do not count
            expired leases, so their responses depend on this number; without it READ mode is not served.

    Timeouts:
        body_timeout_s: Deadline for a client to send a request's head, and then one for its body, in seconds.
        connect_timeout_s: Deadline for connecting to an agent, in seconds.
        first_byte_timeout_s: Deadline for a prefill's response or a stream's first event, in seconds.
        idle_timeout_s: Longest time without data within a stream, in seconds.
        total_timeout_s: Deadline for a whole request, in seconds.
        queue_timeout_s: Longest time that a request waits in the queue, in seconds; then 429.
        keepalive_s: Seconds that an idle connection to an agent stays open.
        client_stall_s: Seconds after which a client that reads nothing, with 64 KiB buffered, is dropped.
        drain_s: Seconds after SIGTERM in which running requests may finish; after Ctrl-C 3 at most. A second
            signal stops the proxy at once.

    Limits:
        prefill_limit: Maximum number of requests in flight at one prefill agent. Default: what the agent
            reports.
        decode_limit: Maximum number of sequences in flight at one decode agent. Default: what the agent
            reports.
        queue_limit: Maximum number of requests queued for a busy fleet; more are rejected with 429. Waiting
            requests with a lower x-priority go first, then API keys share by tokens, and earlier deadlines go
            first.

    Security:
        api_keys: File of the API keys that clients must send, each with its limits (admin, requests=10/s,
            tokens=600000/min, priority=10, cache-ttl=600). Default: no authentication.
        share_prefixes: Let requests of different API keys share cached prefixes of prompts. A client can then
            find out, by the number of cached tokens and by time, which prompts others have sent.
        allowed_hosts: Without api_keys, further names by which clients may call the proxy, such as
            proxy.example.com, .example.com for all below it, or * for any. Addresses, this machine's name,
            `host` and names that no web site has (without a dot; .localhost, .local, .internal) are always
            allowed.
        allow_address: Networks (CIDR), addresses and host names that agents may have, separated by commas;
            registrations from others are rejected. Default: any.
        cluster_key: File made by `kvferry keygen`; with it, only agents with the same key may register.
        agent_ca: PEM file with the authority that signed the agents' certificates. With it, only https agents
            may register; without it, https agents are verified against the system's authorities.

    Logs:
        log_prompts: Include the beginning of every prompt in the request log.
    """

    host: str = "127.0.0.1"
    port: int = 10001
    workers: int = 1
    cluster_name: str = ""
    discovery_port: int = DEFAULT_DISCOVERY_PORT
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    dialect: EngineDialect | None = None
    nodes: Path | None = None
    allow_fields: tuple[str, ...] = ()
    body_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 300.0
    idle_timeout_s: float = 120.0
    total_timeout_s: float = 1800.0
    retries: int = 2
    migrations: int = 3
    prefill_policy: PolicyName = "least_work"
    decode_policy: PolicyName = "least_work"
    split_min_tokens: int | Literal["auto"] = "auto"
    ttft_objective_s: float = 2.0
    tpot_objective_s: float = 0.1
    model_objectives: tuple[str, ...] = ()
    stream_pull_min_tokens: int | None = None
    prefix_pull_min_tokens: int | None = None
    keep_turns_s: float | None = None
    decode_only_fallback: bool = True
    prefill_limit: int | None = None
    decode_limit: int | None = None
    queue_limit: int = 1024
    queue_timeout_s: float = 30.0
    breaker_failures: int = 5
    breaker_pause_s: float = 1.0
    canary_interval_s: float | None = None
    canary_max_share: float = 0.01
    nixl_lease_s: float | None = None
    moriio_lease_s: float | None = None
    max_connections: int = 4096
    keepalive_s: float = 30.0
    client_stall_s: float = 60.0
    drain_s: float = 60.0
    api_keys: Path | None = None
    share_prefixes: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allow_address: str = ""
    cluster_key: Path | None = None
    agent_ca: Path | None = None
    log_prompts: bool = False

    def __post_init__(self) -> None:
        self.check_http()
        check_ports(port=self.port, discovery_port=self.discovery_port)
        check_at_least_1(
            workers=self.workers,
            max_connections=self.max_connections,
            prefill_limit=self.prefill_limit,
            decode_limit=self.decode_limit,
            breaker_failures=self.breaker_failures,
        )
        check_positive(
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_s")}
        )
        if (self.keep_turns_s or 0.0) > MAX_KEEP_S:
            raise ValueError(f"keep_turns_s must be at most {MAX_KEEP_S:g}, got {self.keep_turns_s}")
        self.named_servers()
        AddressRules(self.allow_address)
        CorsPolicy(self.cors_origins)
        AllowedHosts(self.allowed_hosts)
        allowed_fields(self.allow_fields)
        self.objectives()
        check_not_negative(
            retries=self.retries,
            migrations=self.migrations,
            split_min_tokens=0 if self.split_min_tokens == "auto" else self.split_min_tokens,
            stream_pull_min_tokens=self.stream_pull_min_tokens or 0,
            prefix_pull_min_tokens=self.prefix_pull_min_tokens or 0,
            queue_limit=self.queue_limit,
            canary_max_share=self.canary_max_share,
        )

    def objectives(self) -> ModelObjectives:
        """How soon requests should be answered. Raises `ValueError`."""
        return ModelObjectives(Objective(self.ttft_objective_s, self.tpot_objective_s), self.model_objectives)

    def named_servers(self) -> tuple[StaticNode, ...]:
        """The servers that `prefill` and `decode` name. Raises `BadEngineServer`, a `ValueError`."""
        named = tuple(server_from_words(words, "prefill", self.dialect) for words in self.prefill)
        named += tuple(server_from_words(words, "decode", self.dialect) for words in self.decode)
        check_distinct(named)
        return named


def parse_config(argv: Sequence[str]) -> ProxyConfig:
    """Read the command line (and the file that `--config` names).

    Raises:
        SystemExit: with status 2 and a message that names the unknown flag or key, or the wrong value;
            with status 0 after `--help`.
    """
    return parse_flags(
        ProxyConfig,
        argv,
        prog="kvferry proxy",
        description="Serve an OpenAI-compatible API through pairs of prefill and decode agents.",
        check=checked,
    )


def checked(config: ProxyConfig) -> ProxyConfig:
    """Return the settings as they are. Raises ValueError for what this machine does not have."""
    config.check_traces()
    check_files(config, ("api_keys", "cluster_key", "tls_cert", "tls_key", "agent_ca"))
    return config
