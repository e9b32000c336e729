// Sends a prompt, in one stream or several at once, and shows the first one's answer as it comes.

import { stream } from "./api.js";
import { $, ms, say, short } from "./dom.js";

const RECALL =
  "Remember this: The number of Moses is 57213. The number of Ruth is 80642. What is the number of Moses?";
let model = null;
let running = null;

export function start() {
  $("play").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => running?.abort());
}

export function show(live) {
  if (model === null && !$("prompt").value) $("prompt").value = live.model === "scribe" ? RECALL : "Hello!";
  model = live.model;
}

async function send() {
  if (running || model === null) return;
  running = new AbortController();
  $("stop").disabled = false;
  $("answer").replaceChildren();
  say($("answer-note"), "");
  $("answer-note").classList.remove("alert");
  const copies = Math.max(1, Math.min(32, Number($("copies").value) || 1));
  try {
    const streams = Array.from({ length: copies }, (_, index) => one(index === 0, running.signal));
    const tokens = (await Promise.all(streams)).reduce((sum, count) => sum + count, 0);
    if (copies > 1) say($("answer-note"), `${$("answer-note").textContent}; ${tokens} tokens in all ${copies} streams`);
  } catch (error) {
    running.abort(); // the other streams
    if (error.name !== "AbortError") $("answer-note").classList.add("alert");
    say($("answer-note"), error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    running = null;
    $("stop").disabled = true;
  }
}

/** One stream to its end; returns how many tokens it brought. */
async function one(shown, signal) {
  const prompt = $("prompt").value;
  const chat = $("mode").value === "chat";
  const body = {
    model,
    max_tokens: Number($("tokens").value) || 128,
    temperature: Number($("temperature").value),
    stream_options: { include_usage: true },
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  const sent = performance.now();
  let first = null;
  let usage = null;
  let reason = null;
  for await (const event of stream(chat ? "v1/chat/completions" : "v1/completions", body, signal)) {
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    reason = choice?.finish_reason ?? reason;
    const text = chat ? choice?.delta?.content : choice?.text;
    if (!text) continue;
    first ??= performance.now();
    if (shown) $("answer").append(text);
  }
  if (shown && first !== null) {
    const seconds = (performance.now() - first) / 1000;
    const rate = usage.completion_tokens > 1 && seconds > 0 ? `, then ${short((usage.completion_tokens - 1) / seconds)} tokens/s` : "";
    say($("answer-note"), `${usage.completion_tokens} tokens, the first after ${ms(first - sent)}${rate}; ended by ${reason}`);
  }
  return usage?.completion_tokens ?? 0;
}
