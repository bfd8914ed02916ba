"""Test that the real bridge uses only documented names of the vendor package."""

import functools
import inspect
import os
import re
import sys

import pytest
import torch

from tests.hpu import captured_log
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.habana.kernels import FusedKernels
from vllm.platforms.habana.real import RealBridge
from vllm.platforms.hpu import create_hpu_platform

TENSOR_CACHE = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"

# Name below `habana_frameworks` -> its documented parameters in builds 1.19 and later. FusedSDPA
# got its window and its sink later; builds without them are recognized.
DOCUMENTED = {
    "torch.core.mark_step": "device_str='', sync=False",
    "torch.hpu.synchronize": "",
    "torch.hpu.mem_get_info": "device=None",
    "torch.hpu.max_memory_allocated": "device=None",
    "torch.hpu.reset_peak_memory_stats": "device=None",
    "torch.hpu.get_device_name": "device=None",
    "torch.hpu.wrap_in_hpu_graph": (
        "module, asynchronous=False, disable_tensor_cache=False, dry_run=False, max_graphs=None"
    ),
    "torch.hpu.Event.record": "self, stream=None",
    "torch.hpu.Event.query": "self",
    "torch.hpu.metrics.metric_global": "name",
    "torch.hpu.metrics.Metric.stats": "self",
    "torch.hpu.random.manual_seed_all": "seed",
    "torch.internal.bridge_config.env_setting": "name, value",
    "torch.internal.bridge_config.get_pt_compile_only_mode": "",
    "torch.distributed.hccl.initialize_distributed_hpu": (
        "world_size=None, rank=None, local_rank=None"
    ),
    "torch.utils.internal.is_lazy": "",
    "torch.hpex.kernels.FusedSDPA.apply": (
        "q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, "
        "softmax_mode='None', recompute_mode=None, valid_seq_len=None, seq_padding_type='left', "
        "return_dropout_mask=False, return_attn_probs=False, window_size=(-1, -1), sink=None, /"
    ),
    "torch.hpex.kernels.fp8_fused_sdpa": (
        "q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, "
        "softmax_mode='None', d_scale_q=None, d_scale_k=None, d_scale_v=None, q_scale_s=None, "
        "q_scale_o=None, d_scale_s=None, is_amax_s=False, is_amax_o=False, valid_seq_len=None, "
        "seq_padding_type='left', recompute=None"
    ),
    "torch.hpex.kernels.apply_rotary_pos_emb": (
        "p, cos, sin, position_ids=None, offset=0, mode=<RotaryPosEmbeddingMode.BLOCKWISE: 0>, /"
    ),
    "torch.hpex.normalization.FusedRMSNorm.apply": (
        "data_in, gamma, eps, use_stages=True, bwd_mode=0, fast_math=False, /"
    ),
}

X = torch.ones(2, 2, 4)
HEADS = torch.ones(1, 2, 3, 4)
ONE = torch.ones(1)
FP8 = torch.float8_e4m3fn
ROPE = torch.ones(2, 1, 4)


# Method -> (how it is called, its calls of the vendor's package as (name, positional, keywords)).
def disable_compiler(bridge) -> None:
    before = torch._dynamo.config.disable
    try:
        bridge.disable_compiler()
        assert torch._dynamo.config.disable
    finally:
        torch._dynamo.config.disable = before


