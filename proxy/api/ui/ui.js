// SPDX-License-Identifier: Apache-2.0
// The operator's page: shows each snapshot from /ui/events. Elements are updated in place, so that focus,
// scrolling and opened dialogs survive.

import { AgentDialog } from "./agent.js";
import { showCanary } from "./canary.js";
import { Charts, TRAFFIC, TRANSFER } from "./charts.js";
import { age, byId, bytes, duration, host, make, pill, setClass, setText, words } from "./dom.js";
import { Cordons } from "./cordon.js";
import { Errors } from "./errors.js";
import { ModelChoice } from "./model.js";
import { Nodes } from "./nodes.js";
import { showNextStep, showProxy } from "./proxy.js";
import { RequestLookup } from "./requests.js";
import { Table } from "./tables.js";

const PHASES = { route: "Routing", prefill: "Prefill", decode_wait: "Decode wait", decode: "Decode" };
const EVENT_TONES = {
  joined: "good", ready: "good", uncordoned: "good", breaker_closed: "good", lost: "bad", breaker_opened: "bad",
  connection_refused: "bad", pairing_refused: "bad", ping_rejected: "bad", worker_ended: "bad", pair_out: "bad",
  pair_back: "good",
};
const RETRY_MS = 5000;
const STALE_MS = 4000;

const charts = new Charts([[byId("charts"), TRAFFIC], [byId("transfer-charts"), TRANSFER]]);
const agent = new AgentDialog(() => shownWindow);
const nodes = new Nodes(agent, new Cordons((text) => setText(byId("announcement"), text)));
const requests = new RequestLookup();
const errors = new Errors((id) => requests.find(id), (address) => nodes.nameAt(address));

/* ---- requests in flight ---- */

const phaseCounts = new Map();

function addPhase(phase) {
  const item = make("li");
  const count = make("strong", "", "0");
  item.append(count, make("span", "quiet", PHASES[phase] ?? words(phase)));
  byId("phases").append(item);
  phaseCounts.set(phase, count);
}

function showPhases(inFlight) {
  for (const phase of [...Object.keys(PHASES), ...Object.keys(inFlight)]) {
    if (phase !== "ended" && !phaseCounts.has(phase)) addPhase(phase);
  }
  let total = 0;
  for (const [phase, count] of phaseCounts) {
    total += inFlight[phase] ?? 0;
    setText(count, inFlight[phase] ?? 0);
  }
  setText(byId("flight-total"), total);
}

/* ---- tables ---- */

const pairs = new Table(
  byId("pairs"),
  [
    { title: "Reader", value: ({ consumer }) => nodes.nameAt(consumer) },
    { title: "Reads from", value: ({ producer }) => nodes.nameAt(producer) },
    { title: "Backend", value: ({ backend }) => backend || "–" },
    { title: "Pulls", value: ({ pulls }) => pulls, text: ({ pulls }) => pulls.toLocaleString("en"), className: "number" },
    { title: "Failed", value: ({ failures }) => failures, className: "number" },
    { title: "Bytes", value: ({ nbytes }) => nbytes, text: ({ nbytes }) => bytes(nbytes), className: "number" },
    { title: "Mean time", value: ({ pulls, seconds }) => seconds / (pulls || 1), text: ({ pulls, seconds }) => (pulls ? duration(seconds / pulls) : "–"), className: "number" },
    { title: "Last", value: ({ age_s: seconds }) => seconds, text: ({ age_s: seconds }) => age(seconds) },
  ],
  { key: ({ producer, consumer }) => `${producer} ${consumer}`, empty: "No KV has been pulled since this proxy started.", sort: [7, false] },
);

function eventColumn(cell, { kind, count }) {
  const { firstChild: word } = cell;
  setText(word, count > 1 ? `${words(kind)} × ${count}` : words(kind));
  setClass(word, pill(EVENT_TONES[kind] ?? "warn"));
}

const eventAgent = ({ name, address, role }) =>
  name ? `${name}, ${host(address)}` : address ? `${role}, ${host(address)}` : "this proxy";

/** On a phone the detail is below the agent. */
function showEventAgent({ children: [agent, detail] }, event) {
  setText(agent, eventAgent(event));
  setText(detail, event.detail);
}

