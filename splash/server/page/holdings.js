// What each rank holds in the present layout, drawn from the page tables, and the requests that hold it.

import { $, bytes, html, hue, keepHues, paint, say, svg, whole } from "./dom.js";

const MODULES = ["Q-B", "KV-B", "O"];
const CLASSES = { "-1": "free", "-2": "weights", "-3": "cached", "-4": "other" };
let chosen = null;

/** Colour a drawn element as a request's, and have it answer to a choice of the request. */
function ofRequest(element, id) {
  element.classList.add("request");
  element.style.setProperty("--hue", hue(id));
  element.dataset.request = id;
  element.classList.toggle("chosen", id === chosen);
  return element;
}

function choose(id) {
  chosen = id;
  document.body.classList.toggle("picked", id !== null);
  for (const element of document.querySelectorAll("[data-request]")) {
    element.classList.toggle("chosen", element.dataset.request === id);
  }
}

function coloured(tag, attributes, code, running) {
  const element = svg(tag, attributes);
  if (code >= 0) return ofRequest(element, running[code].id);
  element.classList.add(CLASSES[code]);
  return element;
}

/** The arena, a square a cell: one path a colour. */
function arena(rank, picture) {
  const cells = rank.cells.reduce((sum, [, count]) => sum + count, 0);
  const columns = cells > 300 ? 64 : 32;
  const paths = new Map();
  let at = 0;
  for (const [code, count] of rank.cells) {
    let path = paths.get(code) ?? "";
    for (const end = at + count; at < end; at += 1) {
      path += `M${at % columns} ${Math.floor(at / columns)}h.84v.84h-.84z`;
    }
    paths.set(code, path);
  }
  const drawing = svg("svg", { class: "arena", viewBox: `0 0 ${columns} ${Math.ceil(cells / columns)}`, role: "img" });
  drawing.setAttribute("aria-label", `Arena of rank ${picture.ranks.indexOf(rank)}: ${summary(rank)}`);
  for (const [code, d] of paths) drawing.append(coloured("path", { d }, code, picture.running));
  return drawing;
}

