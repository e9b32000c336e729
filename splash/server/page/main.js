// Asks the server what there is to see, twice a second while somebody looks, and has the parts of the page show it.

import { Refused, apiKey, getLive, useKey } from "./api.js";
import { Charts } from "./charts.js";
import { $, html, ms, say, short, whole } from "./dom.js";
import * as holdings from "./holdings.js";
import * as layouts from "./layouts.js";
import * as playground from "./playground.js";

const EVERY_MS = 500;
const RETRY_MS = 2000;
const RECENT_S = 5;
const THEMES = ["auto", "dark", "light"];
const charts = new Charts();
let asked = false;

function status(state, text) {
  $("status").dataset.state = state;
  say($("status"), text);
}

function tiles(live) {
  const recent = charts.samples.filter((sample) => sample.time_s > live.now_s - RECENT_S);
  const sum = (value) => recent.reduce((total, sample) => total + value(sample), 0);
  const mean = (name) => {
    const known = recent.filter((sample) => sample[name] !== null);
    return known.length ? ms(known.reduce((total, sample) => total + sample[name], 0) / known.length) : "–";
  };
  const seconds = sum((sample) => sample.seconds);
  const free = live.load.free_pages.reduce((total, pages) => total + pages, 0);
  const total = live.load.total_pages.reduce((sum, pages) => sum + pages, 0);
  const hits = live.load.prefix_queried_tokens ? (live.load.prefix_hit_tokens / live.load.prefix_queried_tokens) * 100 : 0;
  const shown = [
    ["Layout", live.control.layout, live.control.pinned ? "by hand" : live.control.policy],
    ["Output", seconds ? short(sum((sample) => sample.output_tokens) / seconds) : "0", "tok/s"],
    ["First token", mean("ttft_ms"), ""],
    ["Between tokens", mean("itl_ms"), ""],
    ["Running", whole(live.load.running), `${whole(live.load.waiting)} waiting`],
    ["KV in use", `${short(((total - free) / (total || 1)) * 100)} %`, ""],
    ["Prefix hits", `${short(hits)} %`, ""],
  ];
  if (!$("tiles").children.length) {
    for (const [name] of shown) $("tiles").append(html("div", "", html("dt", "", name), html("dd")));
  }
  shown.forEach(([, value, unit], index) => {
    const cell = $("tiles").children[index].lastElementChild;
    if (cell.dataset.value === value + unit) return;
    cell.dataset.value = value + unit;
    cell.replaceChildren(value, " ", html("small", "", unit));
  });
}

function show(live) {
  charts.take(live);
  const { control } = live;
  say($("about"), `${live.model} · ${control.ranks} ${control.ranks === 1 ? "rank" : "ranks"} · ${control.hardware} · ${live.version}`);
  tiles(live);
  layouts.show(live);
  holdings.showRanks(live);
  holdings.showRequests(live);
  charts.show(live);
  playground.show(live);
}

async function watch() {
  let pause = EVERY_MS;
  if (!document.hidden) {
    try {
      show(await getLive(charts.since));
      status("live", "live");
    } catch (error) {
      pause = RETRY_MS;
      status("down", error instanceof Refused ? error.message : "the server does not answer");
      if (error.status === 401 && !asked) openKey();
      if (!(error instanceof Refused) && !(error instanceof TypeError) && error.name !== "TimeoutError") throw error;
    } finally {
      setTimeout(watch, pause);
    }
  } else {
    document.addEventListener("visibilitychange", watch, { once: true });
  }
}

function openKey() {
  asked = true;
  $("key-value").value = apiKey();
  $("key-dialog").showModal();
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("splash-theme", theme);
  say($("theme"), `Theme: ${theme}`);
}

$("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("splash-theme")) + 1) % THEMES.length]);
});
$("key").addEventListener("click", openKey);
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue === "ok") useKey($("key-value").value.trim());
  $("key-value").value = "";
});
const kept = localStorage.getItem("splash-theme");
setTheme(THEMES.includes(kept) ? kept : "auto");
layouts.start();
playground.start();
watch();
