# SPDX-License-Identifier: Apache-2.0
"""The table in `docs/engines/vllm.md` of what the connector serves, by version of vLLM.

It is worked out by asking the checks that the connector makes when it starts (`check_served`, `groups_of`).
`python -m tests.unit.agent.vllm.served_table --write` puts it into the page; `test_served_table.py` fails
when the page says something else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.vllm.kv_groups import groups_of
from kvferry.agent.vllm.settings import check_served, check_version
from tests.unit.agent.vllm.configs import vllm_config

PAGE = Path(__file__).parents[4] / "docs/engines/vllm.md"
BEGIN, END = "<!-- served: begin -->\n", "<!-- served: end -->\n"
_FULL = ("FullAttentionSpec",)
_RELEASES = [f"0.{minor}" for minor in range(100) if minor]

Row = tuple[str, dict[str, Any], Sequence[str]]
ROWS: tuple[Row, ...] = (
    ("all layers keep all tokens (Llama, Qwen 3)", {}, _FULL),
    ("MLA (DeepSeek, Kimi, GLM)", {"use_mla": True}, ("MLAAttentionSpec",)),
    ("windows (Gemma 3, GPT-OSS, Mistral)", {}, (*_FULL, "SlidingWindowSpec")),
    ("chunks (Llama 4)", {}, (*_FULL, "ChunkedLocalAttentionSpec")),
    ("states (Nemotron-H, Qwen3-Next, Granite 4, LFM2)", {"is_hybrid": True}, (*_FULL, "MambaSpec")),
    ("other KV caches (ring buffers, replay windows, encoders)", {}, ("CircularBufferSpec",)),
    ("a KV cache type, such as `fp8`", {"cache_dtype": "fp8"}, _FULL),
    ("`calculate_kv_scales`", {"calculate_kv_scales": True}, _FULL),
    ("tensor parallel", {"tensor_parallel_size": 2}, _FULL),
    ("pipeline parallel", {"pipeline_parallel_size": 2}, _FULL),
    ("data parallel, MoE models", {"data_parallel_size": 2}, _FULL),
    ("data parallel, dense models", {"data_parallel_index": 1, "engine_id": "a_dp1"}, _FULL),
    ("context parallel, decode", {"decode_context_parallel_size": 2}, _FULL),
    ("context parallel, prefill", {"prefill_context_parallel_size": 2}, _FULL),
    ("an engine on several nodes", {"nnodes": 2}, _FULL),
    ("Ray executor", {"distributed_executor_backend": "ray"}, _FULL),
    ("speculative decoding (ngram, EAGLE, MTP)", {"speculative_config": object()}, _FULL),
    ("sleep mode", {"enable_sleep_mode": True}, _FULL),
)


def table() -> str:
    """The table in Markdown."""
    releases = [release for release in _RELEASES if not _refusal(check_version, f"{release}.0")]
    assert releases, "some version is served"
    lines = [
        f"| vLLM {releases[0]} to {releases[-1]} | served | otherwise, vLLM's log says |",
        "|---|---|---|",
    ]
    for label, changes, kinds in ROWS:
        refusals = {release: _refused(release, changes, kinds) for release in releases}
        served = [release for release in releases if not refusals[release]]
        assert served == releases[len(releases) - len(served) :], (
            f"{label}: what is served goes on being served"
        )
        since = "yes" if served == releases else f"from {served[0]}" if served else "no"
        said = next((f"`{refusal}`" for refusal in refusals.values() if refusal), "")
        lines.append(f"| {label} | {since} | {said} |")
    return "\n".join(lines) + "\n"


def _refused(release: str, changes: dict[str, Any], kinds: Sequence[str]) -> str:
    """What the connector refuses to start with; empty if it starts."""
    config = vllm_config(**changes)
    caches = SimpleNamespace(kv_cache_groups=[_group(kind) for kind in kinds])
    return _refusal(check_served, f"{release}.0", config) or _refusal(groups_of, caches)


def _refusal(check: Any, *given: Any) -> str:
    try:
        check(*given)
    except NotServed as error:
        return str(error)
    return ""


def _group(kind: str) -> Any:
    return SimpleNamespace(kv_cache_spec=type(kind, (), {"block_size": 16})(), layer_names=["layer"])


def page() -> str:
    """The page with this table in it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(table())