BRIDGE_CALLS = {
    "device": (lambda b: b.device, []),
    "device_name": (lambda b: b.device_name, [("torch.hpu.get_device_name", 0, ())]),
    "fp8_max": (lambda b: b.fp8_max, [("torch.hpu.get_device_name", 0, ())]),
    "is_lazy": (lambda b: b.is_lazy, []),
    "collectives_backend": (
        lambda b: b.collectives_backend,
        [("torch.distributed.hccl.initialize_distributed_hpu", 0, ())],
    ),
    "kernels": (lambda b: b.kernels, []),
    "memory_info": (
        lambda b: b.memory_info(),
        [("torch.hpu.synchronize", 0, ()), ("torch.hpu.mem_get_info", 0, ())],
    ),
    "peak_bytes": (
        lambda b: b.peak_bytes(),
        [("torch.hpu.synchronize", 0, ()), ("torch.hpu.max_memory_allocated", 0, ())],
    ),
    "reset_peak": (
        lambda b: b.reset_peak(),
        [("torch.hpu.synchronize", 0, ()), ("torch.hpu.reset_peak_memory_stats", 0, ())],
    ),
    "zeros": (lambda b: b.zeros((2, 3), torch.bfloat16), [("torch.hpu.synchronize", 0, ())]),
    "pinned": (lambda b: b.pinned(5), []),
    "record_event": (
        lambda b: b.record_event().query(),
        [("torch.hpu.Event.record", 1, ()), ("torch.hpu.Event.query", 1, ())],
    ),
    "synchronize": (lambda b: b.synchronize(), [("torch.hpu.synchronize", 0, ())]),
    "now_s": (lambda b: b.now_s(), []),
    "disable_compiler": (disable_compiler, []),
    "mark_step": (lambda b: b.mark_step(), [("torch.core.mark_step", 0, ())]),
    "wrap_in_hpu_graph": (
        lambda b: b.wrap_in_hpu_graph(torch.nn.Linear(2, 2)),
        [("torch.hpu.wrap_in_hpu_graph", 1, ("disable_tensor_cache",))],
    ),
    "is_recording": (lambda b: b.is_recording, []),
    "compile": (lambda b: b.compile(torch.relu), []),
    "compile_module": (lambda b: b.compile_module(torch.nn.Linear(2, 2)), []),
    "counters": (
        lambda b: b.counters(),
        [
            ("torch.hpu.metrics.metric_global", 1, ()),
            ("torch.hpu.metrics.Metric.stats", 1, ()),
            ("torch.hpu.metrics.metric_global", 1, ()),
            ("torch.hpu.metrics.Metric.stats", 1, ()),
        ],
    ),
    "warmed_section": (lambda b: b.warmed_section(), []),
    "can_compile_only": (lambda b: b.can_compile_only, []),
    "compile_only": (
        lambda b: b.compile_only(),
        [("torch.internal.bridge_config.env_setting", 2, ())],
    ),
    "dry_run": (lambda b: b.dry_run(), []),
    "manual_seed": (lambda b: b.manual_seed(7), [("torch.hpu.random.manual_seed_all", 1, ())]),
}
KERNEL_CALLS = {
    "sdpa": (
        lambda k: k.sdpa(HEADS, HEADS, HEADS, is_causal=True),
        [("torch.hpex.kernels.FusedSDPA.apply", 11, ())],
    ),
    "fp8_sdpa": (
        lambda k: k.fp8_sdpa((ONE,) * 3, (ONE,) * 2, *(HEADS.to(FP8),) * 3, is_causal=True),
        [
            (
                "torch.hpex.kernels.fp8_fused_sdpa",
                8,
                (
                    *("d_scale_q", "d_scale_k", "d_scale_v", "q_scale_s", "d_scale_s"),
                    *("valid_seq_len", "seq_padding_type"),
                ),
            )
        ],
    ),
    "rms_norm": (
        lambda k: k.rms_norm(X, torch.ones(4), 1e-6),
        [("torch.hpex.normalization.FusedRMSNorm.apply", 3, ())],
    ),
    "rotary": (
        lambda k: k.rotary(X, ROPE, ROPE, interleaved=False),
        [("torch.hpex.kernels.apply_rotary_pos_emb", 6, ())],
    ),
    "has": (lambda k: k.has("FusedSDPA"), []),
    "why_unused": (lambda k: k.why_unused("FusedRMSNorm"), []),
    "window_left": (lambda k: k.window_left, []),
    "window_multiple": (lambda k: k.window_multiple, []),
    # These call operators of torch, which the stand-in cannot record; tests/ops and tests/attention
    # test them.
    "block_softmax": (lambda k: k.block_softmax, []),
    "block_softmax_adjustment": (lambda k: k.block_softmax_adjustment, []),
    "moe": (lambda k: k.moe, []),
    "bias_moe": (lambda k: k.bias_moe, []),
    "fp8_moe": (lambda k: k.fp8_moe, []),
    "mxfp4_moe": (lambda k: k.mxfp4_moe, []),
    "bias_mxfp4_moe": (lambda k: k.bias_mxfp4_moe, []),
}

