"""Checks of one decoder layer of a model over a large KV cache, against the same layer on the host.

The weights are random, so no checkpoint is read. The program is the one that the engine launches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm.assets import BUNDLED_MODEL
from vllm.attention import CachedLayer
from vllm.attention.backends.hpu_metadata import build_decode_metadata, build_prefill_metadata
from vllm.attention.backends.sdpa import bridge_sdpa
from vllm.bucketing.bucket import decode, prefill
from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelArch,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.hpu_check.check import Comparison, Outcome
from vllm.hpu_check.stopwatch import shortest_s
from vllm.messages import IntArray
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM
from vllm.ops import Ops, get_ops, set_ops
from vllm.ops.hpu import HPUOps
from vllm.ops.native import NativeOps
from vllm.platforms.habana.bridge import DeviceCounters, HabanaBridge
from vllm.platforms.hpu import HPUPlatform
from vllm.transformers_utils.hf_config import complete_hf_config, read_hf_config
from vllm.transformers_utils.hub import resolve_model_folder
from vllm.worker.hpu.execution import CompiledExecution, Execution, GraphExecution
from vllm.worker.hpu.input import DecodeInput, PrefillInput, fields_of, padded_sizes
from vllm.worker.hpu.model import HPUModel
from vllm.worker.hpu.planner import PaddedShape
from vllm.worker.kv_cache import bind_kv_caches, cache_dtype, cache_layout, layers_with_cache

CACHE_SHARE = 0.1
"""Of the free memory: the larger of the two KV caches, which is several GiB on a card."""
_SMALLER = 8
"""The larger cache has so many times the blocks of the smaller one."""
MAX_TIME_RATIO = 1.5
"""Of a decode over the larger cache to one over the smaller. A step that touched the whole cache
would take up to eight times as long."""
_BLOCK_SIZE = 128
_SEQ_LENS = (6, 130, 300)
"""Tokens of each request, the decoded one included."""
_CONTEXT_LENS = (2, 127, 128)
"""Of them, those of the first prefill; a second one has these as context."""
_PADDED_BATCH, _PADDED_QUERY, _PADDED_BLOCKS, _PADDED_CONTEXT = 4, 384, 8, 2


@dataclass(frozen=True)
class _Launched:
    """What a decode over a cache of one size took."""

    cache_bytes: int
    seconds: float
    launch_bytes: int
    """Memory while it ran, besides what was in use before."""
    trouble: tuple[str, ...]
    """Host fallbacks and copies of tensors, in words."""


Prepare = Callable[[HabanaBridge, HPUModel, VllmConfig, Tensor, PaddedShape], Execution]
"""Gives what runs the packed decode of this shape."""


def check_eager(bridge: HabanaBridge, model: str) -> Outcome:
    """Operator by operator; in lazy mode, recorded up to a mark."""
    return _check_decode(bridge, model, lambda bridge, model, *_: Execution(bridge, model))


def check_compiled(bridge: HabanaBridge, model: str) -> Outcome:
    """By `torch.compile`."""
    if bridge.is_lazy:
        return Outcome("skip", "torch.compile needs eager mode (PT_HPU_LAZY_MODE=0)")

    def prepare(
        bridge: HabanaBridge, model: HPUModel, config: VllmConfig, *_: object
    ) -> CompiledExecution:
        execution = CompiledExecution(bridge, model, config)
        execution.allow_shapes(4)
        return execution

    return _check_decode(bridge, model, prepare)


def check_graph(bridge: HabanaBridge, model: str) -> Outcome:
    """As an HPU graph that is replayed."""
    if not bridge.is_lazy:
        return Outcome("skip", "HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1)")

    def prepare(
        bridge: HabanaBridge,
        model: HPUModel,
        config: VllmConfig,
        packed: Tensor,
        shape: PaddedShape,
    ) -> GraphExecution:
        execution = GraphExecution(bridge, model, config.hpu.hidden_layers_per_graph)
        execution.capture(packed, shape)
        return execution

    return _check_decode(bridge, model, prepare)


def check_context(bridge: HabanaBridge, model: str) -> Outcome:
    """A prefill of tokens whose requests have others in the cache already."""
    config = _config_of(model)
    comparison = Comparison()
    with _unsupported_is_skipped() as skipped:
        rig = _Rig(bridge, config, _num_blocks(bridge, config, CACHE_SHARE / _SMALLER))
        want = rig.reference()
        rig.prefill(np.zeros(len(_SEQ_LENS), np.int32), np.array(_CONTEXT_LENS, np.int32))
        starts, ends = np.array(_CONTEXT_LENS, np.int32), np.array(_SEQ_LENS, np.int32) - 1
        got = rig.prefill(starts, ends).cpu()
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            case = f"{end - start} tokens after {start}"
            comparison.add(case, got[row, : end - start], want[row][start:end])
    return skipped[0] if skipped else comparison.outcome(config.model.dtype_name)


def _check_decode(bridge: HabanaBridge, name: str, prepare: Prepare) -> Outcome:
    config = _config_of(name)
    comparison = Comparison()
    with _unsupported_is_skipped() as skipped:
        smaller = _launch(bridge, config, CACHE_SHARE / _SMALLER, prepare, comparison)
        larger = _launch(bridge, config, CACHE_SHARE, prepare, comparison)
    if skipped:
        return skipped[0]
    return _judge(comparison, smaller, larger, config.model.dtype_name)


def _judge(
    comparison: Comparison, smaller: _Launched, larger: _Launched, dtype_name: str
) -> Outcome:
    """Values first: a wrong layer may be fast."""
    gib, mib = larger.cache_bytes / 2**30, larger.launch_bytes / 2**20
    values = comparison.outcome(dtype_name)
    if values.status == "fail":
        return values
    if larger.trouble:
        return Outcome("fail", "; ".join(larger.trouble))
    ratio = larger.seconds / smaller.seconds
    times = (
        f"{larger.seconds * 1e3:.2f} ms with a cache of {gib:.2f} GiB, "
        f"{smaller.seconds * 1e3:.2f} ms with 1/{_SMALLER} of it (ratio {ratio:.2f})"
    )
    if ratio > MAX_TIME_RATIO:
        return Outcome("fail", f"{times}, limit {MAX_TIME_RATIO}: the time depends on the cache")
    grown = larger.launch_bytes - smaller.launch_bytes
    if grown > larger.cache_bytes / 4:  # a copy of the keys, or of the values, is half of it
        return Outcome(
            "fail", f"a launch took {mib:.1f} MiB besides the cache of {gib:.2f} GiB: it is copied"
        )
    return Outcome("pass", f"{values.detail}; {times}; {mib:.1f} MiB while it ran")


def _launch(
    bridge: HabanaBridge,
    config: VllmConfig,
    share: float,
    prepare: Prepare,
    comparison: Comparison,
) -> _Launched:
    rig = _Rig(bridge, config, _num_blocks(bridge, config, share))
    starts, ends = np.zeros(len(_SEQ_LENS), np.int32), np.array(_SEQ_LENS, np.int32)
    rig.prefill(starts, ends - 1)
    packed, shape = rig.pack_decode()
    before, used = bridge.counters(), _used_bytes(bridge)
    bridge.reset_peak()
    with rig.operators():
        run = partial(prepare(bridge, rig.model, config, packed, shape).run, packed, shape)
        hidden_states = run()[1].cpu()
        seconds = shortest_s(bridge, run)
    for row, want in enumerate(rig.reference()):
        case = f"row {row}, {_SEQ_LENS[row]} tokens, cache of {rig.num_blocks} blocks"
        comparison.add(case, hidden_states[row], want[-1])
    launch_bytes = bridge.peak_bytes() - used
    trouble = tuple(_trouble(before, bridge.counters()))
    return _Launched(rig.cache_bytes, seconds, launch_bytes, trouble)


def _trouble(before: DeviceCounters, after: DeviceCounters) -> Iterator[str]:
    new = {
        name: count - before.cpu_fallbacks.get(name, 0)
        for name, count in after.cpu_fallbacks.items()
    }
    if listed := ", ".join(f"{name} ({count})" for name, count in sorted(new.items()) if count):
        yield f"ran on the host: {listed}"
    copies = (after.cache_copies or 0) - (before.cache_copies or 0)
    if copies:
        mib = ((after.copied_bytes or 0) - (before.copied_bytes or 0)) / 2**20
        yield f"{copies} copies of a whole cache tensor, {mib:.1f} MiB"


def _used_bytes(bridge: HabanaBridge) -> int:
    memory = bridge.memory_info()
    return memory.total_bytes - memory.free_bytes


class _Rig:
    """A model of one layer on the card and on the host, and requests of random tokens."""

    def __init__(self, bridge: HabanaBridge, config: VllmConfig, num_blocks: int) -> None:
        self._bridge = bridge
        self.num_blocks = num_blocks
        loaded = load_model(config, TPGroup(), torch.device("cpu"))
        assert isinstance(loaded, CausalLM)
        self._host = loaded
        on_card = load_model(config, TPGroup(), bridge.device)
        assert isinstance(on_card, CausalLM)
        layers = layers_with_cache(on_card)
        if not layers:
            raise ConfigError("the layers of this model have no KV cache")
        self.cache_bytes = _bind(bridge, config, layers, num_blocks)
        self.model = HPUModel(on_card, _BLOCK_SIZE, bridge_sdpa(bridge.kernels))
        limit = config.model.resolved_arch.vocab_size
        self._tokens = [np.random.default_rng(n).integers(0, limit, n) for n in _SEQ_LENS]
        # The last block too: it is the one that a wrong address calculation misses.
        used = -(-np.array(_SEQ_LENS) // _BLOCK_SIZE)
        self._tables = np.zeros((len(_SEQ_LENS), used.max()), np.int32)
        ids = iter([num_blocks - 1, *range(1, num_blocks - 1)])
        for row, count in enumerate(used):
            self._tables[row, :count] = [next(ids) for _ in range(count)]

    @contextmanager
    def operators(self, ops: Ops | None = None) -> Iterator[None]:
        """Inside, layers call these operators. None: those of the card."""
        before = get_ops()
        set_ops(ops or HPUOps(self._bridge))
        try:
            yield
        finally:
            set_ops(before)

    def reference(self) -> list[Tensor]:
        """[tokens, hidden] of each request, by the host in float32."""
        with self.operators(NativeOps()):
            model = self._host.float()
            return [
                model(torch.from_numpy(tokens), torch.arange(len(tokens)))
                for tokens in self._tokens
            ]

    def prefill(self, starts: IntArray, ends: IntArray) -> Tensor:
        """[B, Q, hidden] of these tokens of each request, operator by operator."""
        blocks = _PADDED_CONTEXT if starts.any() else 0
        shape = PaddedShape(prefill(_PADDED_BATCH, _PADDED_QUERY, blocks))
        token_ids = np.zeros((_PADDED_BATCH, _PADDED_QUERY), np.int32)
        positions = np.zeros_like(token_ids)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            token_ids[row, : end - start] = self._tokens[row][start:end]
            positions[row, : end - start] = np.arange(start, end)
        metadata = build_prefill_metadata(
            self._tables,
            starts,
            ends - starts,
            _PADDED_BATCH,
            _PADDED_QUERY,
            blocks,
            _BLOCK_SIZE,
        )
        unused = np.zeros(_PADDED_BATCH, np.int32)
        given = PrefillInput(token_ids.ravel(), positions.ravel(), unused, metadata, unused)
        packed = self._to_card(fields_of(shape).pack(given, padded_sizes(shape)))
        with self.operators():
            hidden_states = Execution(self._bridge, self.model).run(packed, shape)[1]
        return hidden_states.unflatten(0, (_PADDED_BATCH, _PADDED_QUERY))

    def pack_decode(self) -> tuple[Tensor, PaddedShape]:
        """The last token of each request."""
        shape = PaddedShape(decode(_PADDED_BATCH, _PADDED_BLOCKS))
        seq_lens = np.array(_SEQ_LENS, np.int32)
        metadata = build_decode_metadata(
            self._tables, seq_lens, _PADDED_BATCH, _PADDED_BLOCKS, _BLOCK_SIZE
        )
        token_ids, positions = np.zeros((2, _PADDED_BATCH), np.int32)
        token_ids[: len(seq_lens)] = [tokens[-1] for tokens in self._tokens]
        positions[: len(seq_lens)] = seq_lens - 1
        unused = np.zeros(_PADDED_BATCH, np.int32)
        given = DecodeInput(token_ids, unused, positions, metadata, unused)
        return self._to_card(fields_of(shape).pack(given, padded_sizes(shape))), shape

    def _to_card(self, packed: IntArray) -> Tensor:
        return torch.from_numpy(packed).to(self._bridge.device)


def _bind(
    bridge: HabanaBridge, config: VllmConfig, layers: list[CachedLayer], num_blocks: int
) -> int:
    """Give the layers caches of zeros; returns the bytes of all."""
    dtype = cache_dtype(config)
    layout = cache_layout(config, layers, dtype, keeps_all=True)
    bind_kv_caches(layers, HPUPlatform(lambda: bridge), num_blocks, layout, dtype)
    return num_blocks * layout.block_bytes


def _num_blocks(bridge: HabanaBridge, config: VllmConfig, share: float) -> int:
    """Of a cache of one layer in this share of the free memory."""
    arch = config.model.resolved_arch
    slot_bytes = 2 * arch.num_kv_heads * arch.head_size * cache_dtype(config).itemsize
    return max(16, int(bridge.memory_info().free_bytes * share) // (_BLOCK_SIZE * slot_bytes))


def _config_of(name: str) -> VllmConfig:
    """Of an engine for a model of one layer.

    Args:
        name: folder or Hugging Face name; empty: the bundled model.
    """
    folder = Path(BUNDLED_MODEL) if not name else resolve_model_folder(name, load_format="dummy")
    raw = read_hf_config(folder, {"num_hidden_layers": 1})
    arch = ModelArch.from_hf(complete_hf_config(raw, folder, trust_remote_code=False))
    return VllmConfig(
        model=ModelConfig(model=name, path=str(folder), arch=arch, dtype="bfloat16"),
        cache=CacheConfig(block_size=_BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_model_len=512, max_num_seqs=_PADDED_BATCH, max_num_batched_tokens=1024
        ),
        load=LoadConfig(load_format="dummy", use_tqdm_on_load=False),
    )


@contextmanager
def _unsupported_is_skipped() -> Iterator[list[Outcome]]:
    """What a model has and launches of a card do not is no fault of the card."""
    skipped: list[Outcome] = []
    try:
        yield skipped
    except ConfigError as error:
        skipped.append(Outcome("skip", str(error).splitlines()[0]))
