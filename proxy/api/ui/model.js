// SPDX-License-Identifier: Apache-2.0
// Which model the page shows: all of them, or the one that its address names (?model=NAME).

import { byId, make } from "./dom.js";

export class ModelChoice {
  /** `changed` is called when another model is chosen. */
  constructor(changed) {
    this.model = new URLSearchParams(location.search).get("model") ?? ""; // empty for all
    this.select = byId("model");
    this.offered = null;
    this.select.addEventListener("change", () => {
      this.model = this.select.value;
      history.replaceState(null, "", this.model ? `?model=${encodeURIComponent(this.model)}` : location.pathname);
      changed();
    });
  }

  /** Offer these models. Where there is one there is nothing to choose. */
  show(models) {
    byId("model-choice").hidden = models.length < 2 && !this.model;
    byId("model-note").hidden = !this.model;
    byId("transfer").hidden = Boolean(this.model);
    const wanted = ["", ...new Set([...models, this.model].filter(Boolean))];
    if (this.offered === wanted.join("\n")) return;
    this.offered = wanted.join("\n");
    this.select.replaceChildren(...wanted.map((model) => {
      const option = make("option", "", model || "all models");
      option.value = model;
      return option;
    }));
    this.select.value = this.model;
  }
}
