# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: makes the name `KvferryConnector` known to vLLM."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in every one of its processes, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvferryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KvferryConnector", "kvferry.agent.vllm.connector", "KvferryConnector"
        )
