# SPDX-License-Identifier: Apache-2.0
"""Stands in for servers whose memory or network is bad: `KvferryConnector`, in a real vLLM server, with the
fault that `tcp.VARIABLE` names.
"""

from __future__ import annotations

import os

import torch

from kvferry.agent.vllm.connector import KvferryConnector
from tests.standins.faults import tcp


class FaultyConnector(KvferryConnector):
    """See `KvferryConnector`."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with tcp.injected(os.environ.get(tcp.VARIABLE)):
            super().register_kv_caches(kv_caches)
