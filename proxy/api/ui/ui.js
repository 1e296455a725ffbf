// SPDX-License-Identifier: Apache-2.0
// The operator's dashboard: renders each snapshot from /ui/events. Elements are updated in place, so that
// focus, scrolling and opened nodes survive; data only ever becomes text, never markup.
"use strict";

const PHASES = { route: "Routing", prefill: "Prefill", decode_wait: "Decode wait", decode: "Decode" };
const ROLES = ["prefill", "decode", "both"];
const STATE_TONES = { ready: "good", starting: "warn", draining: "warn", refusing: "bad", tripped: "bad", stalled: "bad" };
const RETRY_MS = 5000;
const STALE_MS = 4000;
const RECENT_S = 20;

const byId = (id) => document.getElementById(id);

/** Make an element; `text` is optional. */
function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** Set text only where it differs: a selection survives, and screen readers announce only changes. */
function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

const duration = (seconds) =>
  seconds < 0.00995 ? `${(seconds * 1000).toFixed(1)} ms`
    : seconds < 0.9995 ? `${(seconds * 1000).toFixed(0)} ms`
      : seconds < 9.995 ? `${seconds.toFixed(2)} s`
        : `${seconds.toFixed(0)} s`;
const rate = (value) => (value !== 0 && value < 9.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
const age = (seconds) =>
  seconds < 90 ? `${Math.round(seconds)} s ago`
    : seconds < 5400 ? `${Math.round(seconds / 60)} min ago`
      : `${Math.round(seconds / 3600)} h ago`;
const host = (address) => address.replace(/^(https?|tcp):\/\//, "");

/* ---- charts ---- */

const SVG = "http://www.w3.org/2000/svg";
const EDGE = { left: 46, right: 8, top: 10, bottom: 20 };

function shape(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** The smallest of 1, 2 and 5 times a power of ten that is not below `value`. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

/** One figure: lines over the last minutes, and the values at the cursor or the latest ones. */
class Chart {
  constructor(title, series, format, floor) {
    this.title = title;
    this.series = series; // [{ key, label, tone, area?, hideZero? }]
    this.format = format;
    this.floor = floor; // the smallest maximum of the scale
    this.cursor = null; // slices before the last one, or null
    this.data = null;
    this.figure = make("figure");
    const caption = make("figcaption", "", title);
    this.when = make("span", "when quiet");
    this.output = make("output");
    caption.append(this.when, this.output);
    this.svg = shape("svg", { class: "chart", tabindex: "0", role: "img", "aria-label": title });
    this.figure.append(caption, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.move(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(charts) {
    this.data = charts;
    this.draw();
  }

  point(event) {
    if (!this.data) return;
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    this.move(Math.round((1 - share) * (this.length - 1)));
  }

  key(event) {
    const now = this.cursor ?? -1;
    const to = {
      ArrowLeft: now + 1, ArrowRight: now - 1, PageUp: now + 15, PageDown: now - 15,
      Home: this.length - 1, End: 0, Escape: null,
    };
    if (!this.data || !(event.key in to)) return;
    event.preventDefault();
    this.move(to[event.key]);
  }

  move(cursor) {
    this.cursor = cursor === null ? null : Math.min(Math.max(cursor, 0), this.length - 1);
    this.draw();
  }

  get length() {
    return this.data[this.series[0].key].length;
  }

  draw() {
    if (!this.data) return;
    const width = this.svg.clientWidth || 300;
    const height = this.svg.clientHeight || 132;
    const values = this.series.flatMap(({ key }) => this.data[key]).filter((value) => value !== null);
    const top = niceCeiling(Math.max(this.floor, ...values));
    const x = (index) => EDGE.left + (index / (this.length - 1)) * (width - EDGE.left - EDGE.right);
    const y = (value) => height - EDGE.bottom - (value / top) * (height - EDGE.top - EDGE.bottom);
    const parts = [...this.scale(width, height, top, y)];
    for (const { key, tone, area, hideZero } of this.series) {
      const line = hideZero ? this.data[key].map((value) => value || null) : this.data[key];
      parts.push(...this.line(line, tone, area, x, y));
    }
    if (this.cursor !== null) {
      const at = x(this.length - 1 - this.cursor);
      parts.push(shape("line", { class: "cursor", x1: at, x2: at, y1: EDGE.top, y2: height - EDGE.bottom }));
    }
    this.svg.replaceChildren(...parts);
    this.showValues();
  }

  *scale(width, height, top, y) {
    for (const value of [0, top / 2, top]) {
      const at = Math.round(y(value)) + 0.5;
      yield shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at });
      yield shape("text", { x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, value ? this.format(value) : "0");
    }
    const minutes = Math.round((this.length * this.data.slice_s) / 60);
    yield shape("text", { x: EDGE.left, y: height - 5 }, `${minutes} min ago`);
    yield shape("text", { x: width - EDGE.right, y: height - 5, "text-anchor": "end" }, "now");
  }

  /** Consecutive values as lines, and a dot for a value without neighbours. */
  *line(values, tone, area, x, y) {
    let path = "";
    for (let start = 0; start < values.length; start++) {
      if (values[start] === null) continue;
      let end = start;
      while (end + 1 < values.length && values[end + 1] !== null) end++;
      if (start === end) {
        yield shape("circle", { class: tone, cx: x(start), cy: y(values[start]), r: 2.2 });
      } else {
        const points = values.slice(start, end + 1).map((value, index) => `${x(start + index).toFixed(1)} ${y(value).toFixed(1)}`);
        path += `M${points.join("L")}`;
        if (area) {
          const base = `L${x(end).toFixed(1)} ${y(0).toFixed(1)}L${x(start).toFixed(1)} ${y(0).toFixed(1)}Z`;
          yield shape("path", { class: "area", d: `M${points.join("L")}${base}` });
        }
      }
      start = end;
    }
    if (path) yield shape("path", { class: tone, d: path });
  }

  /** Show the values at the cursor; without one, the latest of the last seconds. */
  showValues() {
    const parts = this.series.map(({ key, label, tone }) => {
      const value = this.value(this.data[key]);
      const part = make("span", `series ${tone}`, `${label} `);
      part.append(make("b", "", value === null ? "–" : this.format(value)), " ");
      return part;
    });
    setText(this.when, this.cursor === null ? "" : age((this.cursor + 1) * this.data.slice_s));
    this.output.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", `${this.title} ${this.when.textContent}: ${this.output.textContent.trim()}`);
  }

  value(values) {
    if (this.cursor !== null) return values[values.length - 1 - this.cursor];
    const recent = values.slice(-Math.ceil(RECENT_S / this.data.slice_s));
    return recent.findLast((value) => value !== null) ?? null;
  }
}

const quantiles = (key) => [
  { key: `${key}_p50`, label: "p50", tone: "main" },
  { key: `${key}_p95`, label: "p95", tone: "tail" },
];
const charts = [
  new Chart("Time to first token", quantiles("ttft"), duration, 0.01),
  new Chart("Time per output token", quantiles("tpot"), duration, 0.001),
  new Chart("Streamed tokens per second", [{ key: "events", label: "tokens", tone: "main", area: true }], rate, 10),
  new Chart(
    "Requests per second",
    [
      { key: "requests", label: "ended", tone: "main", area: true },
      { key: "failures", label: "failed", tone: "bad", hideZero: true },
    ],
    rate,
    1,
  ),
];
byId("charts").append(...charts.map((chart) => chart.figure));

/* ---- phases ---- */

const phaseCounts = new Map();

function showPhases(inFlight) {
  for (const phase of [...Object.keys(PHASES), ...Object.keys(inFlight)]) {
    if (phase === "ended" || phaseCounts.has(phase)) continue;
    const item = make("li");
    const count = make("strong", "", "0");
    item.append(count, make("span", "quiet", PHASES[phase] ?? phase.replaceAll("_", " ")));
    byId("phases").append(item);
    phaseCounts.set(phase, count);
  }
  let total = 0;
  for (const [phase, count] of phaseCounts) {
    total += inFlight[phase] ?? 0;
    setText(count, inFlight[phase] ?? 0);
  }
  setText(byId("flight-total"), total);
}

/* ---- nodes ---- */

function makeMeter(label) {
  const meter = make("div", "meter");
  const bar = make("div", "bar");
  const first = make("i", "first");
  const second = make("i", "second");
  const words = make("span", "words quiet");
  bar.append(first, second);
  meter.append(make("span", "quiet", label), bar, words);
  return {
    meter,
    show(parts, whole, text) {
      first.style.width = `${(100 * parts[0]) / Math.max(whole, 1)}%`;
      second.style.width = `${(100 * parts[1]) / Math.max(whole, 1)}%`;
      setText(words, text);
    },
  };
}

/** One agent: a summary that is always visible, and the other fields of /nodes once it is opened. */
class NodeCard {
  constructor() {
    this.details = make("details");
    const summary = make("summary");
    const line = make("div", "line");
    this.address = make("span", "address mono");
    this.state = make("span", "pill");
    this.ping = make("span", "ping quiet");
    line.append(this.address, this.state, this.ping);
    this.load = makeMeter("Load");
    this.kv = makeMeter("KV");
    this.problem = make("p", "problem");
    summary.append(line, this.load.meter, this.kv.meter, this.problem);
    this.facts = make("dl");
    this.factValues = new Map();
    this.details.append(summary, this.facts);
  }

  show(node, busiest) {
    const { running, waiting, kv_blocks_free: free, kv_blocks_total: total, kv_blocks_leased: leased } = node.load;
    setText(this.address, host(node.address));
    setText(this.state, node.state);
    this.state.className = `pill ${STATE_TONES[node.state] ?? "warn"}`;
    setText(this.ping, `ping ${node.last_ping_s.toFixed(1)} s`);
    const capacity = node.load.max_running || busiest;
    this.load.show([running, waiting], Math.max(capacity, running + waiting), `${running} running, ${waiting} waiting`);
    const percent = total ? Math.round((100 * (total - free)) / total) : 0;
    this.kv.show([Math.max(total - free - leased, 0), leased], total, `${percent} % of ${total} blocks`);
    setText(this.problem, node.not_paired ? `Not paired: ${node.not_paired}` : "");
    this.problem.hidden = !node.not_paired;
    for (const [key, value] of Object.entries(node)) {
      if (value !== null && (typeof value !== "object" || Array.isArray(value))) this.fact(key, value);
    }
  }

  fact(key, value) {
    if (!this.factValues.has(key)) {
      const cell = make("dd", "mono");
      this.facts.append(make("dt", "", key.replaceAll("_", " ")), cell);
      this.factValues.set(key, cell);
    }
    setText(this.factValues.get(key), Array.isArray(value) ? value.join(", ") : value);
  }
}

const cards = new Map(); // by incarnation
const roleColumns = new Map(
  ROLES.map((role) => {
    const column = make("div", `role ${role}`);
    const title = make("h3", "", role);
    const count = make("span", "count");
    title.append(count);
    const list = make("div", "cards");
    const empty = make("p", "empty", `No ${role} agents.`);
    column.append(title, empty, list);
    byId("roles").append(column);
    return [role, { column, count, list, empty }];
  }),
);

function showNodes(nodes, total) {
  setText(byId("num-nodes"), nodes.length < total ? `${total}, the first ${nodes.length} shown` : total);
  const busiest = Math.max(4, ...nodes.map((node) => node.load.running + node.load.waiting));
  const present = new Set(nodes.map((node) => node.incarnation));
  for (const [incarnation, card] of cards) {
    if (present.has(incarnation)) continue;
    card.details.remove();
    cards.delete(incarnation);
  }
  for (const [role, { column, count, list, empty }] of roleColumns) {
    const mine = nodes.filter((node) => node.role === role);
    mine.forEach((node, index) => {
      if (!cards.has(node.incarnation)) cards.set(node.incarnation, new NodeCard());
      const card = cards.get(node.incarnation);
      card.show(node, busiest);
      if (list.children[index] !== card.details) list.insertBefore(card.details, list.children[index] ?? null);
    });
    setText(count, mine.length);
    empty.hidden = mine.length > 0;
    column.hidden = role === "both" && !mine.length;
  }
}

/* ---- tables ---- */

/** Rows of cells `[text, className]`; rows and cells are kept, only their text changes. */
function showRows(table, rows, emptyText) {
  const body = table.tBodies[0];
  const shown = rows.length ? rows : [[[emptyText, "empty-row"]]];
  while (body.rows.length > shown.length) body.deleteRow(-1);
  shown.forEach((cells, index) => {
    const row = body.rows[index] ?? body.insertRow();
    while (row.cells.length > cells.length) row.deleteCell(-1);
    cells.forEach(([text, className], position) => {
      const cell = row.cells[position] ?? row.insertCell();
      cell.className = className ?? "";
      cell.title = className?.includes("cut") ? text : "";
      cell.colSpan = rows.length ? 1 : table.tHead.rows[0].cells.length;
      setText(cell, text);
    });
  });
}

function showIncompatiblePairs(pairings, total) {
  setText(byId("num-incompatible"), pairings.length < total ? `${total}, the first ${pairings.length} shown` : total);
  const rows = pairings.map(({ prefill, decode, reason }) => [[host(prefill), "mono"], [host(decode), "mono"], [reason]]);
  showRows(byId("incompatible"), rows, "Every prefill agent is compatible with every decode agent of its model.");
}

function showRejectedAgents(agents) {
  byId("rejected").hidden = !agents.length;
  setText(byId("num-rejected"), agents.length);
  const rows = agents.map((agent) => [
    [host(agent.address), "mono"],
    [host(agent.control), "mono"],
    [agent.role],
    [agent.reason, "prose"],
    [agent.count],
    [age(agent.last_ping_s)],
  ]);
  showRows(byId("rejected-agents"), rows, "None.");
}

function showFailures(failures) {
  setText(byId("num-failures"), failures.reduce((sum, failure) => sum + failure.count, 0));
  const rows = failures.map((failure) => [
    [failure.status],
    [failure.code.replaceAll("_", " ")],
    [failure.count],
    [age(failure.age_s)],
    [failure.model || "–", "cut"],
    [failure.request_id, "mono cut"],
  ]);
  showRows(byId("failures"), rows, "No request has failed.");
}

function showReadiness({ ready, waiting }) {
  const pill = byId("readiness");
  setText(pill, ready ? "ready" : "not ready");
  pill.className = `pill ${ready ? "good" : "bad"}`;
  const reasons = Object.entries(waiting).map(([model, why]) => (model ? `${model}: ${why}` : why));
  setText(byId("reason"), reasons.join("; "));
  document.title = ready ? "kvferry" : "kvferry: not ready";
}

function show(snapshot) {
  showReadiness(snapshot.readiness);
  showPhases(snapshot.in_flight);
  charts.forEach((chart) => chart.show(snapshot.charts));
  showNodes(snapshot.nodes, snapshot.num_nodes);
  showIncompatiblePairs(snapshot.refused_pairings, snapshot.num_refused_pairings);
  showRejectedAgents(snapshot.refused_agents);
  showFailures(snapshot.failures);
  document.body.dataset.snapshot = snapshot.time;
}

/* ---- the feed ---- */

/** Subscribes to events while the page is visible and not paused. */
class Feed {
  constructor() {
    this.paused = false;
    this.source = null;
    this.timer = null;
  }

  update() {
    const wanted = !this.paused && !document.hidden;
    if (wanted && !this.source) this.open();
    if (!wanted) this.close(this.paused ? "paused" : "");
  }

  open() {
    clearTimeout(this.timer);
    this.source = new EventSource("ui/events");
    this.source.onmessage = (event) => {
      show(JSON.parse(event.data));
      this.setStatus("live");
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.setStatus("no update from the proxy", true), STALE_MS);
    };
    this.source.onerror = () => {
      this.setStatus("the proxy does not respond; retrying", true);
      // The browser reconnects by itself after a broken connection, but not after an HTTP error.
      if (this.source?.readyState !== EventSource.CLOSED) return;
      this.close("the proxy does not respond; retrying", true);
      this.timer = setTimeout(() => this.update(), RETRY_MS);
    };
  }

  close(text, stale = false) {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    this.setStatus(text, stale);
  }

  setStatus(text, stale = false) {
    setText(byId("connection"), text);
    document.body.classList.toggle("stale", stale);
  }
}

const feed = new Feed();
document.addEventListener("visibilitychange", () => feed.update());
byId("pause").addEventListener("click", (event) => {
  feed.paused = !feed.paused;
  setText(event.currentTarget, feed.paused ? "Resume" : "Pause");
  feed.update();
});
feed.update();
