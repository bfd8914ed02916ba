"""The worker of a Gaudi card, real or simulated: load, measure, divide the memory, warm up."""

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.attention.backends.sdpa import (
    SDPAKernel,
    bridge_sdpa,
    flex_sdpa,
    naive_sdpa,
    require_flex,
)
from vllm.attention.cached_layer import layers_with_cache
from vllm.bucketing import format_bytes
from vllm.bucketing.ledger import MemoryClass
from vllm.bucketing.log_lines import num_blocks_line
from vllm.config import VllmConfig
from vllm.cost_model.cards import CARDS
from vllm.cost_model.run_times import RunEngine
from vllm.distributed import Collectives, Link, Rendezvous, TorchCollectives
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.messages import SchedulerOutput
from vllm.model_executor.loader import load_model
from vllm.model_executor.model_memory import model_tensors
from vllm.model_executor.models.interface import CausalLM, LoadableModel, PoolingModel
from vllm.model_executor.speculators.interface import Speculator
from vllm.ops import set_ops
from vllm.ops.hpu.operators import HPUOps
from vllm.platforms import resolve_platform
from vllm.platforms.hpu import HPUPlatform
from vllm.utils.process import startup_progress
from vllm.worker.block_store import has_uncopied_states
from vllm.worker.calculated_scales import calculate_scales
from vllm.worker.hpu.draft_runner import HPUDraftRunner, make_draft_runner
from vllm.worker.hpu.encoder import CardEncoder
from vllm.worker.hpu.items import DeviceItems
from vllm.worker.hpu.launches.step_report import StepShape
from vllm.worker.hpu.launches.tp_group_status import TPGroupStatus
from vllm.worker.hpu.memory.block_copies import CardBlockCopies
from vllm.worker.hpu.memory.memory import (
    divide_memory,
    make_ledger,
    max_kv_blocks,
    max_launch_bytes,
    subtract_states,
)
from vllm.worker.hpu.memory.memory_forecast import MemoryForecast
from vllm.worker.hpu.memory.memory_profile import MemoryProfile, is_out_of_memory, used_bytes
from vllm.worker.hpu.memory.offload import choose_layers, stream_layers
from vllm.worker.hpu.memory.sleep import CardCache, CardWeights, SleepingGraphs
from vllm.worker.hpu.model_figures import log_converted, model_figures
from vllm.worker.hpu.model_runner import HPUModelRunner
from vllm.worker.hpu.pooling_runner import HPUPoolingRunner
from vllm.worker.hpu.speculator_runner import make_speculator_runner
from vllm.worker.hpu.warmup.profile import profile_launches
from vllm.worker.hpu.warmup_queue import WarmUpQueue
from vllm.worker.interface import MemoryReport, WarmUpStep, WarmUpUpdate
from vllm.worker.kv_cache import (
    bind_kv_caches,
    cache_dtype,
    count_kept_states,
    log_states,
    num_provisional,
)
from vllm.worker.parts.item_rows import count_item_states
from vllm.worker.parts.memory_use import (
    MemoryUse,
    division,
    draft_use,
    items_use,
    states_use,
    weights_use,
)
from vllm.worker.runner import StepHandle
from vllm.worker.sleep import KV_CACHE, TAGS, WEIGHTS
from vllm.worker.worker_base import WorkerBase

logger = init_logger(__name__)

_SLEEPS_WITH = {
    MemoryClass.WEIGHTS: frozenset({WEIGHTS}),
    MemoryClass.KV_CACHE: frozenset({KV_CACHE}),
    MemoryClass.PREFILL_GRAPHS: frozenset(TAGS),
    MemoryClass.DECODE_GRAPHS: frozenset(TAGS),
}
"""Memory class that is given back while one of these parts sleeps."""

_PROFILE_BLOCKS = 2
"""KV blocks while the memory of a launch is measured: all its references are to one of them."""


