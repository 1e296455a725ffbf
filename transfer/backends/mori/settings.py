# SPDX-License-Identifier: Apache-2.0
"""Options of the mori backend, and their form for the library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.transfer.backends.common.settings import parse_settings

MAX_REGION_BYTES = (2 << 30) - (64 << 10)
"""Some NICs refuse to register 2 GiB in one piece."""
_MAX_RETRY_COUNT = 7
_MAX_TIMEOUT = 31
"""Both as wide as their fields in a queue pair (ibv_modify_qp(3))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoriSettings:
    """Options of the mori backend, as in `--transfer-options mori.NAME=VALUE,…`.

    They hold whatever the library's own environment variables say, except where there is no default here.

    Args:
        qp_per_transfer: Queue pairs to each peer.
        num_worker_threads: Threads that post work requests; 1 posts on the caller's.
        post_batch_size: Work requests posted at once; -1 divides a batch evenly among the queue pairs.
        max_send_wr: Work requests that one queue pair holds. At most what the device can (`max_qp_wr`).
        max_cqe_num: Entries of a completion queue.
        max_msg_sge: Pieces of local memory that one work request may gather; 0 leaves it to MORI.
        poll_cq_mode: How completions are found: by polling, or by events of the device. Both keep a core
            busy.
        retry_count: How often a NIC sends again what was not acknowledged, 0 to 7, before it gives the peer
            up. Soft RoCE takes 7 for no limit.
        timeout: How long it waits for the acknowledgement: 4.096 µs times two to the power of this, 1 to
            31; 0 waits without a limit.
        notification: Notify the producer of every batch. No kvferry process reads them, and MORI keeps each.
        devices: RDMA devices to use, joined by `+`; with a leading `^`, not to use.
        nic_index: The one device used for host memory, by its place in the list.
        service_level: RDMA service level.
        traffic_class: RDMA traffic class.
        region_bytes: Largest piece of a pool registered at once. MORI joins neighbouring requests, none of
            which may become longer than the device's longest message: 1 GiB on common NICs.
        control_timeout_ms: Longest that the library may wait for one answer of a peer while it connects.
        probe_s: How long a child process may take to try whether MORI works here; 0 does not try, so that
            what ends the child ends the rank instead.
    """

    qp_per_transfer: int = 4
    num_worker_threads: int = 4
    post_batch_size: int = -1
    max_send_wr: int = 8192
    max_cqe_num: int = 16384
    max_msg_sge: int = 0
    poll_cq_mode: Literal["polling", "event"] = "polling"
    retry_count: int | None = None
    timeout: int | None = None
    notification: bool = False
    devices: str = ""
    nic_index: int | None = None
    service_level: int | None = None
    traffic_class: int | None = None
    region_bytes: int = 1 << 30
    control_timeout_ms: int = 2000
    probe_s: int = 30

    def __post_init__(self) -> None:
        for name in (
            "qp_per_transfer", "num_worker_threads", "max_send_wr", "max_cqe_num", "control_timeout_ms",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"mori.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_msg_sge", "probe_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"mori.{name} must not be negative, got {getattr(self, name)}")
        for name, most in (("retry_count", _MAX_RETRY_COUNT), ("timeout", _MAX_TIMEOUT)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ValueError(f"mori.{name} must be 0 to {most}, got {value}")
        if self.post_batch_size != -1 and self.post_batch_size < 1:
            raise ValueError(f"mori.post_batch_size must be -1 or at least 1, got {self.post_batch_size}")
        if not 0 < self.region_bytes <= MAX_REGION_BYTES:
            raise ValueError(f"mori.region_bytes must be at most {MAX_REGION_BYTES}, got {self.region_bytes}")

    def takes(self, device: str) -> bool:
        """Whether the library looks at an RDMA device of this name."""
        names = self.devices.replace("+", ",") or os.environ.get("MORI_RDMA_DEVICES", "")
        if not names:
            return True
        return (device in names.removeprefix("^").split(",")) is not names.startswith("^")

    def environment(self) -> dict[str, str]:
        """What the library reads from its environment, alone or before its own settings object.

        A fence has to know how many queue pairs there are, and what is posted how much one holds: so nothing
        that this backend relies on is left to variables that are set for something else.
        """
        values = {
            "MORI_IO_QP_PER_TRANSFER": self.qp_per_transfer,
            "MORI_IO_NUM_NICS_PER_TRANSFER": 1,
            "MORI_IO_NUM_WORKER_THREADS": self.num_worker_threads,
            "MORI_IO_POST_BATCH_SIZE": self.post_batch_size,
            "MORI_IO_POLL_CQ_MODE": self.poll_cq_mode,
            "MORI_IO_ENABLE_NOTIFICATION": int(self.notification),
            "MORI_IO_ENABLE_CHUNKING": 0,
            "MORI_IO_QP_MAX_SEND_WR": self.max_send_wr,
            "MORI_IO_QP_MAX_CQE": self.max_cqe_num,
            "MORI_IO_QP_MAX_MSG_SGE": self.max_msg_sge or None,
            "MORI_IO_QP_MAX_SGE": self.max_msg_sge or None,
            "MORI_IO_QP_RETRY_CNT": self.retry_count,
            "MORI_IO_QP_TIMEOUT": self.timeout,
            "MORI_IO_CP_TIMEOUT_MS": self.control_timeout_ms,
            "MORI_RDMA_DEVICES": self.devices.replace("+", ",") or None,
            "MORI_IO_RDMA_NIC_IDX": self.nic_index,
            "MORI_RDMA_SL": self.service_level,
            "MORI_RDMA_TC": self.traffic_class,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def rdma_config(self, library: Any) -> Any:
        """The library's own settings object."""
        modes = {"polling": library.PollCqMode.POLLING, "event": library.PollCqMode.EVENT}
        config = library.RdmaBackendConfig(
            qp_per_transfer=self.qp_per_transfer,
            post_batch_size=self.post_batch_size,
            num_worker_threads=self.num_worker_threads,
            poll_cq_mode=modes[self.poll_cq_mode],
            enable_notification=self.notification,
        )
        config.max_send_wr = self.max_send_wr
        config.max_cqe_num = self.max_cqe_num
        config.max_msg_sge = self.max_msg_sge
        return config


def read_settings(options: Mapping[str, str]) -> MoriSettings:
    """Read the options as text. Raises ValueError that names the wrong one."""
    return parse_settings("mori", MoriSettings, options)
