"""The base class of the workers of all devices: sleep mode, reloading weights, profiling.

Its methods are entries of `vllm.worker.interface.Worker`, which says what they take and return.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.config import VllmConfig
from vllm.config.arch.speculators import SPECULATORS
from vllm.distributed import Collectives, Link, RankLayout, Rendezvous, Stage, TPGroup
from vllm.errors import RequestError
from vllm.messages import AdapterRef, EngineRequest, RunnerStats, StepTokens
from vllm.model_executor.loader import load_model, load_speculator
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.quantization import Quantization
from vllm.model_executor.quantization.inc import measure as inc_measure
from vllm.structured_output.matchers import GrammarMatchers
from vllm.worker.block_store import BlockStore, hash_contents
from vllm.worker.drafts.stage_drafts import makes_drafts
from vllm.worker.interface import MemoryReport, WarmUpStep, WarmUpUpdate
from vllm.worker.model_runner import ModelRunner
from vllm.worker.parts.adapters import Adapters
from vllm.worker.pooling_runner import PoolingRunner
from vllm.worker.sleep import KV_CACHE, WEIGHTS, ModelWithDrafter, Sleep, SleepingWeights, SleepPart
from vllm.worker.torch_profile import TorchProfile


class WorkerBase(ABC):
    """The base class of workers: one device, its model and its KV cache.

    Args:
        config: config of the engine.
        device: device that it computes on.

    Attributes:
        model, runner, profile: set when the model is loaded; the runner runs the steps, the
            profile makes traces of them.
        grammars: grammars of requests with structured output; their modules are loaded while the
            model is loaded.
        rank, local_rank: of this worker among the workers of the model, and on this machine.
        num_local_ranks: workers on this machine.
        tp: the ranks that share each layer.
        stage: the layers of this rank.
        has_values: False: weights get memory, but are not loaded.
    """

    model: nn.Module
    runner: ModelRunner | PoolingRunner
    profile: TorchProfile
    stage: Stage
    _blocks: BlockStore
    rank = 0
    local_rank = 0
    has_values = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.grammars = GrammarMatchers(config)
        self.tp = TPGroup()
        self.num_local_ranks = config.parallel.world_size
        self._sleep: Sleep | None = None
        self._adds_measurements = False

    # ---- the start, see `vllm.worker.interface.Worker` --------------------------------------

    def load(self, rank: int) -> None:
        """Build the model and load its weights."""
        self.rank = self.local_rank = rank
        parallel = self.config.parallel
        num_layers = self.config.model.resolved_arch.num_layers
        self.stage = Stage(0, num_layers)
        if parallel.world_size > 1:
            layout = RankLayout.of(parallel)
            self.tp = TPGroup(
                layout.tensor_rank(rank),
                layout.tensor_size,
                has_whole_experts=parallel.enable_expert_parallel,
            )
            self.stage = Stage.of(
                layout.pipeline_rank(rank),
                layout.pipeline_size,
                num_layers,
                parallel.pipeline_layer_partition,
            )
        observed = self.config.observability
        parallel = self.config.parallel
        name = f"rank{rank}"
        if parallel.data_parallel_size > 1:
            name = f"replica{parallel.data_parallel_rank}.{name}"
        self.profile = TorchProfile(observed.torch_profiler_dir, name, observed.profiled_steps)
        self.grammars.preload_while_loading()
        self._load_model()
        self.grammars.end_preload()

    @abstractmethod
    def _load_model(self) -> None:
        """Load the model and set `model` and `runner`."""

    def join(self, rendezvous: Rendezvous) -> None:
        """Connect to the other ranks, so that layers can exchange tensors.

        See `Rendezvous.join`.
        """
        if self.tp.size > 1:
            self.tp.collectives = self._make_collectives(rendezvous)
        if self.stage.count > 1:
            self.stage.link = self._make_link(rendezvous)

    @property
    def _draft_config(self) -> VllmConfig | None:
        """Config of the draft model or speculator; None if this pipeline stage has none."""
        if not makes_drafts(self.config, self.stage):
            return None
        return self.config.of_draft_model

    @abstractmethod
    def _make_collectives(self, rendezvous: Rendezvous) -> Collectives:
        """Create the collectives between the ranks that share layers."""

    def _make_link(self, rendezvous: Rendezvous) -> Link:
        """Create the link between the pipeline stages."""
        return rendezvous.open_link()

    @abstractmethod
    def measure(self) -> MemoryReport:
        """Measure how much memory is left for the KV cache.

        Raises:
            ConfigError: it would not hold one request of max_model_len tokens.
        """

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Allocate a KV cache of `num_blocks` blocks, the null block included."""

    def next_warm_up(self, update: WarmUpUpdate) -> WarmUpStep | None:
        """Return None: a device without buckets has no warm-up."""
        return None

    def warm_up(self) -> str | None:
        """Run the step that `next_warm_up` has returned; here there is never one."""
        raise RuntimeError("no step of a warm-up has been named")

    def describe_engine(self) -> dict[str, Any] | None:
        """Return None: no times of forward passes are measured."""
        return None

    def list_buckets(self) -> list[tuple[int, int, int, int, bool]]:
        """Return an empty list: here there are no buckets."""
        return []

    def replace_buckets(self, buckets: Sequence[Sequence[int]]) -> bool:
        """Return False: here there are no buckets."""
        return False

    def record_tokens(self, tokens: StepTokens) -> None:
        """Record the tokens that another stage has sampled; see `Worker.record_tokens`."""
        assert isinstance(self.runner, ModelRunner), "a pooling model samples no tokens"
        self.runner.record_tokens(tokens)

    # ---- the model ------------------------------------------------------------------------

    @property
    def model_runner(self) -> ModelRunner | PoolingRunner:
        """The runner of the steps, under the name that worker extensions use."""
        return self.runner

    def get_model(self) -> nn.Module:
        """Return the model."""
        return self.model

    def reload_weights(self, weights_path: str | None = None) -> None:
        """Read the weights again, and the weights of a draft model in the same files."""
        self._weights.reload(weights_path)

    def _build_model(self, folder: str) -> nn.Module:
        """Build a new model with the weights of a folder, in host memory."""
        load = replace(self.config.load, use_tqdm_on_load=False)
        model = replace(self.config.model, path=folder)
        return self._read_model(replace(self.config, model=model, load=load))

    @abstractmethod
    def _read_model(self, config: VllmConfig) -> nn.Module:
        """Load a new model of this config into host memory, with weights in the layout
        that runs.
        """

    def _read_drafter(self, config: VllmConfig, device: torch.device) -> nn.Module:
        """Load the draft model or speculator of this config, with weights in the layout
        that runs.
        """
        row = SPECULATORS.get(self.config.speculative.method or "")
        if row is None:
            return load_model(
                config, self.tp, device, self._dense_format(), has_values=self.has_values
            )
        model = self.model
        assert isinstance(model, CausalLM), "a pooling model has no drafts"
        return load_speculator(
            row.class_path, config, model, device, self._dense_format(), has_values=self.has_values
        )

    def _build_drafter(self, folder: str) -> nn.Module:
        """Build a new draft model or speculator with the weights of a folder, in host memory."""
        config = self._draft_config
        assert config is not None, "this worker makes no drafts"
        load = replace(config.load, use_tqdm_on_load=False)
        model = replace(config.model, path=folder)
        return self._read_drafter(replace(config, model=model, load=load), torch.device("cpu"))

    def _dense_format(self) -> Quantization | None:
        """Return the storage format of dense weights for the kernels; None: dense torch tensors."""
        return None

    def reset_measurements(self) -> None:
        """Reset the measured values (`QUANT_CONFIG`, mode MEASURE)."""
        inc_measure.reset(self.model)

    def save_measurements(self, adds: bool | None = None) -> str:
        """Write the measured values (`QUANT_CONFIG`, mode MEASURE) to a file, and return
        its path.
        """
        inc = self.config.model.inc
        if inc is None or not self.config.model.is_measured:
            found = "not set" if inc is None else f"{inc.path}, with mode {inc.mode}"
            raise RequestError(
                f"nothing was measured: QUANT_CONFIG is {found}, but it must name a JSON file with "
                "mode MEASURE when the engine starts. Use `vllm calibrate`, which writes such a "
                "file and measures"
            )
        self._adds_measurements = self._adds_measurements if adds is None else adds
        return inc_measure.save(self.model, inc, self.tp, self.stage, self._adds_measurements)

    # ---- KV blocks elsewhere ----------------------------------------------------------------

    def cache_fingerprint(self) -> bytes:
        """Return a hash of everything except tokens that the content of KV blocks depends on.

        See `hash_contents`.
        """
        weights, kernels = self._weights_and_kernels()
        scales = [
            (layer.key_scales.tolist(), layer.value_scales.tolist())
            for layer in self.model.modules()
            if isinstance(layer, Attention)
        ]
        return hash_contents(self.config, self.rank, self._blocks, weights, scales, kernels)

    @abstractmethod
    def _weights_and_kernels(self) -> tuple[Iterable[Tensor], str]:
        """Return the bytes of all weights, [num_bytes] uint8 each on the CPU, and the kernels'
        name.
        """

    def block_bytes(self) -> int:
        """Return the bytes of a KV block in all layers of this rank."""
        return self._blocks.block_bytes

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        """Return the bytes of each KV block, in all layers of this rank."""
        return self._blocks.read(block_ids)

    def write_blocks(self, block_ids: list[int], blocks: list[list[bytes]]) -> bool:
        """Write this rank's part of KV blocks; return False if one of them has the wrong size."""
        if any(len(block) != self.config.parallel.world_size for block in blocks):
            return False
        return self._blocks.write(block_ids, [block[self.rank] for block in blocks])

    # ---- sleep mode -----------------------------------------------------------------------

    def _set_memory(
        self, weights: SleepingWeights, cache: SleepPart, drafter: SleepingWeights | None = None
    ) -> None:
        """Register the memory that can be reloaded and, with sleep mode, released.

        Args:
            weights: weights of the model.
            cache: KV caches of all models.
            drafter: weights of the draft model or speculator; None: this worker has none.
        """
        if drafter is not None:
            row = SPECULATORS.get(self.config.speculative.method or "")
            in_model = row is not None and not row.has_files
            weights = ModelWithDrafter(weights, drafter, have_one_folder=in_model)
        self._weights = weights
        if self.config.model.enable_sleep_mode:
            self._sleep = Sleep({WEIGHTS: weights, KV_CACHE: cache})

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache; no step may be in flight. See `Sleep`."""
        assert self._sleep is not None, "sleep mode is off"
        self._sleep.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again; see `Sleep`."""
        assert self._sleep is not None, "sleep mode is off"
        self._sleep.wake_up(tags)

    def sleeping_tags(self) -> list[str]:
        """Return the parts that sleep: a list that may contain "weights" and "kv_cache"."""
        return self._sleep.tags if self._sleep is not None else []

    # ---- profiling ------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Begin a trace; see `TorchProfile.start`."""
        self.profile.start()

    def stop_profile(self) -> str:
        """End the trace, and return the path of its file."""
        return self.profile.stop()

    # ---- for the engine -------------------------------------------------------------------

    def prepare(self, request: EngineRequest) -> Future[str | None] | None:
        """Load in the background what the steps of a request need; see `Executor.prepare`."""
        return self.runner.parts.prepare(request)

    def release(self, request_ids: Sequence[str]) -> None:
        """Free what requests have needed, when they have ended; see `Executor.release`."""
        self.runner.parts.release(request_ids)

    def load_adapter(self, name: str, path: str, key: str, number: int) -> str | None:
        """Load a LoRA adapter; see `AdapterMemory.load`."""
        return self._adapters.memory.load(AdapterRef(name, path, key, number))

    def unload_adapter(self, number: int) -> bool:
        """Drop a LoRA adapter; return False if it is not loaded."""
        return self._adapters.unload(number)

    def pin_adapter(self, number: int) -> bool:
        """Keep a LoRA adapter in memory permanently; return False if that is not possible."""
        return self._adapters.memory.pin(number)

    def adapter_numbers(self) -> list[int]:
        """Return the ids of the LoRA adapters in memory."""
        return list(self._adapters.memory.keys())

    def has_adapter(self, number: int, key: str) -> bool:
        """Return whether the LoRA adapter with this id is in memory with this content (`key`)."""
        return self._adapters.memory.keys().get(number) == key

    @property
    def _adapters(self) -> Adapters:
        adapters = self.runner.parts.find(Adapters)
        assert adapters is not None, "the engine has checked that it accepts adapters"
        return adapters

    def stats(self) -> RunnerStats:
        """Return the counters of the runner."""
        return self.runner.stats()
