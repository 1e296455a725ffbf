// SPDX-License-Identifier: Apache-2.0
// Drain and undrain an agent.

import { beside, byId, nameOf, setText } from "./dom.js";

/** Drain and undrain, asked for in a dialog; with API keys an admin's is asked for once, and kept in memory. */
export class Drains {
  constructor(announce) {
    this.announce = announce;
    this.key = "";
    this.node = null;
    this.dialog = byId("drain-dialog");
    this.input = byId("drain-key");
    byId("drain-cancel").addEventListener("click", () => this.dialog.close());
    byId("drain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  ask(node) {
    this.node = node;
    const word = node.drained ? "Undrain" : "Drain";
    setText(byId("drain-title"), `${word} ${nameOf(node)}`);
    setText(byId("drain-text"), node.drained
      ? "It gets new requests from this proxy again."
      : "It finishes what it has, and gets no new requests from this proxy until it is undrained or restarts.");
    setText(byId("drain-go"), word);
    this.say("");
    byId("drain-key-row").hidden = true;
    this.dialog.showModal();
  }

  async send() {
    const { incarnation, drained } = this.node;
    const action = drained ? "undrain" : "drain";
    if (this.input.value) this.key = this.input.value;
    byId("drain-go").disabled = true;
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
        byId("drain-key-row").hidden = false;
        this.input.focus();
      } else {
        const body = await response.json().catch(() => null);
        this.say(body?.error?.message ?? `HTTP ${response.status}`);
      }
    } catch {
      this.say("The proxy does not respond.");
    } finally {
      byId("drain-go").disabled = false;
      this.input.value = "";
    }
  }

  say(text) {
    setText(byId("drain-error"), text);
  }
}
