"""Log lines that users of the Gaudi stack grep for: buckets, memory, warm-up, graph capture.

Only texts; the runner decides when they are logged.
"""

from collections.abc import Sequence

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.ledger import MemorySplit, format_bytes
from vllm.logger import cut_list

_PHASE_NAMES = {Phase.PREFILL: "prompt", Phase.DECODE: "decode"}


def bucket_config_line(
    phase: Phase,
    batch: object,
    size: object,
    *,
    size_label: str = "seq",
    context: object = None,
    parts: Sequence[str] = ("min", "step", "max_warmup"),
) -> str:
    """Return `Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]`.

    Args:
        phase: whose ranges they are.
        batch: the range of batch sizes; `str()` gives it in brackets.
        size: the range of lengths, or of blocks.
        size_label: name of the second range.
        context: the range of blocks of context; None: the strategy has none.
        parts: names of the values of a range.
    """
    name = _PHASE_NAMES[phase].capitalize()
    blocks = "" if context is None else f", blocks:{context}"
    return f"{name} bucket config ({', '.join(parts)}) bs:{batch}, {size_label}:{size}{blocks}"


def generated_line(phase: Phase, buckets: Sequence[Bucket]) -> str:
    """Return `Generated 24 prompt buckets: [(1, 128), ...]`, in ascending order.

    Pairs are (batch, length) and (batch, total blocks). If a prompt has context, or a decode has
    drafts, buckets are triples, and the line names their values.
    """
    name = _PHASE_NAMES[phase]
    legend = " [bs, query, num_blocks]" if _needs_triples(phase, buckets) else ""
    return f"Generated {len(buckets)} {name} buckets{legend}: {_listed(phase, buckets)}"


def omitted_line(buckets: Sequence[Bucket], max_num_batched_tokens: int) -> str:
    """Return `Omitted 7 prompt buckets due to exceeded token budget
    (max_num_batched_tokens=2048)`."""
    return (
        f"Omitted {len(buckets)} prompt buckets due to exceeded token budget "
        f"(max_num_batched_tokens={max_num_batched_tokens})"
    )


def warmup_line(
    phase: Phase, index: int, total: int, bucket: Bucket, free_bytes: int, *, graph: bool = False
) -> str:
    """Return `[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:79.16 GiB`.

    `index` counts from 1. The size of a decode is its number of blocks.
    """
    stage = ("Graph/" if graph else "") + _PHASE_NAMES[phase].capitalize()
    shape = f"batch_size:{bucket.batch} seq_len:{_size(bucket)}"
    if phase is Phase.PREFILL and bucket.blocks:
        shape += f" num_blocks:{bucket.blocks}"
    return f"[Warmup][{stage}][{index}/{total}] {shape} free_mem:{format_bytes(free_bytes)}"


def encoder_line(index: int, total: int, name: str, free_bytes: int) -> str:
    """Return `[Warmup][Encoder][1/8] 4096 patches free_mem:79.16 GiB`."""
    return f"[Warmup][Encoder][{index}/{total}] {name} free_mem:{format_bytes(free_bytes)}"


def encoder_graphs_line(captured: Sequence[int], total: int, unit: str, used_bytes: int) -> str:
    """Return `Graph/Encoder captured:2 (50.0%) used_mem:64 KiB patches:[64, 80]`."""
    percent = 100 * len(captured) / total if total else 100.0
    return (
        f"Graph/Encoder captured:{len(captured)} ({percent:.1f}%) "
        f"used_mem:{format_bytes(used_bytes)} {unit}:{list(captured)}"
    )


def captured_line(phase: Phase, captured: Sequence[Bucket], total: int, used_bytes: int) -> str:
    """Return `Graph/Decode captured:1 (100.0%) used_mem:64 KiB buckets:[(4, 128)]`."""
    percent = 100 * len(captured) / total if total else 100.0
    return (
        f"Graph/{_PHASE_NAMES[phase].capitalize()} captured:{len(captured)} ({percent:.1f}%) "
        f"used_mem:{format_bytes(used_bytes)} buckets:{_listed(phase, captured)}"
    )


def graph_memory_line(
    graph_bytes: int, free_bytes: int, prompt_bytes: int, decode_bytes: int, prompt_ratio: float
) -> str:
    """Return the line about the memory of graphs, logged before they are captured."""
    return (
        f"Using {format_bytes(graph_bytes)}/{format_bytes(free_bytes)} of free device memory for "
        f"HPUGraphs, {format_bytes(prompt_bytes)} for prompt and {format_bytes(decode_bytes)} for "
        f"decode (VLLM_GRAPH_PROMPT_RATIO={prompt_ratio})"
    )


def memory_split_line(split: MemorySplit, utilization: float, graph_reserved: float) -> str:
    """Return the line about the division of the memory that is free after the profiling run."""
    return (
        f"Free device memory: {format_bytes(split.free_bytes)}, "
        f"{format_bytes(split.usable_bytes)} usable (gpu_memory_utilization={utilization}), "
        f"{format_bytes(split.graph_bytes)} reserved for HPUGraphs "
        f"(VLLM_GRAPH_RESERVED_MEM={graph_reserved}), "
        f"{format_bytes(split.kv_bytes)} reserved for KV cache"
    )


def num_blocks_line(num_blocks: int) -> str:
    """Return `# HPU blocks: 4107, # CPU blocks: 0`: blocks are not moved to the host."""
    return f"# HPU blocks: {num_blocks}, # CPU blocks: 0"


def warmup_finished_line(seconds: float, allocated_bytes: int) -> str:
    """Return `Warmup finished in 32 secs, allocated 92.77 MiB of device memory`."""
    return (
        f"Warmup finished in {seconds:.0f} secs, "
        f"allocated {format_bytes(allocated_bytes)} of device memory"
    )


def listed(buckets: Sequence[Bucket]) -> str:
    """Format buckets as [(batch, query_len, blocks), ...]; a long list is cut in the middle."""
    return cut_list([(b.batch, b.query_len, b.blocks) for b in buckets])


def _listed(phase: Phase, buckets: Sequence[Bucket]) -> str:
    if _needs_triples(phase, buckets):
        return listed(sorted(buckets))
    return cut_list([(b.batch, _size(b)) for b in sorted(buckets)])


def _needs_triples(phase: Phase, buckets: Sequence[Bucket]) -> bool:
    """Return whether the log must show three sizes of each bucket, since two do not identify it."""
    if phase is Phase.DECODE:
        return any(bucket.query_len > 1 for bucket in buckets)
    return any(bucket.blocks for bucket in buckets)


def _size(bucket: Bucket) -> int:
    return bucket.blocks if bucket.phase is Phase.DECODE else bucket.query_len
