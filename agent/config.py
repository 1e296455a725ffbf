# SPDX-License-Identifier: Apache-2.0
"""Settings of one agent, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from kvferry.common.telemetry.logs import LogFormat

Role = Literal["prefill", "decode", "both"]

START_TIMEOUT_S = 600.0
"""Longest time that an agent takes to start; nearly all of it goes into loading the model."""

MAX_NAME_CHARS = 64
BUNDLED_MODELS = Path(str(files("kvferry.models")))
_DEVICE = re.compile(r"cpu|cuda(?::(\d{1,3}))?")


def check_name(name: str) -> None:
    """Raise ValueError for an agent's name that pages could not show."""
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(f"name must be at most {MAX_NAME_CHARS} printable characters, got {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent.

    Args:
        model: Checkpoint directory (Hugging Face layout), or the name of a bundled model, or of one in the
            Hugging Face cache on this machine.
        engine: What computes: kvferry's own engine; vllm, a vLLM server, which has other options (--engine
            vllm --help); or auto, which takes vllm where it is installed and finds a GPU, and says why. It
            must be given on the command line.
        role: Which legs of a request this agent serves.
        served_model_name: Name that clients ask for; the directory's name when not given.
        name: Name of this agent on operators' pages, of at most 64 characters; its address when not given.
        host: Address that the HTTP server and the control channel bind.
        port: HTTP port; 0 lets the OS choose.
        advertise_host: Host that peers and proxies must dial; the bound host when not given.
        control_port: Port of the KV control channel; 0 lets the OS choose.
        proxy: Discovery addresses of the proxies to announce to: HOST:PORT, or dns:NAME[:PORT] for every
            address of a name, which is looked up again and again.
        device: Where the model runs: cpu; cuda, one GPU per rank from GPU 0 on; or cuda:N, from GPU N on.
        dtype: Element type of weights and KV; auto is float32 on CPU and the checkpoint's own on CUDA.
        load_format: safetensors reads the checkpoint; dummy makes random weights from its config.
        self_check: Compare the model with transformers' own forward on CPU before the start; auto does so for
            architectures that are not in the table of docs/models.md.
        generation_config: auto takes the sampling settings that a request leaves out from the checkpoint's
            generation_config.json; none takes OpenAI's defaults.
        trust_request_chat_template: Let requests bring a chat_template, which can take any amount of work.
        tp: Tensor-parallel ranks, one process each.
        max_model_len: Longest prompt plus answer, in tokens; the checkpoint's own limit when not given.
        block_size: Tokens per KV block.
        kv_blocks: KV blocks in the pool; when not given, enough for 16 sequences of max_model_len on CPU.
        max_num_seqs: Most sequences that run at once.
        prefill_chunk: Prompt tokens computed per step; chunks end at absolute multiples of it.
        max_batch_tokens: Most tokens in one step.
        prefix_cache: Reuse blocks of prompts that begin alike.
        transfer: KV transfer backend; auto takes the best that works with the peer.
        transfer_options: Options of transfer backends, BACKEND.NAME=VALUE separated by commas.
        verify_kv: Checksum every KV block lent, and check those pulled; producers must have it on as well.
        lease_s: Seconds without a renewal after which a lease expires and its blocks are freed.
        pull_timeout_s: Deadline for pulling one prompt's KV, waiting for room included.
        on_pull_failure: What a decode agent does when the KV cannot be proven right.
        threads: Compute threads per rank; 0 divides the cores among the ranks of this agent.
        max_body_bytes: Largest request body accepted.
        drain_s: Seconds that SIGTERM or POST /drain give to what runs, is on its way, or is leased, before
            the agent ends; Ctrl-C gives 3 at most, and a second signal none.
        cluster_key: File made by `kvferry keygen`, the same as its proxies'; with it, only they are served.
        tls_cert: PEM file with the certificate (and its chain) for serving by https; needs tls_key.
        tls_key: PEM file with the key that belongs to it, without a password.
        log_prompts: Write the beginning of every prompt to the log, with the request's line.
        log_level: Least severe log line written.
        log_format: text, or json for one JSON object a line.
        otlp_endpoint: Base URL of an OpenTelemetry collector to which traces are sent by OTLP over HTTP, as
            http://localhost:4318. Default: as OTEL_EXPORTER_OTLP_ENDPOINT says, else no traces.
    """

    model: str
    engine: Literal["kvferry", "vllm", "auto"] = "kvferry"
    role: Role = "both"
    served_model_name: str | None = None
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    advertise_host: str | None = None
    control_port: int = 6301
    proxy: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    self_check: Literal["auto", "on", "off"] = "auto"
    generation_config: Literal["auto", "none"] = "auto"
    trust_request_chat_template: bool = False
    tp: int = 1
    max_model_len: int | None = None
    block_size: int = 16
    kv_blocks: int | None = None
    max_num_seqs: int = 64
    prefill_chunk: int = 256
    max_batch_tokens: int = 1024
    prefix_cache: bool = True
    transfer: Literal["auto", "mori", "cuda_ipc", "nixl", "mooncake", "nccl", "tcp"] = "auto"
    transfer_options: str = ""
    verify_kv: bool = False
    lease_s: float = 10.0
    pull_timeout_s: float = 30.0
    on_pull_failure: Literal["recompute", "fail"] = "recompute"
    threads: int = 0
    max_body_bytes: int = 8 * 1024 * 1024
    drain_s: float = 60.0
    cluster_key: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    log_prompts: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        positive = ("tp", "block_size", "max_num_seqs", "prefill_chunk", "max_batch_tokens", "max_body_bytes")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lease_s", "pull_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if self.engine != "kvferry":
            raise ValueError(f"engine: {self.engine} must be given on the command line of kvferry agent")
        check_name(self.name)
        if not self.drain_s >= 0:
            raise ValueError(f"drain_s must not be negative, got {self.drain_s}")
        for name in ("port", "control_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be a port number (0-65535), got {getattr(self, name)}")
        for name in ("kv_blocks", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if _DEVICE.fullmatch(self.device) is None:
            raise ValueError(f"device must be cpu, cuda or cuda:N, got {self.device!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, got {self.threads}")
        if self.prefill_chunk % self.block_size:
            raise ValueError(
                f"prefill_chunk ({self.prefill_chunk}) must be a multiple of block_size ({self.block_size})"
            )
        if self.max_batch_tokens < self.prefill_chunk:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must hold "
                f"one prefill_chunk ({self.prefill_chunk})"
            )

    @property
    def first_gpu(self) -> int | None:
        """The GPU of rank 0, those of the other ranks follow; None on CPU."""
        device = _DEVICE.fullmatch(self.device)
        assert device is not None
        return None if self.device == "cpu" else int(device[1] or 0)

    @property
    def model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.served_model_name or Path(self.model).name

    @property
    def advertised_host(self) -> str:
        """The host that peers must dial."""
        return self.advertise_host or self.host
