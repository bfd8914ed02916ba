"""Test `vllm hpu-check` on simulated cards, on cards that compute wrongly, and without a card."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gaudi_sim import execute as sim_execute
from gaudi_sim.bridge import SimBridge, SimulatedKernels
from gaudi_sim.card.device import HpuTensor
from gaudi_sim.graphs.graphs import CapturedGraph
from tests.exhaustive import exhaustive
from tests.hpu import needs_simulated_device
from tests.platforms.conftest import lazy, vendor  # noqa: F401
from tests.reach import use_device_nodes
from vllm import envs
from vllm.attention.backends import hpu_attn
from vllm.cost_model.measured import RATES, read_measured
from vllm.entrypoints.cli.main import main
from vllm.hpu_check import CHECKS, NAMES, collectives, device, run, stopwatch
from vllm.hpu_check.check import Outcome, run_check
from vllm.hpu_check.programs import check_compile_counting
from vllm.platforms.habana.real import RealBridge
from vllm.sample.restrictions.masks import TokenMasks
from vllm.worker.hpu.launches.device_tokens import DeviceTokens

LINKS = ("link_bytes_per_s", "all_reduce_s")
"""Rates between cards."""
LAZY = {"VLLM_HPU_SIM": "gaudi2", "PT_HPU_LAZY_MODE": "1"}
EAGER = {"VLLM_HPU_SIM": "gaudi3", "PT_HPU_LAZY_MODE": "0"}


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure two runs: a simulated card takes the same time for each run after the first."""
    monkeypatch.setattr(stopwatch, "NUM_RUNS", 2)


@pytest.fixture(autouse=True)
def no_compiled_code_is_left() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Set the variables of this test, on a simulated machine without a card."""
    use_device_nodes(monkeypatch, tmp_path, tmp_path)

    def set_environment(variables: dict[str, str]) -> None:
        loaded = envs.Envs.load(variables)
        monkeypatch.setattr(envs, "get", lambda: loaded)

    return set_environment


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit the checks of a decoder layer and of sampling, which other tests cover."""
    few = {
        name: row
        for name, row in CHECKS.items()
        if not name.startswith(("layer", "prefill with", "sampling", "moe", "fp8", "short"))
    }
    monkeypatch.setattr(run, "CHECKS", few)


