# SPDX-License-Identifier: Apache-2.0
"""One ATOM server on this machine's CPU, at 0c982ea92 or ffdf3bb5d.

ATOM's own are the HTTP server, request and answer types, streams, input processing, routing over ranks,
scheduler, block manager, the scheduler's KV connector and, where there is one, the ping. Ours is what a GPU
would do: the model's forward pass (`model.py`), and the memory that is read over RDMA (`Fabric`).

`python -m tests.atom.server --root DIRECTORY --role kv_producer --port N …`; `GET /harness` tells what was
asked, what was answered and what is still pinned.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from tests.atom import stubs
from tests.atom.model import MODEL, SLOW, SLOW_STEP_S, Tokenizer, draw

BLOCK_TOKENS = 16
NUM_BLOCKS = 512
MAX_MODEL_LEN = 4096
NEVER_WRITTEN = "memory that nobody has written"
POLL_S = 0.01

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Fabric:
    """The KV memory of all servers, in files: by host, handshake port, rank and block.

    Blocks are numbered alike on every rank, so another rank's memory is read just as readily.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, host: str, port: int, rank: int, blocks: list[int], kv: str) -> None:
        for block in blocks:
            self._replace(self._memory(host, port, rank, block), kv)

    def read(self, host: str, port: int, rank: int, blocks: list[int]) -> str:
        found = {self._read(self._memory(host, port, rank, block)) for block in blocks}
        return found.pop() if len(found) == 1 else NEVER_WRITTEN

    def notify(self, host: str, port: int, rank: int, transfer_id: int) -> None:
        """Tell the producer that a transfer has been read, once more with every call."""
        name = f"done-{host}-{port}-{rank}-{transfer_id}-{time.monotonic_ns()}"
        self._replace(self._folder / name, "")

    def take_notified(self, host: str, port: int, rank: int) -> list[int]:
        """The transfers whose end was notified since the last call."""
        prefix = f"done-{host}-{port}-{rank}-"
        taken = []
        for path in sorted(self._folder.glob(f"{prefix}*")):
            path.unlink()
            taken.append(int(path.name.removeprefix(prefix).split("-")[0]))
        return taken

    def _memory(self, host: str, port: int, rank: int, block: int) -> Path:
        return self._folder / f"kv-{host}-{port}-{rank}-{block}"

    def _replace(self, path: Path, text: str) -> None:
        made = path.with_name(f"new-{threading.get_ident()}-{time.monotonic_ns()}")
        made.write_text(text)
        made.rename(path)

    @staticmethod
    def _read(path: Path) -> str:
        with suppress(FileNotFoundError):
            return path.read_text()
        return NEVER_WRITTEN


