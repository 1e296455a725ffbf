# SPDX-License-Identifier: Apache-2.0
"""On NVIDIA GPUs, best two with NVLink: cuda_ipc beside a plain peer copy and beside nixl.

With one GPU both processes share it, which proves the code and measures nothing of interest.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.transfer.decode_step import DecodeStep
from benchmarks.transfer.plane import LendingProcess, Puller
from benchmarks.transfer.plane_agent import PlaneAgent
from benchmarks.transfer.pools import poisoned_pool, scattered
from benchmarks.transfer.reader import PeerProcess, Reader
from benchmarks.transfer.report import Chart, Report
from kvferry.transfer.engine import usable
from kvferry.transfer.layout import KVGeometry, SpanTable

QWEN3_8B = KVGeometry(
    num_layers=36, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16, rope="default:1000000"
)
BLOCK_BYTES = QWEN3_8B.num_kv_heads * QWEN3_8B.head_block_bytes
BLOCKS = 512
LAYER_PIECES = QWEN3_8B.num_layers * 2
"""Pieces of a block where every layer has pools of its own for K and V, as in most engines."""
POOL_BLOCKS = 1024
PLANE_POOL_BLOCKS = 4096
SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
SHAPES = ((16384, 32), (8192, 16))
"""Words in flight and warps per program."""
GIB = 1 << 30
ROUNDS = 15
STEPS = 30


def devices() -> tuple[str, str]:
    """The GPU that is read from, and the one that reads."""
    return "cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"


async def run(report: Report) -> None:
    """All cases, in under 70 s on two H200s. Processes start together, as most of that is their start."""
    owner, reader = devices()
    pool_bytes = POOL_BLOCKS * BLOCK_BYTES
    with contextlib.ExitStack() as stack:
        cuda_ipc = stack.enter_context(PeerProcess("cuda_ipc", pool_bytes, device=owner, seed=1))
        nixl = _nixl_peer(stack, pool_bytes, owner)
        lender = stack.enter_context(LendingProcess("cuda_ipc", QWEN3_8B, PLANE_POOL_BLOCKS, owner, seed=2))
        pool = poisoned_pool(pool_bytes, reader)
        link = _peer_copy(owner, reader)
        report.add(f"plain copy of 1 GiB, {owner} to {reader}", link, "GB/s")
        seconds = _by_layout(report, cuda_ipc, pool, link)
        await _plane(report, lender, reader, link)
        _slowdown(report, cuda_ipc, pool, reader)
        if nixl is not None:
            _beside_nixl(report, nixl, pool, seconds)


def _nixl_peer(stack: contextlib.ExitStack, pool_bytes: int, device: str) -> PeerProcess | None:
    verdict = usable("nixl")
    if not verdict.ok:
        print(f"nixl left out: {verdict.reason}")
        return None
    return stack.enter_context(PeerProcess("nixl", pool_bytes, device=device, seed=1))


def layouts() -> dict[str, SpanTable]:
    """The same bytes as one span per block, and as one span per block, layer and K or V."""
    pool_bytes = POOL_BLOCKS * BLOCK_BYTES
    return {
        "block-major": scattered(BLOCK_BYTES, BLOCKS, pool_bytes, seed=7),
        "layer-major": scattered(BLOCK_BYTES // LAYER_PIECES, BLOCKS * LAYER_PIECES, pool_bytes, seed=8),
    }


def _peer_copy(owner: str, reader: str) -> float:
    """GB/s of the plainest copy there is."""
    source = torch.randint(-(1 << 62), 1 << 62, (GIB // 8,), device=owner)
    destination = torch.empty_like(source, device=reader)
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize(owner)
        torch.cuda.synchronize(reader)
        begun = time.perf_counter()
        destination.copy_(source)
        torch.cuda.synchronize(owner)
        torch.cuda.synchronize(reader)
        samples.append(time.perf_counter() - begun)
    if not torch.equal(destination, source.to(reader)):
        raise RuntimeError("a plain copy came out different")
    return GIB / statistics.median(samples) / 1e9


def _by_layout(report: Report, peer: PeerProcess, pool: torch.Tensor, link: float) -> dict[str, float]:
    """cuda_ipc's seconds per layout at the default share, its CPU time, and its speed by share."""
    seconds: dict[str, float] = {}
    with Reader(peer, pool) as reader:
        for name, spans in layouts().items():
            reader.check(spans)
            samples = [reader.seconds(spans) for _ in range(ROUNDS)]
            report.detail[f"cuda_ipc {name}: seconds"] = samples
            seconds[name] = statistics.median(samples)
            rate = BLOCKS * BLOCK_BYTES / seconds[name] / 1e9
            bound = 0.9 if name == "block-major" else None
            report.add(f"cuda_ipc ÷ plain copy, {name} ({rate:.1f} GB/s)", rate / link, "×", bound)
        cpu = _cpu_per_block(reader)
        report.add("cuda_ipc: CPU per block in the reading rank", cpu, "µs", 0.2, at_least=False)
    with Reader(peer, pool, {"mixed_bytes": "0"}) as reader:
        spans = layouts()["block-major"]
        reader.check(spans)
        ours = statistics.median(reader.seconds(spans) for _ in range(ROUNDS))
        rate = BLOCKS * BLOCK_BYTES / ours / 1e9
        report.add(f"by the kernel alone ÷ plain copy, block-major ({rate:.1f} GB/s)", rate / link, "×")
        report.add("by the kernel alone: CPU per block", _cpu_per_block(reader), "µs")
    return seconds


