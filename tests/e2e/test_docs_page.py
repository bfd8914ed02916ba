"""Test the page that lists the routes of the API, in a real browser."""

import pytest

from tests.e2e.browser import CHROMIUM
from tests.e2e.page_checks import LOWEST_CONTRAST, NAMELESS
from tests.entrypoints.openai.observed_server import KEY, served
from tests.entrypoints.openai.server_fakes import make_app

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
]


def test_routes_and_fields_are_listed_once_the_key_is_given(page):
    app, _ = make_app(api_key=(KEY,))
    with served(app) as url:
        page.open(url + "/docs", width=375, scheme="dark")
        page.wait_for_text("#key-form", "asks for an API key")
        page.fill("#key", KEY)
        page.click("#key-form button")
        page.wait_for_text("#routes", "/v1/chat/completions")
        page.click("summary")
        page.wait_for_text("table", "messages")
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        assert page.evaluate(LOWEST_CONTRAST) >= 4.5
        assert page.evaluate(NAMELESS) == []
    page.complaints[:] = [line for line in page.complaints if "401" not in line]
