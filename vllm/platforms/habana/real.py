"""Access a Gaudi card through `habana_frameworks`, which no other module imports.

Written from the published interface; it has not run on a card. Uses names and arguments that builds
1.19 and later have in common, and the parts that `parts` finds.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from vllm.cost_model.cards import CARDS
from vllm.logger import init_logger
from vllm.platforms.habana.bridge import (
    COMPILE_BACKEND,
    KNOWN_CARDS,
    OUT_OF_MEMORY_TEXT,
    DeviceCounters,
    DeviceEvent,
    MemoryInfo,
)
from vllm.platforms.habana.kernels import FusedKernels
from vllm.platforms.habana.parts import find_parts, log_absent
from vllm.platforms.habana.trials import Runner, find_fault

logger = init_logger(__name__)

_FP8_MAX = CARDS["gaudi3"].e4m3_max
"""Largest value of e4m3 on cards that `CARDS` does not list."""


class RealBridge:
    """The card of this process. Importing the vendor library loads its driver."""

    def __init__(self, *, has_peers: bool = False) -> None:
        """Open the card.

        Args:
            has_peers: this process is one of several, each with its own card.
        """
        if has_peers:
            # Importing this sets the module id of this rank, which must be known before the card is
            # opened.
            import_module("habana_frameworks.torch.distributed.hccl")
        import habana_frameworks.torch as htorch
        import habana_frameworks.torch.core as htcore
        import habana_frameworks.torch.hpu as hthpu
        import habana_frameworks.torch.hpu.random as htrandom

        self._htcore: Any = htcore
        self._hthpu: Any = hthpu
        self._htrandom: Any = htrandom
        self._is_lazy: bool = htorch.utils.internal.is_lazy()
        self._found = find_parts()
        log_absent(self._found)
        fault = partial(find_fault, Runner(self.device, self._is_lazy))
        self._kernels = FusedKernels(self._found, lambda: self.device_name, fault)

    @property
    def device(self) -> torch.device:
        return torch.device("hpu", 0)

    @property
    def device_name(self) -> str:
        name: str = self._hthpu.get_device_name()
        # Variants of a card have names that begin with the name of the card.
        return next((known for known in KNOWN_CARDS if name.upper().startswith(known)), name)

    @property
    def fp8_max(self) -> float:
        name = self.device_name
        return next((card.e4m3_max for card in CARDS.values() if card.name == name), _FP8_MAX)

    @property
    def is_lazy(self) -> bool:
        return self._is_lazy

    @property
    def is_recording(self) -> bool:
        return self._is_lazy or torch.compiler.is_compiling()

    @property
    def collectives_backend(self) -> str:
        # The import registers the backend.
        import_module("habana_frameworks.torch.distributed.hccl")
        return "hccl"

    @property
    def kernels(self) -> FusedKernels:
        return self._kernels

    def memory_info(self) -> MemoryInfo:
        # In lazy mode, memory is allocated when recorded operations are launched.
        self._hthpu.synchronize()
        free_bytes, total_bytes = self._hthpu.mem_get_info()
        return MemoryInfo(free_bytes, total_bytes)

    def peak_bytes(self) -> int:
        self._hthpu.synchronize()
        peak_bytes: int = self._hthpu.max_memory_allocated()
        return peak_bytes

    def reset_peak(self) -> None:
        self._hthpu.synchronize()
        self._hthpu.reset_peak_memory_stats()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            tensor = torch.zeros(shape, dtype=dtype, device=self.device)
            self._hthpu.synchronize()
        except RuntimeError as error:
            if OUT_OF_MEMORY_TEXT in str(error):
                raise MemoryError(str(error)) from error
            raise
        return tensor

    def pinned(self, num_elements: int) -> Tensor:
        buffer = torch.empty(num_elements, dtype=torch.int32, device="cpu")
        try:
            return buffer.pin_memory()
        except RuntimeError as error:
            # The bridge documents pinned memory, but no published engine depends on it.
            logger.warning(
                "host memory cannot be pinned, so copies to the card use pageable memory: %s", error
            )
            return buffer

    def record_event(self) -> DeviceEvent:
        event: DeviceEvent = self._hthpu.Event()
        event.record()  # type: ignore[attr-defined]
        return event

    def synchronize(self) -> None:
        self._hthpu.synchronize()

    def now_s(self) -> float:
        return time.perf_counter()

    def mark_step(self) -> None:
        self._htcore.mark_step()

    def wrap_in_hpu_graph(self, module: nn.Module) -> nn.Module:
        if not self._is_lazy:
            raise RuntimeError("HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1)")
        wrapped: nn.Module = self._hthpu.wrap_in_hpu_graph(module, disable_tensor_cache=True)
        return wrapped

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, backend=COMPILE_BACKEND, **options)
        return compiled

    def compile_module(self, module: nn.Module, **options: Any) -> None:
        module.compile(backend=COMPILE_BACKEND, **options)

    def disable_compiler(self) -> None:
        dynamo: Any = torch._dynamo.config
        dynamo.disable = True

    def counters(self) -> DeviceCounters:
        compiled = self._stats("graph_compilation")
        fallbacks = self._stats("cpu_fallback")
        return DeviceCounters(
            compilations=compiled.get("TotalNumber", 0),
            compile_s=compiled.get("TotalTime", 0) / 1e6,  # the metric is in microseconds
            cpu_fallbacks=dict(fallbacks.get("FallbackOps", {})),
            recipes=tuple(tuple(recipe) for recipe in compiled.get("recipe", ())),
        )

    def warmed_section(self) -> AbstractContextManager[None]:
        return nullcontext()

    @cached_property
    def can_compile_only(self) -> bool:
        is_known = "bridge_config" in self._found  # newer bridges have a getter for the flag
        if not is_known:
            logger.warning(
                "Cannot use PT_COMPILE_ONLY_MODE. Warmup time will be negatively impacted. Please "
                "update Gaudi Software Suite."
            )
        return is_known

    def compile_only(self) -> AbstractContextManager[None]:
        env_setting = self._found["bridge_config"][0]
        block: AbstractContextManager[None] = env_setting("PT_COMPILE_ONLY_MODE", True)
        return block

    def dry_run(self) -> AbstractContextManager[None]:
        return nullcontext()

    def manual_seed(self, seed: int) -> None:
        self._htrandom.manual_seed_all(seed)

    def _stats(self, metric_name: str) -> Mapping[str, Any]:
        if "metrics" not in self._found:
            return {}
        metric = self._found["metrics"][0](metric_name)
        return {} if metric is None else dict(metric.stats())