def check(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run the command; return the exit code, and (status, detail) of each check in `--json`."""
    code = main(["hpu-check", "--json"])
    report = json.loads(capsys.readouterr().out)
    rows = {row["name"]: (row["status"], row["detail"]) for row in report["checks"]}
    for status, count in report["totals"].items():
        assert count == sum(found == status for found, _ in rows.values())
    assert tuple(rows) == (*NAMES[:3], *run.CHECKS)
    for row in report["checks"]:
        assert row["expected"]
        assert bool(row["advice"]) is (row["status"] == "fail")
    return code, rows


@pytest.mark.parametrize(
    ("variables", "skipped"),
    [
        (
            LAZY,
            {
                "collectives": "there is one card",
                "torch.compile": "hpu_backend needs eager ",
                "layer compiled": "torch.compile needs eager mode",
                "kernel block_softmax": "only GAUDI3 have it: ",
                "kernel block_softmax_adjustment": "only GAUDI3 have it: ",
            },
        ),
        # Exhaustive: the compiled layer of eager mode is also tested in test_hpu_check_layer.py.
        exhaustive(
            EAGER,
            {
                "collectives": "there is one card",
                "graph replay": "HPU graphs need lazy mode",
                "layer graph": "HPU graphs need lazy mode",
                "moe of few bits": "convert_from_uint4 is documented for lazy mode",
                "moe with biases": "convert_from_uint4 is documented for lazy mode",
                "matmul of few bits": "convert_from_uint4 is documented for lazy mode",
                "uint4 matmul": "convert_from_uint4 is documented for lazy mode",
            },
        ),
    ],
)
def test_a_simulated_card_passes_in_both_modes(environment, capsys, variables, skipped):
    environment(variables)
    code, rows = check(capsys)
    assert code == 0
    for name, (status, detail) in rows.items():
        assert status == ("skip" if name in skipped else "pass"), (name, detail)
        assert detail.startswith(skipped.get(name, ""))
    assert rows["drafts"][1].startswith(
        "accepted drafts of 4 requests: [0, 1, 2, 3] of 3, as on the host"
    )
    mode = "lazy" if variables is LAZY else "eager"
    assert rows["device"][1].startswith(f"{variables['VLLM_HPU_SIM'].upper()}, {mode} mode, torch ")


def test_what_the_bridge_lacks_is_skipped_and_the_rest_passes(environment, capsys, only_kernels):
    absent = ("FusedSDPA", "FusedRMSNorm", "apply_rotary_pos_emb")
    environment({**LAZY, "VLLM_HPU_SIM_ABSENT": ",".join(absent)})
    code, rows = check(capsys)
    assert code == 0
    for name in absent:
        status, detail = rows[f"kernel {name}"]
        assert (status, detail.partition(":")[0]) == ("skip", "this build of the bridge lacks it")
    assert {status for name, (status, _) in rows.items() if name.startswith("sdpa")} == {"skip"}
    for name in ("rms_norm", "rotary neox", "prefill attention"):
        assert rows[name][0] == "pass"


@pytest.mark.parametrize("variables", [LAZY, EAGER], ids=["lazy", "eager"])
def test_saved_rates_of_a_simulated_card_are_near_the_cost_model(
    environment, monkeypatch, tmp_path, variables
):
    environment(variables)
    monkeypatch.setattr(run, "CHECKS", {"memory": CHECKS["memory"]})
    path, card = tmp_path / "card.json", variables["VLLM_HPU_SIM"]
    assert main(["hpu-check", "--save", str(path)]) == 0
    measured = read_measured(path, card)
    assert measured.is_simulated
    of_one_card = [name for name in RATES if name not in LINKS]
    in_both_modes = ["matmul_flops_per_s", "memory_bytes_per_s"]
    assert list(measured.rates) == (of_one_card if variables is LAZY else in_both_modes)
    for name in measured.rates:
        assert measured.slowness(name) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    ("name", "reason"), [("", "it is a folder"), ("none/card.json", "its folder does not exist")]
)
def test_a_file_of_rates_is_tried_before_the_checks(
    environment, monkeypatch, capsys, tmp_path, name, reason
):
    environment(LAZY)
    monkeypatch.setattr(run, "CHECKS", {"memory": None})  # would fail if it ran
    path = tmp_path / name
    assert main(["hpu-check", "--save", str(path)]) == 2
    assert f"--save {path} cannot be written: {reason}" in capsys.readouterr().err


def test_a_triton_that_breaks_the_compiler_of_torch_is_found(monkeypatch):
    assert device.check_triton().status == "pass"
    monkeypatch.setitem(sys.modules, "torch._inductor.freezing", None)
    monkeypatch.setattr(device, "version", lambda name: "3.8.0")
    monkeypatch.setattr(torch, "__version__", "2.6.0+hpu.1.21.3")
    outcome = device.check_triton()
    assert outcome.status == "fail"
    assert outcome.detail.startswith(
        "torch 2.6.0+hpu.1.21.3, triton 3.8.0: torch.compile cannot start ("
    )
    assert outcome.detail.endswith("; install 'triton>=3.1,<3.3'")


def test_a_triton_of_another_torch_is_found_where_the_compiler_starts_all_the_same(monkeypatch):
    monkeypatch.setattr(device, "version", lambda name: "3.8.0")
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    assert device.check_triton() == Outcome(
        "fail",
        "torch 2.7.1, triton 3.8.0: this triton belongs to a different version of torch; install "
        "'triton>=3.1,<3.4'",
    )


def test_the_table_is_aligned_and_says_what_was_simulated(environment, capsys, only_kernels):
    environment(LAZY)
    assert main(["hpu-check"]) == 0
    first, header, *rows, totals = capsys.readouterr().out.splitlines()
    assert first == "SIMULATED card (gaudi2): nothing below ran on hardware"
    column = header.index("result")
    assert [row[: column - 2].rstrip() for row in rows] == [*NAMES[:3], *run.CHECKS]
    assert {row[column : header.index("detail")].strip() for row in rows} == {"pass", "skip"}
    assert all(row.endswith(" ms]") for row in rows)
    assert totals.startswith(f"{len(rows) - 4} passed, 0 failed, 4 skipped in ")


def raise_two_lines(*args: object, **kwargs: object) -> None:
    raise RuntimeError("synapse says no\nand much more")


def swapped_rotary(self, x, cos, sin, *, interleaved, rotary=SimulatedKernels.rotary):
    return rotary(self, x, cos, sin, interleaved=not interleaved)


def not_a_number(self, x, weight, eps):
    return x * float("nan")


def without_causality(self, query, key, value, attn_mask=None, *, sdpa=SimulatedKernels.sdpa, **kw):
    if attn_mask is None:
        kw = {"scale": kw.get("scale")}
    return sdpa(self, query, key, value, attn_mask, **kw)


def counters_with_fallbacks(self):
    return replace(self.card.counters(), cpu_fallbacks={"aten::sort": 2, "aten::gather": 1})


def no_maximum_of_int32(op, args, kwargs, *, is_lazy, needs_host=sim_execute.needs_host):
    if op is torch.ops.aten.amax.default and args[0].dtype == torch.int32:
        return "kernel"
    return needs_host(op, args, kwargs, is_lazy=is_lazy)


def drafts_that_are_all_right(self, packed, shape, sampled, accept=DeviceTokens.accept):
    output = accept(self, packed, shape, sampled)
    return output if output is None or output.is_cpu else output.clamp_min(1 + self.max_drafts)


def masks_of_the_first_rows(self, logits, rows, apply=TokenMasks.apply_on_card):
    apply(self, logits, torch.arange(len(rows)).to(logits.device))


CAUSAL = {"sdpa causal", "sdpa shared heads", "sdpa valid lengths", "prefill attention"}
BROKEN = {
    "rotary of the other kind": (
        (SimulatedKernels, "rotary", swapped_rotary),
        {"rotary neox", "rotary gpt-j"},
        "torch.float32, 64 of 64 rotated: max error ",
    ),
    "a norm that is no number": (
        (SimulatedKernels, "rms_norm", not_a_number),
        {"rms_norm", "graph replay"},
        "torch.float32, norm of [33, 256]: max error nan, limit 1e-03 (6 of 6 cases)",
    ),
    "a kernel that sees what is to come": (
        (SimulatedKernels, "sdpa", without_causality),
        CAUSAL,
        "torch.float32, softmax None: max error ",
    ),
    "a kernel that raises": (
        (SimulatedKernels, "sdpa", raise_two_lines),
        {*CAUSAL, "sdpa mask"},
        "RuntimeError: synapse says no",
    ),
    "a replay that is stale": (
        (CapturedGraph, "replay", lambda self, *args, **kwargs: self.outputs),
        {"graph replay"},
        "second call: max error ",
    ),
    "memory that is not taken": (
        (SimBridge, "zeros", lambda self, shape, dtype: torch.zeros(1)),
        {"memory"},
        "94.62 of 94.62 GiB free; an allocation of 256 MiB took 0.0 MiB",
    ),
    "an operator without a kernel": (
        (SimBridge, "counters", counters_with_fallbacks),
        {"host fallbacks"},
        "ran on the host: aten::gather (1), aten::sort (2)",
    ),
    "a maximum without a kernel": (
        (sim_execute, "needs_host", no_maximum_of_int32),
        {"integer reductions", "drafts", "host fallbacks"},
        "ran on the host: aten::amax",
    ),
    "drafts that are taken for right": (
        (DeviceTokens, "accept", drafts_that_are_all_right),
        {"drafts"},
        "the outputs of a forward pass with drafts differ from the host",
    ),
    "masks for other rows": (
        (TokenMasks, "apply_on_card", masks_of_the_first_rows),
        {"token masks"},
        "with 4000 tokens, the masked tokens differ from the host",
    ),
    "new tokens that are not stored": (
        (hpu_attn, "write_kv_cache", lambda *args: None),
        {"decode attention", "prefill attention"},
        "torch.float32, plain blocks, window None: max error ",
    ),
    "a copy that is not the same": (
        (HpuTensor, "cpu", lambda self: torch.zeros(self.shape, dtype=self.dtype)),
        {*CAUSAL, "host copies", "index types", "sdpa mask", "rms_norm", "rotary neox"}
        | {"rotary gpt-j", "silu_and_mul", "decode attention", "graph replay", "uint4 matmul"}
        | {"matmul of few bits", "pinned copies", "integer reductions", "token masks", "drafts"},
        "torch.float32 values differ after a copy to the card and back (waiting)",
    ),
}  # fmt: skip

BESIDE_ALL_OTHERS = ("a kernel that raises", "a copy that is not the same")
"""With these faults all checks run; with another fault the checks that find it and one more."""


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_fails_and_the_other_checks_still_run(
    environment, capsys, monkeypatch, only_kernels, what
):
    (owner, name, replacement), expected, message = BROKEN[what]
    environment(LAZY)
    if what not in BESIDE_ALL_OTHERS:
        few = {name: run.CHECKS[name] for name in run.CHECKS if name in {*expected, "silu_and_mul"}}
        monkeypatch.setattr(run, "CHECKS", few)
    monkeypatch.setattr(owner, name, replacement)
    code, rows = check(capsys)
    assert code == 1
    failed = {name: detail for name, (status, detail) in rows.items() if status == "fail"}
    assert failed.keys() == expected
    assert next(detail for detail in failed.values()).startswith(message)
    assert not any("\n" in detail for detail in failed.values())


@pytest.mark.parametrize(
    ("steps", "status", "detail"),
    [
        ([0, 1, 1, 1, 1, 2], "pass", "compilations: first shape 1, again 0, new shape 1"),
        ([0, 1, 1, 2, 2, 3], "fail", "compilations: first shape 1, again 1, new shape 1"),
        ([0, 1, 1, 1, 1, 1], "fail", "compilations: first shape 1, again 0, new shape 0"),
        ([0, 0, 0, 0, 0, 0], "skip", "first shape 0, again 0, new shape 0: no compilation was "),
    ],
)
def test_compile_counts_are_judged(steps, status, detail, monkeypatch):
    bridge = SimBridge("gaudi2", is_lazy=True)
    readings = iter([replace(bridge.counters(), compilations=n) for n in steps])
    monkeypatch.setattr(bridge, "counters", lambda: next(readings))
    with torch.inference_mode():
        outcome = check_compile_counting(bridge)
    assert outcome.status == status and outcome.detail.startswith(detail)


# Leave out checks that the stand-in package cannot pass: it counts no compilations, and rotates
# pairs of neighbors in float32 only.
CALLS_OF_THE_REAL_BRIDGE = [
    name
    for name in CHECKS
    if name.startswith(("sdpa", "rms", "rotary neox", "decode att", "prefill att"))
]


@pytest.mark.parametrize("name", CALLS_OF_THE_REAL_BRIDGE)
def test_kernels_of_the_real_bridge_are_called_as_documented(vendor, name, monkeypatch):  # noqa: F811
    # The stand-in package has no tensors of its own: use the simulated card's. They are computed
    # on this processor, so the time of a call is not measured.
    SimBridge("gaudi2")
    monkeypatch.setattr(RealBridge, "now_s", lambda bridge: 0.0)
    result = run_check(name, lambda: CHECKS[name].run(RealBridge(), ""))
    assert result.status == "pass", result.detail


def test_a_card_that_does_not_open_fails_once(environment, capsys, monkeypatch):
    environment(LAZY)
    monkeypatch.setattr("gaudi_sim.bridge.SimBridge", raise_two_lines)
    code, rows = check(capsys)
    assert code == 1
    assert rows.pop("device") == ("fail", "RuntimeError: synapse says no")
    assert rows.pop("triton fits torch")[0] == "pass"  # this check needs no card
    assert {status for status, _ in rows.values()} == {"skip"}


PACKAGE = (
    f"the package habana_frameworks (habana-torch-plugin) is not installed for {sys.executable}"
)


@pytest.mark.parametrize("has_node", [False, True])
def test_without_a_card_it_says_what_is_missing(environment, capsys, tmp_path, has_node):
    environment({})
    if has_node:
        (tmp_path / "accel").mkdir()
        (tmp_path / "accel" / "accel0").touch()
    assert main(["hpu-check"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"no Gaudi card: {PACKAGE}\n" in captured.err
    assert ("there is no Gaudi " in captured.err) is not has_node
    assert captured.err.endswith("  VLLM_HPU_SIM=gaudi2 vllm hpu-check\n")

    assert main(["hpu-check", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["card"] is None
    assert report["missing"][0] == PACKAGE and len(report["missing"]) == 2 - has_node


# Exhaustive: tests/e2e/test_parallel_hpu_faults.py uses the collectives of cards in every run.
@pytest.mark.exhaustive
@needs_simulated_device
def test_collectives_over_two_simulated_cards(monkeypatch):
    monkeypatch.setenv("VLLM_HPU_SIM", "gaudi2")
    outcome = collectives.check_collectives(2)
    assert (outcome.status, outcome.detail) == ("pass", "sum, gather and send over 2 cards")
    assert sorted(outcome.rates) == sorted(LINKS)


@needs_simulated_device
def test_the_rates_of_links_are_saved_with_the_rates_of_the_card(
    environment, monkeypatch, tmp_path
):
    """The program of a rank is replaced, because a test machine has no cards with links."""
    environment(LAZY)
    program = """
import json, sys
if sys.argv[1] != "0":  # only the rates of the first rank are saved
    sys.exit()
from types import SimpleNamespace
from vllm.cost_model.links import all_reduce_bytes
from vllm.hpu_check import collectives
from vllm.hpu_check.stopwatch import measure_links
now_s = 0.0
def sum_up(x):
    global now_s
    now_s += 40e-6 + all_reduce_bytes(x.nbytes, 4) / 2e11
    return x
import torch
bridge = SimpleNamespace(
    zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    synchronize=lambda: None,
    now_s=lambda: now_s,
)
rates = measure_links(bridge, SimpleNamespace(size=4, all_reduce=sum_up))
collectives.rates_file(sys.argv[3]).write_text(json.dumps(rates))
"""
    monkeypatch.setattr(collectives, "RANK_PROGRAM", program)
    monkeypatch.setattr(run, "CHECKS", {"memory": CHECKS["memory"]})
    monkeypatch.setattr("vllm.entrypoints.cli.hpu_check.simulated_card", lambda: None)
    monkeypatch.setattr("vllm.entrypoints.cli.hpu_check.missing_of_card", list)
    monkeypatch.setattr("vllm.entrypoints.cli.hpu_check.num_cards", lambda: 4)
    path = tmp_path / "card.json"
    assert main(["hpu-check", "--save", str(path)]) == 0
    measured = read_measured(path, LAZY["VLLM_HPU_SIM"])
    assert measured.rates["link_bytes_per_s"] == pytest.approx(2e11, rel=1e-3)
    assert measured.rates["all_reduce_s"] == pytest.approx(40e-6, rel=1e-3)
    assert "link_bytes_per_s x 1.31, all_reduce_s x 0.803" in measured.describe()


@needs_simulated_device
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("all_reduce", "the sum over 1 cards must be 0.0, got 1.0"),
        ("all_gather", r"all-gather over 1 cards .* got \[1.0\]"),
    ],
)
def test_a_wrong_value_of_a_collective_is_found(
    environment, monkeypatch, tmp_path, method, message
):
    environment({"VLLM_HPU_SIM": "gaudi2"})
    monkeypatch.setattr(collectives.TPGroup, method, lambda self, x: x + 1)
    with pytest.raises(RuntimeError, match=message):
        collectives.exchange("0", "1", str(tmp_path / "store"))


def test_a_wrong_value_from_the_card_before_is_found():
    class Link:
        def send(self, x: torch.Tensor) -> None:
            raise AssertionError("the last card sends nothing")

        def receive(self, x: torch.Tensor) -> None:
            x[:1] = 1.0

    with pytest.raises(RuntimeError, match=r"^card 2 must receive .* of card 1, got 1.0 to 0.0$"):
        collectives.send_on(Link(), torch.full((4,), 2.0), 2, 3)


@pytest.mark.parametrize(
    ("program", "timeout_s", "detail"),
    [
        (
            "import sys, time; sys.exit('trace\\nno route') if sys.argv[1] == '1' else "
            "time.sleep(60)",
            60,
            "rank 1 of 2: no route",
        ),
        ("import time; time.sleep(60)", 0.1, "rank 0 of 2: no answer"),
    ],
)
def test_collectives_that_do_not_work_fail_in_time(monkeypatch, program, timeout_s, detail):
    monkeypatch.setattr(collectives, "RANK_PROGRAM", program)
    monkeypatch.setattr(collectives, "TIMEOUT_S", timeout_s)
    outcome = collectives.check_collectives(2)
    assert (outcome.status, outcome.detail) == ("fail", detail)
