// SPDX-License-Identifier: Apache-2.0
// Which charts there are, and a cursor that they share.

import { Chart, forgetColours } from "./chart.js";
import { bytes, duration, make, percent, rate, setText } from "./dom.js";

const quantiles = (key) => [
  { key: `${key}_p50`, label: "p50", tone: "main" },
  { key: `${key}_p95`, label: "p95", tone: "tail" },
  { key: `${key}_p99`, label: "p99", tone: "end" },
];

/** Of requests; with `byModel` also of those for one model. */
export const TRAFFIC = [
  { title: "Time to first token", byModel: true, series: quantiles("ttft"), format: duration, floor: 0.01 },
  { title: "Inter-token latency", byModel: true, series: quantiles("itl"), format: duration, floor: 0.001 },
  { title: "Time per output token", byModel: true, series: quantiles("tpot"), format: duration, floor: 0.001 },
  { title: "Streamed tokens per second", byModel: true, series: [{ key: "events", label: "tokens", tone: "main", area: true }], format: rate, floor: 10 },
  { title: "Prompt tokens per second", series: [{ key: "prompt_tokens", label: "tokens", tone: "main", area: true }], format: rate, floor: 10 },
  {
    title: "Requests per second",
    byModel: true,
    series: [
      { key: "requests", label: "ended", tone: "main", area: true },
      { key: "client_errors", label: "4xx", tone: "warn", sparse: true },
      { key: "rejected", label: "429", tone: "limit", sparse: true },
      { key: "server_errors", label: "5xx", tone: "bad", sparse: true },
    ],
    format: rate,
    floor: 1,
  },
  { title: "Requests waiting for an agent", series: [{ key: "queued", label: "waiting", tone: "main", area: true }], format: rate, floor: 4 },
  { title: "Wait in the queue", series: [{ key: "queue_wait_p95", label: "p95 of those that waited", tone: "main" }], format: duration, floor: 0.1 },
  {
    title: "Retries per second",
    series: [
      { key: "retries", label: "retries", tone: "main", sparse: true },
      { key: "migrations", label: "migrations", tone: "tail", sparse: true },
    ],
    format: rate,
    floor: 1,
  },
  { title: "Prompt tokens from a prefix cache", series: [{ key: "cached", label: "cached", tone: "main", area: true }], format: percent, floor: 1 },
];

export const TRANSFER = [
  { title: "KV pulled per second", series: [{ key: "pull_bytes", label: "bytes", tone: "main", area: true }], format: bytes, floor: 1000 },
  { title: "Time of a pull", series: quantiles("pull"), format: duration, floor: 0.01 },
  {
    title: "Pulls that failed, per second",
    series: [
      { key: "recomputes", label: "recomputed", tone: "warn", sparse: true },
      { key: "leases_expired", label: "leases expired", tone: "limit", sparse: true },
      { key: "pull_failures", label: "failed", tone: "bad", sparse: true },
    ],
    format: rate,
    floor: 1,
  },
];

/** Of one agent. */
export const AGENT = [
  {
    title: "Sequences",
    series: [
      { key: "running", label: "running", tone: "main", area: true },
      { key: "waiting", label: "waiting", tone: "tail" },
    ],
    format: rate,
    floor: 4,
  },
  {
    title: "KV blocks in use",
    series: [
      { key: "kv_used", label: "all", tone: "main", area: true },
      { key: "kv_leased", label: "leased to a reader", tone: "end" },
    ],
    format: percent,
    floor: 1,
  },
];

/** The charts of one part of the page. Those that are empty are named in one line. */
class Group {
  constructor(parent, settings, cursor) {
    this.charts = settings.map((each) => new Chart(each, cursor));
    this.folded = make("p", "quiet hint folded");
    parent.append(...this.charts.map(({ figure }) => figure));
    parent.after(this.folded);
  }

  fold(ofOneModel) {
    const charts = this.charts.filter(({ byModel }) => byModel || !ofOneModel);
    for (const chart of this.charts) chart.figure.hidden = chart.isEmpty || !charts.includes(chart);
    const empty = charts.filter((chart) => chart.isEmpty).map(({ title }) => title);
    setText(this.folded, empty.length ? `Empty in this window: ${empty.join(", ")}.` : "");
  }
}

/** Charts with one cursor; `parts` are elements with the settings of the charts in them. */
export class Charts {
  constructor(parts) {
    this.cursor = null; // slices before the last one, or null
    this.isMoving = false;
    this.groups = parts.map(([parent, settings]) => new Group(parent, settings, this));
    this.all = this.groups.flatMap(({ charts }) => charts);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      forgetColours();
      for (const { plot } of this.all) plot?.redraw(false, true);
    });
  }

  /** With `ofOneModel`, only what is counted by model. */
  show(charts, ofOneModel = false) {
    for (const chart of this.all) chart.show(charts);
    for (const group of this.groups) group.fold(ofOneModel);
  }

  move(cursor) {
    this.cursor = cursor;
    this.isMoving = true;
    for (const chart of this.all) chart.place();
    this.isMoving = false;
  }
}
