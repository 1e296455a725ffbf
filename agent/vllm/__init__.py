# SPDX-License-Identifier: Apache-2.0
"""kvferry in vLLM: our connector in its processes, and the agent that starts a server with it."""


def register() -> None:
    """Make the name `KvferryConnector` known to vLLM.

    It is the entry point `vllm.general_plugins`: each of vLLM's processes calls it, perhaps more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvferryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KvferryConnector", "kvferry.agent.vllm.connector", "KvferryConnector"
        )
