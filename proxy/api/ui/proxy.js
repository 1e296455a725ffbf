// SPDX-License-Identifier: Apache-2.0
// Which proxy this is, whether it can serve, and how to start the first agent.

import { byId, pill, setClass, setText } from "./dom.js";

const LOOPBACK = /^(localhost|127\..*|\[?::1\]?)$/;

/** In the header and in the title: tabs of two proxies differ. */
export function showProxy({ cluster_name: cluster, machine, version }, { ready, waiting }) {
  const name = cluster || (location.port ? `${machine}:${location.port}` : machine);
  setText(byId("proxy-name"), name);
  setText(byId("proxy-version"), cluster ? `on ${machine}, version ${version}` : `version ${version}`);
  document.title = ready ? `${name} · kvferry` : `${name} not ready · kvferry`;

  const word = byId("readiness");
  setText(word, ready ? "ready" : "not ready");
  setClass(word, pill(ready ? "good" : "bad"));
  const reasons = Object.entries(waiting).map(([model, why]) => (model ? `${model}: ${why}` : why));
  setText(byId("reason"), reasons.join("; "));
}

/** What to do while no agent is known. */
export function showNextStep(proxy, isEmpty) {
  byId("next-step").hidden = !isEmpty;
  if (!isEmpty) return;
  const isLocal = LOOPBACK.test(proxy.discovery_host);
  const parts = ["kvferry agent", `--proxy ${discoveryAddress(proxy)}`, "--model FOLDER"];
  if (!isLocal) parts.push("--host ADDRESS");
  if (proxy.has_cluster_key) parts.push("--cluster-key FILE");
  setText(byId("next-command"), parts.join(" "));
  setText(byId("next-note"), isLocal
    ? "This proxy takes agents of its own machine only; for others start it with --host."
    : "ADDRESS is that of the agent's machine.");
}

/** Where an agent finds this proxy: as this page was reached, where the proxy listens on every address. */
function discoveryAddress({ discovery_host: bound, discovery_port: port, machine }) {
  const host = bound || (LOOPBACK.test(location.hostname) ? machine : location.hostname);
  return `${host.includes(":") && !host.startsWith("[") ? `[${host}]` : host}:${port}`;
}
