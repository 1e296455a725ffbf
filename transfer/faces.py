# SPDX-License-Identifier: Apache-2.0
"""The two faces of the transfer plane: one for the engine's scheduler, one for each of its ranks."""

from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.events import LeaseEnded, PlaneEvent, PlaneStats, PullDone, PullFailed, PullQuiescent
from kvferry.transfer.plane import PlaneConfig, Remote
from kvferry.transfer.producer.lease import DuplicateTransfer
from kvferry.transfer.ranks.worker import WorkerConnector

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
