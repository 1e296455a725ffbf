# SPDX-License-Identifier: Apache-2.0
"""Both halves of the connector with the real transfer plane, between two servers: all of it but vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.agent.vllm.connector_worker import KvferryConnectorWorker
from kvferry.agent.vllm.kv_groups import RankShape, groups_of
from kvferry.agent.vllm.settings import read_settings
from kvferry.agent.vllm.startup import start_connector_scheduler
from kvferry.proxy.wire.registration import Role
from kvferry.transfer.engine import usable
from kvferry.transfer.layout import split_heads
from tests.helpers.servers import free_port
from tests.helpers.waiting import patient, wait_until
from tests.standins.vllm_scheduler import Status, VllmRequest, VllmScheduler, prompt
from tests.standins.vllm_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK, BLOCKS, LAYERS, HEADS, DIM = 4, 16, 3, 4, 8
LENGTH = 18
ROLES: tuple[Role, Role] = ("prefill", "decode")
EARLIER: dict[str, Callable[[int], tuple[int, ...]]] = {
    "HND": lambda heads: (BLOCKS, 2, heads, BLOCK, DIM),
    "CPU": lambda heads: (BLOCKS, heads, BLOCK, 2 * DIM),
}
"""Shapes in memory; vLLM's views have tokens before heads where K and V lie apart."""
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


def caches(order: str, heads: int, seed: int) -> dict[str, torch.Tensor]:
    """KV caches as vLLM 0.29 and later registers them, in the layout of that name; HND and CPU are those of
    versions before, an allocation for each layer (docs/sources.md#vllm).
    """
    size = {"L": LAYERS, "B": BLOCKS, "H": heads, "N": BLOCK, "C": 2 * DIM}
    generator = torch.Generator().manual_seed(seed)
    if order in EARLIER:
        pools = [torch.rand(EARLIER[order](heads), generator=generator) for _ in range(LAYERS)]
        views = [pool.permute(0, 1, 3, 2, 4) if pool.dim() == 5 else pool for pool in pools]
        return {f"model.layers.{layer}.attn": view for layer, view in enumerate(views)}
    pool = torch.rand([size[each] for each in order], generator=generator)
    left = order.replace("L", "")
    return {
        f"model.layers.{layer}.attn": pool.select(order.index("L"), layer).permute(
            [left.index(each) for each in "BHNC"]
        )
        for layer in range(LAYERS)
    }


def vllm_config(tp_size: int, dp_rank: int | None = None, **changes: Any) -> Any:
    text_config = SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0, "_name_or_path": str(tp_size)})
    model = SimpleNamespace(
        model="org/model", revision=None, hf_config=SimpleNamespace(_commit_hash="c"), seed=0,
        hf_text_config=text_config, quantization=None, dtype="bfloat16",
        tokenizer="org/model", tokenizer_revision=None, max_model_len=1024,
        served_model_name=["m"], get_total_num_kv_heads=lambda: HEADS, get_head_size=lambda: DIM,
        get_diff_sampling_param=dict,
    )  # fmt: skip
    vars(model).update(changes)
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=2048),
        parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_index=dp_rank or 0),
        kv_transfer_config=SimpleNamespace(engine_id="e" if dp_rank is None else f"e_dp{dp_rank}"),
    )


