# SPDX-License-Identifier: Apache-2.0
"""One tensor-parallel rank: its share of the model and of the KV pool, and the loop that runs steps."""

from __future__ import annotations

import datetime
import logging
import os
import threading
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch
import torch.distributed as dist

from kvferry.agent.config import AgentConfig
from kvferry.agent.messages.steps import (
    Boot,
    FromRank,
    RankReady,
    StepDone,
    StepWritten,
    StopRank,
    ToRank,
    step_address,
    transfer_address,
)
from kvferry.agent.worker.model import ModelShard, ModelSpec, eos_ids
from kvferry.agent.worker.runner import StepRunner
from kvferry.agent.worker.shm_allgather import RankExchange
from kvferry.agent.worker.tensor_parallel import Group
from kvferry.transfer.memory import allocate_pool, device_name, own_pool
from kvferry.transfer.ranks.channel import connect_at_once
from kvferry.transfer.ranks.worker import WorkerConnector

log = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)
_DEFAULT_SEQUENCES = 16
_CUDA_POOL_SHARE = 0.85


class NoDevice(RuntimeError):
    """The device that a rank is to use is not there; the message says which and what is."""


class Rank:
    """Device memory, place in the process group and transfer thread of one rank."""

    def __init__(self, boot: Boot, run_dir: Path, rank: int) -> None:
        config = self._config = boot.config
        device = _open_device(config, rank)
        self._group = _join_group(config, rank, device, run_dir)
        self._model = ModelShard(
            ModelSpec(
                directory=Path(config.model),
                device=device,
                dtype=config.dtype,
                load_format=config.load_format,
                max_model_len=config.max_model_len,
                group=self._group,
            )
        )
        self._eos_ids = eos_ids(Path(config.model), self._model.config)
        self._geometry = self._model.geometry(config.block_size)
        self._pool = self._allocate_pool(device)
        self._runner = StepRunner(
            self._model,
            self._pool,
            self._eos_ids,
            is_sampler=rank == 0,
        )
        self._runner.warm_up(self._model.max_model_len)
        self._computing = threading.Event()
        self._connector = WorkerConnector(
            address=transfer_address(run_dir, rank),
            rank=rank,
            pool=own_pool(self._pool, self._geometry, config.tp, rank),
            transfer=config.transfer,
            bind_host=config.host,
            advertise_host=config.advertised_host,
            transfer_options=config.transfer_options,
            computing=self._computing,
        )
        self._connector.start()
        self._engine = connect_at_once(step_address(run_dir))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connector.close()
        self._engine.close()
        if self._group.exchange is not None:
            self._group.exchange.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def serve(self) -> None:
        """Report readiness, then run steps until `StopRank`, or until the engine process has ended."""
        self._send(self._ready())
        decoder = msgspec.msgpack.Decoder(ToRank)
        for message in map(decoder.decode, self._engine.frames()):
            if isinstance(message, StopRank):
                return
            written = StepWritten(rank=self._group.rank, number=message.number)
            self._computing.set()
            outputs = self._runner.run(message, partial(self._send, written))
            self._computing.clear()
            self._send(StepDone(rank=self._group.rank, number=message.number, outputs=outputs))

    def _send(self, message: FromRank) -> None:
        self._engine.send(msgspec.msgpack.encode(message))

    def _ready(self) -> RankReady:
        return RankReady(
            rank=self._group.rank,
            device=device_name(self._pool.device),
            geometry=msgspec.to_builtins(self._geometry),
            num_blocks=self._pool.shape[0],
            max_model_len=self._model.max_model_len,
            vocab_size=self._model.config.vocab_size,
            eos_ids=self._eos_ids,
            weights=self._model.weights_hash,
        )

    def _allocate_pool(self, device: torch.device) -> torch.Tensor:
        """Allocate `kv_blocks`, or as many as fit."""
        heads = len(self._geometry.local_heads(self._group.size, self._group.rank))
        block_bytes = heads * self._geometry.head_block_bytes
        num_blocks = self._config.kv_blocks or self._default_blocks(block_bytes, device)
        return allocate_pool(self._geometry.pool_shape(num_blocks, heads), self._model.dtype, device)

    def _default_blocks(self, block_bytes: int, device: torch.device) -> int:
        if device.type == "cpu":
            return _DEFAULT_SEQUENCES * -(-self._model.max_model_len // self._config.block_size)
        free, _ = torch.cuda.mem_get_info(device)
        fits = torch.tensor(int(free * _CUDA_POOL_SHARE) // block_bytes, device=device)
        if self._group.size > 1:
            dist.all_reduce(fits, op=dist.ReduceOp.MIN)
        return int(fits)


def _open_device(config: AgentConfig, rank: int) -> torch.device:
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // config.tp))
    if config.first_gpu is None:
        return torch.device("cpu")
    device, count = torch.device("cuda", config.first_gpu + rank), torch.cuda.device_count()
    if not count:
        raise NoDevice(f"--device {config.device}: torch {torch.__version__} sees no GPU here")
    if device.index >= count:
        raise NoDevice(
            f"--device {config.device} --tp {config.tp}: {device} is needed, torch sees {count} GPUs"
        )
    torch.cuda.set_device(device)
    return device


def _join_group(config: AgentConfig, rank: int, device: torch.device, run_dir: Path) -> Group:
    """Meet the other ranks, in the agent's own directory."""
    if config.tp == 1:
        return Group(rank, 1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{run_dir}/process-group",
        rank=rank,
        world_size=config.tp,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    if device.type == "cuda":
        return Group(rank, config.tp)
    limit_s = _COLLECTIVE_TIMEOUT.total_seconds()
    exchange = RankExchange(run_dir, rank, config.tp, barrier=dist.barrier, timeout_s=limit_s)
    return Group(rank, config.tp, exchange)