def _cpu_per_block(reader: Reader) -> float:
    """Microseconds of this process."""
    spans = layouts()["block-major"]
    begun = time.process_time()
    for _ in range(ROUNDS):
        reader.seconds(spans)
    return (time.process_time() - begun) / ROUNDS / BLOCKS * 1e6


def _beside_nixl(
    report: Report, peer: PeerProcess, pool: torch.Tensor, cuda_ipc_seconds: dict[str, float]
) -> None:
    with Reader(peer, pool) as reader:
        for name, spans in layouts().items():
            reader.check(spans)
            rounds = ROUNDS if name == "block-major" else 3
            samples = [reader.seconds(spans) for _ in range(rounds)]
            report.detail[f"nixl {name}: seconds"] = samples
            ours = statistics.median(samples)
            rate = BLOCKS * BLOCK_BYTES / ours / 1e9
            report.add(f"cuda_ipc ÷ nixl, {name} (nixl {rate:.1f} GB/s)", ours / cuda_ipc_seconds[name], "×")


async def _plane(report: Report, lender: LendingProcess, device: str, link: float) -> None:
    """From `open` to the last byte."""
    remote = lender.address()
    async with PlaneAgent("cuda_ipc", QWEN3_8B, PLANE_POOL_BLOCKS, device, seed=None) as agent:
        puller = Puller(lender, agent, remote)
        for gigabytes, slack_s, rounds in ((1, 0.0005, 30), (8, 0.0, 10)):
            count = round(gigabytes * 1e9 / BLOCK_BYTES)
            await puller.check(count)
            begun = time.process_time()
            timing = await puller.median(count, rounds)
            cpu = (time.process_time() - begun) / rounds / count * 1e6
            wire_s = count * BLOCK_BYTES / (link * 1e9)
            bound = 1.15 * wire_s + slack_s
            report.add(
                f"open to last byte, {gigabytes} GB ({timing.last_byte_s / wire_s:.3f} × the wire's)",
                timing.last_byte_s * 1e3,
                "ms",
                bound * 1e3,
                at_least=False,
            )
            report.add(f"open to confirmed lease, {gigabytes} GB", timing.proven_s * 1e3, "ms")
            report.add(f"CPU per block of the whole reading process, {gigabytes} GB", cpu, "µs")


