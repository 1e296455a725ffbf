// SPDX-License-Identifier: Apache-2.0
// The agents: one line each, with a dialog behind its name.

import { age, byId, host, make, nameOf, percent, pill, setClass, setText } from "./dom.js";
import { Table } from "./tables.js";

const STATE_TONES = { ready: "good", starting: "warn", draining: "warn", cordoned: "warn", refusing: "bad", tripped: "bad", stalled: "bad", lost: "bad" };
const STATE_ORDER = ["lost", "stalled", "tripped", "refusing", "starting", "draining", "cordoned", "ready"];

/** Two parts of a whole as a bar, with words beside it. */
function makeMeter(cell, first, second) {
  const bar = make("span", "bar");
  const parts = [make("i", first), make("i", second)];
  const text = make("span", "words");
  const more = make("span", "words wide"); // where there is room
  bar.append(...parts);
  cell.append(bar, text, more);
  cell.meter = { parts, text, more, shown: "" };
}

function showMeter({ meter, firstChild: bar }, counts, whole, text, more = "") {
  bar.hidden = !counts;
  counts ??= [0, 0];
  const shares = counts.map((count) => `${Math.min(100, (100 * count) / Math.max(whole, 1)).toFixed(1)}%`);
  const shown = `${shares} ${text}${more}`;
  if (meter.shown === shown) return;
  meter.shown = shown;
  meter.parts.forEach((part, index) => {
    part.style.width = shares[index];
  });
  setText(meter.text, text);
  setText(meter.more, more);
}

const busy = ({ load }) => (load ? load.running + load.waiting : -1);
/** Of an agent that does both, what share of its work lately was prompts. */
const roleOf = ({ role, work }) => {
  const worked = work ? work.prefill_share + work.decode_share : 0;
  return role === "both" && worked > 0.01 ? `both, ${percent(work.prefill_share / worked)} prefill` : role;
};
const kvShare = ({ load }) => (load?.kv_blocks_total ? 1 - load.kv_blocks_free / load.kv_blocks_total : -1);

export class Nodes {
  constructor(dialog, cordons) {
    this.nodes = [];
    this.names = new Map(); // by address
    this.busiest = 4;
    this.dialog = dialog;
    this.cordons = cordons;
    this.filter = byId("filter");
    this.filter.addEventListener("input", () => this.showRows());
    byId("lost").addEventListener("click", () => {
      this.filter.value = "lost";
      this.showRows();
    });
    this.table = new Table(byId("nodes"), this.columns(), {
      key: (node) => node.incarnation,
      empty: "No agents.",
      sort: [0, false],
      rowClass: (node) => (node.state === "lost" ? "lost" : ""),
    });
  }

  columns() {
    return [
      { title: "Agent", value: nameOf, make: (cell) => this.makeName(cell), show: showName },
      { title: "Role", value: (node) => node.role, text: roleOf, className: "wide" },
      { title: "Model", value: (node) => node.model, className: "cut wide" },
      { title: "State", value: (node) => STATE_ORDER.indexOf(node.state), make: (cell) => cell.append(make("span")), show: showState },
      { title: "Load", value: busy, make: (cell) => makeMeter(cell, "running", "waiting"), show: (cell, node) => this.showLoad(cell, node), className: "meter" },
      { title: "KV blocks", value: kvShare, make: (cell) => makeMeter(cell, "used", "leased"), show: showKv, className: "meter" },
      { title: "Last ping", value: (node) => node.last_ping_s, text: (node) => (node.load ? `${node.last_ping_s.toFixed(1)} s` : age(node.last_ping_s)), className: "wide number" },
      { title: "Actions", hidden: true, make: (cell) => this.makeAction(cell), show: showAction, className: "action" },
    ];
  }

  show({ nodes, num_nodes: total, lost }) {
    const gone = lost.map((event) => ({
      incarnation: `lost ${event.address}`, name: event.name, address: event.address, role: event.role, model: event.model,
      state: "lost", last_ping_s: event.age_s, not_paired: null, load: null,
    }));
    this.nodes = [...nodes, ...gone];
    this.names = new Map(this.nodes.map((node) => [node.address, nameOf(node)]));
    this.busiest = Math.max(4, ...nodes.map(busy));
    const count = nodes.length < total ? `${total}, the first ${nodes.length} shown` : `${total}`;
    byId("lost").hidden = !gone.length;
    setText(byId("lost"), `${gone.length} lost`);
    setText(byId("num-nodes"), gone.length ? `${count}, and ${gone.length} lost` : count);
    this.showRows();
    this.dialog.update(this.nodes);
  }

  /** The name of the agent at an address, which stands for those without a name. */
  nameAt(address) {
    return this.names.get(address) ?? host(address);
  }

  showRows() {
    const wanted = this.filter.value.trim().toLowerCase().split(/\s+/);
    const matches = (node) => {
      const text = `${node.name ?? ""} ${host(node.address)} ${node.role} ${node.state} ${node.model} ${node.dialect ?? ""}`.toLowerCase();
      return wanted.every((word) => text.includes(word));
    };
    const rows = this.filter.value.trim() ? this.nodes.filter(matches) : this.nodes;
    this.table.show(rows);
  }

  makeName(cell) {
    const name = make("button", "link name");
    name.type = "button";
    name.addEventListener("click", () => {
      this.dialog.open(this.nodes.find(({ incarnation }) => incarnation === name.dataset.incarnation));
    });
    cell.append(make("i", "dot"), name, make("span", "mono quiet address"), make("span", "problem"));
  }

  makeAction(cell) {
    const button = make("button", "small");
    button.type = "button";
    button.addEventListener("click", () => {
      const node = this.nodes.find(({ incarnation }) => incarnation === button.dataset.incarnation);
      if (node) this.cordons.ask(node);
    });
    cell.append(button);
  }

  showLoad(cell, { load }) {
    if (!load) return showMeter(cell, null, 1, "–");
    const { running, waiting } = load;
    const whole = Math.max(load.max_running || this.busiest, running + waiting);
    showMeter(cell, [running, waiting], whole, waiting ? `${running} + ${waiting}` : `${running}`, waiting ? " waiting" : "");
  }
}

function showName(cell, node) {
  const [dot, name, address, problem] = cell.children;
  setClass(dot, `dot ${node.role}`);
  name.dataset.incarnation = node.incarnation;
  setText(name, nameOf(node));
  setText(address, node.name ? host(node.address) : "");
  setText(problem, node.not_paired && node.state === "ready" ? `not paired: ${node.not_paired}` : "");
}

function showState({ firstChild: state }, node) {
  setText(state, node.state);
  setClass(state, pill(STATE_TONES[node.state] ?? "warn"));
}

function showKv(cell, { load }) {
  if (!load?.kv_blocks_total) return showMeter(cell, null, 1, "–");
  const { kv_blocks_free: free, kv_blocks_total: total, kv_blocks_leased: leased } = load;
  showMeter(cell, [Math.max(total - free - leased, 0), leased], total, percent(1 - free / total), ` of ${total}`);
}

function showAction({ firstChild: button }, node) {
  const word = node.state === "cordoned" ? "Uncordon" : "Cordon";
  button.dataset.incarnation = node.incarnation;
  button.hidden = !node.load || node.state === "draining"; // it does not come back
  setText(button, word);
  const label = `${word} ${nameOf(node)}`;
  if (button.getAttribute("aria-label") !== label) button.setAttribute("aria-label", label);
}