# Method -> (how it is called, the operator of `torch.ops.hpu` with its positional arguments).
OPERATOR_CALLS = {
    "cast_to_fp8": (
        lambda k: k.cast_to_fp8("x", "s", FP8),
        ("cast_to_fp8_v2", "x", "s", False, False, FP8),
    ),
    "cast_from_fp8": (
        lambda k: k.cast_from_fp8("x", "s", torch.bfloat16),
        ("cast_from_fp8", "x", "s", torch.bfloat16),
    ),
    "fp8_gemm": (
        lambda k: k.fp8_gemm("x", "w", "xs", "ws", torch.float32),
        ("fp8_gemm_v2", "x", False, "w", True, None, torch.float32, "xs", "ws", None, False),
    ),
    "from_uint4": (
        lambda k: k.from_uint4("w", "s", "z", torch.float32),
        ("convert_from_uint4", "w", "s", "z", torch.float32),
    ),
}


POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def named(package, name: str):
    return functools.reduce(getattr, name.split("."), package)


def public_names(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def test_every_method_of_the_protocol_is_in_the_contract():
    assert public_names(HabanaBridge) == set(BRIDGE_CALLS)
    assert public_names(FusedKernels) == set(KERNEL_CALLS) | set(OPERATOR_CALLS)


@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_operators_get_their_documented_arguments_in_order(vendor, monkeypatch, name):
    call, expected = OPERATOR_CALLS[name]
    calls = []

    class Recorder:
        def __getattr__(self, operator):
            return lambda *args: calls.append((operator, *args)) or ("out", "amax")

    kernels = RealBridge().kernels
    monkeypatch.setattr(torch.ops, "hpu", Recorder(), raising=False)
    call(kernels)
    assert calls == [expected]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_stand_in_has_the_documented_signature(vendor, name):
    import habana_frameworks.torch.distributed.hccl
    import habana_frameworks.torch.hpex.kernels
    import habana_frameworks.torch.hpex.normalization
    import habana_frameworks.torch.hpu.metrics
    import habana_frameworks.torch.hpu.random
    import habana_frameworks.torch.internal.bridge_config  # noqa: F401

    assert str(inspect.signature(named(vendor, name))) == f"({DOCUMENTED[name]})"


# The vendor's package calls this when it is imported; the engine never calls it.
AT_IMPORT = {"torch.distributed.hccl.initialize_distributed_hpu"}


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if name not in AT_IMPORT])
def test_the_simulated_card_takes_the_documented_arguments_in_order(lazy, facade, name):
    import habana_frameworks
    import habana_frameworks.torch.hpex.kernels
    import habana_frameworks.torch.hpex.normalization
    import habana_frameworks.torch.internal.bridge_config

    parts = [part.strip() for part in re.split(r",(?![^(]*\))", DOCUMENTED[name]) if part]
    documented = [part.partition("=")[0] for part in parts if part != "/"]
    found = inspect.signature(named(habana_frameworks, name)).parameters
    assert list(found)[: len(documented)] == documented
    kinds = {parameter.kind for parameter in found.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_ONLY if "/" in parts else POSITIONAL}


def test_opening_the_card_asks_for_the_mode_once(vendor):
    RealBridge()
    assert vendor.calls == [("torch.utils.internal.is_lazy", 0, ())]


@pytest.mark.parametrize("name", BRIDGE_CALLS)
def test_a_bridge_method_makes_documented_calls_only(vendor, name):
    bridge = RealBridge()
    vendor.calls.clear()
    use, expected = BRIDGE_CALLS[name]
    use(bridge)
    assert vendor.calls == expected
    assert {call[0] for call in expected} <= DOCUMENTED.keys()


@pytest.mark.parametrize("name", KERNEL_CALLS)
def test_a_kernel_makes_documented_calls_only(vendor, name):
    kernels = RealBridge().kernels
    vendor.calls.clear()
    use, expected = KERNEL_CALLS[name]
    use(kernels)
    assert vendor.calls == expected
    assert {call[0] for call in expected} <= DOCUMENTED.keys()


def test_an_undocumented_name_or_argument_fails(vendor):
    import habana_frameworks.torch.core as htcore
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    with pytest.raises(AttributeError):
        htcore.flush_everything()
    with pytest.raises(TypeError):
        htcore.mark_step(wait=True)
    with pytest.raises(TypeError):
        FusedSDPA.apply(HEADS, HEADS, HEADS, is_causal=True)  # `apply` accepts no keywords


