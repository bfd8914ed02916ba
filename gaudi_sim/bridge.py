"""A simulated Gaudi that implements the bridge's protocol. It says nothing about real cards."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gaudi_sim.card.card import SimulatedCard
from gaudi_sim.card.device import HpuTensor, activated, install, register_compiler
from gaudi_sim.card.recipes import RecipeCache
from gaudi_sim.card.unlaunched import mapped_zeros
from gaudi_sim.compile import compile_for_card
from gaudi_sim.execute import execute
from gaudi_sim.graphs.graphs import wrap_in_hpu_graph
from gaudi_sim.kernels.kernels import register
from gaudi_sim.vendor import bridge_config, install_vendor, random
from gaudi_sim.vendor.hpu import Event, device_module
from vllm.cost_model.cards import CARDS
from vllm.platforms.habana.bridge import (
    COMPILE_BACKEND,
    DeviceCounters,
    DeviceEvent,
    MemoryInfo,
)
from vllm.platforms.habana.kernels import FusedKernels
from vllm.platforms.habana.parts import NEWEST, Version, absent_of_release, find_parts, log_absent
from vllm.platforms.habana.trials import Runner, find_fault


class SimBridge:
    """One simulated card. Creating another one replaces it, since a process has one device."""

    collectives_backend = "gloo"

    def __init__(
        self,
        model: str,
        *,
        is_lazy: bool = False,
        is_strict: bool = False,
        is_vendor: bool = False,
        has_lazy_collectives: bool = False,
        keeps_graph_tensors: bool = False,
        records_graphs: bool = True,
        traces: bool = True,
        recipe_cache: str | None = None,
        release: Version = NEWEST,
        absent: Iterable[str] = (),
        pool_bytes: int | None = None,
    ) -> None:
        """Create a card and register it as the device `hpu`.

        Args:
            model: a key of `cost_model.cards.CARDS`.
            is_strict: everything that stalls a card raises in a warmed section, and indices
                outside of a tensor raise everywhere.
            is_vendor: let other libraries import this card as `habana_frameworks`.
            has_lazy_collectives: a collective can be part of a graph, as with
                PT_HPU_ENABLE_LAZY_COLLECTIVES.
            keeps_graph_tensors: HPU graphs keep their inputs and intermediate tensors, as with
                PT_HPUGRAPH_DISABLE_TENSOR_CACHE=0.
            records_graphs: HPU graphs can be replayed with values.
            traces: `torch.compile` traces a function for each of its shapes. Otherwise a compiled
                function runs as it is written, and its operators are one recipe, which takes much
                less time on the host.
            recipe_cache: where compiled recipes are kept after the process ends, in the format of
                PT_HPU_RECIPE_CACHE_CONFIG; None: nowhere.
            release: release of the bridge; parts of later releases are missing.
            absent: further missing parts, of `parts.PARTS`.
            pool_bytes: memory of the card; None: the memory of a real one.

        Raises:
            ConfigError: this torch cannot register a device from Python, or the recipe cache
                cannot be used.
        """
        spec = CARDS[model]
        if pool_bytes is not None:
            spec = replace(spec, pool_bytes=pool_bytes)
        self.card = SimulatedCard(
            spec,
            is_lazy=is_lazy,
            is_strict=is_strict,
            has_lazy_collectives=has_lazy_collectives,
            keeps_graph_tensors=keeps_graph_tensors,
            records_graphs=records_graphs,
            recipe_cache=RecipeCache.from_config(recipe_cache) if recipe_cache else None,
        )
        self._traces = traces
        install(self.card, execute=execute, device_module=device_module())
        if traces or not is_lazy:
            register_compiler(compile_for_card)
        if is_vendor:
            install_vendor()
        self._kernels = SimulatedKernels(
            self.device,
            self.device_name,
            is_lazy=is_lazy,
            release=release,
            absent=absent,
            computing=self._computing,
        )

    @property
    def device(self) -> torch.device:
        return torch.device("hpu", 0)

    @property
    def device_name(self) -> str:
        return self.card.spec.name

    @property
    def fp8_max(self) -> float:
        return self.card.spec.e4m3_max

    @property
    def is_lazy(self) -> bool:
        return self.card.is_lazy

    @property
    def is_recording(self) -> bool:
        # While torch traces, the state of the card must not be read: it would be guarded.
        return self.is_lazy or torch.compiler.is_compiling() or self.card.is_recording

    @property
    def kernels(self) -> FusedKernels:
        return self._kernels

    def memory_info(self) -> MemoryInfo:
        self.synchronize()
        pool = self.card.memory
        return MemoryInfo(pool.limit_bytes - pool.in_use_bytes, pool.limit_bytes)

    def peak_bytes(self) -> int:
        self.synchronize()
        return self.card.memory.max_in_use_bytes

    def reset_peak(self) -> None:
        self.synchronize()
        self.card.memory.reset_peak()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            memory = self.card.memory
            memory.check(memory.device_bytes(num_bytes, dtype), is_kept=True)
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
        tensor = HpuTensor(mapped_zeros(num_bytes).view(dtype).view(shape))
        self.card.caches.add(tensor.lease)
        self.synchronize()
        return tensor

    def pinned(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=torch.int32, device="cpu")

    def record_event(self) -> DeviceEvent:
        event = Event()
        event.record()
        return event

    def synchronize(self) -> None:
        self.card.synchronize()

    def now_s(self) -> float:
        return self.card.clock.host_s

    def mark_step(self) -> None:
        self.card.mark_step()

    def wrap_in_hpu_graph(self, module: nn.Module) -> nn.Module:
        if not self.is_lazy:
            raise RuntimeError("HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1)")
        return wrap_in_hpu_graph(module, self.card)

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if self._traces:
            traced: Callable[..., Any] = torch.compile(function, backend=COMPILE_BACKEND, **options)
            return traced

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.card.compiled_region():
                return function(*args, **kwargs)

        return run

    def compile_module(self, module: nn.Module, **options: Any) -> None:
        if self._traces:
            module.compile(backend=COMPILE_BACKEND, **options)
        else:
            module.forward = self.compile(module.forward)

    def disable_compiler(self) -> None:
        if self._traces:  # else nothing is compiled, and the compiler may not be loaded
            dynamo: Any = torch._dynamo.config
            dynamo.disable = True

    def counters(self) -> DeviceCounters:
        return self.card.counters()

    def warmed_section(self) -> AbstractContextManager[None]:
        return self.card.warmed_section()

    @property
    def can_compile_only(self) -> bool:
        return True

    def compile_only(self) -> AbstractContextManager[None]:
        return bridge_config.env_setting("PT_COMPILE_ONLY_MODE", True)

    def dry_run(self) -> AbstractContextManager[None]:
        return self._set_dry_run(True)

    def _computing(self) -> AbstractContextManager[None]:
        """Return a context in which operators compute, even in a dry run."""
        return self._set_dry_run(False)

    @contextmanager
    def _set_dry_run(self, is_on: bool) -> Iterator[None]:
        before, self.card.is_dry_run = self.card.is_dry_run, is_on
        try:
            yield
        finally:
            self.card.is_dry_run = before

    def activated(self) -> AbstractContextManager[None]:
        """Return a context in which the device `hpu` is this card; the previous one is restored."""
        return activated(self.card)

    def manual_seed(self, seed: int) -> None:
        random.manual_seed_all(seed)


class SimulatedKernels(FusedKernels):
    """`FusedKernels` of a simulated release of the bridge; they refuse the same arguments as real
    ones.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        card: str = "GAUDI2",
        *,
        is_lazy: bool = True,
        release: Version = NEWEST,
        absent: Iterable[str] = (),
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the kernels of a simulated card.

        Args:
            device: where trials run; None: the host, whose tensors the kernels accept as well.
            card: name of the card.
            is_lazy: whether the bridge is in lazy mode; see `Runner`.
            release: release of the bridge; parts of later releases are missing.
            absent: further missing parts.
            computing: the context of trials, in which the card computes.
        """
        self._computing = computing
        register()
        lacking = absent_of_release(release, absent)
        found = {name: x for name, x in find_parts(_load).items() if name not in lacking}
        log_absent(found)
        runner = Runner(device or torch.device("cpu"), is_lazy)
        super().__init__(found, lambda: card, partial(find_fault, runner))

    def why_unused(self, name: str) -> str | None:
        """Return why a part is not used; see `FusedKernels.why_unused`."""
        with self._computing():
            return super().why_unused(name)


def _load(module: str) -> ModuleType:
    return import_module(f"gaudi_sim.vendor.{module.rpartition('.')[2]}")
