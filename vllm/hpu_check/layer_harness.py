"""Run one decoder layer of a model on the card and on the host, with requests of random tokens.

The weights are random, so no checkpoint is read. The program is the same as in the engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.assets import BUNDLED_MODEL
from vllm.attention import CachedLayer
from vllm.attention.backends.hpu_metadata import build_decode_metadata, build_prefill_metadata
from vllm.attention.backends.sdpa import bridge_sdpa
from vllm.attention.cached_layer import layers_with_cache
from vllm.bucketing.bucket import decode, prefill
from vllm.config import CacheConfig, LoadConfig, ModelArch, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.hpu_check.check import Outcome
from vllm.messages import IntArray
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM
from vllm.ops import get_ops, set_ops
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.native.operators import NativeOps
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.hpu import HPUPlatform
from vllm.transformers_utils.hf_config import complete_hf_config, read_hf_config
from vllm.transformers_utils.hub import resolve_model_folder
from vllm.worker.hpu.launches.execution import Execution
from vllm.worker.hpu.launches.input import DecodeInput, PrefillInput, fields_of, padded_sizes
from vllm.worker.hpu.launches.model import HPUModel
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.kv_cache import bind_kv_caches, cache_dtype, cache_layout

BLOCK_SIZE = 128
SEQ_LENS = (6, 130, 300)
"""Tokens of each request, the decoded one included."""
CONTEXT_LENS = (2, 127, 128)
"""Lengths of the first prefill; a second one has these tokens as context."""
_PADDED_BATCH, _PADDED_QUERY, _PADDED_BLOCKS, _PADDED_CONTEXT = 4, 384, 8, 2


class LayerTestHarness:
    """A model of one layer on the card and on the host, with requests of random tokens."""

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
            raise ConfigError("the model has no layer with a KV cache, so no layer can be checked")
        self.cache_bytes = bind(bridge, config, layers, num_blocks)
        self.model = HPUModel(on_card, BLOCK_SIZE, bridge_sdpa(bridge.kernels))
        limit = config.model.resolved_arch.vocab_size
        self._tokens = [np.random.default_rng(n).integers(0, limit, n) for n in SEQ_LENS]
        # Use the last block too, because a wrong address calculation is most likely to miss it.
        used = -(-np.array(SEQ_LENS) // BLOCK_SIZE)
        self._tables = np.zeros((len(SEQ_LENS), used.max()), np.int32)
        ids = iter([num_blocks - 1, *range(1, num_blocks - 1)])
        for row, count in enumerate(used):
            self._tables[row, :count] = [next(ids) for _ in range(count)]
        self.num_used_blocks = int(used.sum()) + 1
        """Number of blocks of a cache that is just large enough, the null block included."""

    @contextmanager
    def operators(self, ops: NativeOps | None = None) -> Iterator[None]:
        """Use these operators in layers inside the context; None: the card's operators."""
        before = get_ops()
        set_ops(ops or HPUOps(self._bridge))
        try:
            yield
        finally:
            set_ops(before)

    def reference(self) -> list[Tensor]:
        """Compute the results [tokens, hidden] of each request on the host in float32."""
        with self.operators(NativeOps()):
            model = self._host.float()
            return [
                model(torch.from_numpy(tokens), torch.arange(len(tokens)))
                for tokens in self._tokens
            ]

    def prefill_all(self) -> None:
        """Run a prefill of all tokens except the last of each request."""
        self.prefill(np.zeros(len(SEQ_LENS), np.int32), np.array(SEQ_LENS, np.int32) - 1)

    def prefill(self, starts: IntArray, ends: IntArray) -> Tensor:
        """Run a prefill of some tokens of each request, operator by operator: [B, Q, hidden]."""
        blocks = _PADDED_CONTEXT if starts.any() else 0
        shape = PaddedShape(prefill(_PADDED_BATCH, _PADDED_QUERY, blocks))
        token_ids = np.zeros((_PADDED_BATCH, _PADDED_QUERY), np.int32)
        positions = np.zeros_like(token_ids)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            token_ids[row, : end - start] = self._tokens[row][start:end]
            positions[row, : end - start] = np.arange(start, end)
        metadata = build_prefill_metadata(
            self._tables, starts, ends - starts, _PADDED_BATCH, _PADDED_QUERY, blocks, BLOCK_SIZE
        )
        unused = np.zeros(_PADDED_BATCH, np.int32)
        given = PrefillInput(
            token_ids.ravel(), unused, positions.reshape(1, -1), unused, metadata, unused, unused
        )
        packed = self._to_card(fields_of(shape).pack(given, padded_sizes(shape)))
        with self.operators():
            hidden_states = Execution(self._bridge, self.model).run(packed, shape)[1]
        return hidden_states.unflatten(0, (_PADDED_BATCH, _PADDED_QUERY))

    def pack_decode(self) -> tuple[Tensor, PaddedShape]:
        """Pack a decode of the last token of each request, on the card."""
        packed, shape = self.host_decode()
        return self._to_card(packed), shape

    def host_decode(self, *, is_compact: bool = False) -> tuple[IntArray, PaddedShape]:
        """Pack a decode of the last token of each request, on the host.

        Args:
            is_compact: use a cache of only `num_used_blocks` blocks.
        """
        tables = self._tables
        if is_compact:
            tables = np.minimum(tables, self.num_used_blocks - 1)
        shape = PaddedShape(decode(_PADDED_BATCH, _PADDED_BLOCKS))
        seq_lens = np.array(SEQ_LENS, np.int32)
        metadata = build_decode_metadata(
            tables, seq_lens, _PADDED_BATCH, _PADDED_BLOCKS, BLOCK_SIZE
        )
        token_ids, indices = np.zeros((2, _PADDED_BATCH), np.int32)
        token_ids[: len(seq_lens)] = [tokens[-1] for tokens in self._tokens]
        indices[: len(seq_lens)] = seq_lens - 1
        unused, none = np.zeros(_PADDED_BATCH, np.int32), np.empty((3, 0), np.int32)
        given = DecodeInput(token_ids, unused, indices, unused, metadata, none, unused, unused)
        return fields_of(shape).pack(given, padded_sizes(shape)), shape

    def _to_card(self, packed: IntArray) -> Tensor:
        return torch.from_numpy(packed).to(self._bridge.device)