PEERS = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3", "HABANA_VISIBLE_MODULES": "2,3,6,7"}


def open_card(environment, monkeypatch, **variables: str) -> HabanaBridge:
    """Open the real card of a process with these environment variables."""
    for name in ("HLS_MODULE_ID", "PT_HPU_ENABLE_LAZY_COLLECTIVES", TENSOR_CACHE):
        # Set and delete the variable, so that monkeypatch undoes later changes.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment(**variables)
    return create_hpu_platform().bridge


def test_one_of_several_processes_takes_the_card_of_its_rank_before_it_opens_it(
    environment, card, vendor, monkeypatch
):
    bridge = open_card(environment, monkeypatch, **PEERS)
    assert [name for name, *_ in vendor.calls] == [
        "torch.distributed.hccl.initialize_distributed_hpu",
        "torch.utils.internal.is_lazy",
        "torch.hpu.synchronize",
        "torch.hpu.mem_get_info",  # takes the card
        "torch.hpu.get_device_name",
    ]
    assert os.environ["HLS_MODULE_ID"] == "7"
    assert bridge.collectives_backend == "hccl"
    assert "hccl" in torch.distributed.Backend.backend_list


@pytest.mark.parametrize("said", [{}, {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "0"}], ids=str)
def test_several_processes_have_lazy_collectives_from_the_import_on(
    environment, card, vendor, monkeypatch, said
):
    open_card(environment, monkeypatch, **PEERS, **said)
    assert vendor.torch.FLAGS["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "true"


def test_a_single_process_imports_no_collectives(environment, card, vendor, monkeypatch):
    open_card(environment, monkeypatch)
    assert "PT_HPU_ENABLE_LAZY_COLLECTIVES" not in vendor.torch.FLAGS
    assert "habana_frameworks.torch.distributed.hccl" not in sys.modules


@pytest.mark.parametrize(
    ("value", "passed_on"), [("true", "1"), ("1", "1"), ("false", "0"), ("0", "0")]
)
def test_the_tensor_cache_variable_reaches_the_bridge_in_the_form_it_knows(
    environment, card, vendor, monkeypatch, value, passed_on
):
    name = TENSOR_CACHE
    with captured_log() as log:
        open_card(environment, monkeypatch, **{name: value})
    assert os.environ[name] == passed_on
    assert [line for line in log if name in line] == (
        [] if passed_on == "1" else [
            "PT_HPUGRAPH_DISABLE_TENSOR_CACHE=0: HPU graphs keep their inputs and intermediate "
            "tensors, so fewer graphs fit into the memory. Unset it, so that graphs keep only "
            "their outputs"
        ]
    )  # fmt: skip


def test_a_build_without_compile_only_mode_is_told_apart_once(vendor, monkeypatch):
    from habana_frameworks.torch.internal import bridge_config

    assert RealBridge().can_compile_only
    monkeypatch.delattr(bridge_config, "get_pt_compile_only_mode")
    bridge = RealBridge()
    with captured_log() as log:
        assert not bridge.can_compile_only and not bridge.can_compile_only
    assert log == [
        "Cannot use PT_COMPILE_ONLY_MODE. Warmup time will be negatively impacted. Please update "
        "Gaudi Software Suite."
    ]


def test_metrics_arrive_in_seconds_and_by_operator(vendor, lazy):
    X.to("hpu").int().topk(1)
    lazy.mark_step()
    counters, simulated = RealBridge().counters(), lazy.counters()
    assert counters.compilations == simulated.compilations == 2
    assert counters.compile_s == pytest.approx(simulated.compile_s, abs=1e-6) and counters.compile_s
    assert counters.cpu_fallbacks == {"aten::topk": 1}
    assert counters.graph_replays is None and counters.host_syncs is None


def test_what_fails_is_not_recorded_as_a_call(vendor, eager):
    bridge = RealBridge()
    vendor.calls.clear()
    with pytest.raises(RuntimeError, match="not supported"):
        bridge.kernels.sdpa(HEADS, HEADS, HEADS, X, is_causal=True)
    assert vendor.calls == []
