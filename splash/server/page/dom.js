// Elements, numbers and colours that all parts of the page share.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** An HTML element with a class and children, which may be text. */
export function html(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** An SVG element with attributes and children. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set the text of an element, leaving the document alone where nothing changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const whole = (value) => Math.round(value).toLocaleString("en");

/** Three digits or so. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 100) return whole(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}

export const ms = (value) => (value >= 1000 ? `${short(value / 1000)} s` : `${short(value)} ms`);

/** Bytes with a binary unit. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return unit ? `${short(value)} ${units[unit]}` : `${value} B`;
}

const places = new Map(); // request -> the lowest number that no other request had when it was first seen

/** The hue of a request for as long as it runs: the golden angle keeps those of low numbers apart. */
export function hue(id) {
  if (!places.has(id)) {
    const taken = new Set(places.values());
    let place = 0;
    while (taken.has(place)) place += 1;
    places.set(id, place);
  }
  return ((30 + places.get(id) * 137.508) % 360).toFixed(0);
}

/** Let other requests have the hues of those that have ended. */
export function keepHues(ids) {
  for (const id of places.keys()) if (!ids.includes(id)) places.delete(id);
}

/** Give an element and what is in it the colour of a layout. */
export const paint = (element, layout) => element.style.setProperty("--layout", `var(--${layout})`);
