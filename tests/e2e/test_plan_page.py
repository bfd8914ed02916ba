"""Test the page of `vllm plan --html`, opened as a file in a real browser."""

import pytest

from tests.e2e.browser import CHROMIUM
from tests.e2e.page_checks import LOWEST_CONTRAST, NAMELESS
from tests.hpu import needs_simulated_device
from tests.planning.test_card_search import DENSE, write_model
from vllm.bucketing.bucket import Phase
from vllm.bucketing.traffic import TrafficTable
from vllm.entrypoints.cli.main import main

pytestmark = [
    pytest.mark.e2e,
    needs_simulated_device,
    pytest.mark.usefixtures("plans_removed"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
]


def test_a_plan_with_traffic_is_drawn_in_narrow_and_dark_windows(page, tmp_path, capsys):
    table = TrafficTable(128)
    for batch in range(1, 14):
        table.add(Phase.DECODE, batch, 1, 2 * batch + 1, count=50)
    table.add(Phase.PREFILL, 1, 300, 0, count=5)
    table.save(tmp_path / "traffic.json")
    model = write_model(tmp_path / "<b>dense", DENSE)
    flags = ["--max-model-len", "1024", "--num-gpu-blocks-override", "65", "--max-num-seqs", "16"]
    given = ["--traffic", str(tmp_path / "traffic.json"), "--num-buckets", "4"]
    file = tmp_path / "plan.html"
    command = ["plan", model, "--device", "gaudi2", "--skip-tokenizer-init", *flags, *given]
    assert main([*command, "--html", str(file)]) == 0
    decodes = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("  decodes"))
    page.open(file.as_uri(), width=400, scheme="dark")
    page.wait_for("document.querySelectorAll('.traffic').length")
    assert page.text("h1") == "<b>dense"
    assert page.text("#num-blocks") == "65"
    assert page.text("#throughput") and page.text("#time-line")
    first = "document.querySelector('#maps .charts figure')"
    assert page.evaluate(f"{first}.querySelectorAll('.cell').length") == int(decodes.split()[1])
    assert page.evaluate(f"{first}.querySelectorAll('.traffic').length") == 13
    assert " 4 decode buckets: " in page.text("#maps .note")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate(LOWEST_CONTRAST) >= 4.5
    assert page.evaluate(NAMELESS) == []
    assert not page.evaluate("document.querySelector('#replay').checkVisibility()")
    page.evaluate("document.querySelector('[value=ttft_s]').click()")
    assert ": TTFT, ms from " in page.evaluate("document.querySelector('#curves svg').ariaLabel")


def test_a_replay_has_its_percentiles_on_the_page(page, tmp_path):
    (tmp_path / "trace.csv").write_text("input,output,time\n100,9,0\n300,20,1\n50,5,2\n")
    model = write_model(tmp_path / "dense", DENSE)
    flags = ["--max-model-len", "1024", "--num-gpu-blocks-override", "65", "--max-num-seqs", "4"]
    given = ["--traffic", str(tmp_path / "trace.csv"), "--num-buckets", "4", "--num-cards", "1"]
    file = tmp_path / "plan.html"
    command = ["plan", model, "--device", "gaudi2", "--skip-tokenizer-init", *flags, *given]
    assert main([*command, "--goal-ttft", "500", "--quantization", "fp8", "--html", str(file)]) == 0
    page.open(file.as_uri(), width=400)
    assert page.text("#about").startswith("fp8 weights, bfloat16, on 1 gaudi2 card")
    text = page.text("#replay")
    assert "With the buckets chosen for this traffic" in text
    assert "3 requests, 1 per second" in text and "KV cache in use: " in text
    assert "At the highest rate at which 90 % of the requests meet the goals" in text
    assert page.evaluate("document.querySelectorAll('#replay tbody tr').length") == 6
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate(NAMELESS) == []
