"""Stream a long generation while the layout walks through all five, and compare with a run that does not switch.

make serve                                    # in one terminal
.venv/bin/python examples/switch_walk.py      # in another
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from typing import Any

PROMPT = "And it came to pass in those days"
WALK = ("dp", "cp", "dop", "dcp", "tp")


def post(url: str, body: dict[str, Any]) -> Any:
    """POST a JSON body; the open response."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def stream(server: str, max_tokens: int, every: int, tick: threading.Semaphore | None) -> str:
    """The text of a greedy generation. Releases `tick` each time `every` more chunks have arrived."""
    body = {"model": "scribe", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    text, chunks = [], 0
    with post(f"{server}/v1/completions", {**body, "ignore_eos": True}) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            text.append(json.loads(line[6:])["choices"][0]["text"])
            chunks += 1
            if tick is not None and chunks % every == 0:
                tick.release()
    return "".join(text)


def walk(server: str, tick: threading.Semaphore) -> None:
    """Ask for one layout after another, each once the stream has moved on."""
    for layout in WALK:
        tick.acquire()
        with post(f"{server}/layout", {"layout": layout, "method": "auto"}) as response:
            record = json.load(response)
        kib = [
            (a + b) / 1024 for a, b in zip(record["kv_bytes_received"], record["weight_bytes_received"], strict=True)
        ]
        print(
            f"{record['from']:>4} -> {record['to']:<4} {record['status']:<10} {record['method']:<10} "
            f"received by rank, KiB: {', '.join(f'{size:,.0f}' for size in kib):<16} "
            f"step held up {record['added_ms']:.2f} ms, {record['background_steps']} steps in background"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=600)
    args = parser.parse_args()
    tick = threading.Semaphore(0)
    # Without a stream there is nothing to wait for.
    walker = threading.Thread(target=walk, args=(args.server, tick), daemon=True)
    walker.start()
    switched = stream(args.server, args.max_tokens, args.max_tokens // (len(WALK) + 1), tick)
    walker.join()
    unswitched = stream(args.server, args.max_tokens, 1, None)
    print(f"{len(switched):,} characters streamed; equal to the unswitched run: {switched == unswitched}")


if __name__ == "__main__":
    main()
