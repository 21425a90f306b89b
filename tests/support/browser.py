"""
A real Chromium, without a window, driven over its DevTools protocol; and a server for the pages that it loads.

    with browser.served(folder) as url, browser.chromium() as tab:
        seen = tab.load(url + "index.html", width=390, dark=True)
        seen.complaints == []
        tab.run("document.title")
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import loopback

PROGRAM = shutil.which("chromium")
WHY = "chromium is not installed"

_WORDS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-extensions", "--no-proxy-server",
    "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
#: Serves a folder, as Pages would.
served = loopback.files
#: Seconds until Chromium answers on a loaded machine.
PATIENCE = 60.0


class Loaded(NamedTuple):
    """
    A page that was loaded.

    Attributes:
        complaints: What the console, the policy of the page or the network said.
        asked: Paths of everything that was loaded.
    """

    complaints: list[str]
    asked: list[str]


class Tab:
    """One page of a running Chromium."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers, self._context = socket, itertools.count(1), ""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._context = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **fields: Any) -> dict[str, Any]:
        """Call *method* and return its result; what else comes is kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": fields, **({"sessionId": self._context} if self._context else {})}
        self._socket.send(json.dumps(message))
        while True:
            found = json.loads(self._socket.recv(timeout=PATIENCE))
            if found.get("id") == number:
                assert "error" not in found, found["error"]
                result: dict[str, Any] = found["result"]
                return result
            self._events.append(found)

    def load(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> Loaded:
        """Load *url* and return what happened."""
        self.look(width=width, height=height, dark=dark)
        self._events.clear()
        self.call("Page.navigate", url=url)
        while not any(one.get("method") == "Page.loadEventFired" for one in self._events):
            self._events.append(json.loads(self._socket.recv(timeout=PATIENCE)))
        # Whatever was said while it was loading comes before the answer to this.
        self.run("document.fonts.ready.then(() => 1)")
        return self._seen()

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show what is loaded in a window of that size, by day or by night."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def _seen(self) -> Loaded:
        complaints, asked = list[str](), list[str]()
        for one in self._events:
            fields = one.get("params", {})
            match one.get("method"):
                case "Log.entryAdded":
                    complaints.append(fields["entry"]["text"])
                case "Runtime.exceptionThrown":
                    complaints.append(str(fields["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    complaints.append(str(fields["args"]))
                case "Network.loadingFailed":
                    complaints.append(f"not loaded: {fields}")
                case "Network.responseReceived" if fields["response"]["status"] >= 400:
                    complaints.append(f"{fields['response']['status']}: {fields['response']['url']}")
                case "Network.requestWillBeSent":
                    asked.append(fields["request"]["url"])
        return Loaded(complaints, asked)

    def run(self, script: str) -> Any:
        """Return what *script* gives in the page, as JSON tells it."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")


@contextlib.contextmanager
def chromium() -> Iterator[Tab]:
    """Start Chromium with a profile of its own, and end it with everything that it started."""
    from websockets.sync.client import connect

    assert PROGRAM, WHY
    with tempfile.TemporaryDirectory(prefix="sparkwright-chromium-", ignore_cleanup_errors=True) as profile:
        command = [PROGRAM, *_WORDS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            with connect(_address(Path(profile), process), max_size=64 << 20, proxy=None, open_timeout=PATIENCE) as socket:
                yield Tab(socket)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Return where Chromium listens, once it says so."""
    told, until = profile / "DevToolsActivePort", time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, "chromium ended"
        with contextlib.suppress(FileNotFoundError, ValueError):
            port, path = told.read_text().splitlines()
            return f"ws://127.0.0.1:{port}{path}"
        time.sleep(0.05)
    raise AssertionError("chromium does not say where it listens")
