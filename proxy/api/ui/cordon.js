// SPDX-License-Identifier: Apache-2.0
// Cordon and uncordon an agent.

import { beside, byId, nameOf, setText } from "./dom.js";

/** Cordon and uncordon, asked for in a dialog; with API keys an admin's is asked for once, and kept in memory. */
export class Cordons {
  constructor(announce) {
    this.announce = announce;
    this.key = "";
    this.node = null;
    this.dialog = byId("cordon-dialog");
    this.input = byId("cordon-key");
    byId("cordon-cancel").addEventListener("click", () => this.dialog.close());
    byId("cordon-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  ask(node) {
    this.node = node;
    const word = node.state === "cordoned" ? "Uncordon" : "Cordon";
    setText(byId("cordon-title"), `${word} ${nameOf(node)}`);
    setText(byId("cordon-text"), node.state === "cordoned"
      ? "It gets new requests from this proxy again."
      : "It finishes what it has, and gets no new requests from this proxy until it is uncordoned or restarts.");
    setText(byId("cordon-go"), word);
    this.say("");
    byId("cordon-key-row").hidden = true;
    this.dialog.showModal();
  }

  async send() {
    const { incarnation, state } = this.node;
    const action = state === "cordoned" ? "uncordon" : "cordon";
    if (this.input.value) this.key = this.input.value;
    byId("cordon-go").disabled = true;
    try {
      const response = await fetch(beside(`nodes/${encodeURIComponent(incarnation)}/${action}`), {
        method: "POST",
        credentials: "omit", // a key that the browser attaches by itself is not accepted for this
        headers: this.key ? { Authorization: `Bearer ${this.key}` } : {},
      });
      if (response.ok) {
        this.dialog.close();
        this.announce(`${nameOf(this.node)} was ${action}ed`);
      } else if (response.status === 401) {
        this.say(this.key ? "This key is not an admin's." : "This proxy asks for an admin's API key.");
        this.key = "";
        byId("cordon-key-row").hidden = false;
        this.input.focus();
      } else {
        const body = await response.json().catch(() => null);
        this.say(body?.error?.message ?? `HTTP ${response.status}`);
      }
    } catch {
      this.say("The proxy does not respond.");
    } finally {
      byId("cordon-go").disabled = false;
      this.input.value = "";
    }
  }

  say(text) {
    setText(byId("cordon-error"), text);
  }
}