class Server:
    """A server without a model; `caches` are its ranks'. `remote`: TP ranks as of another node."""

    def __init__(
        self,
        stack: ExitStack,
        role: Role,
        *,
        order: str,
        tp_size: int,
        seed: int,
        stages: int = 1,
        transfer: str = "tcp",
        control_port: int = 0,
        remote: Collection[int] = (),
        verify_kv: float = 0.0,
        **changes: Any,
    ) -> None:
        settings = read_settings(
            {"control_port": control_port, "lease_s": 1.0, "transfer": transfer, "verify_kv": verify_kv}
        )
        heads = len(split_heads(HEADS, tp_size, 0))
        make = hybrid_caches if order == "hybrid" else caches
        self.caches = [make(order, heads, seed + rank) for rank in range(tp_size)]
        groups = (
            HYBRID
            if order == "hybrid"
            else [KVCacheGroupSpec(list(self.caches[0]), FullAttentionSpec(BLOCK, heads))]
        )
        self.specs = [group.kv_cache_spec for group in groups]
        workers = [
            KvferryConnectorWorker(
                settings,
                each,
                [of_stage(group, stage, stages) for group in groups],
                RankShape(
                    tp_rank=rank,
                    tp_size=tp_size,
                    pp_rank=stage,
                    num_blocks=BLOCKS,
                    model_heads=HEADS,
                    cache_dtype="auto",
                ),
                is_remote=rank in remote,
            )
            for stage in range(stages)
            for rank, each in enumerate(self.caches)
        ]
        for worker in workers:
            stack.callback(worker.close)
        self.plane, self.scheduler = start_connector_scheduler(
            settings,
            vllm_config(tp_size, **changes),
            role,
            [worker.facts for worker in workers],
            groups_of(KVCacheConfig(BLOCKS, groups)),
            version="0.32.0",
            free_blocks=lambda: 0,
        )
        stack.callback(self.plane.close)
        for worker in workers:  # first of all, as in vLLM: a rank of another node ends with the plane
            stack.callback(worker.close)
        self.vllm = VllmScheduler(self.scheduler, BLOCKS, *self.specs)

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until it holds."""
        wait_until(condition, step=self.vllm.step)

    def kv(self, blocks: list[int]) -> torch.Tensor:
        """The KV of some blocks over all ranks, [block, layer, head, token, content]."""
        parts = [torch.stack([cache[blocks] for cache in each.values()], dim=1) for each in self.caches]
        return torch.cat(parts, dim=-2 if parts[0].dim() == 6 else 2)


@contextmanager
def pair(
    orders: tuple[str, str] = ("LBHNC", "LBHNC"),
    tp_sizes: tuple[int, int] = (1, 1),
    stages: tuple[int, int] = (1, 1),
    transfers: tuple[str, str] = ("tcp", "tcp"),
    **changes: Any,
) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        producer, consumer = (
            Server(
                stack, role, order=order, tp_size=tp_size, seed=seed, stages=count, transfer=transfer, **more
            )
            for role, order, tp_size, seed, count, transfer, more in zip(
                ("prefill", "decode"), orders, tp_sizes, (1, 9), stages, transfers, ({}, changes), strict=True
            )
        )
        yield producer, consumer


def of_stage(group: KVCacheGroupSpec, stage: int, stages: int) -> KVCacheGroupSpec:
    """The layers that one of several pipeline stages has of a group."""
    share = -(-len(group.layer_names) // stages)
    return replace(group, layer_names=group.layer_names[stage * share : (stage + 1) * share])


def lend(producer: Server, transfer_id: str = "t") -> tuple[VllmRequest, list[int]]:
    request = producer.vllm.add(VllmRequest("p", prompt(LENGTH), HAND_OVER | {"transfer_id": transfer_id}))
    producer.vllm.step()
    blocks = list(request.blocks)
    producer.vllm.finish(request)
    return request, blocks


@pytest.mark.parametrize(
    ("orders", "tp_sizes"),
    [
        (("LBHNC", "LBHNC"), (1, 1)),
        (("LBHNC", "BHLNC"), (1, 2)),
        (("BLHNC", "LHBNC"), (2, 1)),
        (("BHLNC", "LBHNC"), (2, 2)),
        (("HND", "HND"), (1, 2)),
        (("CPU", "CPU"), (2, 1)),
    ],
    ids=["one rank each", "1 to 2", "2 to 1", "2 to 2", "HND, 1 to 2", "CPU, 2 to 1"],
)
def test_a_prompts_kv_arrives_and_the_lease_ends(orders: tuple[str, str], tp_sizes: tuple[int, int]) -> None:
    with pair(orders, tp_sizes) as (producer, consumer):
        lent, theirs = lend(producer)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        assert consumer.vllm.computed == {"d": LENGTH - 1}
        assert torch.equal(consumer.kv(request.blocks), producer.kv(theirs))
        producer.until(lambda: not producer.vllm.requests)
        assert producer.scheduler.take_figures() == {"leases_ended:released": 1}
        assert consumer.scheduler.take_figures()["transfers"] == 1
        consumer.vllm.finish(request)
        for server in (producer, consumer):
            server.vllm.check_integrity()


@pytest.mark.parametrize("remotes", [((1,), ()), ((), (1,)), ((1,), (0, 1))], ids=str)
def test_ranks_on_other_hosts_take_part_by_tcp(
    remotes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    with ExitStack() as stack:
        producer, consumer = (
            Server(stack, role, order="LBHNC", tp_size=2, seed=seed, remote=remote)
            for role, seed, remote in zip(ROLES, (1, 9), remotes, strict=True)
        )
        lent, theirs = lend(producer)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        assert torch.equal(consumer.kv(request.blocks), producer.kv(theirs))
        assert consumer.scheduler.take_figures()["transfer_seconds"] < patient(10.0)
        producer.until(lambda: not producer.vllm.requests)


def test_each_data_parallel_rank_has_a_plane_of_its_own() -> None:
    """With one control port in the settings; a prompt is lent by the rank that has computed it."""
    port = free_ports(2)
    with ExitStack() as stack:
        first, second = (
            Server(stack, "prefill", order="LBHNC", tp_size=1, seed=rank, control_port=port, dp_rank=rank)
            for rank in range(2)
        )
        consumer = Server(stack, "decode", order="LBHNC", tp_size=1, seed=9)
        assert [server.plane.control_port for server in (first, second)] == [port, port + 1]
        for rank, producer in enumerate((second, first)):
            lent, theirs = lend(producer, f"t{rank}")
            assert lent.params is not None and lent.params["remote_dp_rank"] == 1 - rank
            request = consumer.vllm.add(VllmRequest(f"d{rank}", prompt(LENGTH), lent.params))
            consumer.until(lambda request=request: request.status is Status.RUNNING)
            assert torch.equal(consumer.kv(request.blocks), producer.kv(theirs))
            consumer.vllm.finish(request)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_port()
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def test_a_lease_that_nobody_reads_ends_and_a_late_reader_computes_the_prompt() -> None:
    with pair() as (producer, consumer):
        lent, _ = lend(producer)
        producer.until(lambda: not producer.vllm.requests)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        assert consumer.vllm.computed == {"d": 0}
        assert producer.scheduler.take_figures() == {"leases_ended:expired": 1}
        assert consumer.scheduler.take_figures()["recomputed"] == 1


def test_a_transfer_id_is_good_for_one_lease() -> None:
    with pair() as (producer, _):
        lend(producer)
        producer.until(lambda: not producer.vllm.requests)
        lend(producer)
        producer.until(lambda: not producer.vllm.requests)
        assert producer.scheduler.take_figures() == {"leases_ended:expired": 1, "leases_ended:refused": 1}


def test_another_models_kv_is_refused() -> None:
    other = SimpleNamespace(to_dict=lambda: {"rope_theta": 500000.0})
    with pair(hf_text_config=other) as (producer, consumer):
        lent, _ = lend(producer)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        assert consumer.vllm.computed == {"d": 0}
        assert consumer.scheduler.take_figures() == {"failed_transfers:refused": 1, "recomputed": 1}


def best(transfer: str) -> str:
    """What stands for auto on a machine without GPUs."""
    return transfer if transfer != "auto" else "nixl" if usable("nixl").ok else "tcp"


@pytest.mark.parametrize("transfers", [("auto", "auto"), ("auto", "tcp"), ("tcp", "auto")], ids="-".join)
def test_two_servers_use_the_best_transfer_that_both_have(
    transfers: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Auto is what a server has that is told nothing; it says what it opened, and why not others."""
    assert read_settings({}).transfer == "auto"
    caplog.set_level("INFO", "kvferry")
    with pair(transfers=transfers) as (producer, consumer):
        lent, theirs = lend(producer)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        assert torch.equal(consumer.kv(request.blocks), producer.kv(theirs))
        opened = {"auto": ("nixl", "tcp") if best("auto") == "nixl" else ("tcp",), "tcp": ("tcp",)}
        assert producer.plane.transfers == opened[transfers[0]]
    used = "tcp" if "tcp" in transfers else best("auto")
    assert [each.message for each in caplog.records if each.message.endswith(f": KV comes over {used}")]
    assert "another host" not in caplog.text
    said = [each.message for each in caplog.records if each.message.startswith("transfer backends, best")]
    assert len(said) == 2 and all("cuda_ipc: " in line for line in said if "tcp; left" in line)
    assert "nccl" not in " ".join(said), "it was not tried in vLLM"