def bind(bridge: Any, config: VllmConfig, layers: list[CachedLayer], num_blocks: int) -> int:
    """Bind zeroed caches to the layers, allocated by `bridge.zeros`, and return their total
    bytes.
    """
    dtype = cache_dtype(config)
    layout = cache_layout(config, layers, dtype, keeps_all=True)
    bind_kv_caches(layers, HPUPlatform(lambda: bridge), num_blocks, layout, dtype)
    return num_blocks * layout.block_bytes


def num_blocks_of(bridge: HabanaBridge, config: VllmConfig, share: float) -> int:
    """Return the number of blocks of a one-layer cache that fit into this fraction of the free
    memory.
    """
    arch = config.model.resolved_arch
    slot_bytes = 2 * arch.num_kv_heads * arch.head_size * cache_dtype(config).itemsize
    return max(16, int(bridge.memory_info().free_bytes * share) // (BLOCK_SIZE * slot_bytes))


def config_of(name: str) -> VllmConfig:
    """Return the config of an engine for a model of one layer.

    Args:
        name: folder or Hugging Face name; empty: the bundled model.
    """
    folder = Path(BUNDLED_MODEL) if not name else resolve_model_folder(name, load_format="dummy")
    raw = read_hf_config(folder, {"num_hidden_layers": 1})
    arch = ModelArch.from_hf(complete_hf_config(raw, folder, trust_remote_code=False))
    return VllmConfig(
        model=ModelConfig(model=name, path=str(folder), arch=arch, dtype="bfloat16"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_model_len=512, max_num_seqs=_PADDED_BATCH, max_num_batched_tokens=1024
        ),
        load=LoadConfig(load_format="dummy", use_tqdm_on_load=False),
    )


@contextmanager
def unsupported_is_skipped() -> Iterator[list[Outcome]]:
    """Convert errors about model features that a card does not support to skipped checks, because
    the card is not wrong.
    """
    skipped: list[Outcome] = []
    try:
        yield skipped
    except ConfigError as error:
        skipped.append(Outcome("skip", str(error).splitlines()[0]))
