# SPDX-License-Identifier: Apache-2.0
"""The two faces of the transfer plane: one for the engine's scheduler, one for each of its ranks."""

from transfer.events import LeaseEnded, PlaneEvent, PlaneStats, PullDone, PullFailed, PullQuiescent
from transfer.lease import DuplicateTransfer
from transfer.plane import PlaneConfig, Remote
from transfer.scheduler_connector import SchedulerConnector
from transfer.worker_connector import WorkerConnector

__all__ = [
    "DuplicateTransfer",
    "LeaseEnded",
    "PlaneConfig",
    "PlaneEvent",
    "PlaneStats",
    "PullDone",
    "PullFailed",
    "PullQuiescent",
    "Remote",
    "SchedulerConnector",
    "WorkerConnector",
]
