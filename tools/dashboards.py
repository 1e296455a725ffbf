# SPDX-License-Identifier: Apache-2.0
"""Generates the Grafana dashboards of `deploy/monitoring/` from tables of panels.

`python -m tools.dashboards --write` (or `make dashboards`) brings the files up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.reference import metric_helps

FOLDER = Path(__file__).parents[1] / "deploy" / "monitoring"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
STAT_HEIGHT, CHART_HEIGHT = 4, 8

PROXY = 'job="kvferry-proxy"'
AT_PROXY = 'job="kvferry-proxy",model_name=~"$model"'
OF_AGENT = 'job="kvferry-proxy",agent=~"$agent"'
AGENT = 'job="kvferry-agent",model_name=~"$model",instance=~"$agent"'
EACH_AGENT = "instance, name"
"""Labels of one agent: names need not be unique."""
QUANTILES = (("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `series`: expression and legend of each. `red_from`, of a stat: the value that is bad."""

    title: str
    series: Sequence[tuple[str, str]]
    unit: str = "short"
    text: str = ""
    stat: bool = False
    red_from: float | None = None
    red_below: float | None = None


def rate(metric: str, where: str, by: str = "") -> str:
    """What a counter grows by in a second, over all or by one label."""
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}{{{where}}}[$__rate_interval]))"


def quantiles(metric: str, where: str) -> list[tuple[str, str]]:
    """Three quantiles of a histogram."""
    buckets = rate(f"{metric}_bucket", where, "le")
    return [(f"histogram_quantile({share}, {buckets})", name) for share, name in QUANTILES]


def p95(metric: str, where: str, by: str) -> tuple[str, str]:
    """The 95th percentile of a histogram for each value of a label."""
    return f"histogram_quantile(0.95, {rate(f'{metric}_bucket', where, f'le, {by}')})", _legend(by)


def by(metric: str, where: str, label: str) -> tuple[str, str]:
    """The rate of a counter for each value of a label."""
    return rate(metric, where, label), _legend(label)


def _legend(labels: str) -> str:
    """The value of the last label."""
    return f"{{{{{labels.rpartition(', ')[2]}}}}}"


def ratio(part: str, whole: str, where: str) -> str:
    """What share of one counter's growth another one's is."""
    return f"{rate(part, where)} / {rate(whole, where)}"


KV_IN_USE = f"kvferry_agent_kv_cache_usage_perc{{{AGENT}}}"

TOKENS = (
    (rate("kvferry_agent_prompt_tokens_total", AGENT), "prompt"),
    (rate("kvferry_agent_prompt_tokens_cached_total", AGENT), "of it cached"),
    (rate("kvferry_agent_generation_tokens_total", AGENT), "generated"),
)
PROMPT_TOKENS = Panel(
    title="Tokens of prompts", series=quantiles("kvferry_agent_request_prompt_tokens", AGENT)
)
ANSWER_TOKENS = Panel(
    title="Tokens of answers", series=quantiles("kvferry_agent_request_generation_tokens", AGENT)
)
FAILED_PULLS = Panel(
    title="Failed pulls, by reason", series=[by("kvferry_transfer_failures_total", AGENT, "reason")]
)
LEASES_ENDED = Panel(
    title="Leases ended, by cause", series=[by("kvferry_transfer_leases_ended_total", AGENT, "cause")]
)