class HPUWorker(WorkerBase):
    """Runs the model on the card of this process.

    Args:
        config: config of the engine.
        platform: has the card; None: the card of this process.

    Attributes:
        memory_uses: all uses of the memory except forward passes, graphs and the KV cache; exists
            after `measure`.
    """

    model: CausalLM | PoolingModel
    runner: HPUModelRunner | HPUPoolingRunner
    memory_uses: list[MemoryUse]

    def __init__(self, config: VllmConfig, platform: HPUPlatform | None = None) -> None:
        if platform is None:
            found = resolve_platform("hpu")
            assert isinstance(found, HPUPlatform)
            platform = found
        self.platform = platform
        self.bridge = platform.bridge
        super().__init__(config, self.bridge.device)
        gc.set_threshold(*config.hpu.gc_thresholds)
        set_ops(HPUOps(self.bridge))
        self._slicing = config.hpu.prompt_slicing(config.scheduler.max_num_batched_tokens)
        self.forecast = MemoryForecast(self._slicing, config.cache.block_size)
        self._rendezvous: Rendezvous | None = None
        self._drafter: HPUDraftRunner | None = None
        self._num_kept_states: int | None = None
        self._num_item_states: int | None = None
        self._item_bytes = 0

    def _load_model(self) -> None:
        bridge = self.bridge
        with self._within_memory("the weights"), MemoryProfile(bridge) as total:
            with MemoryProfile(bridge) as loading:
                self.model = self._load_weights()
                draft_config, draft_model = self._draft_config, None
                if draft_config is not None:
                    draft_model = self._read_drafter(draft_config, bridge.device)
            logger.info("Pre-loading model weights on %s took %s", bridge.device, loading)
            with MemoryProfile(bridge) as wrapping:
                kernel = self._prompt_kernel()
                self.runner = self._make_runner(self.model, kernel)
                if draft_config is not None and draft_model is not None:
                    self._add_drafter(draft_config, draft_model)
            if bridge.is_lazy and not self.config.model.enforce_eager:
                logger.info("Wrapping in HPU Graph took %s", wrapping)
            else:
                logger.info("Preparing forward passes took %s", wrapping)
        logger.info("Loading model weights took in total %s", total)
        log_converted(self.config, self.model)

    def _prompt_kernel(self) -> SDPAKernel:
        hpu, bridge = self.config.hpu, self.bridge
        if hpu.prompt_attention == "fused":
            wants_fp8 = hpu.fp8_prompts and self._can_round_prompts()
            return bridge_sdpa(bridge.kernels, self._slicing, wants_fp8=wants_fp8)
        if hpu.prompt_attention == "flex":
            require_flex(bridge.device)
            return flex_sdpa
        return naive_sdpa

    def _can_round_prompts(self) -> bool:
        """Return whether attention of prompts can run in FP8; log the reason if not."""
        layers = [x for x in layers_with_cache(self.model) if isinstance(x, Attention)]
        missing = "the KV cache is not of fp8 (--kv-cache-dtype fp8_inc)"
        if cache_dtype(self.config) is torch.float8_e4m3fn:
            if any(layer.measured_scales for layer in layers):
                return True
            missing = (
                "no layer has measured scales for its queries. Measure the model with `vllm "
                "calibrate`, and start with --quantization inc and QUANT_CONFIG"
            )
        logger.warning(
            "VLLM_PROMPT_USE_FP8_FUSEDSDPA=1 has no effect, prompt attention is computed in "
            "bfloat16: %s",
            missing,
        )
        return False

    def _load_weights(self) -> CausalLM | PoolingModel:
        """Load the model to the card, with some of its layers on the host if configured."""
        offload_bytes = self.config.load.cpu_offload_bytes
        layers: list[nn.Module] = []

        def choose(model: LoadableModel) -> list[nn.Module]:
            layers.extend(choose_layers(model, offload_bytes))
            return layers

        model = load_model(
            self.config,
            self.tp,
            self.bridge.device,
            choose_host_layers=choose if offload_bytes else None,
            stage=self.stage,
            has_values=self.has_values,
        )
        if offload_bytes:
            stream_layers(self.bridge, model, layers, offload_bytes)
        return model

    def _make_runner(
        self, model: CausalLM | PoolingModel, kernel: SDPAKernel
    ) -> HPUModelRunner | HPUPoolingRunner:
        if isinstance(model, PoolingModel):
            return HPUPoolingRunner(self.config, model, self.bridge, kernel)
        return HPUModelRunner(self.config, model, self.bridge, kernel, self.grammars)

    def _add_drafter(self, config: VllmConfig, model: nn.Module) -> None:
        runner, max_drafts = self.runner, self.config.scheduler.max_draft_tokens
        assert isinstance(runner, HPUModelRunner)
        if isinstance(model, Speculator):
            self._drafter = make_speculator_runner(config, model, runner, max_drafts)
        else:
            assert isinstance(model, CausalLM), "a draft model generates text"
            self._drafter = make_draft_runner(config, model, runner, max_drafts)
        runner.drafter = self._drafter

    def join(self, rendezvous: Rendezvous) -> None:
        """Join the other ranks; see `WorkerBase.join`."""
        rendezvous.join(self.platform.collectives_backend)
        self._rendezvous = rendezvous
        super().join(rendezvous)
        if self.tp.size > 1:
            self.runner.launches.peers = TPGroupStatus(rendezvous)

    def _make_collectives(self, rendezvous: Rendezvous) -> Collectives:
        group = rendezvous.open_groups(rendezvous.layout.tensor_groups)
        return TorchCollectives(self.tp.size, group, self.platform.before_collective)

    def _make_link(self, rendezvous: Rendezvous) -> Link:
        return rendezvous.open_link(self.bridge.device, self.platform.before_collective)

    def measure(self) -> MemoryReport:
        """Run the largest shapes, and divide the memory that they leave.

        Raises:
            ConfigError: the cache would not hold one request of max_model_len tokens, or no forward
                pass fits in memory.
        """
        self._preparation = MemoryProfile(self.bridge)
        self._preparation.begin()
        with self._within_memory("the KV cache"):
            # Allocate the cache before the first launch, whose workspace remains in use and is
            # counted as memory that launches need.
            memory = self.bridge.memory_info()
            layout = self.runner.cache_layout
            free_bytes = memory.free_bytes - self._count_items(memory.free_bytes)
            self._num_kept_states = count_kept_states(self.config, layout, free_bytes)
            config, free_bytes = subtract_states(self.config, free_bytes, self._state_bytes)
            self._memory_config = config
            self.memory_uses = self._uses(memory.total_bytes, free_bytes)
            report = divide_memory(
                config,
                free_bytes=free_bytes,
                launch_bytes=self._profile(free_bytes),
                block_bytes=self._block_bytes(),
                others=self.memory_uses,
            )
        limit = None if self._encoder is None else self._encoder.max_embeddings
        self._report = replace(
            report,
            num_kept_states=self._num_kept_states,
            num_item_states=self._num_item_states,
            max_image_embeddings=limit,
        )
        return self._report

    def _count_items(self, free_bytes: int) -> int:
        """Return the memory of the items for cross-attention layers, the same on all ranks."""
        if self._items is None:
            return 0
        found = count_item_states(self.config, self.model, free_bytes)
        assert found is not None, "a model with such items has an encoder"
        count, num_bytes = found
        self._num_item_states = count
        if self._rendezvous is not None:
            self._num_item_states = self._rendezvous.minimum("hidden states of items", count)
        self._item_bytes = num_bytes // count * self._num_item_states
        logger.info(
            "Cross-attention cache: %d hidden states of images and sounds (%s)",
            *(self._num_item_states, format_bytes(self._item_bytes)),
        )
        return self._item_bytes

    def _uses(self, total_bytes: int, free_bytes: int) -> list[MemoryUse]:
        """List the uses of the card's memory at the time when forward passes are measured.

        Args:
            total_bytes: total bytes of the card.
            free_bytes: memory that the model and its recurrent states leave.
        """
        config, runner = self.config, self.runner
        states = self._state_bytes
        drafts, parts = 0, [*runner.parts.memory_uses(), items_use(self._item_bytes)]
        if self._drafter is not None:
            tensors = model_tensors(self._drafter.model)
            drafts = sum(tensor.nbytes for tensor in tensors)
        return [
            weights_use(
                total_bytes - free_bytes - states - drafts - sum(use.num_bytes for use in parts),
                "keep some of the weights on the host (--cpu-offload-gb, with --enforce-eager)",
            ),
            draft_use(drafts),
            *parts,
            states_use(config, states),
        ]

    def allocate(self, num_blocks: int) -> None:
        """Allocate a KV cache of `num_blocks` blocks, the null block included."""
        bridge = self.bridge
        with self._within_memory("the scales of the KV cache"):
            calculate_scales(self.config, self.model, self.device)
            bridge.mark_step()
        logger.info(num_blocks_line(num_blocks))
        num_kept = self._num_kept_states or 0
        log_states(self.runner.cache_layout, self._num_rows - num_kept, num_kept)
        total_bytes = bridge.memory_info().total_bytes
        self.ledger = make_ledger(self._memory_config, self._report, total_bytes, num_blocks)
        with self._within_memory("the KV cache"), MemoryProfile(bridge) as allocation:
            self._bind_caches(num_blocks)
        if self._items is not None:
            self._items.pool.warm_up()
        if self._encoder is not None:
            self._encoder.warm_up_agreement()
        if self._drafter is not None:
            self._drafter.start(num_blocks)
        if self.config.connector.kv_transfer is not None:
            self._start_block_copies()
        self.ledger.book(MemoryClass.KV_CACHE, self.ledger.left(MemoryClass.KV_CACHE))
        logger.info("Initializing cache engine took %s", allocation)
        self.warm_ups = WarmUpQueue(
            self.config,
            bridge,
            self.runner,
            self.ledger,
            self.forecast,
            encoder=self._encoder,
            rendezvous=self._rendezvous,
        )
        self.warm_ups.plan(num_blocks)
        self._graphs = SleepingGraphs(self.runner, self._encoder)
        self._given_back: dict[MemoryClass, int] = {}
        drafter = None
        if self._drafter is not None:
            folder = self._drafter.config.model.path or ""
            drafter = CardWeights(self._drafter.model, folder, self._build_drafter, bridge)
        self._set_memory(
            CardWeights(self.model, self.config.model.path or "", self._build_model, bridge),
            CardCache(bridge, self._release_caches, lambda: self._bind_caches(num_blocks)),
            drafter,
        )

    def _start_block_copies(self) -> None:
        layers = self.runner.attention_layers
        if self.runner.cache_layout.state_layers:
            raise has_uncopied_states()
        blocks = CardBlockCopies(self.bridge, layers, self.config.cache.block_size)
        with torch.inference_mode():
            blocks.warm_up()
        self._blocks = blocks

    def _weights_and_kernels(self) -> tuple[Iterable[Tensor], str]:
        return map(_host_bytes, model_tensors(self.model)), self.bridge.device.type

    def next_warm_up(self, update: WarmUpUpdate) -> WarmUpStep | None:
        """Finish the last step of the warm-up, and return the next one; see
        `Worker.next_warm_up`.
        """
        was_starting = not self.warm_ups.has_started
        step = self.warm_ups.next_warm_up(update)
        if was_starting and self.warm_ups.has_started:
            self._preparation.end()
            logger.info("init_cache_engine took %s", self._preparation)
        return step

    def warm_up(self) -> str | None:
        """Run the step of the warm-up that `next_warm_up` has returned; see `Worker.warm_up`."""
        with self._within_memory("a launch for which other cards of the engine have memory"):
            return self.warm_ups.warm_up()

    def describe_engine(self) -> dict[str, Any] | None:
        """Return card and model for measured times; None if the layers are divided into stages."""
        name, parallel = self.bridge.device_name.lower(), self.config.parallel
        cards = [card for card in CARDS if name.startswith(card)]
        if not cards or parallel.pipeline_parallel_size > 1:
            return None
        engine = RunEngine(
            card=cards[0],
            is_simulated=self.platform.is_simulated,
            num_cards=parallel.world_size,
            block_size=self.config.cache.block_size,
            figures=model_figures(self.model, self.config),
        )
        return msgspec.to_builtins(engine)

    def list_buckets(self) -> list[tuple[int, int, int, int, bool]]:
        """Return the sizes of each bucket and whether it is warmed up, future buckets included."""
        return self.warm_ups.list_buckets()

    def replace_buckets(self, buckets: Sequence[Sequence[int]]) -> bool:
        """Begin to warm up other buckets; return whether there are any.

        See `Worker.replace_buckets`.
        """
        return self.warm_ups.replace_buckets(buckets)

    def _read_model(self, config: VllmConfig) -> CausalLM | PoolingModel:
        return load_model(config, self.tp, torch.device("cpu"), stage=self.stage)

    def sleep(self, level: int = 1) -> None:
        """Discard the graphs, which contain addresses, then free the memory of weights and
        cache.
        """
        self._graphs.release()
        super().sleep(level)
        self._book_what_is_awake()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again; once all of it is there, capture the graphs again."""
        super().wake_up(tags)
        if not self.sleeping_tags():
            self._graphs.capture()
        self._book_what_is_awake()

    def _book_what_is_awake(self) -> None:
        """Update the ledger to the memory that is on the card now; sleeping parts keep their
        budget.
        """
        sleeping = self.sleeping_tags()
        for cls, tags in _SLEEPS_WITH.items():
            if not tags.isdisjoint(sleeping):
                booked = self.ledger.booked(cls)
                self.ledger.release(cls, booked)
                self._given_back[cls] = self._given_back.get(cls, 0) + booked
            else:
                self.ledger.book(cls, self._given_back.pop(cls, 0))

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        """Start a step; at most one other may be in flight.

        If step reports are on, this waits for the end of the step.
        """
        report = self.runner.launches.report
        if not report.is_on:
            with self.profile.step(step):
                return self.runner.execute(step)
        with self.profile.step(step), report.step(lambda: self._shape_of(step)):
            handle = self.runner.execute(step)
            handle.result()
        return handle

    def _shape_of(self, step: SchedulerOutput) -> StepShape:
        """Return the shape by which a report names a step that has not started."""
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

    def _profile(self, free_bytes: int) -> int:
        """Run the largest shapes on an almost empty cache; return the bytes they need in
        addition.
        """
        if self._rendezvous is not None:
            # All ranks must run the same launches, because launches exchange tensors. So all use
            # the least free memory of any rank.
            free_bytes = self._rendezvous.minimum("free memory", free_bytes)
        block_bytes = self._block_bytes()
        most = max_launch_bytes(self._memory_config, free_bytes, block_bytes)
        max_blocks = max_kv_blocks(self._memory_config, free_bytes, block_bytes)
        if self._rendezvous is not None:
            max_blocks = self._rendezvous.minimum("KV blocks that fit", max_blocks)
        startup_progress.report("measuring the memory of forward passes")
        self._bind_caches(_PROFILE_BLOCKS)
        resident_bytes, encoder_bytes = used_bytes(self.bridge), 0
        with self.bridge.dry_run():
            found = profile_launches(
                self.config,
                self.bridge,
                self.runner,
                most,
                None if max_blocks == sys.maxsize else max_blocks,
                self.forecast,
            )
            if self._encoder is not None:
                encoder_bytes = self._encoder.measure(resident_bytes, most, self._rendezvous)
        self._release_caches()
        gc.collect()  # garbage must not count as memory in use
        if found is None:
            uses = self._uses(self.bridge.memory_info().total_bytes, free_bytes)
            raise self._out_of_memory("any forward pass, even the smallest", uses)
        profile, launch_bytes = found
        logger.info("Model profiling run took %s", profile)
        if self._encoder is not None:
            logger.info(
                "The encoder of %s needs %s for its largest forward pass. It is warmed up for "
                "these sizes, in %s: %s",
                *(self._encoder.reads, format_bytes(encoder_bytes), self._encoder.unit),
                ", ".join(map(str, self._encoder.sizes)),
            )
        # The model and the encoder never run at the same time and share one workspace.
        return max(launch_bytes, encoder_bytes)

    @property
    def _encoder(self) -> CardEncoder | None:
        return self.runner.encoder if isinstance(self.runner, HPUModelRunner) else None

    @property
    def _items(self) -> DeviceItems | None:
        return self.runner.items if isinstance(self.runner, HPUModelRunner) else None

    @property
    def _num_rows(self) -> int:
        """Number of recurrent states: one per request of the batch, one of padding, the kept
        states.
        """
        return self.config.scheduler.max_num_seqs + 1 + (self._num_kept_states or 0)

    @property
    def _state_bytes(self) -> int:
        """Memory of the recurrent states, and of the inputs that are kept for drafts."""
        layout, num_rows = self.runner.cache_layout, self.config.scheduler.max_num_seqs + 1
        inputs = layout.input_bytes * num_provisional(self.config) * num_rows
        return layout.state_bytes * self._num_rows + inputs

    def _block_bytes(self) -> int:
        return sum(runner.cache_layout.block_bytes for runner in self._runners)

    @property
    def _runners(self) -> list[HPUModelRunner | HPUPoolingRunner | HPUDraftRunner]:
        """The runner of the model, and the one of the draft model, which uses the same blocks."""
        return [self.runner] if self._drafter is None else [self.runner, self._drafter]

    def _bind_caches(self, num_blocks: int) -> None:
        dtype = cache_dtype(self.config)
        for runner in self._runners:
            layers, layout = runner.attention_layers, runner.cache_layout
            bind_kv_caches(
                *(layers, self.platform, num_blocks, layout, dtype, self._num_rows),
                provisional=(self.config.scheduler.max_num_seqs + 1, num_provisional(self.config)),
            )
        if self._drafter is not None and self._drafter.states is not None:
            self._drafter.states.bind(num_blocks)
        if self._items is not None and self._num_item_states is not None:
            self._items.pool.allocate(self._num_item_states, self.platform, self.model.dtype)

    def _release_caches(self) -> None:
        for runner in self._runners:
            for layer in runner.attention_layers:
                layer.release_kv_cache()
        if self._drafter is not None and self._drafter.states is not None:
            self._drafter.states.release()
        if self._items is not None:
            self._items.pool.release()

    @contextmanager
    def _within_memory(self, what: str) -> Iterator[None]:
        """Let an out-of-memory error in this context name `what`, not the failed allocation."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(what) from error

    def _out_of_memory(self, what: str, uses: Sequence[MemoryUse] = ()) -> ConfigError:
        """Create the error about a card that has too little memory.

        Args:
            what: name of the tensors or the step that does not fit, such as "the weights".
            uses: uses of the memory; empty: not known.
        """
        total = format_bytes(self.bridge.memory_info().total_bytes)
        scheduler, more = self.config.scheduler, ""
        if self._draft_config is not None:
            more += "use a smaller draft model (--speculative-config), "
        if self.config.lora.enable_lora:
            more += "lower --max-loras or --max-lora-rank, "
        settings = (
            f"lower --max-num-batched-tokens ({scheduler.max_num_batched_tokens}), --max-num-seqs "
            f"({scheduler.max_num_seqs}) or --max-model-len ({scheduler.max_model_len})"
        )
        if uses:
            text = f"no memory for {what}: the card has {total}. {division(uses)}, or {settings}"
            return ConfigError(text)
        return ConfigError(
            f"no memory for {what}: the card has {total}, and the weights in "
            f"{self.config.model.dtype_name} are loaded first. Use a smaller model or dtype, keep "
            f"some of the weights on the host (--cpu-offload-gb, with --enforce-eager), {more}or "
            f"{settings}"
        )


def _host_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
