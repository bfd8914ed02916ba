"""The worker of a Gaudi card, real or simulated: load, measure, divide the memory, warm up."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vllm.attention.backends.sdpa import (
    SDPAKernel,
    bridge_sdpa,
    flex_sdpa,
    naive_sdpa,
    require_flex,
)
from vllm.bucketing import (
    BucketPlan,
    Catalog,
    MemoryLedger,
    Phase,
    format_bytes,
    plan_buckets,
)
from vllm.bucketing.ledger import MemoryClass, MemorySplit, open_ledger, split_memory
from vllm.bucketing.log_lines import memory_split_line, num_blocks_line
from vllm.config import VllmConfig
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.kv_cache_spec import KVCacheLayout
from vllm.logger import init_logger
from vllm.messages import SchedulerOutput
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM, LoadableModel, PoolingModel
from vllm.ops import set_ops
from vllm.ops.hpu import HPUOps
from vllm.platforms import resolve_platform
from vllm.platforms.habana.bridge import FusedKernels
from vllm.platforms.hpu import HPUPlatform
from vllm.utils import startup_progress
from vllm.worker.hpu.memory_profile import MemoryProfile, is_out_of_memory
from vllm.worker.hpu.model_runner import HPUModelRunner
from vllm.worker.hpu.offload import choose_layers, stream_layers
from vllm.worker.hpu.profile import profile_launches
from vllm.worker.hpu.sleep import CardCache, CardWeights, SleepingGraphs
from vllm.worker.hpu.step_report import StepShape
from vllm.worker.hpu.warmup import WarmUp
from vllm.worker.kv_cache import (
    bind_kv_caches,
    cache_layout,
    check_capacity,
    count_blocks,
)
from vllm.worker.model_runner import StepHandle
from vllm.worker.pooling.hpu_runner import HPUPoolingRunner, WholePromptRunner
from vllm.worker.sleep import KV_CACHE, TAGS, WEIGHTS
from vllm.worker.worker_base import WorkerBase

logger = init_logger(__name__)

_SLEEPS_WITH = {
    MemoryClass.WEIGHTS: frozenset({WEIGHTS}),
    MemoryClass.KV_CACHE: frozenset({KV_CACHE}),
    MemoryClass.PREFILL_GRAPHS: frozenset(TAGS),
    MemoryClass.DECODE_GRAPHS: frozenset(TAGS),
}
"""What is given back while one of these parts sleeps."""

_PROFILE_BLOCKS = 2
"""KV blocks while the memory of a launch is measured: all its references are to one of them."""


class HPUWorker(WorkerBase):
    """Runs the model on the card of this process.

    Args:
        config: of the engine.
    """

    model: CausalLM | PoolingModel
    runner: HPUModelRunner

    def __init__(self, config: VllmConfig) -> None:
        platform = resolve_platform("hpu")
        assert isinstance(platform, HPUPlatform)
        self.platform = platform
        self.bridge = platform.bridge
        super().__init__(config, self.bridge.device)
        gc.set_threshold(*config.hpu.gc_thresholds)
        set_ops(HPUOps(self.bridge))

    def load_model(self) -> None:
        """Build the model and read its weights.

        Raises:
            ConfigError: they do not fit the memory of the card, or cannot be loaded.
        """
        bridge = self.bridge
        self.grammars.preload_beside_weights()
        with self._within_memory("the weights"), MemoryProfile(bridge) as total:
            with MemoryProfile(bridge) as loading:
                self.model = self._load()
            logger.info("Pre-loading model weights on %s took %s", bridge.device, loading)
            with MemoryProfile(bridge) as wrapping:
                kernel = _prompt_kernel(self.config, bridge.kernels, bridge.device)
                self.runner = self._make_runner(self.model, kernel)
            logger.info("Wrapping in HPU Graph took %s", wrapping)
        logger.info("Loading model weights took in total %s", total)

    def _load(self) -> CausalLM | PoolingModel:
        """The model on the card; some of its layers on the host, if that was asked for."""
        asked_bytes = self.config.load.cpu_offload_bytes
        if not asked_bytes:
            return load_model(self.config, TPGroup(), self.bridge.device)
        layers: list[nn.Module] = []

        def choose(model: LoadableModel) -> list[nn.Module]:
            layers.extend(choose_layers(model, asked_bytes))
            return layers

        model = load_model(self.config, TPGroup(), self.bridge.device, choose_host_layers=choose)
        stream_layers(self.bridge, model, layers, asked_bytes)
        return model

    def _make_runner(self, model: CausalLM | PoolingModel, kernel: SDPAKernel) -> HPUModelRunner:
        if isinstance(model, PoolingModel):
            pooler = self.config.model.pooler
            assert pooler is not None
            kind = WholePromptRunner if pooler.needs_whole_prompts else HPUPoolingRunner
            return kind(self.config, model, self.bridge, kernel)
        return HPUModelRunner(self.config, model, self.bridge, kernel, self.grammars)

    def initialize_cache(self) -> int:
        """Divide the memory, allocate the KV cache and warm up.

        Returns:
            The number of blocks, the null block included.

        Raises:
            ConfigError: the cache would not hold one request of max_model_len tokens, or no
                launch fits the memory.
        """
        with self._within_memory("the KV cache"), MemoryProfile(self.bridge) as total:
            workspace_bytes = self._profile()
            num_blocks, self.ledger = self._divide_memory(workspace_bytes)
            with MemoryProfile(self.bridge) as allocation:
                self._bind_caches(num_blocks)
            self.ledger.book(MemoryClass.KV_CACHE, self.ledger.left(MemoryClass.KV_CACHE))
            logger.info("Initializing cache engine took %s", allocation)
            self._prepare_launches(plan_buckets(self.config, num_blocks))
        logger.info("init_cache_engine took %s", total)
        self._graphs = SleepingGraphs(self.runner)
        self._given_back: dict[MemoryClass, int] = {}
        self._set_memory(
            CardWeights(self.model, self.config.model.path or "", self._build_model, self.bridge),
            CardCache(self.bridge, self._release_caches, lambda: self._bind_caches(num_blocks)),
        )
        return num_blocks

    def _read_model(self, config: VllmConfig) -> CausalLM | PoolingModel:
        return load_model(config, TPGroup(), torch.device("cpu"))

    def sleep(self, level: int = 1) -> None:
        """Throw the graphs away, which hold addresses, then give back what they point to."""
        self._graphs.release()
        super().sleep(level)
        self._book_what_is_awake()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory again; when all of it is there, capture the graphs again."""
        super().wake_up(tags)
        if not self.sleeping_tags():
            self._graphs.capture()
        self._book_what_is_awake()

    def _book_what_is_awake(self) -> None:
        """Let the ledger say what is on the card now; what sleeps keeps its budget."""
        sleeping = self.sleeping_tags()
        for cls, tags in _SLEEPS_WITH.items():
            if not tags.isdisjoint(sleeping):
                booked = self.ledger.booked(cls)
                self.ledger.release(cls, booked)
                self._given_back[cls] = self._given_back.get(cls, 0) + booked
            else:
                self.ledger.book(cls, self._given_back.pop(cls, 0))

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        """Start a step; at most one other is in flight. With a step report on, it has ended
        then."""
        report = self.runner.report
        if not report.is_on:
            with self.profile.step(step):
                return self.runner.execute(step)
        with self.profile.step(step), report.step(lambda: self._shape_of(step)):
            handle = self.runner.execute(step)
            handle.result()
        return handle

    def _shape_of(self, step: SchedulerOutput) -> StepShape:
        """What a report says of a step that has not begun."""
        batch = self.runner.batch
        num_tokens, num_prompt = batch.num_tokens.copy(), batch.num_prompt_tokens.copy()
        for new in step.new_requests:
            num_prompt[new.row] = len(new.request.prompt_token_ids)
            num_tokens[new.row] = num_prompt[new.row] + len(new.output_token_ids)
        return StepShape.of(
            num_tokens[step.rows].tolist(),
            self.config.cache.block_size,
            is_prompt=bool((step.num_computed_tokens < num_prompt[step.rows]).any()),
        )

    # ---- memory ---------------------------------------------------------------------------

    def _profile(self) -> int:
        """Run the largest launches on next to no cache; the bytes they need besides it."""
        most = self._most_workspace()
        startup_progress.report("measuring the memory of launches")
        self._bind_caches(_PROFILE_BLOCKS)
        with self.bridge.dry_run():
            profile = profile_launches(self.config, self.bridge, self.runner, most)
        self._release_caches()
        gc.collect()  # what is garbage by now is not in use
        if profile is None:
            raise self._out_of_memory("a launch, even the smallest")
        logger.info("Model profiling run took %s", profile)
        return max(0, profile.device_bytes)

    def _most_workspace(self) -> int:
        """What launches may need so that the cache still holds the longest request."""
        cache = self.config.cache
        num_blocks = cache.num_gpu_blocks_override or self.config.max_blocks_per_request + 1
        share = cache.gpu_memory_utilization * (1 - self._graph_share)
        cache_bytes = num_blocks * self._block_bytes() / share if share else 0
        return int(self.bridge.memory_info().free_bytes - cache_bytes)

    def _divide_memory(self, workspace_bytes: int) -> tuple[int, MemoryLedger]:
        """KV blocks, and the ledger of what is booked for what."""
        cache, hpu = self.config.cache, self.config.hpu
        memory = self.bridge.memory_info()
        free_bytes = max(0, memory.free_bytes - workspace_bytes)
        reserved = self._graph_share
        split = split_memory(free_bytes, cache.gpu_memory_utilization, reserved)
        logger.info(memory_split_line(split, cache.gpu_memory_utilization, reserved))
        block_bytes = self._block_bytes()
        num_blocks = self._count_blocks(split, block_bytes)
        logger.info(num_blocks_line(num_blocks, 0))
        check_capacity(
            self.config,
            num_blocks,
            block_bytes,
            free_bytes,
            f"--gpu-memory-utilization; {format_bytes(memory.free_bytes - free_bytes)} are kept "
            "for launches, less with a lower --max-num-batched-tokens",
        )
        ledger = open_ledger(
            total_bytes=memory.total_bytes,
            weight_bytes=memory.total_bytes - memory.free_bytes,
            workspace_bytes=memory.free_bytes - free_bytes,
            split=split,
            prompt_ratio=hpu.graph_prompt_ratio,
            block_bytes=max(1, block_bytes),
        )
        ledger.assign(MemoryClass.KV_CACHE, num_blocks * block_bytes)
        return num_blocks, ledger

    def _count_blocks(self, split: MemorySplit, block_bytes: int) -> int:
        cache = self.config.cache
        if not block_bytes:
            return count_blocks(self.config, 0, split.kv_bytes)
        override = cache.num_gpu_blocks_override
        if override is not None:
            if override * block_bytes > split.kv_bytes:
                raise ConfigError(
                    f"num_gpu_blocks_override={override}: the blocks take "
                    f"{format_bytes(override * block_bytes)}, the KV cache can have "
                    f"{format_bytes(split.kv_bytes)}"
                )
            return override
        num_blocks = split.num_blocks(block_bytes)
        # More than all requests together can hold serves only the prefixes of finished ones.
        most = self.config.scheduler.max_num_seqs * self.config.max_blocks_per_request
        if not cache.enable_prefix_caching:
            return min(num_blocks, most + 1)
        # A contiguous decode reads the cache up to its highest block: a large one is slow.
        return min(num_blocks, 2 * most + 1) if self.config.hpu.contiguous_pa else num_blocks

    @property
    def _graph_share(self) -> float:
        """Of the usable memory."""
        return 0.0 if self.config.model.enforce_eager else self.config.hpu.graph_reserved_mem

    def _block_bytes(self) -> int:
        return self._layout.block_bytes

    @property
    def _layout(self) -> KVCacheLayout:
        """One block table per request: the block lists of a launch serve all layers."""
        layers = self.runner.attention_layers
        return cache_layout(self.config, layers, self._dtype, has_one_table=True)

    def _bind_caches(self, num_blocks: int) -> None:
        layers = self.runner.attention_layers
        bind_kv_caches(layers, self.platform, num_blocks, self._layout, self._dtype)

    def _release_caches(self) -> None:
        for layer in self.runner.attention_layers:
            layer.release_kv_cache()

    @contextmanager
    def _within_memory(self, what: str) -> Iterator[None]:
        """Name what there is no memory for, in place of the allocation that failed."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(what) from error

    def _out_of_memory(self, what: str) -> ConfigError:
        total = format_bytes(self.bridge.memory_info().total_bytes)
        scheduler = self.config.scheduler
        return ConfigError(
            f"no memory for {what}: the card has {total}, of which weights in "
            f"{self.config.model.dtype_name} come first. Use a smaller model or dtype, keep some "
            f"of the weights on the host (--cpu-offload-gb, with --enforce-eager), or lower "
            f"--max-num-batched-tokens ({scheduler.max_num_batched_tokens}), --max-num-seqs "
            f"({scheduler.max_num_seqs}) or --max-model-len ({scheduler.max_model_len})"
        )

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.model.dtype_name)
        return dtype

    # ---- launches -------------------------------------------------------------------------

    def _prepare_launches(self, plan: BucketPlan) -> None:
        for line in plan.warnings:
            logger.warning(line)
        for line in plan.info:
            logger.info(line)
        catalog = plan.catalog
        if Phase.DECODE not in self.runner.phases:
            catalog = Catalog(catalog.prefill, ())
        self.runner.use_catalog(catalog, plan.limits)
        if self.config.hpu.skip_warmup:
            logger.info("Skipping warmup...")
            self.runner.report.finish_warmup()  # what compiles from here on, requests wait for
            return
        WarmUp(self.config, self.bridge, self.runner, catalog, plan.limits, self.ledger).run()
        if self.config.hpu.full_warmup:
            self.runner.execution.forbid_recompilation()


def _prompt_kernel(config: VllmConfig, kernels: FusedKernels, device: torch.device) -> SDPAKernel:
    if config.hpu.prompt_attention == "fused":
        return bridge_sdpa(kernels)
    if config.hpu.prompt_attention == "flex":
        require_flex(device)
        return flex_sdpa
    return naive_sdpa
