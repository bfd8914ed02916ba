"""The status page in a real browser, over a live server whose engine is only numbers."""

import pytest

from tests.e2e.browser import CHROMIUM, Page, chromium_page
from tests.entrypoints.openai.observed_server import (
    KEY,
    FakeEngine,
    make_app,
    ready_engine,
    served,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
]

SCRIPT = "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with chromium_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(autouse=True)
def quiet(page: Page):
    """No test may leave an exception or blocked content behind."""
    page.complaints.clear()
    yield
    page.evaluate("sessionStorage.clear()")
    assert page.complaints == []


def wait_for_text(page: Page, selector: str, text: str) -> None:
    page.wait_for(f"document.querySelector({selector!r}).innerText.includes({text!r})")


def is_shown(page: Page, selector: str) -> bool:
    return page.evaluate(f"document.querySelector({selector!r}).checkVisibility()")


def test_the_start_is_followed_until_requests_are_served(page):
    engine = FakeEngine()
    engine.startup.report("warming up", 12, 40)
    with served(make_app(engine)) as url:
        page.open(url)
        wait_for_text(page, "#phase", "warming up (12 of 40)")
        assert page.text("#state") == "starting"
        assert "left" in page.text("#eta")
        assert page.evaluate("document.querySelector('progress').value") == 12
        height = page.evaluate("document.body.scrollHeight")
        engine.startup.set_ready()
        engine.work()
        wait_for_text(page, "#state", "ready")
        wait_for_text(page, "#running", "6")
        assert page.text("#model") == "stdlib"
        assert page.text("#eta") == ""
        assert page.evaluate("document.body.scrollHeight") == height, "the layout jumps"


def test_figures_follow_the_engine(page):
    engine = ready_engine()
    with served(make_app(engine)) as url:
        page.open(url)
        wait_for_text(page, "#recent", "none yet")
        engine.work(num_tokens=5000)
        engine.finish("chatcmpl-7", "length")
        wait_for_text(page, "#recent", "chatcmpl-7")
        assert page.text("#kv") == "42.1"
        assert page.text("#prefix") == "64.0"
        assert page.text("#padding") == "10.0"
        assert page.text("#misses") == "1"
        assert page.text("#generation-total") == "5,000"
        wait_for_text(page, "#generation-rate", "1,000")  # 5,000 in five seconds
        assert page.text("#recent td").split() == [
            *("chatcmpl-7", "length", "100", "ms", "250", "ms", "2.00", "s", "120", "64", "48")
        ]
        label = page.evaluate("document.querySelector('#generation-line').ariaLabel")
        assert label == "Generated tokens per second in the last 120 seconds, at most 5,000"
        engine.work(num_tokens=1, num_waiting=77)
        wait_for_text(page, "#waiting", "77")


def test_what_clients_send_is_text(page):
    engine = ready_engine()
    engine.finish(SCRIPT, SCRIPT)
    with served(make_app(engine)) as url:
        page.open(url)
        wait_for_text(page, "#recent", SCRIPT)
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.title") == "vLLM status"


def test_the_key_is_asked_for_kept_in_the_tab_and_forgotten(page):
    def enter(key: str) -> None:
        page.evaluate(f"document.querySelector('#key').value = {key!r}")
        page.evaluate("document.querySelector('#key-form button').click()")

    with served(make_app(ready_engine(), keys=(KEY,))) as url:
        page.open(url)
        wait_for_text(page, "#key-form", "asks for an API key")
        assert not is_shown(page, "#figures")
        for key, answer in (("wrong", "did not take"), ("schlüssel", "without spaces")):
            enter(key)
            wait_for_text(page, "#key-error", answer)
        enter(KEY)
        wait_for_text(page, "#state", "ready")
        assert is_shown(page, "#figures") and not is_shown(page, "#key-form")
        page.open(url)
        wait_for_text(page, "#state", "ready")
        page.evaluate("document.querySelector('#forget').click()")
        wait_for_text(page, "#state", "locked")
        assert page.evaluate("sessionStorage.length") == 0
    page.complaints[:] = [line for line in page.complaints if "401" not in line]


def test_a_server_that_is_gone_is_told_and_found_again(page):
    app = make_app(ready_engine())
    with served(app) as url:
        page.open(url)
        wait_for_text(page, "#state", "ready")
    wait_for_text(page, "#state", "unreachable")
    with served(app, port=int(url.rpartition(":")[2])):
        wait_for_text(page, "#state", "ready")
    page.complaints[:] = [line for line in page.complaints if "ERR_" not in line]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 375, 800, 1600])
def test_nothing_overflows_and_all_text_can_be_read(page, width, scheme):
    engine = ready_engine()
    engine.work(num_tokens=123_456)
    engine.finish("chatcmpl-" + 40 * "0")
    with served(make_app(engine)) as url:
        page.open(url, width=width, scheme=scheme)
        wait_for_text(page, "#running", "6")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(LOWEST_CONTRAST) >= 4.5
        assert page.evaluate(NAMELESS) == []


# The least ratio of luminances between a text and what is behind it (WCAG 2, AA asks for 4.5).
LOWEST_CONTRAST = """(() => {
  const light = (c) => {
    const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (c !== 'rgba(0, 0, 0, 0)') return c;
    }
  };
  const ratios = [...document.querySelectorAll('body *')]
    .filter((e) => e.checkVisibility())
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a))
    .map(([a, b]) => (a + 0.05) / (b + 0.05));
  return Math.min(...ratios);
})()"""

# Meters, pictures, inputs and regions that a screen reader could not name.
NAMELESS = """[...document.querySelectorAll('meter, svg, progress, input, [role=region]')]
  .filter((e) => !e.ariaLabel && !e.getAttribute('aria-labelledby') && !e.labels?.length)
  .map((e) => e.outerHTML)"""
