"""Test the status page in a real browser, with a live server whose engine only has numbers that the
test sets.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.e2e.browser import CHROMIUM
from tests.e2e.page_checks import LOWEST_CONTRAST, NAMELESS
from tests.entrypoints.openai.observed_server import (
    KEY,
    ObservedEngine,
    make_app,
    ready_engine,
    served,
)
from tests.exhaustive import exhaustive
from vllm.config import PoolerConfig
from vllm.engine.metrics.media_metrics import MediaReadStats
from vllm.entrypoints.shared.card_telemetry import CardTelemetry
from vllm.messages import MediaStats, RunnerStats, SchedulerStats, WarmUpStats
from vllm.multimodal.interface.media_times import MediaTimes
from vllm.platforms.habana.card_reading import CardReading

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
]

ENDS_OF_TIMES = """[...document.querySelector('.times').children]
  .filter((e) => getComputedStyle(e).visibility === 'visible')
  .map((e) => {
    const range = document.createRange();
    range.selectNodeContents(e);
    const {left, right} = range.getBoundingClientRect();
    return [left, right];
  })"""
"""Left and right ends of the texts below a chart."""
SCRIPT = "<img src=x onerror=\"document.title='broken'\">"


def test_the_start_is_followed_until_requests_are_served(page):
    engine = ObservedEngine()
    engine.startup.report("warming up", 12, 40, 33.0)
    with served(make_app(engine)) as url:
        page.open(url + "/status")
        page.wait_for_text("#phase", "warming up (12 of 40)")
        assert page.text("#state") == "starting"
        assert "left" in page.text("#eta")
        assert page.evaluate("document.querySelector('progress').value") == 12
        height = page.evaluate("document.body.scrollHeight")
        engine.startup.set_ready()
        engine.work()
        page.wait_for_text("#state", "ready")
        page.wait_for_text("#running", "6")
        assert page.text("#model") == "stdlib"
        assert page.text("#eta") == ""
        assert page.evaluate("document.body.scrollHeight") == height, "the layout jumps"


def test_figures_follow_the_engine(page):
    engine = ready_engine()
    with served(make_app(engine)) as url:
        page.open(url + "/status")
        page.wait_for_text("#recent", "none yet")
        engine.work(num_tokens=5000)
        engine.finish("chatcmpl-7", "length")
        page.wait_for_text("#recent", "chatcmpl-7")
        assert page.text("#kv") == "42.1"
        assert page.text("#prefix") == "64.0"
        assert page.text("#padding") == "1.4"
        assert page.evaluate("document.querySelector('#padding-note').title") == (
            "as predicted, 10.0 % of tokens, 25.0 % of KV blocks of decodes"
        )
        assert page.text("#misses") == "1"
        assert page.text("#generation-total") == "5,000"
        page.wait_for_text("#generation-rate", "1,000")  # 5,000 tokens in five seconds
        assert page.text("#recent td").split() == [
            *("chatcmpl-7", "length", "100", "ms", "250", "ms", "2.00", "s", "120", "64", "48")
        ]
        label = page.evaluate("document.querySelector('#generation-chart svg').ariaLabel")
        assert label == "Generated tokens per second in the last 120 seconds, at most 5,000"
        assert not page.is_shown("#traffic")
        engine.buckets = [(1, 8, 1, 200, True), (1, 4, 1, 100, False)]
        page.click("#show-traffic")
        page.wait_for("document.querySelectorAll('#traffic .traffic').length === 1")
        page.wait_for("document.querySelectorAll('#traffic .cell').length === 2")
        [cold] = page.evaluate(
            "[...document.querySelectorAll('.cold title')].map(e => e.textContent)"
        )
        assert cold == "batch 4, 100 KV blocks: 104 tokens and blocks, not warm yet"
        assert "outlines are buckets that are not warm yet" in page.text("#traffic")
        engine.buckets = [(1, 8, 1, 200, True), (1, 4, 1, 100, True)]
        warm = WarmUpStats(num_warm=2, num_wanted=2)
        engine.work(stats=SchedulerStats(warm_up=warm))
        page.wait_for("!document.querySelector('.cold')")
        engine.core_metrics.traffic_table.add(0, 1, 300, 0)
        engine.work(num_tokens=1, num_waiting=77)
        page.wait_for_text("#waiting", "77")
        page.wait_for("document.querySelectorAll('#traffic .traffic').length === 2")
        # On the CPU, prompts have no buckets.
        assert page.text("#traffic figcaption").endswith(" Prompts")
        assert page.text("#traffic figcaption").startswith("Decodes")


def test_a_chart_has_an_axis_of_time_and_one_of_size(page):
    engine = ready_engine()
    engine.work(num_tokens=1300)
    with served(make_app(engine)) as url:
        page.open(url + "/status")
        page.wait_for_text("#generation-chart .top", "2,000 tokens/s")
        times = page.text("#generation-chart .times span").split(" ago")
        assert times == ["120 s", " 90 s", " 60 s", " 30 s", " now"]


def test_words_are_those_of_the_device_and_of_the_model(page):
    engine = ready_engine()
    engine.work(stats=SchedulerStats(num_running=1, num_kv_blocks=9))
    with served(make_app(engine)) as url:
        page.open(url + "/status")
        page.wait_for_text("#running", "1")
        assert "Padding" not in page.text("main") and "Bucket" not in page.text("main")
        assert page.is_shown(".of-generation") and page.is_shown("#kv-tile")
        engine.work()
        page.wait_for_text(".of-buckets", "Padding")
        pooler = PoolerConfig(task="embed", pooling_type="MEAN")
        config = engine.core_metrics.config
        engine.core_metrics.config = replace(config, model=replace(config.model, pooler=pooler))
        page.wait_for("!document.querySelector('.of-generation').checkVisibility()")
        assert page.text("#chat-link") == "Chat"


def test_the_page_of_a_server_that_warms_up_says_how_far_it_is(page):
    engine = ready_engine()
    figures = {"num_warm": 16, "num_wanted": 86, "seconds_left": 41.0, "longest_delay_s": 0.35}
    engine.work(stats=SchedulerStats(warm_up=WarmUpStats(is_warming=True, **figures)))
    with served(make_app(engine)) as url:
        page.open(url + "/status")
        page.wait_for_text("#warm-buckets", "16")
        text = " ".join(page.text("#warm-up").split())
        assert text == "Warm buckets 16 of 86; about 41.0 s left, longest delay of a step 350 ms"
        engine.work()
        page.wait_for("document.querySelector('#warm-up').hidden")


def test_cards_are_listed_where_they_can_be_read(page):
    app = make_app(ready_engine())
    cards = [
        CardReading(0, 3, "HL-225", 412.6, 51.0, 88 * 2**30, 96 * 2**30, 0.87),
        CardReading(1, None, SCRIPT),
    ]
    vars(app.state.context)["_card_telemetry"] = CardTelemetry(lambda: cards, max_age_s=0)
    with served(app) as url:
        page.open(url + "/status")
        page.wait_for_text("#card-rows", "HL-225")
        first, second = page.text("#card-rows").split(f"1 {SCRIPT}")
        assert " ".join(first.split()) == "0 HL-225 3 87 % 413 W 51 °C 88.0 of 96.0 GiB"
        assert " ".join(second.split()) == "– – – – – of – GiB"
        cards.clear()
        page.wait_for("document.querySelector('#cards').hidden")


def test_media_are_shown_of_models_that_read_them(page):
    engine = ready_engine()
    read = MediaReadStats(MediaTimes(), num_cache_queries=8, num_cache_hits=2)

    def encode(seconds):
        media = MediaStats(num_queries=8, num_hits=4)
        runner = RunnerStats(num_encoded_items=4, encode_seconds=seconds)
        engine.work(stats=SchedulerStats(num_running=1, media=media, runner=runner))

    encode(0.0)
    app = make_app(engine)
    with served(app) as url:
        page.open(url + "/status")
        page.wait_for_text("#running", "1")
        assert not page.is_shown(".of-media")
        for _ in range(6):
            read.read.add("image", 0.1)
        fetched = app.state.context.media_fetcher.times
        for seconds in (0.25, 0.75):
            fetched.add("image", seconds)
        engine.metrics = replace(engine.metrics, read_media=lambda: read)
        page.wait_for_text(".of-media", "6 image; fetched in 500 ms each, decoded in 100 ms")
        shown = [" ".join(page.text(f"#{name}").split()) for name in ("read-hits", "encoded-hits")]
        assert shown == ["25.0", "50.0"]
        encode(0.2)
        page.wait_for("parseFloat(document.querySelector('#encoder-share').textContent) > 0")
        assert page.text("#encode-time") == "50 ms"
        assert page.evaluate("document.querySelector('#encoder-meter').value") > 0
        assert page.evaluate(NAMELESS) == []


def test_the_phases_of_a_start_are_listed(page):
    engine = ObservedEngine()
    engine.startup.finished_phases = [("loading weights", 3.21), ("nothing", 0.0)]
    with served(make_app(engine)) as url:
        page.open(url + "/status", scheme="dark")
        page.wait_for_text("#phases", "start 3.21 s: loading weights 3.21 s")
        assert "nothing" not in page.text("#phases")
        assert page.evaluate(LOWEST_CONTRAST) >= 4.5


def test_what_clients_send_is_text(page):
    engine = ready_engine()
    engine.finish(SCRIPT, SCRIPT)
    with served(make_app(engine)) as url:
        page.open(url + "/status")
        page.wait_for_text("#recent", SCRIPT)
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.title") == "vLLM status"


def test_the_key_is_asked_for_kept_in_the_tab_and_forgotten(page):
    def enter(key: str) -> None:
        page.fill("#key", key)
        page.click("#key-form button")

    with served(make_app(ready_engine(), keys=(KEY,))) as url:
        page.open(url + "/status")
        page.wait_for_text("#key-form", "asks for an API key")
        assert not page.is_shown("#figures")
        for key, answer in (("wrong", "did not take"), ("schlüssel", "without spaces")):
            enter(key)
            page.wait_for_text("#key-error", answer)
        enter(KEY)
        page.wait_for_text("#state", "ready")
        assert page.is_shown("#figures") and not page.is_shown("#key-form")
        page.open(url + "/status")
        page.wait_for_text("#state", "ready")
        page.click("#forget")
        page.wait_for_text("#state", "locked")
        assert page.evaluate("sessionStorage.length") == 0
    page.complaints[:] = [line for line in page.complaints if "401" not in line]


def test_a_server_that_is_gone_is_told_and_found_again(page):
    app = make_app(ready_engine())
    with served(app) as url:
        page.open(url + "/status")
        page.wait_for_text("#state", "ready")
    page.wait_for_text("#state", "unreachable")
    with served(app, port=int(url.rpartition(":")[2])):
        page.wait_for_text("#state", "ready")
    page.complaints[:] = [line for line in page.complaints if "ERR_" not in line]


# Exhaustive: the colors of a scheme do not depend on the width of the window.
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        *((320, "light"), (375, "dark"), (800, "light"), (1600, "dark")),
        *(exhaustive(320, "dark"), exhaustive(375, "light")),
        *(exhaustive(800, "dark"), exhaustive(1600, "light")),
    ],
)
def test_nothing_overflows_and_all_text_can_be_read(page, width, scheme):
    engine = ready_engine()
    engine.work(num_tokens=123_456)
    engine.finish("chatcmpl-" + 40 * "0")
    with served(make_app(engine)) as url:
        page.open(url + "/status", width=width, scheme=scheme)
        page.wait_for_text("#running", "6")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(LOWEST_CONTRAST) >= 4.5
        assert page.evaluate(NAMELESS) == []
        ends = page.evaluate(ENDS_OF_TIMES)
        assert len(ends) >= 4 and all(a[1] < b[0] for a, b in pairwise(ends))
