// SPDX-License-Identifier: Apache-2.0
// Where one request went, looked up by its id.

import { beside, byId, duration, host, make, setText, words } from "./dom.js";

const PHASES = { route: "Routing and queue", prefill: "Prefill", decode_wait: "Decode: KV and first event", decode: "Decode: events" };

export class RequestLookup {
  constructor() {
    this.input = byId("request-id");
    byId("request-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.find(this.input.value.trim());
    });
  }

  /** Look a request up and show it. */
  async find(id) {
    if (!id) return;
    this.input.value = id;
    byId("request").replaceChildren();
    this.say("looking");
    try {
      const response = await fetch(beside(`ui/requests/${encodeURIComponent(id)}`));
      const body = await response.json();
      if (!response.ok) return this.say(body.error?.message ?? `HTTP ${response.status}`);
      this.say("");
      byId("request").replaceChildren(...parts(body));
    } catch {
      this.say("the proxy does not respond");
    }
  }

  say(text) {
    setText(byId("request-status"), text);
  }
}

function* parts(request) {
  const arrived = new Date(request.arrived * 1000).toLocaleTimeString();
  const ended = request.status === null ? "under way" : `status ${request.status}`;
  yield make("p", "quiet", [
    request.endpoint, request.model || "no model", `arrived ${arrived}`, ended, request.code ? words(request.code) : null,
    `${duration(request.total_s)} in all`, request.first_text_s === null ? null : `first text after ${duration(request.first_text_s)}`,
  ].filter(Boolean).join(" · "));
  if (request.message) yield make("p", "problem", request.message);
  yield phaseList(request);
  yield stepList(request);
}

/** The phases as bars on one scale of time. */
function phaseList({ phases, total_s: total }) {
  const list = make("ol", "phases-of-one");
  for (const { phase, start_s: start, end_s: end } of phases) {
    const spent = (end ?? total) - start;
    const item = make("li");
    const track = make("span", "track");
    const bar = make("i", phase);
    bar.style.marginLeft = `${(100 * start) / Math.max(total, 1e-9)}%`;
    bar.style.width = `${Math.max(0.4, (100 * spent) / Math.max(total, 1e-9))}%`;
    track.append(bar);
    item.append(make("span", "", PHASES[phase] ?? words(phase)), track, make("span", "number", duration(spent)));
    list.append(item);
  }
  return list;
}

/** Where it was routed, what failed, and what the agents say of their time, in order. */
function stepList({ attempts, losses, agent_timing: timings }) {
  const steps = [
    ...attempts.map(({ at_s: at, prefill, decode, transfer_id: id }) => {
      const pair = id ? `prefill ${host(prefill)}, decode ${host(decode)}, transfer ${id}` : `one agent, ${host(decode)}`;
      return { at, text: `routed to ${pair}`, tone: "" };
    }),
    ...losses.map(({ at_s: at, reason }) => ({ at, text: `lost: ${reason}`, tone: "problem" })),
  ].toSorted((one, other) => one.at - other.at);
  const list = make("ul", "steps");
  for (const { at, text, tone } of steps) list.append(make("li", tone, `${duration(at)}: ${text}`));
  if (timings.length) {
    const spans = timings.map((each) => each.split(";dur=")).map(([name, ms]) => `${words(name)} ${duration(ms / 1000)}`);
    list.append(make("li", "", `agents' own times: ${spans.join(", ")}`));
  }
  return list;
}
