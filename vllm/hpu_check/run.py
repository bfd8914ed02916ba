"""The checks, in order."""

from collections.abc import Callable, Iterator
from functools import partial

from vllm.hpu_check import attention, collectives, device, kernels, programs
from vllm.hpu_check.check import CheckResult, Outcome, run_check
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.hpu import HPUPlatform

CHECKS: dict[str, Callable[[HabanaBridge], Outcome]] = {
    "memory": device.check_memory,
    "host copies": device.check_host_copies,
    "index types": device.check_index_types,
    "sdpa causal": kernels.check_sdpa_causal,
    "sdpa shared heads": kernels.check_sdpa_shared_heads,
    "sdpa mask": kernels.check_sdpa_mask,
    "sdpa valid lengths": kernels.check_sdpa_valid_lengths,
    "rms_norm": kernels.check_rms_norm,
    "rotary neox": kernels.check_rotary_neox,
    "rotary gpt-j": kernels.check_rotary_gptj,
    "silu_and_mul": kernels.check_silu_and_mul,
    "decode attention": attention.check_decode,
    "prefill attention": attention.check_prefill,
    "graph replay": programs.check_graph_replay,
    "torch.compile": programs.check_torch_compile,
    "compile counting": programs.check_compile_counting,
    "host fallbacks": programs.check_host_fallbacks,  # of all the checks before it
}
"""Name -> check of an open card."""

NAMES = ("triton fits torch", "collectives", "device", *CHECKS)
"""Of all rows of the report."""


def run_checks(platform: HPUPlatform, num_cards: int) -> Iterator[CheckResult]:
    """Check the card of this process; one result after another, as they come.

    Args:
        platform: its card must not be open yet: the collectives need all cards.
        num_cards: of this machine.
    """
    yield run_check("triton fits torch", device.check_triton)
    yield run_check("collectives", lambda: collectives.check_collectives(num_cards))
    opened = run_check("device", lambda: device.describe(platform.bridge))
    yield opened
    for name, check in CHECKS.items():
        if opened.status == "pass":
            yield run_check(name, partial(check, platform.bridge))
        else:
            yield CheckResult(name, "skip", "the card could not be opened", 0.0)