FLEET: dict[str, list[Panel]] = {
    "Fleet": [
        *(
            Panel(
                title=f"{role.capitalize()} agents ready",
                series=[
                    (
                        f"max(sum by (instance) (kvferry_proxy_nodes{{{PROXY},"
                        f'role=~"{role}|both",state="ready"}}))',
                        "",
                    )
                ],
                stat=True,
                red_below=1,
            )
            for role in ("prefill", "decode")
        ),
        Panel(
            title="Agents lost, 1 h",
            series=[
                (f"max(sum by (instance) (increase(kvferry_proxy_agents_lost_total{{{PROXY}}}[1h])))", "")
            ],
            stat=True,
            red_from=1,
        ),
        Panel(
            title="Refused pairings",
            series=[(f"max(sum by (instance) (kvferry_proxy_refused_pairings{{{PROXY}}}))", "")],
            stat=True,
            red_from=1,
        ),
        Panel(
            title="Requests in flight",
            series=[(f"sum(kvferry_proxy_requests_in_flight{{{PROXY}}})", "")],
            stat=True,
        ),
        Panel(
            title="Requests waiting",
            series=[(f"sum(kvferry_proxy_num_requests_waiting{{{PROXY}}})", "")],
            stat=True,
        ),
        Panel(
            title="Requests failed, 5 min",
            text="Share of requests that ended with a 5xx, of the model with most of them.",
            series=[('max(kvferry:requests_failed:ratio_rate5m{model_name=~"$model"})', "")],
            unit="percentunit",
            stat=True,
            red_from=0.01,
        ),
        Panel(
            title="First token too late, 5 min",
            text="Share of streamed requests over --ttft-objective-s, of the model with most of them.",
            series=[('max(kvferry:ttft_slow:ratio_rate5m{model_name=~"$model"})', "")],
            unit="percentunit",
            stat=True,
            red_from=0.05,
        ),
    ],
    "What clients see": [
        Panel(
            title="Time to first token",
            series=quantiles("kvferry_proxy_time_to_first_token_seconds", AT_PROXY),
            unit="s",
        ),
        Panel(
            title="Time per output token",
            series=quantiles("kvferry_proxy_request_time_per_output_token_seconds", AT_PROXY),
            unit="s",
            text="Mean over each streamed answer.",
        ),
        Panel(
            title="End to end",
            series=quantiles("kvferry_proxy_e2e_request_latency_seconds", AT_PROXY),
            unit="s",
        ),
        Panel(
            title="Requests by status",
            series=[by("kvferry_proxy_requests_total", AT_PROXY, "status")],
            unit="reqps",
            text="499: the client left.",
        ),
        Panel(
            title="Requests by model",
            series=[by("kvferry_proxy_requests_total", AT_PROXY, "model_name")],
            unit="reqps",
        ),
        Panel(
            title="Rejected",
            series=[
                by("kvferry_proxy_rejections_total", PROXY, "reason"),
                (rate("kvferry_proxy_requests_total", f'{AT_PROXY},status="429"'), "all 429"),
            ],
            unit="reqps",
            text="What is not in a reason is over its API key's own rate.",
        ),
    ],
    "Objectives": [
        Panel(
            title=title,
            series=[
                (f'kvferry:{name}:ratio_rate{window}{{model_name=~"$model"}}', f"{{{{model_name}}}} {window}")
                for window in ("5m", "1h", "3d")
            ],
            unit="percentunit",
            text=f"Share of {what}, over the window in the legend.",
        )
        for title, name, what in (
            ("Requests failed", "requests_failed", "requests that ended with a 5xx"),
            ("First token too late", "ttft_slow", "streamed requests over --ttft-objective-s"),
            ("Tokens too slow", "tpot_slow", "streamed requests over --tpot-objective-s"),
        )
    ],
    "Where the time goes": [
        Panel(
            title="Requests in flight by phase",
            series=[(f"sum by (phase) (kvferry_proxy_requests_in_flight{{{PROXY}}})", "{{phase}}")],
        ),
        Panel(
            title="Phases at the proxy, p95",
            series=[p95("kvferry_proxy_phase_seconds", PROXY, "phase")],
            unit="s",
        ),
        Panel(
            title="Phases at the agents, p95",
            series=[p95("kvferry_agent_phase_seconds", AGENT, "phase")],
            unit="s",
        ),
    ],
    "Tokens": [
        Panel(
            title="Tokens",
            series=TOKENS,
            text="A second, at the fleet's own agents.",
        ),
        PROMPT_TOKENS,
        ANSWER_TOKENS,
    ],
    "Agents": [
        Panel(title="Running", series=[(f"kvferry_agent_num_requests_running{{{AGENT}}}", "{{name}}")]),
        Panel(title="Waiting", series=[(f"kvferry_agent_num_requests_waiting{{{AGENT}}}", "{{name}}")]),
        Panel(title="KV blocks in use", series=[(KV_IN_USE, "{{name}}")], unit="percentunit"),
        Panel(
            title="In flight at each agent",
            series=[(f"sum by (agent) (kvferry_proxy_agent_in_flight{{{OF_AGENT}}})", "{{agent}}")],
            text="Of the proxies' sequences.",
        ),
        Panel(
            title="Failures of each agent",
            series=[by("kvferry_proxy_agent_legs_total", f'{OF_AGENT},outcome="failed"', "agent")],
            unit="reqps",
            text="What counts for its circuit breaker.",
        ),
        Panel(
            title="Agents by role and state",
            series=[(f"sum by (role, state) (kvferry_proxy_nodes{{{PROXY}}}) > 0", "{{role}} {{state}}")],
        ),
    ],
    "Scaling": [
        Panel(
            title="Agents wanted",
            series=[(f"sum by (role) (kvferry_proxy_wanted_agents{{{AT_PROXY}}})", "{{role}}")],
            text="That the requests which arrive would keep busy all the time.",
        ),
        Panel(
            title="Prefill backlog",
            series=[(f"sum(kvferry_proxy_prefill_backlog_seconds{{{AT_PROXY}}})", "of one agent's work")],
            unit="s",
        ),
        Panel(
            title="Decode pressure",
            series=[(f"sum(kvferry_proxy_decode_pressure{{{AT_PROXY}}})", "sequences over slots")],
            unit="percentunit",
            text="Over 100 % some wait.",
        ),
    ],
    "Failover and discovery": [
        Panel(
            title="Retries and migrations",
            series=[
                (rate("kvferry_proxy_retries_total", PROXY, "leg"), "retries, {{leg}} lost"),
                (rate("kvferry_proxy_migrations_total", PROXY), "migrations"),
                (rate("kvferry_proxy_retries_denied_total", PROXY), "denied"),
            ],
            unit="reqps",
        ),
        Panel(
            title="Refused pairings, by reason",
            series=[(f"sum by (reason) (kvferry_proxy_refused_pairings{{{PROXY}}}) > 0", "{{reason}}")],
        ),
        Panel(
            title="Refused and bad pings",
            series=[
                by("kvferry_proxy_rejected_pings_total", PROXY, "reason"),
                (rate("kvferry_proxy_bad_pings_total", PROXY), "no ping at all"),
            ],
        ),
    ],
}