def test_servers_without_a_transfer_in_common_exchange_nothing() -> None:
    if not usable("nixl").ok:
        pytest.skip("nixl is not installed")
    with pair(transfers=("nixl", "tcp")) as (producer, consumer):
        lent, _ = lend(producer)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        figures = consumer.scheduler.take_figures()
        assert not figures.get("transfers") and any(name.startswith("failed_transfers:") for name in figures)


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_layout_that_mixes_heads_is_read_by_whole_pages(order: str, tp_size: int) -> None:
    with pair((order, order), (tp_size, tp_size)) as (producer, consumer):
        lent, theirs = lend(producer)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        assert consumer.vllm.computed == {"d": LENGTH - 1}
        assert torch.equal(consumer.kv(request.blocks), producer.kv(theirs))


@pytest.mark.parametrize(("orders", "tp_sizes"), [(("LBNHC", "LBNHC"), (1, 2)), (("LBNHC", "LBHNC"), (1, 1))])
def test_whole_pages_of_another_split_or_order_are_refused(
    orders: tuple[str, str], tp_sizes: tuple[int, int]
) -> None:
    with pair(orders, tp_sizes) as (producer, consumer):
        lent, _ = lend(producer)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        assert consumer.vllm.computed == {"d": 0}
        assert consumer.scheduler.take_figures() == {"failed_transfers:refused": 1, "recomputed": 1}


