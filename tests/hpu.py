"""A simulated Gaudi for one test, in a process whose other tests run on the CPU."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from pytest import MonkeyPatch
from torch.utils import backend_registration

from gaudi_sim.bridge import SimBridge
from tests.reach import replace_ops, skip_profiling_run
from vllm import envs
from vllm.cost_model import cards
from vllm.engine import engine_core
from vllm.engine.async_scheduling import AsyncSchedulingPolicy
from vllm.platforms import resolve_platform
from vllm.platforms.hpu import HPUPlatform
from vllm.utils.process.process_memory import keep_for_good

MODES = {
    "HPU graphs": (1, False),
    "lazy": (1, True),
    "torch.compile": (0, False),
    "eager": (0, True),
}
"""PT_HPU_LAZY_MODE and enforce_eager."""

FEW_BUCKETS = {
    "VLLM_PROMPT_BS_BUCKET_MAX": 1,
    "VLLM_PROMPT_SEQ_BUCKET_MIN": 32,
    "VLLM_PROMPT_SEQ_BUCKET_STEP": 32,
    "VLLM_PROMPT_SEQ_BUCKET_MAX": 32,
    "VLLM_DECODE_BS_BUCKET_MIN": 4,
    "VLLM_DECODE_BLOCK_BUCKET_MIN": 32,
    "VLLM_DECODE_BLOCK_BUCKET_STEP": 32,
    "VLLM_CONTIGUOUS_PA": 0,
}
"""An engine with these starts within a second or two; torch.compile needs one for each bucket, and
by default up to three for each decode, for slices."""

SMALL_ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 33,
    "block_size": 16,
}
"""Arguments of `LLM` to use with them."""

HAS_SIMULATED_DEVICE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""False before torch 2.10, which older Gaudi images have (`make test-vendor`)."""

NO_SIMULATED_DEVICE = f"the simulated card needs torch 2.10 or newer, not {torch.__version__}"

needs_simulated_device = pytest.mark.skipif(not HAS_SIMULATED_DEVICE, reason=NO_SIMULATED_DEVICE)
"""For tests that start a simulated card in another process. In the process of a test, whatever
makes one skips the test by itself (tests/conftest.py)."""

_OURS = ("VLLM_", "PT_HPU", "HABANA_")

_num_kept_modules = 0

_LAUNCH_BYTES = 2**30
"""Far more than a launch of a tiny model needs, far less than a card has."""


@contextmanager
def steps_in_flight() -> Iterator[None]:
    """Let new engines in this context always schedule the next step before the result of the last
    one.

    Otherwise an engine decides by the measured time of its steps.
    """
    with MonkeyPatch.context() as patch:
        patch.setattr(
            engine_core, "AsyncSchedulingPolicy", lambda allowed: AsyncSchedulingPolicy(allowed, 0)
        )
        yield


@contextmanager
def simulated_hpu(
    *,
    card: str = "gaudi2",
    pool_bytes: int | None = None,
    has_profiling_run: bool = True,
    **variables: object,
) -> Iterator[SimBridge]:
    """Let `LLM(...)` run on a new simulated card in this context, then restore the process.

    The card is strict unless `VLLM_HPU_SIM_STRICT=0` is among the variables. Variables of the
    engine that the environment already has are ignored. An engine for the CPU that was made before
    must not run inside: a process has one table of operators.

    Args:
        card: a key of `cards.CARDS`.
        pool_bytes: memory of the card; None is what the real one has.
        has_profiling_run: measure the memory of launches at a start. False is for tests of tokens:
            a start takes half the time, since the profiling run compiles its launches for a cache
            of its own. Only for engines of one card: the cards of other processes would wait for
            this one to measure as well.
        variables: environment variables by name; True and False are 1 and 0.

    Yields:
        The card.
    """
    values = {"VLLM_HPU_SIM": card, "VLLM_HPU_SIM_STRICT": 1, **variables}
    with MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(_OURS)]:
            patch.delenv(name)
        for name, value in values.items():
            patch.setenv(name, str(int(value)) if isinstance(value, bool) else str(value))
        if pool_bytes is not None:
            spec = replace(cards.CARDS[card], pool_bytes=pool_bytes)
            patch.setitem(cards.CARDS, card, spec)
        if not has_profiling_run:
            skip_profiling_run(patch, _LAUNCH_BYTES)
        replace_ops(patch, None)
        # torch flushes the processor's caches at each compilation, to time its guards for a log
        # line.
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        thresholds = gc.get_threshold()
        _forget_environment()
        try:
            with torch._dynamo.config.patch(disable=torch._dynamo.config.disable):
                platform = resolve_platform("hpu")
                assert isinstance(platform, HPUPlatform)
                bridge = platform.bridge
                assert isinstance(bridge, SimBridge)
                yield bridge
        finally:
            gc.set_threshold(*thresholds)
            torch.compiler.set_stance("default")
            torch._dynamo.reset()
            patch.undo()
            _forget_environment()
            _leave_new_modules_out_of_collections()


@contextmanager
def captured_log(level: int = logging.INFO) -> Iterator[list[str]]:
    """Collect the messages that the package logs inside the block; they are not shown."""
    logger, messages = logging.getLogger("vllm"), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    with MonkeyPatch.context() as patch:
        patch.setattr(logger, "handlers", [handler])
        patch.setattr(logger, "propagate", False)
        before = logger.level
        logger.setLevel(level)
        try:
            yield messages
        finally:
            logger.setLevel(before)


def _leave_new_modules_out_of_collections() -> None:
    """Exclude new modules from garbage collection.

    Each start on a card requests a full collection, which would visit all modules that earlier
    tests have imported, most of all torch's compiler.
    """
    global _num_kept_modules
    if len(sys.modules) > _num_kept_modules + 100:
        _num_kept_modules = len(sys.modules)
        keep_for_good()


def _forget_environment() -> None:
    envs.get.cache_clear()
    resolve_platform.cache_clear()
