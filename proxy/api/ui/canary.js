// SPDX-License-Identifier: Apache-2.0
// How the answers of each pair compare with those of its decode server alone.

import { age, beside, byId, setText } from "./dom.js";
import { Table } from "./tables.js";

const EVERY_MS = 5000;
const MOST = 200;

const table = new Table(
  byId("canary-pairs"),
  [
    { title: "Pair", value: ({ pair }) => pair },
    { title: "State", value: ({ state }) => state },
    { title: "Probes", value: ({ probes }) => probes, className: "number" },
    { title: "Different", value: ({ different }) => different, className: "number" },
    { title: "Failed", value: ({ failed }) => failed, className: "number" },
    { title: "Last comparison", value: ({ last }) => last, className: "prose" },
    { title: "Last", value: ({ age_s: seconds }) => seconds, text: ({ age_s: seconds }) => age(seconds) },
  ],
  { key: ({ pair }) => pair, empty: "No pair has been probed.", sort: [3, true] },
);

let asked = -EVERY_MS;

/** Fetch the comparisons again, if the last time is long enough ago. */
export async function showCanary() {
  if (performance.now() - asked < EVERY_MS) return;
  asked = performance.now();
  try {
    const response = await fetch(beside("canary"));
    if (!response.ok) return;
    const { pairs } = await response.json();
    byId("canary").hidden = !pairs.length;
    setText(byId("num-canary"), pairs.length);
    table.show(pairs.slice(0, MOST));
  } catch {
    // The feed's status tells that the proxy does not respond.
  }
}
