// The last minutes as charts over one axis of time.

import { $, bytes, html, ms, paint, say, short, svg, whole } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 110;
const LEFT = 40;
const GAP_S = 1.2;
const COLOURS = ["var(--accent)", "var(--cp)", "var(--dop)", "var(--dcp)", "var(--dp)", "var(--bad)", "var(--muted)", "var(--text)"];

/** name, unit, and series of [label, value of a sample, dashed, filled]. */
const CHARTS = [
  ["Throughput", "tok/s", [
    ["output", (s) => s.output_tokens / s.seconds, false, true],
    ["prompts", (s) => s.prompt_tokens / s.seconds, true, false],
  ]],
  ["Step time", "ms", [
    ["median", (s) => s.step_ms, false, true], ["longest", (s) => s.step_max_ms, true, false],
  ]],
  ["Time to first token", "ms", [
    ["mean", (s) => s.ttft_ms, false, false, true], ["longest", (s) => s.ttft_max_ms, true, false, true],
  ]],
  ["Time between tokens", "ms", [
    ["mean", (s) => s.itl_ms, false, true], ["longest", (s) => s.itl_max_ms, true, false],
  ]],
  ["Requests", "", [
    ["running", (s) => s.running, false, true], ["waiting", (s) => s.waiting, true, false],
  ]],
];

export class Charts {
  constructor() {
    this.samples = [];
    this.events = [];
    this.figures = new Map();
  }

  /** The time of the last sample, after which the server has more to tell. */
  get since() {
    return this.samples.length ? this.samples.at(-1).time_s : null;
  }

  take(live) {
    if (live.now_s < (this.since ?? 0)) {
      this.samples = []; // another engine's clock
      this.events = [];
    }
    this.samples.push(...live.samples);
    const known = new Set(this.events.map((event) => `${event.id} ${event.time_s}`));
    this.events.push(...live.events.filter((event) => !known.has(`${event.id} ${event.time_s}`)));
    while (this.samples.length && this.samples[0].time_s < live.now_s - 620) this.samples.shift();
    while (this.events.length > 200) this.events.shift();
  }

  show(live) {
    const span = Number($("span").value);
    const first = live.now_s - span;
    const samples = this.samples.filter((sample) => sample.time_s > first);
    const x = (time) => LEFT + ((time - first) / span) * (WIDTH - LEFT);
    this.ribbon(live, samples, x);
    for (const [name, unit, series] of CHARTS) this.lines(name, unit, series, samples, x);
    const ranks = live.picture.ranks.map((_, rank) => [
      `rank ${rank}`, (s) => (s.used_pages[rank] / (live.load.total_pages[rank] || 1)) * 100, rank > 0, rank === 0,
    ]);
    this.lines("KV pages in use", "%", ranks, samples, x);
    this.list(live);
  }

  figure(name, wide) {
    if (!this.figures.has(name)) {
      const caption = html("figcaption");
      const drawing = svg("svg", { class: "chart", role: "img", preserveAspectRatio: "none" });
      const figure = html("figure", wide ? "wide" : "", caption, drawing);
      $("charts").append(figure);
      this.figures.set(name, { caption, drawing });
    }
    return this.figures.get(name);
  }

  /** The layout over time, with a pin where a switch was committed or refused. */
  ribbon(live, samples, x) {
    const { caption, drawing } = this.figure("Layout", true);
    const width = drawing.clientWidth || WIDTH;
    const scale = (time) => Math.max(0, ((x(time) - LEFT) / (WIDTH - LEFT)) * width);
    drawing.setAttribute("viewBox", `0 0 ${width} 58`);
    const blocks = [];
    for (const sample of samples) {
      const start = sample.time_s - sample.seconds;
      const last = blocks.at(-1);
      if (last && last.layout === sample.layout && start - last.end < GAP_S) last.end = sample.time_s;
      else blocks.push({ layout: sample.layout, start, end: sample.time_s });
    }
    const parts = [];
    for (const { layout, start, end } of blocks) {
      const from = scale(start);
      const to = scale(end);
      const box = svg("rect", { x: from, y: 16, width: Math.max(1, to - from - 1), height: 26, rx: 5 });
      box.style.fill = `var(--${layout})`;
      parts.push(box);
      if (to - from > 30) parts.push(svg("text", { class: "name", x: (from + to) / 2, y: 33, "text-anchor": "middle" }, layout));
    }
    for (const event of this.events) {
      const at = scale(event.time_s);
      if (at <= 0 || isNothing(event)) continue;
      const pin = svg("path", { class: "pin", d: event.status === "committed" ? `M${at - 5} 3h10l-5 9z` : `M${at - 4} 4l8 8m0 -8l-8 8` });
      if (event.status !== "committed") pin.style.stroke = "var(--bad)";
      pin.append(svg("title", {}, eventText(event)));
      parts.push(pin, svg("line", { class: "mark", x1: at, x2: at, y1: 12, y2: 44 }));
    }
    parts.push(svg("text", { x: 2, y: 55 }, `${$("span").selectedOptions[0].text} ago`), svg("text", { x: width - 2, y: 55, "text-anchor": "end" }, "now"));
    drawing.replaceChildren(...parts);
    drawing.setAttribute("aria-label", `Layout over time: ${blocks.map((block) => block.layout).join(", then ") || "nothing ran"}`);
    caption.replaceChildren(html("strong", "", "Layout"), html("span", "", `now ${live.control.layout}`), html("span", "", "▾ a switch; × one that was not committed"));
  }

