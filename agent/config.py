# SPDX-License-Identifier: Apache-2.0
"""Settings of one agent, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from kvferry.agent.announce.options import ServerOptions
from kvferry.common.http.browser_guard import AllowedHosts
from kvferry.common.shared_options import (
    HttpOptions,
    LogOptions,
    TraceOptions,
    check_at_least_1,
    check_not_negative,
)
from kvferry.transfer.options import PlaneOptions, TransferChoice

Engine = Literal["kvferry", "vllm", "sglang", "auto"]
"""What `--engine` takes."""

START_TIMEOUT_S = 600.0
"""Longest time that an agent takes to start; nearly all of it goes into loading the model."""

BUNDLED_MODELS = Path(str(files("kvferry.models")))
_DEVICE = re.compile(r"cpu|cuda(?::(\d{1,3}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig(ServerOptions, PlaneOptions, HttpOptions, TraceOptions, LogOptions):
    """Settings of one agent.

    Model:
        model: Checkpoint directory (Hugging Face layout), or the name of a bundled model, or of one in the
            Hugging Face cache on this machine.
        dtype: Element type of weights and KV; auto is float32 on CPU and the checkpoint's own on CUDA.
        load_format: safetensors reads the checkpoint; dummy makes random weights from its config.
        self_check: Compare the model with transformers' own forward pass on CPU before the start; auto does
            so for architectures that are not in the table of docs/models.md.
        generation_config: Default sampling settings of requests: auto uses the checkpoint's
            generation_config.json; none uses OpenAI's defaults.
        max_model_len: Longest prompt plus answer, in tokens. Default: the checkpoint's own limit.

    Engine:
        engine: kvferry's own engine; vllm or sglang, a server of that engine, which has other options
            (--engine vllm --help); or auto, which uses vllm if it is installed and finds a GPU, and prints
            the reason. It must be given on the command line.
        device: Where the model runs: cpu; cuda, one GPU per rank from GPU 0 on; or cuda:N, from GPU N on.
        block_size: Tokens per KV block.
        kv_blocks: KV blocks in the pool. Default on CPU: enough for 16 sequences of max_model_len.
        prefill_chunk: Prompt tokens computed per step; chunks end at absolute multiples of it.
        max_batch_tokens: Maximum number of tokens in one step.
        prefix_cache: Reuse the blocks of prompts with the same beginning.
        threads: Compute threads per rank; 0 divides the cores among the ranks of this agent.

    KV transfer:
        transfer: KV transfer backend; auto uses the best that works with the peer.
        verify_kv: Checksum every KV block that is transferred. Both servers of a transfer need it.

    Limits:
        max_num_seqs: Maximum number of sequences that run at once.

    Security:
        allowed_hosts: Without cluster_key, further names by which this agent may be called, such as
            agent.example.com, .example.com for all below it, or * for any. Addresses, this machine's name,
            `host`, `advertise_host` and names that no web site has (without a dot; .localhost, .local,
            .internal) are always allowed.
        trust_request_chat_template: Allow chat_template in requests, which can use any amount of CPU time.

    Logs:
        log_prompts: Write the beginning of every prompt to the log, with the request's line.
    """

    model: str
    engine: Engine = "kvferry"
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    self_check: Literal["auto", "on", "off"] = "auto"
    generation_config: Literal["auto", "none"] = "auto"
    allowed_hosts: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    max_model_len: int | None = None
    block_size: int = 16
    kv_blocks: int | None = None
    max_num_seqs: int = 64
    prefill_chunk: int = 256
    max_batch_tokens: int = 1024
    prefix_cache: bool = True
    transfer: TransferChoice = "auto"
    verify_kv: bool = False
    threads: int = 0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        self.check_server()
        self.check_plane()
        self.check_http()
        AllowedHosts(self.allowed_hosts)
        check_at_least_1(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            prefill_chunk=self.prefill_chunk,
            max_batch_tokens=self.max_batch_tokens,
            kv_blocks=self.kv_blocks,
            max_model_len=self.max_model_len,
        )
        check_not_negative(threads=self.threads)
        if self.engine != "kvferry":
            raise ValueError(f"engine: {self.engine} must be given on the command line of kvferry agent")
        if _DEVICE.fullmatch(self.device) is None:
            raise ValueError(f"device must be cpu, cuda or cuda:N, got {self.device!r}")
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
