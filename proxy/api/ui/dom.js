// SPDX-License-Identifier: Apache-2.0
// Elements and the text in them. Data only ever becomes text, never markup.

export const byId = (id) => document.getElementById(id);

/** The URL of a path beside this page. Unlike the page's own it has no credentials, which `fetch` rejects. */
export const beside = (path) => new URL(path, location.href);

/** Make an element; `text` is optional. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}

/** Set text only where it differs: a selection survives, and screen readers announce only changes. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function setClass(element, className) {
  if (element.className !== className) element.className = className;
}

/** A pill, a word with a colour that says whether it is good or bad. */
export const pill = (tone) => `pill ${tone}`;

export const duration = (seconds) =>
  seconds < 0.00995 ? `${(seconds * 1000).toFixed(1)} ms`
    : seconds < 0.9995 ? `${(seconds * 1000).toFixed(0)} ms`
      : seconds < 9.995 ? `${seconds.toFixed(2)} s`
        : `${seconds.toFixed(0)} s`;

export const rate = (value) =>
  value !== 0 && value < 0.095 ? value.toFixed(2)
    : value !== 0 && value < 9.95 ? value.toFixed(1)
      : Math.round(value).toLocaleString("en");

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 999.5 && unit < UNITS.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit === 0 || count >= 99.5 ? Math.round(count) : count.toPrecision(count < 9.95 ? 2 : 3)} ${UNITS[unit]}`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export const age = (seconds) =>
  seconds < 90 ? `${Math.round(seconds)} s ago`
    : seconds < 5400 ? `${Math.round(seconds / 60)} min ago`
      : `${Math.round(seconds / 3600)} h ago`;

/** How long something has lasted. */
export function span(seconds) {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (minutes < 2) return `${Math.floor(seconds)} s`;
  if (hours < 2) return `${minutes} min`;
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const words = (name) => name.replaceAll("_", " ");

export const host = (address) => address.replace(/^(https?|tcp):\/\//, "");

/** What an agent is called; its address stands for those without a name. */
export const nameOf = ({ name, address }) => name || host(address);
