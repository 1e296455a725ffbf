// SPDX-License-Identifier: Apache-2.0
// One chart, drawn by uPlot (its files lie beside this one).

import { age, make, setText } from "./dom.js";

const RECENT_S = 20; // without a cursor, the latest value of so many seconds is shown
const PAGE_SLICES = 15; // by which PageUp and PageDown move

/** The page's colours, which change with the scheme. */
const colours = new Map();

function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

/** Read the colours again, after the scheme has changed. */
export const forgetColours = () => colours.clear();

/** One figure: lines over a window, and the values at the cursor or the latest ones. */
export class Chart {
  constructor({ title, series, format, floor, byModel = false }, group) {
    this.title = title;
    this.series = series; // [{ key, label, tone, area?, sparse? }]; sparse ones, which are last, are stacked bars
    this.format = format;
    this.floor = floor; // the smallest maximum of the scale
    this.byModel = byModel; // whether there are values for one model
    this.group = group; // whose cursor it shows
    this.data = null;
    this.plot = null;
    this.figure = make("figure");
    const caption = make("figcaption", "", title);
    this.when = make("span", "when quiet");
    this.output = make("span", "values");
    this.values = series.map(({ label, tone }) => {
      const part = make("span", `series ${tone}`, `${label} `);
      const value = make("b", "", "–");
      part.append(value);
      this.output.append(part, " ");
      return value;
    });
    caption.append(this.when, this.output);
    this.box = make("div", "chart");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", title);
    this.figure.append(caption, this.box);
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("blur", () => this.group.move(null));
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  show(charts) {
    const length = charts[this.series[0].key].length;
    const times = Array.from({ length }, (_, index) => (index + 1 - length) * charts.slice_s);
    this.data = { times, slice_s: charts.slice_s, lines: this.series.map(({ key }) => charts[key]) };
    this.box.dataset.points = this.data.lines.flat().filter((value) => value !== null && value !== 0).length;
    if (!this.plot) this.plot = this.makePlot();
    const drawn = this.data.lines.map((line, index) => (this.series[index].sparse ? stacked(this.data.lines.slice(index)) : line));
    this.plot.setData([times, ...drawn]);
    this.showValues();
  }

  /** Whether there is nothing to see; never while it has the keyboard's focus. */
  get isEmpty() {
    return this.box.dataset.points === "0" && this.box !== document.activeElement;
  }

  makePlot() {
    const axis = { stroke: () => colour("quiet"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: () => colour("line"), width: 1 } };
    return new uPlot({
      width: this.box.clientWidth || 300,
      height: this.box.clientHeight,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: {
        x: { time: false, range: (_, min, max) => [min, max] },
        y: { range: (_, min, max) => [0, Math.max(this.floor, (max ?? 0) * 1.05)] },
      },
      axes: [
        { ...axis, size: 22, gap: 4, splits: (plot) => minuteMarks(plot.scales.x.min), values: (_, splits) => splits.map((at) => (at === 0 ? "now" : `${-at / 60} min`)) },
        { ...axis, size: 58, gap: 4, space: 18, values: (_, splits) => splits.map((value) => (value === 0 ? "0" : this.format(value))) },
      ],
      series: [
        {},
        ...this.series.map(({ label, tone, area, sparse }) => ({
          label,
          width: 1.6,
          stroke: () => colour(`tone-${tone}`),
          fill: area ? () => colour("area") : sparse ? () => colour(`tone-${tone}`) : undefined,
          points: { show: false },
          paths: sparse ? uPlot.paths.bars({ size: [1, 6, 2] }) : undefined,
        })),
      ],
      hooks: { setCursor: [(plot) => this.pointed(plot)] },
    }, [[], ...this.series.map(() => [])], this.box);
  }

  resize() {
    if (this.plot && this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height: this.box.clientHeight });
  }

  /** The pointer has moved over this chart. */
  pointed(plot) {
    if (this.group.isMoving || !this.data) return;
    const index = plot.cursor.left >= 0 ? plot.cursor.idx : null;
    const back = index === null || index === undefined ? null : this.data.times.length - 1 - index;
    if (back !== this.group.cursor) this.group.move(back);
  }

  key(event) {
    const now = this.group.cursor ?? -1;
    const to = {
      ArrowLeft: now + 1, ArrowRight: now - 1, PageUp: now + PAGE_SLICES, PageDown: now - PAGE_SLICES,
      Home: Infinity, End: 0, Escape: null,
    };
    if (!this.data || !(event.key in to)) return;
    event.preventDefault();
    const last = this.data.times.length - 1;
    this.group.move(to[event.key] === null ? null : Math.min(Math.max(to[event.key], 0), last));
  }

  /** Show the group's cursor. */
  place() {
    if (!this.plot || !this.data) return;
    const { cursor } = this.group;
    const at = cursor === null ? -10 : this.plot.valToPos(this.data.times[this.data.times.length - 1 - cursor], "x");
    this.plot.setCursor({ left: at, top: cursor === null ? -10 : 0 }, false, false);
    this.showValues();
  }

  /** Show the values at the cursor; without one, the latest of the last seconds. */
  showValues() {
    const { cursor } = this.group;
    const shown = this.data.lines.map((line) => this.value(line, cursor));
    this.values.forEach((element, index) => setText(element, shown[index] === null ? "–" : this.format(shown[index])));
    setText(this.when, cursor === null ? "" : age((cursor + 1) * this.data.slice_s));
    this.box.setAttribute("aria-label", `${this.title} ${this.when.textContent}: ${this.output.textContent.trim()}`);
  }

  value(line, cursor) {
    if (cursor !== null) return line[line.length - 1 - cursor];
    const recent = line.slice(-Math.max(1, Math.ceil(RECENT_S / this.data.slice_s)));
    return recent.findLast((value) => value !== null) ?? null;
  }
}

/** Bars that stand on those of the series behind: none hides another. */
function stacked([line, ...behind]) {
  return line.map((value, slice) => behind.reduce((sum, { [slice]: more }) => sum + more, value) || null);
}

/** Minutes that are round, at most six of them, from `oldest` (negative seconds) to now. */
function minuteMarks(oldest) {
  const step = [60, 120, 300, 600, 900].find((each) => -oldest / each <= 6) ?? 1800;
  const marks = [];
  for (let at = 0; at >= oldest; at -= step) marks.unshift(at);
  return marks;
}
