# SPDX-License-Identifier: Apache-2.0
"""Options of the mori backend, and their form for the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_REGION_BYTES = (2 << 30) - (64 << 10)
"""Some NICs refuse to register 2 GiB in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoriSettings:
    """Options of the mori backend, as in `--transfer-options mori.NAME=VALUE,…`. Zero leaves a size to MORI.

    Args:
        qp_per_transfer: Queue pairs to each peer.
        num_worker_threads: Threads that post work requests; 1 posts on the caller's.
        post_batch_size: Work requests posted at once; -1 divides a batch evenly among the queue pairs.
        max_send_wr: Work requests that one queue pair holds.
        max_cqe_num: Entries of a completion queue.
        max_msg_sge: Pieces of local memory that one work request may gather.
        notification: Notify the producer of every batch. No kvferry process reads them, and MORI keeps each.
        devices: RDMA devices to use, joined by `+`; with a leading `^`, not to use.
        nic_index: The one device used for host memory, by its place in the list.
        service_level: RDMA service level.
        traffic_class: RDMA traffic class.
        region_bytes: Largest piece of a pool registered at once. MORI joins neighbouring requests, none of
            which may become longer than the device's longest message: 1 GiB on common NICs.
        control_timeout_ms: Longest that the library may block while it connects.
    """

    qp_per_transfer: int = 4
    num_worker_threads: int = 4
    post_batch_size: int = -1
    max_send_wr: int = 0
    max_cqe_num: int = 0
    max_msg_sge: int = 0
    notification: bool = False
    devices: str = ""
    nic_index: int | None = None
    service_level: int | None = None
    traffic_class: int | None = None
    region_bytes: int = 1 << 30
    control_timeout_ms: int = 2000

    def __post_init__(self) -> None:
        for name in ("qp_per_transfer", "num_worker_threads", "control_timeout_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"mori.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_send_wr", "max_cqe_num", "max_msg_sge"):
            if getattr(self, name) < 0:
                raise ValueError(f"mori.{name} must not be negative, got {getattr(self, name)}")
        if self.post_batch_size != -1 and self.post_batch_size < 1:
            raise ValueError(f"mori.post_batch_size must be -1 or at least 1, got {self.post_batch_size}")
        if not 0 < self.region_bytes <= MAX_REGION_BYTES:
            raise ValueError(f"mori.region_bytes must be at most {MAX_REGION_BYTES}, got {self.region_bytes}")

    @property
    def send_depth(self) -> int:
        """Work requests that one queue pair holds, the library's default included."""
        return self.max_send_wr or 8192

    def environment(self) -> dict[str, str]:
        """Settings that the library reads from its environment only, or lets that override."""
        values = {
            "MORI_IO_QP_PER_TRANSFER": self.qp_per_transfer,
            "MORI_IO_CP_TIMEOUT_MS": self.control_timeout_ms,
            "MORI_RDMA_DEVICES": self.devices.replace("+", ","),
            "MORI_IO_RDMA_NIC_IDX": self.nic_index,
            "MORI_RDMA_SL": self.service_level,
            "MORI_RDMA_TC": self.traffic_class,
        }
        return {name: str(value) for name, value in values.items() if value not in (None, "")}

    def rdma_config(self, library: Any) -> Any:
        """The library's own settings object."""
        config = library.RdmaBackendConfig(
            qp_per_transfer=self.qp_per_transfer,
            post_batch_size=self.post_batch_size,
            num_worker_threads=self.num_worker_threads,
            poll_cq_mode=library.PollCqMode.POLLING,
            enable_notification=self.notification,
        )
        config.max_send_wr = self.max_send_wr
        config.max_cqe_num = self.max_cqe_num
        config.max_msg_sge = self.max_msg_sge
        return config
