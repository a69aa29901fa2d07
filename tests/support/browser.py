"""A headless Chromium, by its devtools protocol (https://chromedevtools.github.io)."""

import base64
import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket
from support.waiting import until

_TOLD = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """One tab. told: the messages of its console; asked: the addresses that it has requested."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=120)
        self._count = 0
        self.told: list[str] = []
        self.asked: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and return its result; events that arrive meanwhile are kept."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv())
            if said.get("method") in _TOLD:
                self.told.append(json.dumps(said["params"])[:500])
            elif said.get("method") == "Network.requestWillBeSent":
                self.asked.append(said["params"]["request"]["url"])
            elif said.get("id") == self._count:
                assert "error" not in said, said
                return said["result"]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def run(self, code: str) -> Any:
        """The value of a piece of JavaScript; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def show(self, page: Path, width: int = 1280, dark: bool = False) -> None:
        """Open a page, and wait until all is drawn."""
        self.told, self.asked = [], []
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")  # no mix-up with the page before
        self.call("Page.navigate", url=page.resolve().as_uri())
        drawn = "document.documentElement?.dataset.drawn || ''"
        until(lambda: self.run(drawn), "the page", why=lambda: self.told)

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        about = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        about |= {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def busy_s(self) -> float:
        """CPU seconds that the page's thread has used."""
        found = self.call("Performance.getMetrics")["metrics"]
        return float(next(it["value"] for it in found if it["name"] == "TaskDuration"))

    def picture(self, path: Path) -> None:
        """Save a picture of the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "scale": 1, "width": size["width"], "height": size["height"]}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(program: str, folder: Path) -> Iterator[Browser]:
    """A new browser, with its files in this folder."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    flags += ["--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen([program, *flags], stderr=subprocess.DEVNULL)
    try:
        port = folder / "DevToolsActivePort"
        until(lambda: "\n" in port.read_text(), "the browser", 60, why=process.poll)
        where = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        with urllib.request.urlopen(where, timeout=60) as answer:
            pages = [it for it in json.load(answer) if it["type"] == "page"]
        opened = Browser(pages[0]["webSocketDebuggerUrl"])
        yield opened
        opened.close()
    finally:
        process.terminate()
        process.wait(60)
