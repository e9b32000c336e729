"""A headless Chromium, driven over a pipe in the DevTools protocol: what the tests of the live page need of it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --disable-extensions "
    "--remote-debugging-pipe"
).split()
PATIENCE_S = 30.0


def find_chromium() -> str | None:
    """Path of a Chromium, None where there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Page:
    """One tab. `problems` holds what its console called an error, exceptions and refused loads included."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, events
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page."""
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int, dark: bool = True) -> None:
        """Give the tab a size in CSS pixels, and a scheme of colours."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression comes to; it may be a promise of a JSON value."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        # The browser waits for the next frame, so that this does not spin.
        frame = f"new Promise(done => setTimeout(() => done(Boolean({expression})), 20))"
        while not self.value(frame):
            assert time.monotonic() < deadline, f"still false after {PATIENCE_S} s: {expression}; {self.problems}"

    def click(self, selector: str) -> None:
        """Click the first element that a selector finds."""
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str) -> None:
        """Press a key that is named as in KeyboardEvent.key: Tab or Enter."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def screenshot(self, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        return base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            received = self._receive(method)
            if received.get("id") == self._number:
                assert "error" not in received, received["error"]
                result: dict[str, Any] = received["result"]
                return result
            self._note(received)

    def _receive(self, method: str) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._events], [], [], PATIENCE_S)
            assert ready, f"{method}: the browser does not answer"
            part = os.read(self._events, 1 << 20)
            assert part, f"{method}: the browser has ended"
            self._pending += part
        message, self._pending = self._pending.split(b"\0", 1)
        received: dict[str, Any] = json.loads(message)
        return received

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.problems.append(json.dumps(params["args"]))


@contextlib.contextmanager
def browsing(program: str) -> Iterator[Page]:
    """A tab of a browser of its own, which ends with it."""
    commands_read, commands = os.pipe()
    events, events_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads commands from 3 and writes events to 4.
        script = f'exec "$@" 3<&{commands_read} 4>&{events_write}'
        process = subprocess.Popen(
            ["bash", "-c", script, "browser", program, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(commands_read, events_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_read)
        os.close(events_write)
        try:
            yield Page(commands, events)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)
            os.close(commands)
            os.close(events)