@pytest.mark.parametrize("stages", [(2, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1)])
def test_pipeline_stages_may_differ(stages: tuple[int, int], tp_sizes: tuple[int, int]) -> None:
    with pair(("LBHNC", "BHLNC"), tp_sizes, stages) as (producer, consumer):
        lent, theirs = lend(producer)
        request = consumer.vllm.add(VllmRequest("d", prompt(LENGTH), lent.params))
        consumer.until(lambda: request.status is Status.RUNNING)
        assert consumer.vllm.computed == {"d": LENGTH - 1}
        assert torch.equal(consumer.kv(request.blocks), producer.kv(theirs))


WINDOW, STATE_BYTES = 6, 40
HYBRID = [
    KVCacheGroupSpec(["full.0", "full.1"], FullAttentionSpec(BLOCK, HEADS)),
    KVCacheGroupSpec(["window.0", "window.1"], SlidingWindowSpec(BLOCK, HEADS, sliding_window=WINDOW)),
    KVCacheGroupSpec(["state.0"], MambaSpec(2 * BLOCK)),
]


def hybrid_caches(order: str, heads: int, seed: int) -> dict[str, torch.Tensor]:
    """As vLLM 0.29+ has them: every group's layers begin at the same bytes, and a state's page is padded."""
    page = heads * BLOCK * 2 * DIM
    memory = torch.rand((BLOCKS, 2, heads, BLOCK, 2 * DIM), generator=torch.Generator().manual_seed(seed))
    pages = memory.view(torch.int8).as_strided(
        (BLOCKS, 1, 1, STATE_BYTES), (2 * page * 4, STATE_BYTES, STATE_BYTES, 1)
    )
    layers = {f"{kind}.{layer}": memory[:, layer] for kind in ("full", "window") for layer in range(2)}
    return layers | {"state.0": pages}


@pytest.mark.parametrize("length", [LENGTH, 13, 17])
@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_each_group_of_a_hybrid_gets_its_own_blocks(stages: tuple[int, int], length: int) -> None:
    """The only layer with a state is in the first stage."""
    with pair(("hybrid", "hybrid"), stages=stages) as (producer, consumer):
        params = HAND_OVER | {"transfer_id": "t"}
        lent = producer.vllm.add(VllmRequest("p", prompt(length), params))
        producer.vllm.step()
        theirs = [list(group) for group in lent.groups]
        producer.vllm.finish(lent)
        before = {name: cache.clone() for name, cache in consumer.caches[0].items()}
        request = consumer.vllm.add(VllmRequest("d", prompt(length), lent.params))
        consumer.vllm.step()
        allocated = [list(group) for group in request.groups]
        consumer.until(lambda: request.status is Status.RUNNING)
        assert consumer.vllm.computed == {"d": length - 1}
        written: set[int] = set()
        for spec, group, ours, other in zip(consumer.specs, HYBRID, allocated, theirs, strict=True):
            kept = range(spec.first_kept(length - 1), -(-(length - 1) // spec.block_size))
            for name in group.layer_names:
                for position in kept:
                    assert torch.equal(
                        consumer.caches[0][name][ours[position]], producer.caches[0][name][other[position]]
                    )
            written |= {ours[position] for position in kept}
        untouched = [block for block in range(BLOCKS) if block not in written]
        for name, cache in consumer.caches[0].items():
            assert torch.equal(cache[untouched], before[name][untouched])
        figures = consumer.scheduler.take_figures()
        assert figures["transfers"] == 1
        producer.until(lambda: not producer.vllm.requests)
        consumer.vllm.finish(request)
        for server in (producer, consumer):
            server.vllm.check_integrity()


def test_an_engine_whose_api_process_has_gone_ends() -> None:
    """I8"""
    code = """
import os, sys, time
from contextlib import ExitStack
from kvferry.agent.vllm import startup
from tests.unit.agent.vllm.test_two_servers import Server
if os.fork():
    sys.stdin.read(1)
    os._exit(0)
startup.api_process = os.getppid
with ExitStack() as stack:
    Server(stack, "prefill", order="LBHNC", tp_size=1, seed=0)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    engine = int(parent.stdout.readline())
    parent.stdin.close()
    parent.wait(timeout=patient(5.0))
    deadline = time.monotonic() + patient(3.0)
    while is_alive(engine):
        assert time.monotonic() < deadline, "it goes on without its API"
        time.sleep(0.01)
    parent.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
