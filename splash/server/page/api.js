// Requests to the server that the page came from.

const KEY = "splash-api-key";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request; the response if it succeeded, else `Refused` with what the server said. */
async function send(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new Refused(response.status, answer?.error?.message ?? `the server answered ${response.status}`);
}

export async function getLive(since) {
  const query = since === null ? "" : `?since=${since}`;
  return (await send(`live${query}`, { signal: AbortSignal.timeout(15000) })).json();
}

export const switchTo = async (layout, method) => (await send("layout", { method: "POST", body: { layout, method } })).json();

export const returnToAuto = async () => (await send("layout", { method: "POST", body: { layout: "auto" } })).json();

export const abortSwitch = async () => (await send("layout/switch", { method: "DELETE" })).json();

/** The events of a streamed completion, parsed. */
export async function* stream(path, body, signal) {
  const response = await send(path, { method: "POST", body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (pending + value).split("\n");
    pending = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(500, event.error.message);
      yield event;
    }
  }
}
