"""Formats the tables of `vllm plan`, with one function for each section."""

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from vllm.bucketing import format_bytes
from vllm.planning.engine_plan import StageRoom
from vllm.planning.plan import MemorySection, Plan
from vllm.planning.start import PhaseStart, StartPlan
from vllm.planning.throughput.prediction import Prediction
from vllm.planning.throughput.table import as_lines

_WIDTH = 100
_BAR_WIDTH = 40
_MAX_OF_NAME = 40


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield a plan as lines of text."""
    name = plan.model.rstrip("/").rpartition("/")[2][-_MAX_OF_NAME:]
    yield f"{name}, {plan.about}"
    if plan.mode:
        yield plan.mode
    if plan.text_only:
        yield plan.text_only
    if plan.measured:
        yield plan.measured
    yield ""
    yield from memory_lines(plan.memory, "the machine" if plan.device == "cpu" else "each card")
    if plan.reserved:
        yield plan.reserved
    if plan.stages:
        yield ""
        yield from stage_lines(plan.stages)
    if plan.start is not None:
        yield ""
        yield from start_lines(plan.start)
        if plan.completed:
            yield plan.completed
    if plan.throughput:
        yield ""
        yield from throughput_lines(plan.throughput)
        if plan.not_in_speed:
            yield f"  {plan.not_in_speed}"


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of at most 100 columns: longer ones are continued, with more indentation.

    A word, such as a path, is never divided.
    """
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        yield from (
            wrap(
                line,
                _WIDTH,
                subsequent_indent=f"{indent}  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            if len(line) > _WIDTH
            else [line]
        )


def memory_lines(memory: MemorySection, owner: str) -> Iterator[str]:
    """Yield the section about the memory of a card, or of a machine, as lines of text."""
    yield f"{f'Memory of {owner}':<34}  {format_bytes(memory.total_bytes):>10}"
    for what, num_bytes in memory.uses:
        share = num_bytes / memory.total_bytes
        bar = "#" * round(share * _BAR_WIDTH)
        yield f"  {what:<32}  {format_bytes(num_bytes):>10} {share:>6.1%}  {bar}".rstrip()
    if not memory.block_bytes:
        yield "This model needs no KV cache"
        return
    yield (
        f"KV cache: {memory.num_blocks} blocks of {memory.block_size} tokens, "
        f"{format_bytes(memory.block_bytes)} each"
    )
    yield (
        f"Fits {memory.num_sequences:.1f} requests of {memory.max_model_len} tokens "
        f"(--max-model-len) at a time; the longest possible: {memory.longest_context} tokens"
    )
    if memory.num_sequences > memory.max_num_seqs:
        yield f"At most {memory.max_num_seqs} requests run at a time (--max-num-seqs)"


def stage_lines(stages: Sequence[StageRoom]) -> Iterator[str]:
    """Yield the section about pipeline stages as lines of text."""
    yield "Stages        layers     weights   workspace  room for KV blocks"
    for number, stage in enumerate(stages, start=1):
        layers = f"{stage.first_layer}-{stage.end_layer - 1}"
        yield (
            f"  stage {number:<4}  {layers:>6}  {format_bytes(stage.weight_bytes):>10}  "
            f"{format_bytes(stage.launch_bytes):>10}  {stage.num_blocks:>18}"
        )
    decides = min(range(len(stages)), key=lambda index: stages[index].num_blocks)
    yield f"The other figures are for stage {decides + 1}, which has room for the fewest blocks"


def start_lines(start: StartPlan) -> Iterator[str]:
    """Yield the section about the warm-up as lines of text."""
    phases = [("prompts", start.prefill)]
    if start.decode.num_buckets:  # models that pool prompts have no decodes
        phases.append(("decodes", start.decode))
    yield "Warm-up     buckets  shapes   compile       run  HPU graphs   capture  graph memory"
    for name, phase in phases:
        yield _phase_line(name, phase)
    yield f"  sampling                  {_seconds(start.sampling_s):>9}"
    yield (
        "Sizes of buckets    batch               tokens              KV blocks  "
        "(with the warm-up of each)"
    )
    for name, phase in phases:
        yield f"  {name:<16}  {'  '.join(_sizes(phase))}".rstrip()
    yield from start.notes
    if not start.num_first_buckets:
        yield f"Together, the times above are {_seconds(start.cold_s)}"
        return
    yield (
        f"All buckets are warm {_seconds(start.cold_s)} after the weights are read, or "
        f"{_seconds(start.cached_s)} with compiled recipes on disk"
    )
    yield (
        f"vllm serve answers after {_seconds(start.first_s)}, when {start.num_first_buckets} "
        f"buckets are warm (--ready-when first)"
    )


def throughput_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield the section about the throughput as lines of text."""
    output = predictions[0].lengths.output
    yield (
        f"Throughput by number of concurrent requests, {output} output tokens each (expected, "
        "and range)"
    )
    for line in as_lines(predictions):
        yield f"  {line}"


def _phase_line(name: str, phase: PhaseStart) -> str:
    return (
        f"  {name:<8}  {phase.num_buckets:>7}  {phase.num_shapes:>6} "
        f"{_seconds(phase.compile_s):>9} {_seconds(phase.run_s):>9}  {phase.num_graphs:>10} "
        f"{_seconds(phase.capture_s):>9}  {format_bytes(phase.graph_bytes):>12}"
    )


def _sizes(phase: PhaseStart) -> list[str]:
    """Return the number of sizes in each dimension, and the mean warm-up of one of them."""
    counts = phase.num_sizes.values()
    each = [f" ({_seconds(phase.seconds / count)} each)" if count > 1 else "" for count in counts]
    return [f"{f'{count}{text}':<18}" for count, text in zip(counts, each, strict=True)]


def _seconds(seconds: float) -> str:
    """Format a time in seconds, or in minutes from two minutes on.

    >>> [_seconds(x) for x in (0.31, 59.6, 119.0, 696.0)]
    ['0.3 s', '60 s', '119 s', '11.6 min']
    """
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
