// SPDX-License-Identifier: Apache-2.0
// Tables whose rows and cells are kept from one snapshot to the next: only what has changed is written, and
// focus, selection and scrolling survive.

import { make, setClass, setText } from "./dom.js";

/**
 * A table that can be sorted by its columns' headings.
 *
 * A column is { title, value, text?, className?, title? }: `value(row)` is what it is sorted by, `text(row)` what
 * is shown (by default the value), or `show(cell, row)` fills the cell. A column without `value` cannot be
 * sorted by.
 */
export class Table {
  constructor(table, columns, { key, empty, sort = null, rowClass = () => "" }) {
    this.columns = columns;
    this.key = key;
    this.empty = empty;
    this.sort = sort; // [column, descending], or null for the order in which rows come
    this.rowClass = rowClass;
    this.rows = new Map();
    this.shown = [];
    this.body = make("tbody");
    this.note = make("tr");
    const cell = make("td", "empty-row", empty);
    cell.colSpan = columns.length;
    this.note.append(cell);
    this.headings = columns.map((column, index) => this.heading(column, index));
    const head = make("thead");
    const line = make("tr");
    line.append(...this.headings);
    head.append(line);
    table.append(head, this.body);
    this.showOrder();
  }

  heading({ title, value, className = "", hidden = false }, index) {
    const heading = make("th", className);
    heading.scope = "col";
    if (value && this.sort) {
      const button = make("button", "sort", title);
      button.type = "button";
      button.addEventListener("click", () => {
        const descends = this.sort[0] === index ? !this.sort[1] : typeof value(this.shown[0] ?? {}) === "number";
        this.sort = [index, descends];
        this.showOrder();
        this.show(this.shown);
      });
      heading.append(button);
    } else {
      heading.append(make("span", hidden ? "unseen" : "", title));
    }
    return heading;
  }

  showOrder() {
    if (!this.sort) return;
    this.headings.forEach((heading, index) => {
      if (index !== this.sort[0]) heading.removeAttribute("aria-sort");
      else heading.setAttribute("aria-sort", this.sort[1] ? "descending" : "ascending");
    });
  }

  /** Show these rows, and no others. */
  show(rows) {
    this.shown = rows;
    const ordered = this.ordered(rows);
    const wanted = new Set(ordered.map(this.key));
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      row.line.remove();
      this.rows.delete(key);
    }
    this.note.remove();
    let before = null;
    for (const data of ordered) {
      const line = this.row(data);
      const next = before ? before.nextSibling : this.body.firstChild;
      if (next !== line) this.body.insertBefore(line, next);
      before = line;
    }
    if (!ordered.length) this.body.append(this.note);
  }

  row(data) {
    const key = this.key(data);
    let row = this.rows.get(key);
    if (!row) {
      const line = make("tr");
      const cells = this.columns.map(({ className = "", make: fill }) => {
        const cell = make("td", className);
        if (fill) fill(cell);
        line.append(cell);
        return cell;
      });
      row = { line, cells };
      this.rows.set(key, row);
    }
    this.columns.forEach((column, index) => {
      const cell = row.cells[index];
      if (column.show) column.show(cell, data);
      else this.showText(cell, String(column.text ? column.text(data) : column.value(data)), column);
    });
    setClass(row.line, this.rowClass(data));
    return row.line;
  }

  showText(cell, text, { className = "" }) {
    if (cell.dataset.text === text) return;
    cell.dataset.text = text;
    setText(cell, text);
    if (className.includes("cut")) cell.title = text;
  }

  ordered(rows) {
    if (!this.sort) return rows;
    const [index, descends] = this.sort;
    const { value } = this.columns[index];
    const sign = descends ? -1 : 1;
    return rows.toSorted((one, other) => {
      const [a, b] = [value(one), value(other)];
      const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
      return sign * order;
    });
  }
}
