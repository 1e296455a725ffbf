# SPDX-License-Identifier: Apache-2.0
"""What this machine has for serving, in lines for a person: devices, ports, models, vLLM, SGLang."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvferry.agent.architectures import (
    architecture_of,
    is_tested,
    read_config,
    uneven_reason,
    unsupported_reason,
)
from kvferry.agent.cli import with_model_directory
from kvferry.agent.config import BUNDLED_MODELS, AgentConfig
from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.sglang import settings as sglang
from kvferry.agent.vllm import settings as vllm
from kvferry.common.exceptions import message_of
from kvferry.deploy.launcher import listen_error
from kvferry.proxy.config import ProxyConfig
from kvferry.transfer.engine import Usability
from kvferry.transfer.rdma_devices import RdmaDevice

RDMA_BACKENDS = ("mori", "nixl", "mooncake")
"""Those that can move KV over an RDMA device."""
MAX_CACHED_MODELS = 20


def count_gpus() -> int:
    """How many GPUs torch sees."""
    # Not at the top: TAB completes commands, and must be quick.
    import torch

    return torch.cuda.device_count()


def describe_devices() -> list[str]:
    """One line for the processor, and one for each GPU that torch sees, or that it sees none."""
    # Not at the top: TAB completes this command, and must be quick.
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [f"device: cpu, {len(os.sched_getaffinity(0))} cores, {_gib(memory)} of memory"]
    if not torch.cuda.is_available():
        return [*lines, f"device: no GPU that torch {torch.__version__} sees"]
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        lines.append(f"device: cuda:{number}, {name}, {_gib(free)} free of {_gib(total)}")
    return lines


def describe_ports() -> list[str]:
    """One line for each port that processes take by default: whether it is free."""
    proxy, agent = ProxyConfig(), AgentConfig(model="any")
    ports = {
        proxy.port: "the proxy's HTTP",
        proxy.discovery_port: "the proxy's discovery",
        agent.port: "an agent's HTTP",
        agent.control_port: "an agent's KV control",
    }
    errors = {port: listen_error("0.0.0.0", port) for port in ports}
    return [f"port: {port}, {use}: {errors[port] or 'free'}" for port, use in ports.items()]


def named_models() -> list[str]:
    """Return the models that can be named here: those bundled, then those of the Hugging Face cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    bundled = sorted(path.parent.name for path in BUNDLED_MODELS.glob("*/config.json"))
    try:
        cached = sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except CacheNotFound:
        cached = []
    return bundled + cached[:MAX_CACHED_MODELS]


def describe_model(name: str, tp: int) -> tuple[bool, str]:
    """Whether `tp` ranks can serve a model, and a line that says so, or why not."""
    try:
        directory = Path(with_model_directory(AgentConfig(model=name)).model)
        config = read_config(directory)
    except (ValueError, OSError) as error:
        return False, f"model: {message_of(error).removeprefix('model: ')}"
    reason = unsupported_reason(config, tp)
    uneven = uneven_reason(config, tp)
    verdict = f"not supported: {reason}" if reason is not None else uneven or "served"
    if verdict == "served" and not is_tested(config):
        verdict += " if an agent's self-check passes: no test covers this architecture"
    return (
        reason is None and uneven is None,
        f"model: {name}, {architecture_of(config)}, {directory}: {verdict}",
    )


def installed_version(*names: str) -> str | None:
    """The version of the first of these distributions that is in this environment; None if none is."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def describe_vllm(installed: str | None) -> str:
    """One line: whether `kvferry agent --engine vllm` works with the vLLM of this environment."""
    absent = "not in this environment; kvferry agent --engine vllm takes another by --engine-python"
    return _describe_engine("vLLM", installed, vllm.check_version, absent)


def describe_sglang(installed: str | None) -> str:
    """One line: whether the SGLang of this environment can have our transfer plane inside."""
    return _describe_engine("SGLang", installed, sglang.check_version, "not in this environment")


def _describe_engine(name: str, installed: str | None, check: Callable[[str], None], absent: str) -> str:
    if installed is None:
        return f"{name}: {absent}"
    try:
        check(installed)
    except NotServed as error:
        return f"{name}: {error}"
    return f"{name}: {installed}, served"


def describe_rdma(devices: list[RdmaDevice], verdicts: dict[str, Usability]) -> list[str]:
    """One line for each device: its name, its ports' state, and who can use it."""
    if not devices:
        return ["RDMA: no device"]
    able = [name for name in RDMA_BACKENDS if verdicts[name].ok]
    lines = [_describe(device, able) for device in devices]
    return [*lines, f"RDMA: a process may lock {_lockable()} of memory; a larger KV pool is not registered"]


def _describe(device: RdmaDevice, able: list[str]) -> str:
    ports = "; ".join(f"port {each.number} {each.state}, {each.link}, {each.rate}" for each in device.ports)
    return (
        f"RDMA: {device.name} ({device.pci_address or 'no PCI address'}): {ports or 'no port'}; "
        f"{_access(device)}; usable by {', '.join(able) if able and device.usable_by_us else 'no backend'}"
    )


def _access(device: RdmaDevice) -> str:
    if device.node is None:
        return "no device file: the kernel module ib_uverbs is not loaded"
    whether = "open to this user" if device.usable_by_us else "closed to this user"
    return f"{device.node} {device.permissions or 'is missing'}, {whether}"


def _lockable() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "any amount" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.0f} GiB"
