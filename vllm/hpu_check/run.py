"""List the checks in order, with the expected result of each and advice for a failure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from vllm.hpu_check import (
    attention,
    collectives,
    decoder_layer,
    device,
    integers,
    kernels,
    operators,
    programs,
    sampling,
    short_run,
)
from vllm.hpu_check.check import MAX_CALL_S, MAX_STEP_S, CheckResult, Outcome, run_check
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.habana.parts import PARTS
from vllm.platforms.habana.trials import TRIALS
from vllm.platforms.hpu import HPUPlatform

_VERSIONS = (
    "check that driver, firmware and habana-torch-plugin are of one release of the Gaudi software"
)
_KERNEL = f"{_VERSIONS}; if they are, report the case to the vendor with these figures"
_LAYER = (
    "compare with the other layer checks: if only one mode fails, its compiler is at fault, so "
    f"use another mode (--enforce-eager, PT_HPU_LAZY_MODE); otherwise {_VERSIONS}. If out of "
    "memory: end other processes on this card"
)
_SLOW = (
    "end other processes on this card; if a layer check also fails, that is the cause; look for a "
    "low power or clock limit (hl-smi)"
)
_SAMPLING = f"requests that ask for this get wrong tokens on this card: {_VERSIONS}"


@dataclass(frozen=True)
class Check:
    """A check that needs an open card."""

    run: Callable[[HabanaBridge, str], Outcome]
    """Function of the card and the name of a model that runs the check."""
    expected: str
    advice: str = _KERNEL
    """Advice if the check fails."""


def _of_card(
    check: Callable[[HabanaBridge], Outcome], expected: str, advice: str = _KERNEL
) -> Check:
    """Create a check that does not depend on the model."""
    return Check(lambda bridge, _: check(bridge), expected, advice)


def _check_part(bridge: HabanaBridge, name: str) -> Outcome:
    """Check whether the engine uses an optional part of the bridge on this card."""
    part = PARTS[name]
    reason = bridge.kernels.why_unused(name)
    if reason is not None:
        return Outcome("skip", f"{reason}: {part.instead}")
    tried = ", computes the values of torch on the host" if name in TRIALS else ""
    since = ".".join(str(number) for number in part.since)
    return Outcome("pass", f"used{tried} (known from release {since} on)")


_OF_HOST = "the same values as torch on the host"
_OF_KERNEL = f"{_OF_HOST}, in at most {MAX_CALL_S * 1e3:.0f} ms a call"
_IN_TIME = f"in at most {MAX_STEP_S * 1e3:.0f} ms a call"
_ON_CARD = f"{_OF_HOST}, without an operator on the host"
_OF_LAYER = (
    "the same values as the layer on the host in float32; the time does not depend on the size of "
    "the cache; no copy of the cache and no operator on the host"
)

CHECKS: dict[str, Check] = {
    "memory": _of_card(
        device.check_memory,
        "allocated memory is taken from the free memory, and freed again",
        "end other processes on this card (hl-smi lists them)",
    ),
    "host copies": _of_card(
        device.check_host_copies, "the bytes are the same after a copy to the card and back"
    ),
    "index types": _of_card(device.check_index_types, "int32 and int64 choose the same rows"),
    "pinned copies": _of_card(
        integers.check_pinned_copies, "the bytes on the card are the bytes that were sent"
    ),
    "integer reductions": _of_card(integers.check_reductions, _ON_CARD),
    "token masks": _of_card(integers.check_token_masks, f"{_ON_CARD}, {_IN_TIME}", _SAMPLING),
    "drafts": _of_card(
        integers.check_drafts,
        _ON_CARD,
        f"outputs with drafts are wrong on this card: leave --speculative-config out; {_VERSIONS}",
    ),
    **{
        f"kernel {name}": _of_card(
            partial(_check_part, name=name), "used if the Gaudi software and the card have it"
        )
        for name in PARTS
    },
    "sdpa causal": _of_card(kernels.check_sdpa_causal, _OF_KERNEL),
    "sdpa shared heads": _of_card(kernels.check_sdpa_shared_heads, _OF_KERNEL),
    "sdpa mask": _of_card(kernels.check_sdpa_mask, _OF_KERNEL),
    "sdpa valid lengths": _of_card(kernels.check_sdpa_valid_lengths, _OF_KERNEL),
    "rms_norm": _of_card(kernels.check_rms_norm, _OF_KERNEL),
    "rotary neox": _of_card(kernels.check_rotary_neox, _OF_KERNEL),
    "rotary gpt-j": _of_card(kernels.check_rotary_gptj, _OF_KERNEL),
    "silu_and_mul": _of_card(kernels.check_silu_and_mul, _OF_KERNEL),
    "moe": _of_card(operators.check_moe, _OF_KERNEL),
    "fp8 cast": _of_card(operators.check_fp8_cast, "errors of at most half a step of e4m3"),
    "fp8 matmul": _of_card(operators.check_fp8_matmul, _OF_KERNEL),
    "fp8 moe": _of_card(operators.check_fp8_moe, _OF_KERNEL),
    "moe of few bits": _of_card(operators.check_narrow_moe, _OF_KERNEL),
    "moe with biases": _of_card(operators.check_bias_moe, _OF_KERNEL),
    "matmul of few bits": _of_card(operators.check_narrow_matmul, _OF_KERNEL),
    "uint4 matmul": _of_card(operators.check_uint4_matmul, _OF_KERNEL),
    "decode attention": _of_card(attention.check_decode, f"{_OF_HOST}, {_IN_TIME}"),
    "prefill attention": _of_card(attention.check_prefill, f"{_OF_HOST}, {_IN_TIME}"),
    "graph replay": _of_card(
        programs.check_graph_replay, "one capture of the graph, and the right values in each call"
    ),
    "torch.compile": _of_card(programs.check_torch_compile, _OF_HOST),
    "compile counting": _of_card(
        programs.check_compile_counting,
        "a new shape is compiled, a known one is not",
        "engine steps will wait for compilations: check PT_HPU_RECIPE_CACHE_CONFIG and that "
        "versions fit",
    ),
    "layer eager": Check(decoder_layer.check_eager, _OF_LAYER, _LAYER),
    "layer compiled": Check(decoder_layer.check_compiled, _OF_LAYER, _LAYER),
    "layer graph": Check(decoder_layer.check_graph, _OF_LAYER, _LAYER),
    "prefill with context": Check(
        decoder_layer.check_context,
        f"the same values as the layer on the host in float32, {_IN_TIME}",
        _LAYER,
    ),
    **{
        f"sampling {kind}": _of_card(
            partial(sampling.check_sampling, kind=kind),
            f"the same tokens as the sampler on the host for the same logits and seeds, {_IN_TIME}",
            _SAMPLING,
        )
        for kind in sampling.KINDS
    },
    "host fallbacks": _of_card(  # fallbacks during all earlier checks
        programs.check_host_fallbacks,
        "no operator runs on the host",
        "each of these stops the card in every step: report the operators to the vendor",
    ),
    "short run": Check(
        short_run.check_short_run,
        f"the same values as on the host, at most {short_run.MAX_TIME_RATIO:.0f} times the "
        "predicted time, no operator on the host",
        _SLOW,
    ),
}
"""Name -> check of an open card."""

NAMES = ("triton fits torch", "collectives", "device", *CHECKS)
"""Names of all rows of the report."""


def run_checks(platform: HPUPlatform, num_cards: int, model: str = "") -> Iterator[CheckResult]:
    """Check the card of this process, and yield each result when it is known.

    Args:
        platform: platform whose card is not open yet, because the collectives need all cards.
        num_cards: number of cards on this machine.
        model: folder or Hugging Face name of the model whose layer is checked; empty: the bundled
            one.
    """
    yield _explained(
        run_check("triton fits torch", device.check_triton),
        "the compiler of torch can be imported",
        "install the version of triton that the detail of this check names",
    )
    yield _explained(
        run_check("collectives", lambda: collectives.check_collectives(num_cards)),
        "the right sum and gathered data over all cards",
        "check the links between the cards (hl-smi -L) and that no other process uses one of them",
    )
    opened = run_check("device", lambda: device.describe(platform.bridge))
    yield _explained(opened, "the card opens", "end other processes on this card, or restart it")
    for name, check in CHECKS.items():
        if opened.status == "pass":
            result = run_check(name, partial(check.run, platform.bridge, model))
        else:
            result = CheckResult(name, "skip", "the card could not be opened", 0.0)
        yield _explained(result, check.expected, check.advice)


def _explained(result: CheckResult, expected: str, advice: str) -> CheckResult:
    return replace(result, expected=expected, advice=advice if result.status == "fail" else "")
