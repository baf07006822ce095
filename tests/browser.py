"""Debian's Chromium without a window, driven by its DevTools protocol.

The package kubernetes needs websocket-client, so it is always here.
"""

import base64
import json
import os
import re
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import websocket

from tests.waiting import PATIENCE, until

RULES = "wcag2a", "wcag2aa", "wcag21a", "wcag21aa"


class Tab:
    """A tab of the browser."""

    def __init__(self, url: str) -> None:
        # Chromium refuses a connection with an origin that it does not know.
        self._socket = websocket.create_connection(url, timeout=PATIENCE, suppress_origin=True)
        self._numbers = count(1)

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str, **parameters: object) -> Any:  # noqa: ANN401 - of any command
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv())).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, script: str) -> Any:  # noqa: ANN401 - of any script
        """The value of an expression in the page; a promise is awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url: str, *, scripts: bool = True) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=url)
        until(lambda: self.run("document.readyState") == "complete")

    def look(self, width: int, *, dark: bool = False) -> None:
        """Set the width of the window, in pixels, and the colours that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def violations(self) -> list[str]:
        """The accessibility rules that the page breaks, by axe-core."""
        package = find_spec("axe_core_python")
        assert package is not None
        assert package.origin is not None
        self.run(Path(package.origin).with_name("axe.min.js").read_text() + "; null")
        options = json.dumps({"runOnly": RULES})
        found = self.run(f"axe.run(document, {options}).then((found) => found.violations)")
        return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found]


@contextmanager
def chromium() -> Iterator[Tab]:
    """A tab of a new browser, for the block."""
    # Processes of the browser may write to their profile for a moment after the kill.
    with tempfile.TemporaryDirectory(prefix="pf-chromium-", ignore_cleanup_errors=True) as home:
        log = Path(home, "log")
        options = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage")
        command = ["chromium", *(f"--{option}" for option in options)]
        command += ["--remote-debugging-port=0", f"--user-data-dir={home}/profile", "about:blank"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, "HOME": home},
                start_new_session=True,
            )
        try:
            listens = re.compile(r"DevTools listening on ws://(127\.0\.0\.1:\d+)/")
            until(lambda: listens.search(log.read_text()) is not None or process.poll() is not None)
            found = listens.search(log.read_text())
            assert found, log.read_text()
            with urllib.request.urlopen(f"http://{found[1]}/json", timeout=PATIENCE) as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            with closing(Tab(pages[0]["webSocketDebuggerUrl"])) as tab:
                yield tab
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)
