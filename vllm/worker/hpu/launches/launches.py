"""Padded forward passes on a card: the common part of generating and pooling runners."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.bucketing import Bucket, Phase, StepLimits
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.traffic import TrafficTable
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.messages import IntArray, ModelRunnerOutput, RunnerStats, SchedulerOutput
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.utils.trace import LAUNCH_COUNTERS, PaddingCounts, Trace, get_trace, launch_counters
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch, LaunchInput
from vllm.worker.hpu.launches.block_moves import BlockMover, StateMover
from vllm.worker.hpu.launches.execution import GraphExecution, make_execution
from vllm.worker.hpu.launches.host_buffers import HostBuffers
from vllm.worker.hpu.launches.input import HPUInputBuilder
from vllm.worker.hpu.launches.late_shapes import LateShapes
from vllm.worker.hpu.launches.model import LaunchModel
from vllm.worker.hpu.launches.planner import (
    HPULaunchPlanner,
    ItemSlotSizes,
    PaddedLaunch,
    PaddedShape,
    launch_shapes,
)
from vllm.worker.hpu.launches.step_report import RecentLaunches, StepReport
from vllm.worker.hpu.launches.tp_group_status import TPGroupStatus
from vllm.worker.parts.image_attention import ImageAttention
from vllm.worker.parts.row_parts import RowParts

_MAX_MERGED_PROMPTS = 64
"""Rows of the logits of a merged prefill, however few its prompts are."""
_SHAPES_OF_BUCKET = 3
"""Maximum number of shapes of a bucket for each number of items; see `launch_shapes`."""

Finish = Callable[[], ModelRunnerOutput]
"""Waits for the result of a step."""

Sampling = Literal["none", "warm_up", "heaviest"]
"""Sampling of a launch of padding, in addition to greedy sampling: none, all kinds that the warm-up
compiles for its batch size, or the kind that needs the most memory."""


@dataclass(frozen=True, slots=True)
class PaddedInput(LaunchInput):
    """A padded forward pass whose inputs are packed."""

    launch: PaddedLaunch
    packed: IntArray
    """Packed inputs on the host."""


class PaddedOutput(NamedTuple):
    """The output of a padded forward pass, and its input on the card."""

    packed: Tensor
    """Packed inputs on the card."""
    result: Tensor
    """Logits or pooled vectors, see `Outputs`."""
    hidden_states: Tensor


def _need_prefill(rows: IntArray, computed: IntArray) -> npt.NDArray[np.bool_]:
    """Return for each single token that it runs as a prefill."""
    return np.ones(len(rows), np.bool_)


class PaddedLaunches:
    """Plans, packs, runs and counts the forward passes of one model, in the shapes of a catalog.

    Args:
        config: config of the engine.
        bridge: the card.
        model: runs a packed forward pass.
        inputs: packs the inputs.
        batch: the running requests.
        parts: what else requests bring, such as adapters or images.
        has_decodes: requests generate tokens. Otherwise single tokens of prompts run as prefills,
            so that decodes need no buckets.
        whole_prompts: every prompt runs in one forward pass.
        single_tokens: each request of a forward pass has one token, and there are no prompts.
        mover: copies blocks of the cache; None: blocks are never copied.
        items: items that requests read by cross-attention; None: nothing.
        state_mover: copies recurrent states; None: none are kept for prefixes.

    Attributes:
        stage: pipeline stage of the model.
        block_size: tokens of a block.
        may_compile: forward passes of this step contain code that no warm-up can know.
        warmed: section of the running forward pass in which nothing may compile or wait; closed
            where it may.
        inputs, to_device, execution, report: pack a forward pass, copy it to the card, run it, and
            report what it compiled.
        phases: phases of its forward passes: prefill, decode.
        planner: exists after the first `use_catalog`.
        is_warm: the warm-up has ended.
        traffic: counts what steps of the model need before padding; None: not counted.
        peers: the cards that run every forward pass together with this one; None: there are none.
        draft_launches: forward passes of the draft model or speculator, which use the same
            buckets and are warmed up together with these.
    """

    def __init__(
        self,
        config: VllmConfig,
        bridge: HabanaBridge,
        model: LaunchModel,
        inputs: HPUInputBuilder,
        batch: InputBatch,
        parts: RowParts,
        *,
        has_decodes: bool = True,
        whole_prompts: bool = False,
        single_tokens: bool = False,
        mover: BlockMover | None = None,
        items: ItemSlotSizes | None = None,
        state_mover: StateMover | None = None,
    ) -> None:
        self.stage = model.model.stage
        self.block_size = config.cache.block_size
        self.may_compile = False
        self.warmed = ExitStack()
        self.draft_launches: list[PaddedLaunches] = []
        self.peers: TPGroupStatus | None = None
        self._single_tokens = single_tokens
        self._config = config
        self._bridge = bridge
        self._dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        self.inputs = inputs
        self.to_device = HostBuffers(bridge).to_device
        self.execution = make_execution(bridge, model, config)
        hpu = config.hpu
        self.report = StepReport(
            bridge, hpu.log_compilations, hpu.log_cpu_fallbacks, log_recipes=hpu.log_recipes
        )
        self.phases = tuple(Phase) if has_decodes else (Phase.PREFILL,)
        self._batch = batch
        self._parts, self._items = parts, items
        self.mover, self.state_mover = mover, state_mover
        self._whole_prompts = whole_prompts
        self._merged_prompts = 0
        if config.hpu.merged_prefill and not whole_prompts:
            self._merged_prompts = min(config.scheduler.max_num_seqs, _MAX_MERGED_PROMPTS)
        self.is_warm = False
        self._is_draft = False
        self._late = LateShapes[PaddedShape]()
        self._num_run_tokens = 0
        # Only a model without pipeline stages is timed: a stage waits for other stages, and the
        # first stage does not wait for its device.
        clock = bridge.now_s if self.stage.count == 1 else None
        self._recent = RecentLaunches(clock, self.block_size)
        self.traffic: TrafficTable | None = None

    def use_catalog(self, catalog: Catalog, limits: StepLimits) -> None:
        """Use the buckets of this catalog from now on.

        Raises:
            ConfigError: prompts must not be split, and a prompt of max_model_len tokens has no
                bucket.
        """
        longest = max((bucket.query_len for bucket in catalog.prefill), default=0)
        max_model_len = self._config.scheduler.max_model_len
        if self._whole_prompts and longest < max_model_len:
            raise ConfigError(
                f"the longest prompt bucket has {longest} tokens, max_model_len is "
                f"{max_model_len}, and this model cannot run a prompt in parts: set "
                f"VLLM_PROMPT_SEQ_BUCKET_MAX={max_model_len}, or lower --max-model-len"
            )
        self._limits = limits
        image_attention = self._parts.find(ImageAttention)
        self.planner = HPULaunchPlanner(
            catalog,
            limits,
            self._batch,
            self._merged_prompts,
            self._parts.needs_prefill if Phase.DECODE in self.phases else _need_prefill,
            has_states=self._config.model.resolved_arch.has_states,
            piece_end=None if image_attention is None else image_attention.piece_end,
            late=self._late,
            item_slots=self._items,
        )
        for launches in self.draft_launches:
            launches.use_catalog(catalog, limits)

    def add_draft_launches(self, launches: "PaddedLaunches") -> None:
        """Let the forward passes of a draft model use the same buckets; both share one report."""
        self.draft_launches.append(launches)
        launches._is_draft = True
        launches.report = self.report

    def runs(self, shape: PaddedShape) -> bool:
        """Return whether forward passes of this shape can occur."""
        bucket = shape.bucket
        if shape.item_slots and self._items is None:
            return False
        return not self._single_tokens or (bucket.phase is Phase.DECODE and bucket.query_len == 1)

    def launch_shapes(self, bucket: Bucket) -> list[PaddedShape]:
        """Return all padded shapes in which batches of a bucket can run."""
        sizes = (0,) if self._items is None else self._items.sizes
        return launch_shapes(bucket, self._limits, self._merged_prompts, sizes)

    def plan(self, step: SchedulerOutput) -> list[Launch]:
        """Split a step into forward passes."""
        if self._whole_prompts:
            return self.planner.plan_prompts(step)
        return self.planner.plan(step)

    def recorded(self, start: Callable[[], Finish]) -> Finish:
        """Start a step, and record its forward passes once its result is available.

        Args:
            start: starts the step, and returns a function that waits for its result.
        """
        self._recent.begin_step()
        finish = start()

        def finish_and_record() -> ModelRunnerOutput:
            output = finish()
            self._recent.end_step()
            return output

        return finish_and_record

    @contextmanager
    def running(self, launch: Launch) -> Iterator[None]:
        """Count and trace everything that a forward pass does, while the context is open.

        After the warm-up, nothing may compile or wait until `warmed` is closed; after a full
        warm-up this includes unexpected shapes.
        """
        assert isinstance(launch, PaddedLaunch)
        bucket, trace = launch.bucket, get_trace()
        is_known = self.report.check_warmed(
            bucket.phase, bucket.batch, bucket.query_len, bucket.blocks
        )
        is_compiled = self.planner.is_compiled(launch.shape)
        is_warmed = is_known and self.planner.catalog.is_warmed(bucket)
        is_promised = self.is_warm and (is_warmed or self._config.hpu.full_warmup)
        self._num_run_tokens += bucket.num_tokens
        if launch.needed is not None and not self._is_draft:
            self._recent.add(launch.needed, bucket, is_compiled=is_compiled)
            if self.traffic is not None:
                self.traffic.add(bucket.phase, *launch.needed)
        span = trace.span(
            str(bucket.phase),
            how=self.execution.how(launch.shape),
            batch=bucket.batch,
            query_len=bucket.query_len,
            blocks=bucket.blocks,
        )
        is_promised = is_promised and not self.may_compile
        with self.warmed_section(is_promised=is_promised) as self.warmed, span:
            yield
            if self.mover is not None and not is_compiled and bucket.phase is Phase.DECODE:
                self.mover.warm_up()  # a decode of the warm-up also copies blocks
            if self.state_mover is not None and not is_compiled:
                self.state_mover.warm_up()
        if not is_compiled:
            self._note_compiled(launch)
        if trace.is_on:
            _trace_launch(trace, launch, self.block_size)

    def build(self, launch: Launch) -> PaddedInput:
        """Pack the inputs of a forward pass, and send other inputs of a prefill to the card."""
        assert isinstance(launch, PaddedLaunch)
        if launch.bucket.phase is Phase.PREFILL:
            self._parts.send(launch)
        packed, sampled = self.inputs.pack(launch)
        return PaddedInput(launch, sampled, packed)

    def run(self, given: PaddedInput) -> PaddedOutput:
        """Copy inputs to the card, run the forward pass, and save recurrent states of its
        requests.
        """
        shape, kept = given.launch.shape, given.launch.kept_states
        packed = self.to_device(given.packed)
        outputs = self.execution.run(packed, shape, *self.received(shape))
        if kept is not None and self.state_mover is not None:
            self.state_mover.copy(kept[:, ::2])
        return PaddedOutput(packed, *outputs)

    def send(self, output: PaddedOutput) -> None:
        """Send hidden states to the next pipeline stage."""
        self.stage.connected.send(self.kept(output.hidden_states))

    def kept(self, output: Tensor) -> Tensor:
        """Return a copy of a graph's output, which the next forward pass of this shape
        overwrites.
        """
        kept = output.clone()
        self._bridge.mark_step()
        return kept

    def _note_compiled(self, launch: PaddedLaunch) -> None:
        """Note that a forward pass has compiled its shape.

        A bucket is warmed up once all of its shapes are compiled, including the shapes of draft
        models. (After a part of a prompt, which samples nothing, the small recipe that stores its
        tokens is not compiled yet.)
        """
        self._late.add(launch.shape)
        ends = launch.num_computed_tokens + launch.num_scheduled_tokens
        samples = bool((ends >= self._batch.num_tokens[launch.rows]).any())
        catalog, bucket = self.planner.catalog, launch.bucket
        if self._is_draft or not samples or bucket not in catalog:
            return
        shapes = self.launch_shapes(bucket)
        if all(
            s in each._late for each in (self, *self.draft_launches) for s in shapes if each.runs(s)
        ):
            catalog.mark_warmed([bucket])

    @contextmanager
    def warmed_section(self, *, is_promised: bool) -> Iterator[ExitStack]:
        """Forbid compiling and waiting until the returned stack is closed, if `is_promised`."""
        with ExitStack() as warmed:
            if is_promised:
                warmed.enter_context(self._bridge.warmed_section())
            yield warmed

    def stats(self, num_steps: int, num_useful_tokens: int) -> RunnerStats:
        """Return the counters of a runner.

        Padding is counted as the model computes it: batch size times length of the bucket, minus
        the tokens of requests.
        """
        report = self.report
        return RunnerStats(
            num_steps=num_steps,
            num_useful_tokens=num_useful_tokens,
            num_padded_tokens=self._num_run_tokens - num_useful_tokens,
            num_bucket_hits=report.num_hits,
            num_bucket_misses=report.num_misses,
            num_late_compilations=report.recent_compilations(),
            num_decode_blocks=self._recent.num_decode_blocks,
            num_padded_blocks=self._recent.num_padded_blocks,
            recent_launches=self._recent.record,
        )

    def size_before(self, shape: PaddedShape) -> tuple[int, int] | None:
        """Return the size of the hidden states from the previous pipeline stage; None on the first
        stage.

        It is [B * Q, hidden], or larger if inputs of inner layers are appended.
        """
        if self.stage.is_first:
            return None
        return shape.bucket.num_tokens, self.execution.model.size_before

    def received(self, shape: PaddedShape) -> list[Tensor]:
        """Receive the data of the previous pipeline stage; an empty list on the first stage."""
        size = self.size_before(shape)
        if size is None:
            return []
        return [self.stage.receive(*size, self._dtype, self._bridge.device)]

    def run_padding(self, shape: PaddedShape) -> PaddedOutput:
        """Run a forward pass without requests."""
        packed, *before = self.padding_inputs(shape)
        return PaddedOutput(packed, *self.execution.run(packed, shape, *before))

    def padding_inputs(self, shape: PaddedShape) -> list[Tensor]:
        """Make the inputs of a forward pass without requests, on the device.

        These are the packed input, which writes only to the null block, and the hidden states of
        the previous stage, if there is one.
        """
        none = np.empty(0, np.int32)
        launch = PaddedLaunch(
            none,
            none,
            none,
            shape.bucket,
            shape.is_contiguous,
            shape.merged_prompts,
            shape.num_shared,
            shape.item_slots,
        )
        packed, _ = self.inputs.pack(launch)
        size = self.size_before(shape)
        states = [] if size is None else [self._bridge.zeros(size, self._dtype)]
        return [self.to_device(packed), *states]

    def allow_buckets(self, num_buckets: int) -> None:
        """Prepare for forward passes of `num_buckets` buckets; see `Execution.allow_shapes`."""
        num_shapes = num_buckets * _SHAPES_OF_BUCKET
        if self._items is not None:
            num_shapes *= len(self._items.sizes)
        # torch's limits count the compiled variants of a function, and all models share functions.
        num_models = 1 + len(self.draft_launches)
        for launches in (self, *self.draft_launches):
            launches.execution.allow_shapes(num_models * num_shapes)

    def capture(self, shape: PaddedShape) -> None:
        """Capture the graph of a shape, if forward passes of it can occur."""
        assert isinstance(self.execution, GraphExecution)
        if not self.runs(shape):
            return
        packed, *before = self.padding_inputs(shape)
        self.execution.capture(packed, shape, *before)
        for launches in self.draft_launches:
            launches.capture(shape)

    def release(self, shape: PaddedShape) -> None:
        """Discard the graph of a shape, if it has one."""
        assert isinstance(self.execution, GraphExecution)
        self.execution.release(shape)
        for launches in self.draft_launches:
            launches.release(shape)

    def finish_warmup(self) -> None:
        """Note that the warm-up has ended, and nothing new should compile from now on."""
        for launches in (self, *self.draft_launches):
            launches.is_warm = True
        self.report.finish_warmup()


class PaddedRunner(Protocol):
    """The methods of a runner that profiling, warm-up and sleep mode use."""

    launches: PaddedLaunches

    def warm_up(self, shape: PaddedShape, *, sampling: Sampling = "none") -> None:
        """Run a forward pass of this shape that has only padding.

        Args:
            shape: the padded shape.
            sampling: which sampling follows it.
        """
        ...


def _trace_launch(trace: Trace, launch: PaddedLaunch, block_size: int) -> None:
    """Write the counters of a forward pass to a trace: requested sizes, and the bucket used."""
    bucket = launch.bucket
    is_prompt = bucket.phase is Phase.PREFILL
    seq_lens = launch.num_computed_tokens + launch.num_scheduled_tokens
    held = launch.num_computed_tokens if is_prompt else seq_lens
    blocks = -(-held // block_size)
    size = PaddingCounts(
        phase="prompt" if is_prompt else "decode",
        rows=len(launch.rows),
        padded_rows=bucket.batch,
        query_len=int(launch.num_scheduled_tokens.max(initial=1)),
        tokens=int(launch.num_scheduled_tokens.sum()),
        padded_tokens=bucket.num_tokens,
        block_refs=int(blocks.max(initial=0) if is_prompt else blocks.sum()),
        padded_blocks=bucket.blocks,
    )
    trace.counter(LAUNCH_COUNTERS, **launch_counters(size))
