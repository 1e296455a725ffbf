// SPDX-License-Identifier: Apache-2.0
// One agent in a dialog: what it is, and its last minutes. Asked for with each snapshot while it is open.

import { AGENT, Charts } from "./charts.js";
import { age, beside, byId, host, make, nameOf, percent, setText, span } from "./dom.js";

const ENGINES = { native: "kvferry", "vllm-kvferry": "vLLM with kvferry's connector" };
const ROLES = { prefill: "prefill", decode: "decode", both: "prefill and decode" };

export class AgentDialog {
  /** `shownWindow` returns the window that is chosen, `charts` or `hour`. */
  constructor(shownWindow) {
    this.shownWindow = shownWindow;
    this.opened = null; // the incarnation
    this.isAsking = false;
    this.dialog = byId("agent-dialog");
    this.charts = new Charts([[byId("agent-charts"), AGENT]]);
    byId("agent-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => {
      this.opened = null;
    });
  }

  open(node) {
    this.opened = node.incarnation;
    byId("agent-charts").hidden = true;
    this.showFacts(node);
    this.dialog.showModal();
    this.ask();
  }

  /** These are the agents now. One that has left stays as it was. */
  update(nodes) {
    const node = nodes.find(({ incarnation }) => incarnation === this.opened);
    if (!node) return;
    if (node.load) this.ask();
    else this.showFacts(node);
  }

  async ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    const { opened } = this;
    try {
      const response = await fetch(beside(`ui/agents/${encodeURIComponent(opened)}`));
      if (!response.ok || opened !== this.opened) return;
      const agent = await response.json();
      if (opened !== this.opened) return;
      this.showFacts(agent);
      byId("agent-charts").hidden = false;
      this.charts.show(agent[this.shownWindow()]);
    } catch {
      // The page's header says that the proxy does not respond.
    } finally {
      this.isAsking = false;
    }
  }

  showFacts(agent) {
    setText(byId("agent-title"), nameOf(agent));
    const shown = facts(agent).filter(([, value]) => value);
    const list = byId("agent-facts");
    while (list.children.length > 2 * shown.length) list.lastChild.remove();
    while (list.children.length < 2 * shown.length) list.append(make("dt"), make("dd"));
    shown.forEach(([name, value], index) => {
      setText(list.children[2 * index], name);
      setText(list.children[2 * index + 1], value);
    });
    const metrics = byId("agent-metrics");
    metrics.hidden = !/^https?:/.test(agent.address);
    if (!metrics.hidden) metrics.href = `${agent.address.split("#")[0]}/metrics`;
  }
}

/** What is known of an agent, in words; empty where it is not. */
function facts({ load, work, geometry = {}, ...agent }) {
  const blocks = load?.kv_blocks_total;
  return [
    ["State", agent.state],
    ["Gets no requests", agent.not_paired],
    ["Role", ROLES[agent.role] ?? agent.role],
    ["Model", agent.max_model_len ? `${agent.model}, up to ${count(agent.max_model_len)} tokens` : agent.model],
    ["Device", agent.device && devices(agent.device, agent.tp_size)],
    ["Data type", geometry.dtype],
    ["KV blocks", blocks && `${count(blocks)}${geometry.block_size ? ` of ${geometry.block_size} tokens` : ""}, ${kvUse(load)}`],
    ["Sequences", load && `${load.running} running${load.max_running ? ` of at most ${load.max_running}` : ""}, ${load.waiting} waiting`],
    ["Work", work && `${percent(work.prefill_share)} of its time for prompts, ${percent(work.decode_share)} for decoding`],
    ["From this proxy", agent.in_flight !== undefined && `${agent.in_flight} sequences`],
    ["KV transfer", agent.transfers?.join(", ")],
    ["Circuit breaker", agent.breaker],
    ["Engine", ENGINES[agent.dialect] ?? agent.dialect],
    ["Version", agent.version],
    ["Up for", agent.uptime_s && span(agent.uptime_s)],
    ["Last ping", age(agent.last_ping_s)],
    ["Address", host(agent.address)],
    ["Control", agent.control && host(agent.control)],
    ["Incarnation", load && agent.incarnation],
  ];
}

const count = (number) => number.toLocaleString("en");

const devices = (name, ranks) => (ranks > 1 ? `${ranks} × ${name}` : name === "cpu" ? "CPU" : name);

function kvUse({ kv_blocks_free: free, kv_blocks_total: total, kv_blocks_leased: leased }) {
  const used = `${percent(1 - free / total)} in use`;
  return leased ? `${used}, ${percent(leased / total)} leased to a reader` : used;
}