def _slowdown(report: Report, peer: PeerProcess, pool: torch.Tensor, device: str) -> None:
    """How much longer a decode step takes while pulls run without a pause: as agents do it, by the copy
    engines; as they do at rest; and by the kernel alone, by its share of the GPU and its shape.

    The target is for the former, beside a model on the default stream, as agents run it.
    """
    spans = layouts()["block-major"]
    torch.cuda.set_device(device)
    steps = {"default": DecodeStep(device, 0), "high": DecodeStep(device, -1)}
    alone = {name: step.milliseconds(STEPS) for name, step in steps.items()}
    report.add("decode-like step alone, batch 64, context 2048", alone["default"], "ms")

    def beside(reader: Reader, how: str, bounds: dict[str, float]) -> tuple[float, dict[str, float]]:
        """GB/s alone, and the percentages by the priority of the model's stream."""
        reader.check(spans)
        seconds = statistics.median(reader.seconds(spans) for _ in range(ROUNDS))
        rate = BLOCKS * BLOCK_BYTES / seconds / 1e9
        slower = {}
        for name, step in steps.items():
            with _pulling(reader, spans) as pulls:
                slower[name] = (step.milliseconds(STEPS) / alone[name] - 1) * 100
            report.add(
                f"decode slower by, its priority {name}, pull by {how} "
                f"({rate:.0f} GB/s alone, {pulls.rate():.0f} beside it)",
                slower[name],
                "%",
                bounds.get(name),
                at_least=False,
            )
        return rate, slower

    with Reader(peer, pool, computing=True) as reader:
        beside(reader, "the copy engines", {"default": 10.0})
    with Reader(peer, pool) as reader:
        beside(reader, "both, as at rest", {})
    rates: dict[str, list[float]] = {}
    slower: dict[str, list[float]] = {}
    for block_words, num_warps in SHAPES:
        shape = f"{block_words >> 7} KiB, {num_warps} warps"
        for share in SHARES:
            options = {
                "sm_share": share,
                "block_words": block_words,
                "num_warps": num_warps,
                "mixed_bytes": 0,
            }
            with Reader(peer, pool, {name: str(value) for name, value in options.items()}) as reader:
                rate, percent = beside(reader, f"{share:.4g} of the SMs, {shape}", {})
            rates.setdefault(shape, []).append(rate)
            for name, value in percent.items():
                slower.setdefault(f"{shape}, {name} priority", []).append(value)
    x = ("share of the multiprocessors", list(SHARES))
    report.charts += [
        Chart("pull-rate", x[0], "GB/s alone", x[1], rates, log_x=True),
        Chart("decode-slowdown", x[0], "decode step slower by %", x[1], slower, log_x=True),
    ]


class _Pulls:
    """Pulls without a pause, on a thread of their own."""

    def __init__(self, reader: Reader, spans: SpanTable) -> None:
        self._reader = reader
        self._spans = spans
        self._stop = threading.Event()
        self._ends: list[float] = []
        self.thread = threading.Thread(target=self._run)

    def rate(self) -> float:
        """GB/s, from the landing of the first on."""
        between = np.diff(self._ends)
        return float(self._spans[:, 2].sum() / between.mean() / 1e9) if len(between) else 0.0

    def stop(self) -> None:
        self._stop.set()
        self.thread.join()

    def _run(self) -> None:
        ahead = self._reader.begin(self._spans)
        while not self._stop.is_set():
            now, ahead = ahead, self._reader.begin(self._spans)
            self._reader.finish(now)
            self._ends.append(time.perf_counter())
        self._reader.finish(ahead)


@contextlib.contextmanager
def _pulling(reader: Reader, spans: SpanTable) -> Iterator[_Pulls]:
    pulls = _Pulls(reader, spans)
    pulls.thread.start()
    try:
        time.sleep(0.02)
        yield pulls
    finally:
        pulls.stop()