/** KV use as a bar: a piece a request, then what only the prefix cache holds, then room. */
function bar(rank, picture) {
  const pieces = rank.requests.map((pages, index) => [index < picture.running.length ? index : -4, pages]);
  pieces.push([-3, rank.cached]);
  const total = used(rank) + rank.cached + rank.free || 1;
  const drawing = svg("svg", { class: "kv", viewBox: `0 0 ${total} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  let x = 0;
  for (const [code, pages] of pieces) {
    if (pages) drawing.append(coloured("rect", { x, y: 0, width: pages, height: 1 }, code, picture.running));
    x += pages;
  }
  return drawing;
}

const used = (rank) => rank.requests.reduce((sum, pages) => sum + pages, 0);
const summary = (rank) =>
  `${whole(used(rank))} pages of requests, ${whole(rank.cached)} cached, ${whole(rank.free)} free, ` +
  `${whole(rank.weights)} slots of projections`;

function heads(rank, ranks) {
  const grid = html("div", "heads");
  for (const module of MODULES) {
    const groups = html("div");
    groups.setAttribute("role", "img");
    groups.setAttribute("aria-label", `${module}: head groups ${rank.head_groups.join(", ")}`);
    for (let group = 0; group < ranks; group += 1) {
      groups.append(html("i", rank.head_groups.includes(group) ? "held" : "", String(group)));
    }
    grid.append(module, groups);
  }
  return grid;
}

export function showRanks(live) {
  const { picture } = live;
  keepHues(picture.running.map((request) => request.id));
  const placement = live.placements[picture.layout];
  const kv = { replicated: "every page is on every rank", request: "a request's pages are on its owner",
    position: "page c is on rank c mod " + picture.ranks.length }[placement.kv];
  const weights = placement.projections === "sharded" ? "rank h has head group h" : "every rank has all head groups";
  say($("holdings-note"), `${picture.layout}: ${weights}; ${kv}.`);
  paint($("ranks"), picture.layout);
  $("ranks").replaceChildren(
    ...picture.ranks.map((rank, index) =>
      html("article", "rank",
        html("h3", "", `rank ${index}`, html("span", "", summary(rank))),
        heads(rank, picture.ranks.length), bar(rank, picture), arena(rank, picture)),
    ),
  );
  const cell = picture.slots_per_cell > 1 ? `, ${picture.slots_per_cell} slots a square` : "";
  const legend = [["weights", "projections"], ["mix", "pages of requests, a colour each"],
    ["cached", "kept by the prefix cache"], ["free", "free"]];
  $("legend").replaceChildren(
    ...legend.map(([name, text]) => html("li", "", html("i", `swatch ${name}`), text)),
    html("li", "", `one layer's arena of ${whole(picture.slots)} slots of ${bytes(picture.slot_bytes)}${cell}`),
  );
}

/** The pages of a request by rank: the ownership table itself. */
function lanes(request, ranks) {
  const pages = request.holders.length;
  const columns = Math.max(pages, 24);
  const height = ranks * 1.1;
  const drawing = svg("svg", { class: "lanes", viewBox: `0 0 ${columns} ${height}`, role: "img" });
  drawing.style.maxHeight = `${Math.max(10, ranks * 9)}px`;
  drawing.setAttribute("preserveAspectRatio", "xMinYMid meet");
  drawing.setAttribute("aria-label", request.pages.map((count, rank) => `rank ${rank}: ${count} pages`).join(", "));
  let held = "";
  let absent = "";
  request.holders.forEach((mask, page) => {
    for (let rank = 0; rank < ranks; rank += 1) {
      const square = `M${page} ${rank * 1.1}h.86v.9h-.86z`;
      if (Math.floor(mask / 2 ** rank) % 2) held += square;
      else absent += square;
    }
  });
  drawing.append(svg("path", { class: "free", d: absent }), ofRequest(svg("path", { d: held }), request.id));
  return drawing;
}

const rows = new Map();

/** The row of a request, which stays the same element while the request runs. */
function row(request, ranks) {
  const done = html("progress");
  done.max = request.max_tokens;
  done.value = request.output_tokens;
  done.setAttribute("aria-label", "output");
  const swatch = html("i", "swatch");
  swatch.classList.add("request");
  swatch.style.setProperty("--hue", hue(request.id));
  const cached = request.cached_tokens ? `, ${whole(request.cached_tokens)} cached` : "";
  const line = rows.get(request.id) ?? newRow(request.id);
  line.replaceChildren(
    html("td", "", swatch, html("code", "", request.id)),
    html("td", "", `rank ${request.owner}`),
    html("td", "", `${whole(request.prompt_tokens)}${cached}`),
    html("td", "", done, `${whole(request.output_tokens)} of ${whole(request.max_tokens)}`),
    html("td", "", lanes(request, ranks)));
  for (const cell of line.children) cell.setAttribute("role", "cell");
  return line;
}

function newRow(id) {
  const line = html("tr");
  line.setAttribute("role", "row"); // the phone's style takes it out of the table
  line.tabIndex = 0;
  for (const name of ["pointerenter", "focus"]) line.addEventListener(name, () => choose(id));
  for (const name of ["pointerleave", "blur"]) line.addEventListener(name, () => choose(null));
  rows.set(id, line);
  return line;
}

export function showRequests(live) {
  const { picture, load } = live;
  const ranks = picture.ranks.length;
  const more = picture.more_running ? `, ${whole(picture.more_running)} of them not listed` : "";
  say($("requests-note"), `${whole(load.running)} running${more}, ${whole(load.waiting)} waiting, ${whole(load.preemptions)} preempted so far`);
  if (!picture.running.some((request) => request.id === chosen)) choose(null);
  const lines = picture.running.map((request) => row(request, ranks));
  for (const [id, line] of rows) if (!lines.includes(line)) rows.delete(id);
  if (!lines.length) {
    const empty = html("td", "muted", "Nothing runs. Send a prompt in the playground below.");
    empty.colSpan = 5;
    lines.push(html("tr", "", empty));
  }
  const table = $("running");
  // A row that has the focus would lose it if it were put in again.
  if (table.children.length !== lines.length || lines.some((line, index) => table.children[index] !== line)) {
    table.replaceChildren(...lines);
  }
  const queue = picture.waiting.map((request) => {
    const priority = request.priority ? `, priority ${request.priority}` : "";
    return `${request.id} (${whole(request.tokens)} tokens${priority})`;
  });
  if (picture.more_waiting) queue.push(`${whole(picture.more_waiting)} more`);
  say($("queue"), queue.length ? `Queue, next first: ${queue.join(" · ")}` : "The queue is empty.");
}
