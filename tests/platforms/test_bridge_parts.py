"""Test builds of the bridge that lack a kernel: the engine starts, logs which operators it uses
instead, and runs them.
"""

import importlib
from functools import partial, wraps

import pytest
import torch
import torch.nn.functional as F

from gaudi_sim.bridge import SimBridge
from gaudi_sim.vendor import kernels as simulated_kernels
from tests.hpu import captured_log
from vllm.attention.backends.sdpa import FusedSDPA, PromptInputs, bridge_sdpa, naive_sdpa
from vllm.errors import ConfigError
from vllm.ops.expert_options import ExpertBiases, ExpertOptions
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.native.operators import NativeOps
from vllm.platforms import hpu
from vllm.platforms.habana.kernels import FusedKernels
from vllm.platforms.habana.parts import OLDEST, OPERATORS, PARTS, parse_names, parse_release
from vllm.platforms.habana.real import RealBridge
from vllm.platforms.habana.trials import TRIALS

IMPORTED = [name for name, part in PARTS.items() if part.module != OPERATORS]
OLD = [name for name in IMPORTED if PARTS[name].since == OLDEST]
"""Parts that every known release has."""


def forget(part_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the names of a part from the stand-in for the vendor package."""
    part = PARTS[part_name]
    module = importlib.import_module(f"habana_frameworks.torch.{part.module}")
    monkeypatch.delattr(module, part.names[0])


def lines_about(name: str, log: list[str]) -> list[str]:
    return [line for line in log if f"no {name}:" in line]


def test_a_bridge_with_everything_says_nothing(vendor):
    with captured_log() as log:
        kernels = RealBridge().kernels
    assert log == []
    assert [name for name in IMPORTED if not kernels.has(name)] == []


@pytest.mark.parametrize("name", OLD)
def test_a_build_without_a_part_starts_and_says_so_in_one_line(vendor, monkeypatch, name):
    forget(name, monkeypatch)
    with captured_log() as log:
        bridge = RealBridge()
    assert lines_about(name, log) == [
        f"this build of the bridge has no {name}: {PARTS[name].instead}"
    ]
    assert len(log) == 1
    assert bridge.kernels.why_unused(name) == "this build of the bridge lacks it"


@pytest.mark.parametrize("module", ["hpex.kernels", "hpex.normalization", "hpu.metrics"])
def test_a_module_that_cannot_be_imported_is_a_lack_of_its_parts(vendor, monkeypatch, module):
    names = [name for name in IMPORTED if PARTS[name].module == module]
    monkeypatch.setitem(importlib.sys.modules, f"habana_frameworks.torch.{module}", None)
    kernels = RealBridge().kernels
    assert [name for name in IMPORTED if not kernels.has(name)] == names


def test_without_metrics_and_flags_nothing_is_counted_and_nothing_is_compiled_alone(
    vendor, monkeypatch
):
    for name in ("metrics", "bridge_config"):
        forget(name, monkeypatch)
    bridge = RealBridge()
    assert not bridge.can_compile_only
    assert (bridge.counters().compilations, dict(bridge.counters().cpu_fallbacks)) == (0, {})


def test_older_attention_takes_no_window_and_no_sinks(vendor, monkeypatch):
    from habana_frameworks.torch.hpex.kernels import FusedSDPA as VendorSDPA

    monkeypatch.setattr(VendorSDPA, "forward", staticmethod(lambda ctx, q, k, v, scale=None: None))
    kernels = RealBridge().kernels
    assert kernels.has("FusedSDPA")
    assert not kernels.has("FusedSDPA window_size") and not kernels.has("FusedSDPA sink")
    fitted = FusedSDPA(kernels).fitted(has_windows=True, has_sinks=True)
    assert fitted == FusedSDPA(kernels)


def test_windows_and_sinks_go_where_the_vendor_has_them(vendor, monkeypatch):
    from habana_frameworks.torch.hpex.kernels import FusedSDPA as VendorSDPA

    kernels = RealBridge().kernels
    x = torch.ones(1, 2, 128, 4)
    got = []
    monkeypatch.setattr(VendorSDPA, "apply", lambda *args: got.append(args) or args[0])
    kernels.sdpa(x, x, x, is_causal=True)
    kernels.sdpa(x, x, x, is_causal=True, window=5, sinks=torch.ones(2))
    assert len(got[0]) == 11
    assert got[1][11:14] == (False, False, (4, 0))
    assert torch.equal(got[1][14], torch.ones(2)) and len(got[1]) == 15


MODES = {"lazy": True, "compiled": False}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TRIALS)
def test_a_simulated_card_passes_each_trial(name, mode):
    kernels = SimBridge("gaudi3", is_lazy=MODES[mode]).kernels
    with captured_log() as log:
        assert kernels.why_unused(name) is None and kernels.has(name)
    assert log == []


def apply_without_sink(*args):
    return ORIGINAL(*args[:14])


def apply_without_window(*args):
    return ORIGINAL(*args[:13], (-1, -1), *args[14:])


def fp8_without_weight_scale(*args, **scales):
    return ORIGINAL_FP8(*args, **{**scales, "d_scale_s": None})


def fp8_with_scales_swapped(*args, **scales):
    swapped = {"d_scale_q": scales["d_scale_v"], "d_scale_v": scales["d_scale_q"]}
    return ORIGINAL_FP8(*args, **scales | swapped)


def fp8_with_inverse_scales(*args, **scales):
    inverse = {name: 1 / x for name, x in scales.items() if "_scale_" in name}
    return ORIGINAL_FP8(*args, **scales | inverse)


def apply_raising(*args, **options):
    raise RuntimeError("sink is not supported\nby this build")


def window_with_one_more(*args):
    return ORIGINAL(*args[:13], (args[13][0] - 1, args[13][1]), *args[14:])


def window_of_slices_only(*args):
    assert args[0].shape[2] % 1024 == 0, "not a multiple of SLICE_SIZE"
    return ORIGINAL(*args)


ORIGINAL_FP8 = simulated_kernels.fp8_fused_sdpa
ORIGINAL = simulated_kernels.FusedSDPA.apply
WRONG = {
    "FusedSDPA sink": [
        (apply_without_sink, "its values differ from the values of torch (error "),
        (apply_raising, "the card refuses it (RuntimeError: sink is not supported)"),
    ],
    "fp8_fused_sdpa": [
        (fp8_without_weight_scale, "its values differ from the values of torch (error "),
        (fp8_with_scales_swapped, "its values differ from the values of torch (error "),
        (fp8_with_inverse_scales, "its values differ from the values of torch (error "),
        (apply_raising, "the card refuses it (RuntimeError: sink is not supported)"),
    ],
    "FusedSDPA window_size": [
        (apply_without_window, "its values differ from the values of torch (error "),
    ],
}


@pytest.mark.parametrize(
    ("name", "act", "reason"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch, name, act, reason):
    if name == "fp8_fused_sdpa":
        monkeypatch.setattr(simulated_kernels, name, wraps(ORIGINAL_FP8)(partial(act)))
    else:
        monkeypatch.setattr(simulated_kernels.FusedSDPA, "apply", staticmethod(act))
    kernels = SimBridge("gaudi2", is_lazy=True).kernels
    with captured_log() as log:
        assert not kernels.has(name) and not kernels.has(name)
    assert kernels.why_unused(name).startswith(reason)
    assert len(log) == 1, "tried once"
    assert log[0].startswith(f"the kernel {name} of the card is not used: {reason}")
    assert log[0].endswith(f". Instead, {PARTS[name].instead}")


@pytest.mark.parametrize(
    ("act", "left", "multiple"), [(window_with_one_more, 0, 128), (window_of_slices_only, 1, 1024)]
)
def test_a_trial_finds_out_how_the_card_takes_a_window(lazy, monkeypatch, act, left, multiple):
    monkeypatch.setattr(simulated_kernels.FusedSDPA, "apply", staticmethod(act))
    assert lazy.kernels.has("FusedSDPA window_size")
    assert (lazy.kernels.window_left, lazy.kernels.window_multiple) == (left, multiple)
    fitted = FusedSDPA(lazy.kernels).fitted(has_windows=True, has_sinks=False)
    assert (fitted.window_multiple, fitted.has_sinks) == (multiple, False)


def bias_moe_with_gates_before_ups(kernels, x, ids, weights, gate_up, *args, **options):
    halves = [both.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for both in gate_up]
    return BIAS_MOE(kernels, x, ids, weights, halves, *args, **options)


def bias_moe_of_one_layout(kernels, *args):
    return BIAS_MOE(kernels, *args[:10])


def bias_moe_without_limit(kernels, *args, **options):
    return BIAS_MOE(kernels, *args[:8], 1e9, *args[9:], **options)


BIAS_MOE = FusedKernels.bias_moe


@pytest.mark.parametrize(
    "act", [bias_moe_with_gates_before_ups, bias_moe_of_one_layout, bias_moe_without_limit]
)
def test_experts_with_biases_are_plain_matmuls_where_the_operator_is_wrong(lazy, monkeypatch, act):
    monkeypatch.setattr(FusedKernels, "bias_moe", act)
    with captured_log() as log:
        ops = HPUOps(lazy)
        ops.expect_experts(ExpertOptions())
        assert log == [], "experts without biases try nothing"
        options = ExpertOptions(limit=7.0)
        ops.expect_experts(options)
        ops.expect_experts(options)
    [line] = log
    assert line.startswith("the kernel mixture_of_experts with biases of the card is not used: ")
    assert line.endswith(
        "the experts are computed by torch operators, one after the other, which is slower"
    )
    given = (torch.randn(3, 32), torch.tensor([[0, 1]] * 3), torch.rand(3, 2))
    given += (torch.randn(2, 48, 32), torch.randn(2, 32, 24))
    biases = ExpertBiases(torch.randn(2, 48), torch.randn(2, 32))
    on_card = ExpertBiases(*(x.to("hpu") for x in biases))
    got = ops.moe(*(x.to("hpu") for x in given), on_card, options).cpu()
    want = NativeOps().moe(*given, biases, options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_trials_leave_the_random_numbers_of_the_process_alone(lazy):
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    assert lazy.kernels.has("FusedSDPA sink")
    assert torch.equal(torch.rand(3), want)


def test_a_simulated_release_has_what_came_before_it():
    old = SimBridge("gaudi3", is_lazy=True, release=(1, 19)).kernels
    assert [name for name in PARTS if old.has(name)] == [
        name for name, part in PARTS.items() if part.since == OLDEST
    ]
    without = SimBridge("gaudi2", is_lazy=True, absent=["FusedSDPA"]).kernels
    assert not without.has("FusedSDPA") and not without.has("FusedSDPA sink")
    assert without.why_unused("block_softmax") == "only GAUDI3 have it"


def test_operators_without_kernels_are_those_of_torch():
    """These are the three kernels that the engine does not need, on the simulated card."""
    absent = ["FusedSDPA", "FusedRMSNorm", "apply_rotary_pos_emb"]
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True, absent=absent)
    ops, native = HPUOps(bridge), NativeOps()
    assert bridge_sdpa(bridge.kernels) is naive_sdpa
    x, weight = torch.randn(5, 2, 8), torch.randn(8)
    got = ops.rms_norm(x.to("hpu"), weight.to("hpu"), 1e-5).cpu()
    torch.testing.assert_close(got, native.rms_norm(x, weight, 1e-5))
    table, positions = torch.randn(9, 6), torch.tensor([3, 0, 8, 1, 1])
    for is_neox in (True, False):
        given = (positions, x, x, table)
        want = native.rotary_embedding(*given, is_neox)
        for mine, other in zip(
            ops.rotary_embedding(*(t.to("hpu") for t in given), is_neox), want, strict=True
        ):
            torch.testing.assert_close(mine.cpu(), other)
    query = torch.randn(1, 2, 6, 8)
    out = bridge_sdpa(bridge.kernels)(PromptInputs(*(query.to("hpu"),) * 3, None, 0.5))
    want = F.scaled_dot_product_attention(query, query, query, is_causal=True, scale=0.5)
    torch.testing.assert_close(out.cpu(), want)
    assert not bridge.counters().cpu_fallbacks


def test_names_of_parts_and_releases_are_read():
    assert parse_release("1.24") == (1, 24)
    assert parse_names(" FusedSDPA , metrics,") == ["FusedSDPA", "metrics"]
    with pytest.raises(ConfigError, match="VLLM_HPU_SIM_ABSENT: 'SDPA' is unknown; accepted: Fus"):
        parse_names("SDPA")


def test_the_report_of_a_machine_names_what_its_build_lacks(environment, vendor, monkeypatch):
    environment()
    assert hpu.absent_parts() == []
    forget("FusedRMSNorm", monkeypatch)
    assert hpu.absent_parts() == ["FusedRMSNorm"]
    environment(VLLM_HPU_SIM="gaudi2", VLLM_HPU_SIM_BRIDGE="1.23", VLLM_HPU_SIM_ABSENT="metrics")
    assert hpu.absent_parts() == [
        "FusedSDPA sink",
        "mixture_of_experts in MXFP4",
        "mixture_of_experts in MXFP4 with biases",
        "metrics",
    ]