class Rank(threading.Thread):
    """One data-parallel rank: ATOM's scheduler, and the steps of an engine around it."""

    def __init__(self, rank: int, config: SimpleNamespace, host: str, fabric: Fabric, deliver: Any) -> None:
        super().__init__(daemon=True)
        scheduler = importlib.import_module("atom.model_engine.scheduler")
        transfer = importlib.import_module("atom.kv_transfer.disaggregation.types")
        self.scheduler = scheduler.Scheduler(config)
        self.incoming: queue.Queue[Any] = queue.Queue()
        self.died: str | None = None
        self.reasons: list[str] = []
        """The finish reason of every sequence."""
        self._output_of = scheduler.ScheduledBatchOutput
        self._kv_output = transfer.KVConnectorOutput
        self._takes_batch = "batch" in scheduler.Scheduler.postprocess.__code__.co_varnames
        self._rank = rank
        self._host = host
        self._port = config.kv_transfer_config.get("handshake_port", 0)
        self._producer = config.kv_transfer_config.get("kv_role") == "kv_producer"
        self._fabric = fabric
        self._deliver = deliver
        self._fetched: dict[int, str] = {}
        """By sequence: the prompt whose KV has been fetched for it."""
        self._received: set[int] = set()

    def run(self) -> None:
        try:
            while True:
                self._take_incoming()
                if not self._step():
                    time.sleep(POLL_S)
        except Exception as error:
            self.died = f"{type(error).__name__}: {error}"
            raise

    def abort(self, seq_id: int) -> None:
        handler = importlib.import_module("atom.model_engine.engine_utility").EngineUtilityHandler
        handler(None, None, scheduler=self.scheduler)._handle_abort_request({"req_id": seq_id})

    def _take_incoming(self) -> None:
        while not self.incoming.empty():
            kind, what = self.incoming.get()
            if kind == "ADD":
                self.scheduler.extend(what)
            elif what.get("cmd") == "abort_request":
                self.abort(what["req_id"])

    def _step(self) -> bool:
        """Schedule, move KV, compute, finish. Return whether anything was computed."""
        batch, seqs = self.scheduler.schedule() or (None, {})
        self._fetch(getattr(batch, "connector_meta_output", None))
        self.scheduler._update_from_kv_xfer_finished(self._finished_transfers())
        if batch is None or not batch.req_ids:
            return False
        tokens = [(self._compute(seqs[each]),) for each in batch.req_ids]
        output = self._output_of(
            req_ids=list(batch.req_ids),
            token_ids=tokens,
            num_rejected=None,
            num_bonus=None,
            draft_token_ids=None,
        )
        streams: queue.Queue[Any] = queue.Queue()
        extra = {"batch": batch} if self._takes_batch else {}
        finished = self.scheduler.postprocess(
            list(seqs.values()), output, stream_output_queue=streams, **extra
        )
        self.reasons += [seq.leave_reason for seq in finished]
        while not streams.empty():
            self._deliver(streams.get())
        return True

    def _compute(self, seq: Any) -> int:
        """One token of a sequence; a prefill writes its blocks."""
        prompt = Tokenizer().decode(seq.token_ids[: seq.num_prompt_tokens])
        kv = self._fetched.get(seq.id, prompt)
        if seq.id not in self._fetched and not seq.output_tokens:
            self._fabric.write(self._host, self._port, self._rank, seq.block_table, prompt)
        if SLOW in kv and not self._producer:
            time.sleep(SLOW_STEP_S)
        return draw(kv, len(seq.output_tokens))

    def _fetch(self, metadata: Any) -> None:
        """Read the KV that the connector wants, as its worker would over RDMA, and notify the producer."""
        for seq_id, meta in (metadata.reqs_to_recv if metadata is not None else {}).items():
            where = (meta.remote_host, meta.remote_handshake_port, meta.remote_dp_rank)
            self._fetched[seq_id] = self._fabric.read(*where, meta.remote_block_ids)
            self._fabric.notify(*where, meta.transfer_id)
            self._received.add(seq_id)

    def _finished_transfers(self) -> Any:
        received, self._received = self._received, set()
        sent = self._fabric.take_notified(self._host, self._port, self._rank) if self._producer else []
        return self._kv_output(finished_sending=set(sent), finished_recving=received)


class _Socket:
    """What ATOM's router over ranks sends, to one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def send_multipart(self, frames: list[bytes], copy: bool = True) -> None:
        kind, what = pickle.loads(frames[1])  # noqa: S301 - ATOM's own, within this process
        self._rank.incoming.put((kind.name, what))


def make_cores(config: SimpleNamespace, host: str, fabric: Fabric) -> Any:
    """ATOM's router over its ranks, with ranks in threads where it would have processes."""
    manager = importlib.import_module("atom.model_engine.engine_core_mgr")

    class Cores(manager.CoreManager):  # type: ignore[name-defined]
        def __init__(self, num_ranks: int) -> None:
            self.pp_size = 1
            if hasattr(self, "_init_shared_state"):
                self._init_shared_state(config, label="cores", local_engine_count=num_ranks)
            else:  # 0c982ea92
                self.label, self.local_engine_count = "cores", num_ranks
                self._seq_id_to_callback: dict[int, Any] = {}
                self._rr_counter = 0
            self.ranks = [
                Rank(each, _of_rank(config, each), host, fabric, self.deliver) for each in range(num_ranks)
            ]
            self.input_sockets = self.control_sockets = [_Socket(rank) for rank in self.ranks]
            self.engine_core_identities = self.control_identities = [b""] * num_ranks
            for rank in self.ranks:
                rank.start()

        def deliver(self, outputs: list[tuple[int, Any]]) -> None:
            for seq_id, output in outputs:
                callback = self._seq_id_to_callback.get(seq_id)
                if callback is not None:
                    callback(output)
                if output.finished:
                    self._seq_id_to_callback.pop(seq_id, None)
                    if hasattr(self, "_release_seq_load"):
                        self._release_seq_load(seq_id)
            flush = getattr(self, "_flush_stream_batch_fn", None)
            if flush is not None:
                flush()

    return Cores(config.parallel_config.data_parallel_size)


def _of_rank(config: SimpleNamespace, rank: int) -> SimpleNamespace:
    parallel = SimpleNamespace(**vars(config.parallel_config) | {"data_parallel_rank": rank})
    return SimpleNamespace(**vars(config) | {"parallel_config": parallel})


