"""A Gaudi card through `habana_frameworks`, which nothing else imports.

Written from the published interface; it has not run on a card. Uses only names and arguments that
builds 1.19 and later have in common.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from vllm.logger import init_logger
from vllm.platforms.habana.bridge import (
    OUT_OF_MEMORY_TEXT,
    DeviceCounters,
    DeviceEvent,
    FusedKernels,
    MemoryInfo,
)
from vllm.platforms.habana.experts import FusedExperts
from vllm.platforms.habana.operators import QuantizedKernels

logger = init_logger(__name__)

_FP8_MAX = 448.0
_FP8_MAX_OF_GAUDI2 = 240.0
"""Its e4m3 has infinities, where the other one has numbers."""


class RealBridge:
    """The card of this process. Importing the vendor library loads its driver."""

    def __init__(self, *, has_peers: bool = False) -> None:
        """
        Args:
            has_peers: this process is one of several, each with a card of its own.
        """
        if has_peers:
            # Takes the module id of this rank, which has to be known before the card is opened.
            import_module("habana_frameworks.torch.distributed.hccl")
        import habana_frameworks.torch as htorch
        import habana_frameworks.torch.core as htcore
        import habana_frameworks.torch.hpu as hthpu
        import habana_frameworks.torch.hpu.metrics as metrics
        import habana_frameworks.torch.hpu.random as htrandom
        import habana_frameworks.torch.internal.bridge_config as bridge_config

        self._bridge_config: Any = bridge_config
        self._htcore: Any = htcore
        self._hthpu: Any = hthpu
        self._metrics: Any = metrics
        self._htrandom: Any = htrandom
        self._is_lazy: bool = htorch.utils.internal.is_lazy()
        self._kernels = _RealKernels()

    @property
    def device(self) -> torch.device:
        return torch.device("hpu", 0)

    @property
    def device_name(self) -> str:
        name: str = self._hthpu.get_device_name()
        return name

    @property
    def fp8_max(self) -> float:
        return _FP8_MAX_OF_GAUDI2 if self.device_name.upper().startswith("GAUDI2") else _FP8_MAX

    @property
    def is_lazy(self) -> bool:
        return self._is_lazy

    @property
    def collectives_backend(self) -> str:
        import_module("habana_frameworks.torch.distributed.hccl")  # registers the backend
        return "hccl"

    @property
    def kernels(self) -> FusedKernels:
        return self._kernels

    def memory_info(self) -> MemoryInfo:
        self._hthpu.synchronize()  # lazy memory is allocated at launch
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
            # Documented for the bridge, but no published engine relies on it.
            logger.warning("no pinned memory, copies to the card take pageable memory: %s", error)
            return buffer

    def record_event(self) -> DeviceEvent:
        event: DeviceEvent = self._hthpu.Event()
        event.record()  # type: ignore[attr-defined]
        return event

    def synchronize(self) -> None:
        self._hthpu.synchronize()

    def mark_step(self) -> None:
        self._htcore.mark_step()

    def wrap_in_hpu_graph(self, module: nn.Module) -> nn.Module:
        if not self._is_lazy:
            raise RuntimeError("HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1)")
        wrapped: nn.Module = self._hthpu.wrap_in_hpu_graph(module, disable_tensor_cache=True)
        return wrapped

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
        # There is a getter for every flag that a build knows.
        is_known = hasattr(self._bridge_config, "get_pt_compile_only_mode")
        if not is_known:
            logger.warning(
                "Cannot use PT_COMPILE_ONLY_MODE. Warmup time will be negatively impacted. Please "
                "update Gaudi Software Suite."
            )
        return is_known

    def compile_only(self) -> AbstractContextManager[None]:
        block: AbstractContextManager[None] = self._bridge_config.env_setting(
            "PT_COMPILE_ONLY_MODE", True
        )
        return block

    def dry_run(self) -> AbstractContextManager[None]:
        return nullcontext()

    def manual_seed(self, seed: int) -> None:
        self._htrandom.manual_seed_all(seed)

    def _stats(self, metric_name: str) -> Mapping[str, Any]:
        metric = self._metrics.metric_global(metric_name)
        return {} if metric is None else dict(metric.stats())


class _RealKernels(FusedExperts, QuantizedKernels):
    """The kernels of `habana_frameworks.torch.hpex`; all their arguments go by position."""

    def __init__(self) -> None:
        from habana_frameworks.torch.hpex.kernels import (
            FusedSDPA,
            RotaryPosEmbeddingMode,
            apply_rotary_pos_emb,
        )
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        self._sdpa: Any = FusedSDPA
        self._rms_norm: Any = FusedRMSNorm
        self._apply_rotary: Any = apply_rotary_pos_emb
        self._rotary_mode: Any = RotaryPosEmbeddingMode

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        valid_seq_len: Tensor | None = None,
    ) -> Tensor:
        dropout, recompute = 0.0, True
        out: Tensor = self._sdpa.apply(
            query, key, value, attn_mask, dropout, is_causal, scale, softmax_mode, recompute,
            valid_seq_len, "right",
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._rms_norm.apply(x, weight, eps)
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        mode = self._rotary_mode.PAIRWISE if interleaved else self._rotary_mode.BLOCKWISE
        out: Tensor = self._apply_rotary(x, cos, sin, None, 0, mode)
        return out
