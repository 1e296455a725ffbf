# SPDX-License-Identifier: Apache-2.0
"""The plug-in's settings (`KVFERRY_…`), and which configurations of SGLang it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.agent.plugin.settings import NotServed, PluginSettings
from kvferry.common.addresses import WILDCARDS, host_port

_PREFIX = "KVFERRY_"
_SERVED = ("0.5.23",)
BACKENDS = ("nixl", "tcp")
"""Those that were tried in SGLang, best first."""
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "pp_size": (1,),
    "nnodes": (1,),
    "dp_size": (1,),
    "attn_cp_size": (1,),
    "dcp_size": (1,),
    "speculative_algorithm": (None,),
    "tokenizer_worker_num": (1,),
    "enable_lora": (None, False),
    "enable_memory_saver": (False,),
    "enable_hisparse": (False,),
    "disaggregation_enable_kv_checksum": (False,),
}
"""Values of fields of `ServerArgs`; under others a request could go wrong, or they were never tried."""


def read_settings(environ: Mapping[str, str], *, host: str, port: int, own_ip: str) -> PluginSettings:
    """The settings that the environment has, and defaults for this server.

    Args:
        host: What SGLang's API binds, with `port`.
        own_ip: This host's address, as SGLang finds it.

    Raises `NotServed` for what is invalid.
    """
    reachable = own_ip if host in WILDCARDS else host
    values: dict[str, Any] = {"control_port": 0, "advertise_url": f"http://{host_port(reachable, port)}"}
    for name in PluginSettings.__struct_fields__:
        text = environ.get(_PREFIX + name.upper())
        if text is not None:
            values[name] = tuple(text.split(",")) if name == "proxy" else text
    try:
        settings = msgspec.convert(values, PluginSettings, strict=False)
    except msgspec.ValidationError as error:
        raise NotServed(f"{_PREFIX}…: {error}") from error
    if settings.transfer not in ("auto", *BACKENDS):
        raise NotServed(f"{_PREFIX}TRANSFER must be auto or one of {', '.join(BACKENDS)}: it was never tried")
    return settings


def environment_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment that has these fields of `PluginSettings`."""
    return {
        _PREFIX + name.upper(): ",".join(value) if name == "proxy" else str(value)
        for name, value in settings.items()
        if value not in ("", [])
    }


def check_version(version: str) -> None:
    """Raise `NotServed` for a version of SGLang that is not served."""
    if version.partition("+")[0] not in _SERVED:
        raise NotServed(f"SGLang {version} is not served; {', '.join(_SERVED)} is")


def check_served(args: Any, *, defers_release: bool, state_types: Any = ()) -> None:
    """Raise `NotServed` for a configuration (`args`: `ServerArgs`) that is not served.

    Args:
        defers_release: Whether SGLang keeps a failed request's pages until they are no longer written to.
        state_types: What the model keeps beside its KV, as SGLang calls it.
    """
    for name, served in _MUST_BE.items():
        value = getattr(args, name, served[0])
        if value not in served:
            raise NotServed(f"--{name.replace('_', '-')} is not served as {value!r}")
    if state_types:
        names = ", ".join(str(getattr(each, "value", each)) for each in state_types)
        raise NotServed(f"{args.model_path} keeps more than KV ({names}), which is not served")
    if not defers_release:
        raise NotServed("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE must not be off")
