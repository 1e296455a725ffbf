# SPDX-License-Identifier: Apache-2.0
"""The classes that SGLang makes of a transfer backend: a manager for each rank, a sender or a receiver for
each request. Imports sglang; what is decided is decided in `rooms`.

Each rank has a plane of its own: its scheduler frees its own pages, and SGLang agrees over the ranks by the
lowest state of all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import sglang
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode, prepare_abort
from sglang.srt.environ import envs

from kvferry.agent.announce.embedded import Announcement, Server
from kvferry.agent.ids import host_id, mint_incarnation
from kvferry.agent.plugin.plane_thread import PlaneThread, api_process
from kvferry.agent.plugin.settings import PluginSettings
from kvferry.agent.process.run_dir import private_run_dir
from kvferry.agent.sglang.rooms import Fetch, Loan, ProducerRank, Rooms
from kvferry.agent.sglang.server import (
    HeadShare,
    SchedulerLoad,
    geometry_of,
    pool_of,
    prompt_hash,
    read_row,
    tokenizer_of,
    weights_of,
    write_row,
)
from kvferry.agent.sglang.settings import BACKENDS, check_served, read_settings
from kvferry.common.addresses import host_port
from kvferry.common.curve import ClusterKey
from kvferry.proxy.wire.dialects import KV_UNREAD, SGLANG
from kvferry.proxy.wire.registration import Incarnation
from kvferry.transfer.memory import KVPool, device_name
from kvferry.transfer.plane import PlaneConfig, RemotePrompt
from kvferry.transfer.ranks.worker import WorkerConnector

_START_S = 60.0
MAX_PIECES = 1 << 22
"""Of one prompt's KV, for ranks that have other heads: one for each token of each layer's K and V."""
_FIRST_TOKEN = slice(0, 4)
"""In a metadata row: int32."""

log = logging.getLogger(__name__)


class KvferryManager(CommonKVManager):
    """One rank's plane, once `open_plane` has been called. Raises `NotServed`."""

    supports_deferred_decode_kv_release = True
    local_ip: str

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        check_served(
            server_args,
            defers_release=self.enable_deferred_decode_kv_release,
            state_types=args.state_types,
        )

    def register_to_bootstrap(self) -> None:
        """Do nothing: `open_plane` does it, for the plane's port must be known."""

    def open_plane(self, scheduler: Any) -> None:
        """Start the rank's plane, and make it known to decode servers; the first rank's also to proxies."""
        args, ours = self.server_args, self.kv_args
        settings = read_settings(os.environ, host=args.host, port=args.port, own_ip=self.local_ip)
        device = "cpu" if args.device == "cpu" else f"{args.device}:{ours.gpu_id}"
        total = 1 if self.is_mla_backend else scheduler.model_config.get_total_num_kv_heads()
        self.share = HeadShare.of(ours, self.attn_tp_rank, self.attn_tp_size, total)
        pool = pool_of(ours, device, self.share)
        incarnation = mint_incarnation()
        key = None if settings.cluster_key is None else ClusterKey.read(Path(settings.cluster_key))
        geometry = geometry_of(ours, scheduler.model_config, version=sglang.__version__, share=self.share)
        weights = weights_of(scheduler.model_config, str(args.load_format), int(args.random_seed or 0))
        with private_run_dir() as run_dir:
            self._worker = _start_worker(settings, pool, run_dir / "transfer")
            config = PlaneConfig(
                incarnation=incarnation,
                bind_host=settings.bound_host,
                control_port=settings.control_port and settings.control_port + self.attn_tp_rank,
                advertise_host=settings.advertised_host,
                transfer=settings.transfer,
                lease_s=settings.lease_s,
                # SGLang frees pages after its own time-out whatever still writes to them.
                quarantine_s=envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get() / 2,
                geometry=geometry,
                num_blocks=pool.placement.num_blocks,
                weights=weights,
                host_id=host_id(),
                rank_addresses=(self._worker.address,),
                verify_kv=settings.verify_kv,
                curve_secret=None if key is None else key.secret.decode(),
            )
            self.plane = PlaneThread(config, start_timeout_s=_START_S, parent=api_process())
            self.rooms = Rooms(
                self.plane,
                rank=self.attn_tp_rank,
                lease_limit_s=settings.hold_timeout_s + settings.pull_timeout_s,
                pull_timeout_s=settings.pull_timeout_s,
                fill_s=float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
                hold_timeout_s=settings.hold_timeout_s,
            )
            is_decode = self.disaggregation_mode == DisaggregationMode.DECODE
            num_pages = pool.placement.num_blocks
            self.load = SchedulerLoad(scheduler, self.rooms, is_decode=is_decode, page_size=ours.page_size)
            if settings.proxy and self.attn_tp_rank == 0:
                bootstrap = host_port(settings.api_address[0], self.bootstrap_port)
                server = Server(
                    dialect=SGLANG,
                    address=settings.advertise_url.rstrip("/"),
                    host=settings.advertised_host,
                    control="" if is_decode else f"http://{bootstrap}",
                    api=settings.api_address,
                    name=settings.name,
                    role="decode" if is_decode else "prefill",
                    incarnation=incarnation,
                    model=args.served_model_name or args.model_path,
                    max_model_len=scheduler.model_config.context_len,
                    tp_size=self.attn_tp_size,
                    geometry=geometry,
                    weights=weights,
                    tokenizer=tokenizer_of(args),
                    num_blocks=num_pages,
                    max_running=scheduler.max_running_requests,
                    prefill_chunk=scheduler.chunked_prefill_size,
                    device=device_name(pool.regions[0].device),
                    host_id=config.host_id,
                )
                announcement = Announcement(
                    server,
                    self.load,
                    self.load.free_pages,
                    proxies=settings.proxy,
                    key=key,
                    drain_socket=settings.drain_socket,
                )
                self.plane.start(announcement.run)
            else:
                self.plane.start()
        if not is_decode:
            self._register(incarnation, settings.advertised_host)
        log.info(
            "kvferry: a plane over %s at port %d", ", ".join(self.plane.transfers), self.plane.control_port
        )

    def _register(self, incarnation: Incarnation, host: str) -> None:
        """Tell SGLang's bootstrap server where the plane is: only our receivers read its `rank_ip`."""
        local_ip, self.rank_port = self.local_ip, self.plane.control_port
        self.local_ip = f"{host}#{incarnation}"
        try:
            super().register_to_bootstrap()
        finally:
            self.local_ip = local_ip

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether the pages of a request that has failed, perhaps at another rank, are no longer written to.

        No one else writes to our pages, so no producer's acknowledgement is needed.
        """
        return self.rooms.is_quiescent(bootstrap_room)

    def end(self, room: int, failure: str) -> None:
        """Note how a room has ended, for the next poll."""
        if failure:
            self.record_failure(room, failure)
        self.update_status(room, KVPoll.Failed if failure else KVPoll.Success)


def _start_worker(settings: PluginSettings, pool: KVPool, address: Path) -> WorkerConnector:
    with ExitStack() as stack:
        always = Event()
        always.set()  # nothing says when the GPU rests: a read always takes little of it
        worker = WorkerConnector(
            address=address,
            rank=0,
            pool=pool,
            transfer=settings.transfer,
            auto=BACKENDS,
            bind_host=settings.bound_host,
            advertise_host=settings.advertised_host,
            transfer_options=settings.transfer_options,
            computing=always,
        )
        worker.start()
        stack.pop_all()
    return worker


class KvferrySender(CommonKVSender):
    """A prompt that is lent."""

    _request: Any = None
    _loan: Loan | None = None
    _early_send_wait_event: Any

    def __init__(
        self,
        mgr: KvferryManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._pages: list[int] = []
        self._is_counted = True
        mgr.load.transfers += 1
        mgr.update_status(bootstrap_room, KVPoll.WaitingForInput)  # the decode server is not waited for

    def bind_request(self, request: Any) -> None:
        """Know SGLang's request, which its interface does not hand over."""
        self._request = request

    def send(
        self,
        kv_indices: Any,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """Take some of the prompt's pages, which are computed; with the last, lend them all."""
        if self.conclude_state is not None:
            return
        if self._early_send_wait_event is not None:  # a cached prefix may still be on its way to the GPU
            self._early_send_wait_event.synchronize()
            self._early_send_wait_event = None
        self._pages += kv_indices.tolist()
        self.curr_idx += len(kv_indices)
        self._record_transfer_indices(kv_indices, state_indices)
        if self.curr_idx != self.num_kv_indices or self._loan is not None:
            return
        manager, request = self.kv_mgr, self._request
        row = read_row(manager.kv_args, self.aux_index)
        manager.rooms.counts.prompt(len(request.origin_input_ids), int(request.cached_tokens))
        manager.update_status(self.bootstrap_room, KVPoll.Transferring)
        self._loan = manager.rooms.lend(
            self.bootstrap_room,
            self._pages,
            len(request.origin_input_ids),
            prompt_hash(request.origin_input_ids),
            row,
            int.from_bytes(row[_FIRST_TOKEN], "little"),
        )

    def poll(self) -> int:
        if self.conclude_state is None:
            self.kv_mgr.rooms.handle_events()
            if self._loan is not None and self._loan.is_over:
                self.kv_mgr.end(self.bootstrap_room, self._loan.failure)
        return int(super().poll())

    def abort(self) -> None:
        self._give_up()
        super().abort()

    def clear(self) -> None:
        self._give_up()
        super().clear()

    def failure_exception(self) -> None:
        """Raise why the request has failed. SGLang answers 503 if its KV was lent and not read, else 500."""
        is_unread = self._loan is not None and self._loan.was_lent and self._request.finished_reason is None
        try:
            super().failure_exception()
        except Exception as error:
            if is_unread:
                prepare_abort(self._request, f"{KV_UNREAD}: {error}", HTTPStatus.SERVICE_UNAVAILABLE)
            raise

    def _give_up(self) -> None:
        """SGLang frees the pages next."""
        if self._loan is not None:
            self.kv_mgr.rooms.withdraw(self._loan)
        self.kv_mgr.load.transfers -= self._is_counted
        self._is_counted = False


class KvferryReceiver(CommonKVReceiver):
    """A prompt that is fetched."""

    _request: Any = None
    _fetch: Fetch | None = None
    _aux_index = 0

    def __init__(self, mgr: KvferryManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._is_counted = True
        mgr.load.transfers += 1

    def bind_request(self, request: Any) -> None:
        """Know SGLang's request, which its interface does not hand over."""
        self._request = request

    def init(self, prefill_dp_rank: int) -> None:
        super().init(prefill_dp_rank)
        infos = getattr(self, "bootstrap_infos", None)
        if self.conclude_state is not None or not infos:
            return
        try:
            shares = self.kv_mgr.share.sources(self.prefill_info.attn_tp_size)
            sources = [
                self._source(rank, heads, info)
                for (rank, heads), info in zip(shares.items(), infos, strict=True)
            ]
        except ValueError as error:
            self.kv_mgr.end(self.bootstrap_room, f"its KV is not served: {error}")
            return
        self._fetch = self.kv_mgr.rooms.hold(self.bootstrap_room, sources)

    def _source(self, rank: int, heads: range, info: Mapping[str, Any]) -> ProducerRank:
        """`info`: what SGLang's bootstrap server knows of a rank of the prefill server."""
        share = self.kv_mgr.share
        host, _, incarnation = info["rank_ip"].partition("#")
        is_part = heads and not share.is_whole and heads != share.heads
        prompt = RemotePrompt(
            engine_id=incarnation,
            host=host,
            port=int(info["rank_port"]),
            num_tokens=len(self._request.origin_input_ids),
            tp_size=1,
            heads=(heads[0], heads[-1]) if is_part else None,
            num_readers=max(1, share.num_ranks // self.prefill_info.attn_tp_size),
        )
        return ProducerRank(rank, prompt, is_read=bool(heads))

    @property
    def _is_in_pieces(self) -> bool:
        """Whether the heads of a token that are read do not lie beside those of the next."""
        share = self.kv_mgr.share
        return share.total > 1 and bool(share.num_ranks != self.prefill_info.attn_tp_size)

    def _register_kv_args(self) -> bool:
        return True  # no other server writes to our memory

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """There are pages for what the prompt has beyond `decode_prefix_len` tokens: begin to read."""
        if self._fetch is None or aux_index is None or destination != KVTransferDestination.DEVICE:
            self.kv_mgr.end(self.bootstrap_room, "there is nothing to fetch, or not into pages")
            return
        self._aux_index = aux_index
        ids_hash = prompt_hash(self._request.origin_input_ids)
        page_size = self.kv_mgr.kv_args.page_size
        first = (decode_prefix_len or 0) // page_size
        pieces = len(kv_indices) * page_size * len(self.kv_mgr.kv_args.kv_data_ptrs)
        if self._is_in_pieces and pieces > MAX_PIECES:
            reason = f"its KV is in {pieces} pieces, and with other numbers of ranks {MAX_PIECES} are served"
            self.kv_mgr.rooms.cancel(self._fetch, reason)
        self.kv_mgr.rooms.fetch(self._fetch, first, kv_indices.tolist(), ids_hash)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Transferring)
        self.init_time = time.time()

    def poll(self) -> int:
        if self.conclude_state is None:
            self.kv_mgr.rooms.handle_events()
            if self._fetch is not None:
                self.kv_mgr.rooms.check_hold(self._fetch)
                if self._fetch.is_over:
                    self._end(self._fetch)
        return int(super().poll())

    def _end(self, fetch: Fetch) -> None:
        if not fetch.failure:
            try:
                write_row(self.kv_mgr.kv_args, self._aux_index, fetch.row)
            except ValueError as error:
                fetch.failure = str(error)
        if fetch.is_stale:
            self.invalidate_cached_bootstrap_infos()
            self.kv_mgr.prefill_info_table.pop(self.bootstrap_addr, None)
        self.kv_mgr.end(self.bootstrap_room, fetch.failure)

    def abort(self) -> None:
        """Failed is only said once nothing writes to the pages any more: SGLang frees them next."""
        if self.conclude_state is None and self._fetch is not None and self._fetch.reading:
            self.ensure_abort_notified()
        else:
            super().abort()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        if self._fetch is not None:
            self.kv_mgr.rooms.cancel(self._fetch, "Aborted by AbortReq.")

    def clear(self) -> None:
        super().clear()
        if self._fetch is not None:
            self.kv_mgr.rooms.cancel(self._fetch, "given up")
        self.kv_mgr.load.transfers -= self._is_counted
        self._is_counted = False


CLASSES = MappingProxyType(
    {
        "manager": KvferryManager,
        "sender": KvferrySender,
        "receiver": KvferryReceiver,
        "bootstrap_server": CommonKVBootstrapServer,
    }
)