const events = new Table(
  byId("events"),
  [
    { title: "When", value: ({ age_s: seconds }) => seconds, text: ({ age_s: seconds }) => age(seconds) },
    { title: "Event", make: (cell) => cell.append(make("span")), show: eventColumn },
    { title: "Agent", make: (cell) => cell.append(make("span"), make("span", "message narrow")), show: showEventAgent, className: "prose" },
    { title: "Detail", value: ({ detail }) => detail, className: "prose wide" },
  ],
  { key: ({ number }) => number, empty: "Nothing has happened since this proxy started." },
);

const incompatible = new Table(
  byId("incompatible"),
  [
    { title: "Prefill", value: ({ prefill }) => host(prefill), className: "mono" },
    { title: "Decode", value: ({ decode }) => host(decode), className: "mono" },
    { title: "Reason", value: ({ reason }) => reason },
  ],
  { key: ({ prefill, decode }) => `${prefill} ${decode}`, empty: "Every prefill agent is compatible with every decode agent of its model." },
);

const rejected = new Table(
  byId("rejected-agents"),
  [
    { title: "Address", value: ({ address }) => host(address), className: "mono" },
    { title: "Control", value: ({ control }) => host(control), className: "mono" },
    { title: "Role", value: ({ role }) => role },
    { title: "Reason", value: ({ reason }) => reason, className: "prose" },
    { title: "Pings", value: ({ count }) => count, className: "number" },
    { title: "Last ping", value: ({ last_ping_s: seconds }) => seconds, text: ({ last_ping_s: seconds }) => age(seconds) },
  ],
  { key: ({ address, reason }) => `${address} ${reason}`, empty: "None." },
);

function showTransfers({ totals, pull_failures: reasons, num_pairs: number, pairs: list }) {
  const pulls = totals.pulls.reduce((sum, count) => sum + count, 0);
  const parts = [`${pulls.toLocaleString("en")} pulls of ${bytes(totals.pull_bytes)}`];
  const failed = Object.entries(reasons).filter(([, count]) => count).map(([reason, count]) => `${words(reason)} ${count}`);
  parts.push(failed.length ? `failed: ${failed.join(", ")}` : "none failed");
  parts.push(`${totals.recomputes} prompts recomputed`, `${totals.leases_expired} leases expired`);
  setText(byId("transfer-totals"), `Since this proxy started: ${parts.join("; ")}.`);
  setText(byId("num-pairs"), list.length < number ? `${number}, the last ${list.length} shown` : number);
  pairs.show(list);
}

/* ---- windows ---- */

let shownWindow = "charts"; // the snapshot's field
let latest = null;

for (const button of document.querySelectorAll("#windows button")) {
  button.addEventListener("click", () => {
    shownWindow = button.value;
    for (const each of document.querySelectorAll("#windows button")) each.setAttribute("aria-pressed", each === button);
    charts.move(null);
    if (latest) charts.show(latest[shownWindow], Boolean(choice.model));
  });
}

function show(snapshot) {
  latest = snapshot;
  showProxy(snapshot.proxy, snapshot.readiness);
  showNextStep(snapshot.proxy, !snapshot.num_nodes && !snapshot.lost.length);
  showPhases(snapshot.in_flight);
  choice.show(snapshot.models);
  charts.show(snapshot[shownWindow], Boolean(choice.model));
  nodes.show(snapshot);
  showTransfers(snapshot);
  showCanary();
  events.show(snapshot.events.map((event, index) => ({ ...event, number: snapshot.events.length - index })));
  setText(byId("num-incompatible"), snapshot.refused_pairings.length < snapshot.num_refused_pairings
    ? `${snapshot.num_refused_pairings}, the first ${snapshot.refused_pairings.length} shown` : snapshot.num_refused_pairings);
  incompatible.show(snapshot.refused_pairings);
  byId("rejected").hidden = !snapshot.rejected_agents.length;
  setText(byId("num-rejected"), snapshot.rejected_agents.length);
  rejected.show(snapshot.rejected_agents);
  errors.show(snapshot.failures);
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
    this.source = new EventSource(`ui/events?model=${encodeURIComponent(choice.model)}`);
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
const choice = new ModelChoice(() => {
  feed.close("");
  feed.update();
});
document.addEventListener("visibilitychange", () => feed.update());
byId("pause").addEventListener("click", (event) => {
  feed.paused = !feed.paused;
  setText(event.currentTarget, feed.paused ? "Resume" : "Pause");
  feed.update();
});
feed.update();
