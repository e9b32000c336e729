// The five layouts: what each would hold, how long a step takes in it, and the buttons that switch.

import { abortSwitch, returnToAuto, switchTo } from "./api.js";
import { $, html, ms, paint, say, svg } from "./dom.js";

const KV = { replicated: "KV on all", request: "KV by request", position: "KV by position" };
const PROJECTIONS = { sharded: "heads sharded", replicated: "all heads" };
const RECENT_S = 5;
const cards = new Map();

/** A miniature: for each rank the head groups that it holds, and of three requests the pages. */
function glyph(placement, ranks) {
  const shown = Math.min(ranks, 4);
  const width = shown * 5 - 1;
  const drawing = svg("svg", { class: "glyph", viewBox: `0 0 ${width} 5.6`, "aria-hidden": "true" });
  for (let rank = 0; rank < shown; rank += 1) {
    for (let group = 0; group < shown; group += 1) {
      const held = placement.projections === "replicated" || group === rank;
      const size = 4 / shown;
      drawing.append(
        svg("rect", {
          class: held ? "heads" : "empty", x: rank * 5 + group * size, y: 0, width: size - 0.14, height: 1.1, rx: 0.15,
        }),
      );
    }
    for (let request = 0; request < 4; request += 1) {
      for (let page = 0; page < 4; page += 1) {
        const owner = request % shown;
        const held = { replicated: true, request: owner === rank, position: page % shown === rank }[placement.kv];
        const cell = svg("rect", {
          class: held ? "request" : "empty", x: rank * 5 + page, y: 1.6 + request, width: 0.86, height: 0.86, rx: 0.15,
        });
        cell.style.setProperty("--hue", 20 + request * 95);
        drawing.append(cell);
      }
    }
  }
  return drawing;
}

function makeCard(name, live) {
  const placement = live.placements[name];
  const card = {
    root: html("li", "card"), state: html("span"), why: html("p", "why"), button: html("button"),
    predicted: html("i"), predictedText: html("b"), measured: html("i"), measuredText: html("b"),
  };
  card.predictedBar = html("div", "bar predicted", card.predicted);
  card.measuredBar = html("div", "bar", card.measured);
  paint(card.root, name);
  card.button.type = "button";
  card.button.append(`Switch to ${name}`);
  card.button.addEventListener("click", () => ask(() => switchTo(name, $("method").value)));
  card.root.append(
    html("h3", "", name, card.state),
    glyph(placement, live.control.ranks),
    html("div", "bars",
      "predicted", card.predictedBar, card.predictedText, "measured", card.measuredBar, card.measuredText),
    html("p", "why", `${PROJECTIONS[placement.projections]}, ${KV[placement.kv]}`),
    card.why,
    card.button,
  );
  $("cards").append(card.root);
  return card;
}

async function ask(action) {
  $("switch-error").hidden = true;
  try {
    await action();
  } catch (error) {
    say($("switch-error"), error.message);
    $("switch-error").hidden = false;
  }
}

export function start() {
  $("auto").addEventListener("click", () => ask(returnToAuto));
  $("abort").addEventListener("click", () => ask(abortSwitch));
}

function who(control) {
  const { decision, active } = control;
  if (active) {
    const why = active.reason ? `: ${active.reason}` : "";
    return `Switching from ${active.from} to ${active.to}, ${active.status}${why}.`;
  }
  if (control.pinned) return `${control.layout} was chosen by hand and stays until the policy may choose again.`;
  if (decision) return `The ${decision.policy} policy: ${decision.reason}.`;
  if (control.policy === "static") return `The policy is static: ${control.layout} stays until somebody switches.`;
  return `The ${control.policy} policy has not been asked yet; it is when steps run.`;
}

export function show(live) {
  const { control } = live;
  const predictions = control.decision?.predictions_ms ?? {};
  const infeasible = control.decision?.infeasible ?? {};
  say($("decision"), who(control));
  $("controls").hidden = !live.may_switch;
  $("auto").disabled = !control.pinned;
  $("abort").hidden = !control.active;
  if (!$("method").length) $("method").append(...control.methods.map((name) => html("option", "", name)));
  const measured = Object.fromEntries(Object.entries(live.step_times).map(([name, time]) => [name, time.step_ms]));
  const longest = Math.max(...Object.values(predictions), ...Object.values(measured), 0.001);
  for (const name of Object.keys(live.placements)) {
    if (!cards.has(name)) cards.set(name, makeCard(name, live));
    const card = cards.get(name);
    const usable = control.layouts.includes(name);
    const current = control.layout === name;
    card.root.classList.toggle("current", current);
    card.root.classList.toggle("unusable", !usable);
    if (current) card.root.setAttribute("aria-current", "true");
    else card.root.removeAttribute("aria-current");
    const target = control.active?.to === name && !current;
    say(card.state, current ? "serving" : target ? control.active.status : usable ? "" : "not possible here");
    const predicted = predictions[name] ?? null;
    card.predicted.style.width = predicted === null ? "0" : `${(predicted / longest) * 100}%`;
    say(card.predictedText, predicted === null ? "–" : ms(predicted));
    const time = live.step_times[name];
    const age = time ? live.now_s - time.time_s : Infinity;
    card.measured.style.width = time ? `${(time.step_ms / longest) * 100}%` : "0";
    card.measuredBar.classList.toggle("old", age > RECENT_S);
    say(card.measuredText, time ? ms(time.step_ms) : "–");
    const old = time && age > RECENT_S ? `measured ${ago(age)} ago` : "";
    say(card.why, infeasible[name] ?? old);
    card.why.hidden = !card.why.textContent;
    card.button.hidden = !live.may_switch || !usable;
    card.button.disabled = current || target;
  }
}

const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`);