def make_config(options: argparse.Namespace) -> SimpleNamespace:
    """What ATOM's configuration would hold of this server."""
    transfer = {
        "kv_role": options.role,
        "kv_connector": options.connector,
        "handshake_port": options.handshake_port,
    }
    if options.ping:
        proxy_ip, proxy_port = options.ping.split(":")
        transfer |= {"proxy_ip": proxy_ip, "proxy_ping_port": int(proxy_port), "http_port": options.port}
    return SimpleNamespace(
        kv_transfer_config=transfer if options.role != "none" else {},
        tensor_parallel_size=options.tp_size,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        parallel_config=SimpleNamespace(data_parallel_size=options.dp_size, data_parallel_rank=0),
        dp_load_balance="least_requests",
        kv_cache_block_size=BLOCK_TOKENS,
        num_kvcache_blocks=NUM_BLOCKS,
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        max_num_seqs=64,
        max_num_batched_tokens=MAX_MODEL_LEN,
        long_prefill_token_threshold=0,
        max_model_len=MAX_MODEL_LEN,
        bos_token_id=1,
        eos_token_id=2,
        stop_token_ids=[],
        scheduler_delay_factor=0.0,
        speculative_config=None,
        kv_events_config=None,
        hf_config=SimpleNamespace(
            architectures=["LlamaForCausalLM"], model_type="llama", sliding_window=None
        ),
    )


class Recorder:
    """ATOM's application, with what was asked and answered written down, and `/harness` to read it."""

    def __init__(self, app: Any, cores: Any) -> None:
        self._app = app
        self._cores = cores
        self._seen: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/harness":
            return await self._report(send)
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        seen: dict[str, Any] = {"path": scope["path"], "asked": "", "status": None, "answer": ""}
        seen["headers"] = {name.decode(): value.decode() for name, value in scope["headers"]}
        self._seen.append(seen)

        async def listen() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "http.request":
                seen["asked"] += message.get("body", b"").decode()
            return message

        async def speak(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
            else:
                seen["answer"] += message.get("body", b"").decode()
            await send(message)

        return await self._app(scope, listen, speak)

    async def _report(self, send: Send) -> None:
        ranks = self._cores.ranks
        report = {
            "seen": self._seen,
            "died": [rank.died for rank in ranks if rank.died],
            "reasons": [reason for rank in ranks for reason in rank.reasons],
            "pinned": sum(len(rank.scheduler.deferred_free_blocks) for rank in ranks),
            "unfinished": sum(rank.scheduler.get_num_unfinished_requests() for rank in ranks),
        }
        body = json.dumps(report).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def start_ping(config: SimpleNamespace) -> Any:
    """ATOM's worker-side connector, which pings from its constructor (0c982ea92)."""
    engine = importlib.import_module("atom.kv_transfer.disaggregation.kv_transfer_engine")
    group = SimpleNamespace(rank_in_group=0, world_size=config.tensor_parallel_size)
    data_parallel = SimpleNamespace(rank_in_group=0, world_size=config.parallel_config.data_parallel_size)
    engine.__dict__.update(get_tp_group=lambda: group, get_dp_group=lambda: data_parallel)
    return engine.KVConnector(config)


def main(argv: list[str]) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--fabric", type=Path, required=True)
    parser.add_argument("--role", required=True, choices=("kv_producer", "kv_consumer", "none"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--handshake-port", type=int, default=6301)
    parser.add_argument("--connector", default="moriio")
    parser.add_argument("--kv-host", default="127.0.0.1", help="what the server takes its own address to be")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--ping", default="", help="discovery address of a proxy")
    options = parser.parse_args(argv)
    stubs.install(options.root)
    os.environ["ATOM_HOST_IP"] = options.kv_host
    config = make_config(options)
    api = importlib.import_module("atom.entrypoints.openai.api_server")
    processing = importlib.import_module("atom.model_engine.llm_engine").InputOutputProcessor
    cores = make_cores(config, options.kv_host, Fabric(options.fabric))
    tokenizer = Tokenizer()
    engine = SimpleNamespace(
        config=config,
        core_mgr=cores,
        io_processor=processing(config, tokenizer, BLOCK_TOKENS),
        get_metrics_statistics=lambda: {"enabled": True, "kv_blocks_total": NUM_BLOCKS},
        close=lambda: None,
    )
    api.__dict__.update(engine=engine, tokenizer=tokenizer, model_name=MODEL)
    if hasattr(api, "StreamBatchDispatcher"):
        api.__dict__["_stream_batch_dispatcher"] = api.StreamBatchDispatcher(tokenizer)
        cores._flush_stream_batch_fn = api.flush_stream_batch
    pings = start_ping(config) if options.ping else None
    uvicorn.run(Recorder(api.app, cores), host="127.0.0.1", port=options.port, log_level="warning")
    del pings


if __name__ == "__main__":
    main(sys.argv[1:])