TRANSFER: dict[str, list[Panel]] = {
    "Pulls": [
        Panel(title="KV pulled", series=[by("kvferry_transfer_bytes_total", AGENT, EACH_AGENT)], unit="Bps"),
        Panel(
            title="How long pulls take",
            series=quantiles("kvferry_transfer_pull_seconds", AGENT),
            unit="s",
            text="From the first read to the proof that what was read is valid.",
        ),
        Panel(
            title="By backend, p95", series=[p95("kvferry_transfer_pull_seconds", AGENT, "backend")], unit="s"
        ),
        Panel(title="Pulls by backend", series=[by("kvferry_transfer_pull_seconds_count", AGENT, "backend")]),
        Panel(
            title="Speed of a pull",
            series=[
                (
                    f"{rate('kvferry_transfer_bytes_total', AGENT, EACH_AGENT)} "
                    f"/ {rate('kvferry_transfer_pull_seconds_sum', AGENT, EACH_AGENT)}",
                    "{{name}}",
                )
            ],
            unit="Bps",
        ),
        Panel(
            title="Bytes per descriptor",
            series=[
                (ratio("kvferry_transfer_bytes_total", "kvferry_transfer_descriptors_total", AGENT), "bytes")
            ],
            unit="bytes",
        ),
        Panel(
            title="Streamed pulls",
            series=[
                (
                    ratio("kvferry_transfer_streamed_pulls_total", "kvferry_transfer_pulls_total", AGENT),
                    "had blocks before the prefill ended",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            title="Verification",
            series=[
                (
                    ratio(
                        "kvferry_transfer_verify_seconds_total", "kvferry_transfer_pull_seconds_sum", AGENT
                    ),
                    "share of pulling",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            title="Waiting for room to pull into, p95",
            series=[p95("kvferry_agent_phase_seconds", f'{AGENT},phase="pull_wait"', EACH_AGENT)],
            unit="s",
        ),
    ],
    "What goes wrong": [
        FAILED_PULLS,
        Panel(
            title="Prompts computed again", series=[by("kvferry_agent_recomputes_total", AGENT, EACH_AGENT)]
        ),
        Panel(
            title="Share of prompts computed again",
            text="Prompts that decode agents computed because pulling their KV failed.",
            series=[("kvferry:recomputes:ratio_rate10m", "recomputed")],
            unit="percentunit",
        ),
        Panel(
            title="Transfer engines rebuilt",
            series=[by("kvferry_transfer_rebuilds_total", AGENT, EACH_AGENT)],
        ),
        Panel(title="Handshakes", series=[by("kvferry_transfer_handshakes_total", AGENT, EACH_AGENT)]),
        Panel(
            title="Drops at prefill agents",
            series=[by("kvferry_proxy_drops_total", PROXY, "outcome")],
            text="Of KV without a reader.",
        ),
    ],
    "Leases": [
        LEASES_ENDED,
        Panel(
            title="Leased KV blocks",
            series=[(f'kvferry_agent_kv_blocks{{{AGENT},state="leased"}}', "{{name}}")],
        ),
        Panel(
            title="KV blocks in quarantine",
            series=[(f'kvferry_agent_kv_blocks{{{AGENT},state="quarantined"}}', "{{name}}")],
            text="Of failed pulls whose reads may still write.",
        ),
        Panel(
            title="Leases of other engines",
            series=[by("kvferry_proxy_leases_judged_total", PROXY, "verdict")],
        ),
        Panel(
            title="Prompts computed again by other engines",
            series=[by("kvferry_proxy_prompts_recomputed_total", PROXY, "dialect")],
        ),
    ],
}

NODE: dict[str, list[Panel]] = {
    "Now": [
        Panel(
            title="Running", series=[(f"sum(kvferry_agent_num_requests_running{{{AGENT}}})", "")], stat=True
        ),
        Panel(
            title="Waiting", series=[(f"sum(kvferry_agent_num_requests_waiting{{{AGENT}}})", "")], stat=True
        ),
        Panel(
            title="KV blocks in use",
            series=[(f"max({KV_IN_USE})", "")],
            unit="percentunit",
            stat=True,
            red_from=0.95,
        ),
        Panel(
            title="In flight, says the proxy",
            series=[(f"sum(kvferry_proxy_agent_in_flight{{{OF_AGENT}}})", "")],
            stat=True,
        ),
    ],
    "Requests": [
        Panel(
            title="Requests by status",
            series=[by("kvferry_agent_requests_total", AGENT, "status")],
            unit="reqps",
            text="One for each leg.",
        ),
        Panel(
            title="Legs, as the proxy saw them end",
            series=[by("kvferry_proxy_agent_legs_total", OF_AGENT, "outcome")],
            unit="reqps",
        ),
        Panel(
            title="Choices, by how they ended",
            series=[by("kvferry_agent_request_success_total", AGENT, "finished_reason")],
        ),
        Panel(title="Queue", series=quantiles("kvferry_agent_request_queue_time_seconds", AGENT), unit="s"),
        Panel(title="Phases, p95", series=[p95("kvferry_agent_phase_seconds", AGENT, "phase")], unit="s"),
        Panel(
            title="Tokens",
            series=TOKENS,
        ),
    ],
    "Engine": [
        Panel(
            title="Running and waiting",
            series=[
                (f"sum(kvferry_agent_num_requests_running{{{AGENT}}})", "running"),
                (f"sum(kvferry_agent_num_requests_waiting{{{AGENT}}})", "waiting"),
            ],
        ),
        Panel(
            title="KV blocks by state",
            series=[(f"sum by (state) (kvferry_agent_kv_blocks{{{AGENT}}})", "{{state}}")],
        ),
        Panel(title="Engine steps", series=[(rate("kvferry_agent_steps_total", AGENT), "steps")]),
        Panel(
            title="Preemptions", series=[(rate("kvferry_agent_num_preemptions_total", AGENT), "sequences")]
        ),
        PROMPT_TOKENS,
        ANSWER_TOKENS,
    ],
    "KV transfer": [
        Panel(title="KV pulled", series=[(rate("kvferry_transfer_bytes_total", AGENT), "bytes")], unit="Bps"),
        Panel(title="Pulls", series=quantiles("kvferry_transfer_pull_seconds", AGENT), unit="s"),
        FAILED_PULLS,
        LEASES_ENDED,
        Panel(
            title="Prompts computed again",
            series=[(rate("kvferry_agent_recomputes_total", AGENT), "prompts")],
        ),
        Panel(
            title="Memory of the API process",
            series=[(f"process_resident_memory_bytes{{{AGENT}}}", "{{name}}")],
            unit="bytes",
        ),
    ],
}


def dashboard(
    uid: str, title: str, rows: dict[str, list[Panel]], *, one_agent: bool = False
) -> dict[str, Any]:
    """Return one dashboard as Grafana's JSON (schema version 39)."""
    return {
        "uid": uid,
        "title": title,
        "tags": ["kvferry"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "links": [{"type": "dashboards", "title": "kvferry", "tags": ["kvferry"], "asDropdown": True}],
        "templating": {"list": list(_variables(one_agent))},
        "annotations": {"list": []},
        "panels": list(_placed(rows)),
    }


def dashboards() -> dict[Path, str]:
    """Return the text of each dashboard."""
    made = {
        "grafana-fleet.json": dashboard("kvferry-fleet", "kvferry: fleet", FLEET),
        "grafana-transfer.json": dashboard("kvferry-transfer", "kvferry: KV transfer", TRANSFER),
        "grafana-node.json": dashboard("kvferry-node", "kvferry: one agent", NODE, one_agent=True),
    }
    return {FOLDER / name: json.dumps(made[name], indent=1) + "\n" for name in made}


def _variables(one_agent: bool) -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }
    for name, query, many in (
        ("model", f"label_values(kvferry_proxy_requests_total{{{PROXY}}}, model_name)", True),
        ("agent", 'label_values(kvferry_agent_steps_total{model_name=~"$model"}, instance)', not one_agent),
    ):
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": many,
            "includeAll": many,
            **(
                {"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if many else {"current": {}}
            ),
            "hide": 0,
        }


def _placed(rows: dict[str, list[Panel]]) -> Iterator[dict[str, Any]]:
    """Yield the panels with their places: stats in one line, charts three in a line."""
    number, top = 1, 0
    for title, panels in rows.items():
        yield {"id": number, "type": "row", "title": title, "gridPos": _place(0, top, WIDTH, 1), "panels": []}
        number, top = number + 1, top + 1
        in_line = len(panels) if panels[0].stat else 3
        width, height = WIDTH // in_line, STAT_HEIGHT if panels[0].stat else CHART_HEIGHT
        for position, panel in enumerate(panels):
            line, column = divmod(position, in_line)
            yield _panel(panel, number, _place(column * width, top + line * height, width, height))
            number += 1
        top += (len(panels) + in_line - 1) // in_line * height


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.stat:
        options: dict[str, Any] = {
            "colorMode": "value", "graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]},
        }  # fmt: skip
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(panel)}
    else:
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": _description(panel),
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for at, (expression, legend) in enumerate(panel.series)
        ],
    }


def _description(panel: Panel) -> str:
    """Its text, and what the help texts say of its metrics."""
    helps, names = metric_helps(), dict[str, None]()
    for expression, _ in panel.series:
        names |= dict.fromkeys(re.findall(r"\b(?:kvferry|process)_\w+", expression))
    shown = dict.fromkeys(helps[re.sub("_(total|bucket|sum|count)$", "", name)] for name in names)
    return "\n\n".join(filter(None, [panel.text, *shown]))


def _steps(panel: Panel) -> list[dict[str, Any]]:
    if panel.red_below is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    return steps if panel.red_from is None else [*steps, {"color": "red", "value": panel.red_from}]


if __name__ == "__main__":
    for path, text in dashboards().items():
        if sys.argv[1:] == ["--write"]:
            path.write_text(text)
        else:
            print(text)
