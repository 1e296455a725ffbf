// SPDX-License-Identifier: Apache-2.0
// The errors, by kind: those of servers, about which an operator can do something, before those of clients.

import { age, byId, make, pill, setClass, setText, words } from "./dom.js";
import { Table } from "./tables.js";

const isServers = ({ status }) => status >= 500;

export class Errors {
  /** `find` looks up the request with an id; `nameAt` is the name of the agent at an address. */
  constructor(find, nameAt) {
    this.find = find;
    this.nameAt = nameAt;
    this.table = new Table(byId("failures"), this.columns(), {
      key: ({ endpoint, status, code, model }) => `${endpoint} ${status} ${code} ${model}`,
      empty: "None.",
    });
  }

  columns() {
    return [
      { title: "Status", value: ({ status }) => status, make: (cell) => cell.append(make("span")), show: showStatus },
      { title: "Error", make: (cell) => cell.append(make("span"), make("span", "message")), show: showReason, className: "prose" },
      { title: "Agent", value: ({ agent }) => (agent ? this.nameAt(agent) : "–"), className: "wide" },
      { title: "Count", value: ({ count }) => count, className: "number" },
      { title: "Last seen", value: ({ age_s: seconds }) => seconds, text: ({ age_s: seconds }) => age(seconds), className: "wide" },
      { title: "Model", value: ({ model }) => model || "–", className: "cut wide" },
      { title: "Last request", make: (cell) => this.makeRequestLink(cell), show: (cell, { request_id: id }) => setText(cell.firstChild, id), className: "cut" },
    ];
  }

  show(list) {
    byId("errors").hidden = !list.length;
    const count = (some) => some.reduce((sum, failure) => sum + failure.count, 0);
    const servers = list.filter(isServers);
    setText(byId("num-failures"), `${count(servers)} of servers, ${count(list) - count(servers)} of clients`);
    this.table.show([...servers, ...list.filter((failure) => !isServers(failure))]);
  }

  makeRequestLink(cell) {
    const link = make("button", "link mono");
    link.type = "button";
    link.addEventListener("click", () => {
      this.find(link.textContent);
      byId("request-title").scrollIntoView();
    });
    cell.append(link);
  }
}

function showReason({ children: [code, message] }, failure) {
  setText(code, words(failure.code));
  setText(message, failure.message);
}

function showStatus({ firstChild: word }, failure) {
  setText(word, failure.status);
  setClass(word, pill(isServers(failure) ? "bad" : "warn"));
}