  lines(name, unit, series, samples, x) {
    const { caption, drawing } = this.figure(name, false);
    const width = drawing.clientWidth || WIDTH;
    const at = (time) => ((x(time) - LEFT) / (WIDTH - LEFT)) * (width - LEFT) + LEFT;
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = series.map(([, value]) => samples.map((sample) => value(sample)));
    const top = nice(Math.max(0, ...values.flat().filter((value) => value !== null)));
    const y = (value) => HEIGHT - 8 - (value / top) * (HEIGHT - 20);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const line = y(top * share);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width, y1: line, y2: line }));
      parts.push(svg("text", { x: LEFT - 6, y: line + 3.5, "text-anchor": "end" }, short(top * share)));
    }
    const legend = [];
    series.forEach(([label, , dashed, filled, sparse], index) => {
      const stroke = COLOURS[index % COLOURS.length];
      const lines = path(samples, values[index], at, y, sparse);
      for (const points of filled ? lines : []) {
        const area = `${draw(points)}L${points.at(-1)[0]} ${y(0)}L${points[0][0]} ${y(0)}Z`;
        parts.push(stroked(svg("path", { class: "fill", d: area }), stroke));
      }
      parts.push(stroked(svg("path", { class: dashed ? "series dash" : "series", d: lines.map(draw).join("") }), stroke));
      const key = html("i", dashed ? "dash" : "");
      key.style.setProperty("--stroke", stroke);
      const last = values[index].findLast((value) => value !== null);
      legend.push(html("span", "", key, `${label} ${short(last)}${unit && ` ${unit}`}`));
    });
    for (const event of this.events) {
      const where = at(event.time_s);
      if (event.status !== "committed" || where < LEFT || isNothing(event)) continue;
      parts.push(svg("line", { class: "mark", x1: where, x2: where, y1: 4, y2: HEIGHT - 8 }));
    }
    drawing.replaceChildren(...parts);
    caption.replaceChildren(html("strong", "", name), ...legend);
    drawing.setAttribute("aria-label", caption.textContent);
  }

  list(live) {
    const items = this.events.toReversed().slice(0, 50).map((event) => {
      const age = live.now_s - event.time_s;
      const to = html("span", "tag", event.to);
      const from = html("span", "tag", event.from);
      paint(to, event.to);
      paint(from, event.from);
      const when = html("time", "", age < 100 ? `${Math.round(age)} s ago` : `${Math.round(age / 60)} min ago`);
      const cost = event.status === "committed"
        ? `${bytes(event.bytes_received)} received, step held up ${ms(event.added_ms)}` : event.reason;
      const how = `${event.status} ${event.method && `${event.method}, `}${event.by_policy ? "by the policy" : "by hand"}`;
      return html("li", "", when, html("span", "", from, " → ", to), html("span", "", how), html("span", "muted", cost));
    });
    if (!items.length) items.push(html("li", "muted", "No switch yet."));
    $("events").replaceChildren(...items);
    say($("switches").firstElementChild, `Switches (${whole(this.events.length)})`);
  }
}

/** Whether somebody asked for the layout that served already. */
const isNothing = (event) => event.status === "committed" && event.from === event.to && !event.bytes_received;

const eventText = (event) => `${event.from} to ${event.to}: ${event.status} ${event.method} ${event.reason}`.trim();

function stroked(element, stroke) {
  element.style.setProperty("--stroke", stroke);
  return element;
}

/** Runs of points without a gap; a sparse series joins what is apart. */
function path(samples, values, at, y, sparse) {
  const runs = [];
  let end = -Infinity;
  samples.forEach((sample, index) => {
    const value = values[index];
    if (value === null) return;
    const start = sample.time_s - sample.seconds;
    if (!runs.length || (!sparse && start - end > GAP_S)) runs.push([[at(start), y(value)]]);
    runs.at(-1).push([at(sample.time_s), y(value)]);
    end = sample.time_s;
  });
  return runs;
}

const draw = (points) => points.map(([px, py], index) => `${index ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");

/** A round number not below the value. */
function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((round) => round >= value);
}
