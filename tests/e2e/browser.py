"""A headless Chromium that is controlled over two pipes in its DevTools protocol, without a driver
or a port.
"""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_POLLS = 600
_POLL_S = 0.05


class Page:
    """One tab.

    Attributes:
        complaints: errors that the browser has logged: exceptions, blocked content.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.complaints: list[str] = []
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._received = b""
        self._last_id = 0
        self._num_loads = 0
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Open an address, in a window of this size and in light or dark colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        num_loads = self._num_loads
        self.call("Page.navigate", url=url)
        while self._num_loads == num_loads:
            self._note(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, after waiting for a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text that the elements of a selector show."""
        script = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.evaluate(f"{script}.map(e => e.innerText).join(' ')")

    def is_shown(self, selector: str) -> bool:
        """Return whether the first element of a selector can be seen."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).checkVisibility()")

    def click(self, selector: str) -> None:
        """Click the first element of a selector, which must exist and be enabled."""
        found = f"document.querySelector({json.dumps(selector)})"
        assert self.evaluate(f"{found} && !{found}.disabled"), f"{selector} cannot be clicked"
        self.evaluate(f"{found}.click()")

    def fill(self, selector: str, text: str) -> None:
        """Enter a text into the first field of a selector, as if typed."""
        self.evaluate(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
            f"field.value = {json.dumps(text)};"
            "for (const name of ['input', 'change'])"
            "  field.dispatchEvent(new Event(name, {bubbles: true})); })()"
        )

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until the first element of a selector can be seen and shows a text."""
        found = f"document.querySelector({json.dumps(selector)})"
        # A hidden element has a text as well.
        is_shown = f"{found} && {found}.checkVisibility()"
        self.wait_for(f"{is_shown} && {found}.innerText.includes({json.dumps(text)})")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression, or its promise, is true.

        The page is asked a limited number of times. It answers when it has drawn everything, so a
        slow machine gets more time.
        """
        for _ in range(_POLLS):
            if self.evaluate(f"Promise.resolve({expression}).then(Boolean)"):
                return
            time.sleep(_POLL_S)
        raise AssertionError(f"{expression}: {self.text('body')}")

    def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return the answer."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params, **self._session}
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method = event.get("method")
        if method == "Page.loadEventFired":
            self._num_loads += 1
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]))
        elif method == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(event["params"]["entry"]["text"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            data = os.read(self._from_browser, 1 << 20)
            assert data, "the browser has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextmanager
def chromium_page(profile: Path) -> Iterator[Page]:
    """Open a tab of a new browser, which is closed at the end of the block.

    Args:
        profile: an empty folder for its files.
    """
    assert CHROMIUM is not None
    browser_reads, to_browser = os.pipe()
    from_browser, browser_writes = os.pipe()

    def place_pipes() -> None:
        """Connect the pipes to the file descriptors 3 and 4, which the browser reads and writes."""
        copies = [os.dup(browser_reads), os.dup(browser_writes)]
        while min(copies) <= 4:  # neither copy may be 3 or 4, which `dup2` replaces below
            copies = [os.dup(copy) for copy in copies]
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)

    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=place_pipes,
    )
    os.close(browser_reads)
    os.close(browser_writes)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_browser)
        os.close(from_browser)
