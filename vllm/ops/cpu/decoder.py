"""A whole decoder on the C++ kernels: embedding, layers and final norm in one call.

Per operator, a launch of a small model spends more time in Python and in waking threads than in
arithmetic. Here a call sets a few pointers. Knows tensors and packed weights; knows no modules:
`vllm.model_executor.fused_decoder` reads them from a model.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch import Tensor

from vllm.ops.cpu.library import require_cpu_kernels
from vllm.ops.cpu.linear import PackedWeight, WeightFormat

_DTYPES = (torch.float32, torch.bfloat16)
_MAX_WINDOW = 2**31 - 1

_num_threads = torch.get_num_threads


@dataclass(frozen=True, kw_only=True)
class FusedLayer:
    """One layer, with H query heads, G key/value heads and D head size. None: there is none."""

    qkv: PackedWeight
    """[(H + 2 G) * D, hidden]: queries, keys, values."""
    output: PackedWeight
    """[hidden, H * D]"""
    gate_up: PackedWeight
    """[2 * I, hidden]: gate, up."""
    down: PackedWeight
    """[hidden, I]"""
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    input_norm: Tensor
    """[hidden]"""
    attention_norm: Tensor
    """[hidden], after attention."""
    query_norm: Tensor | None
    """[D]"""
    key_norm: Tensor | None
    key_cache: Tensor
    """[num_blocks, S, G, D]"""
    value_cache: Tensor
    scale: float
    """Multiplies query @ key."""
    sliding_window: int | None
    """Most recent keys a query sees; None for all."""


@dataclass(frozen=True, kw_only=True)
class FusedModel:
    """A decoder. Tensors but `cos_sin` have one dtype, bfloat16 or float32."""

    layers: Sequence[FusedLayer]
    embedding: Tensor | PackedWeight
    """[vocab_size, hidden]"""
    final_norm: Tensor
    """[hidden]"""
    cos_sin: Tensor
    """[max_positions, rot_dim] float32: cosines, then sines, of halves of a head."""
    norm_eps: float


class DecoderStatus(IntEnum):
    """Why a launch was not computed; the values are those of csrc/cpu/decoder_model.h."""

    DONE = 0
    BAD_TOKEN = 1
    BAD_POSITION = 2
    BAD_SLOT = 3
    BAD_REQUEST = 4
    NO_MEMORY = 5
    BAD_START = 6


_WEIGHTS = ("qkv", "output", "gate_up", "down")
_TENSORS = (
    *("qkv_bias", "output_bias", "gate_up_bias", "down_bias"),
    *("input_norm", "attention_norm", "query_norm", "key_norm", "key_cache", "value_cache"),
)
_OPTIONAL = ("qkv_bias", "output_bias", "gate_up_bias", "down_bias", "query_norm", "key_norm")


class FusedDecoder:
    """Runs launches of one model. Its results have the same bits as those of single operators.

    Keeps the tensors of the model alive, and scratch memory for its largest launch. One call at
    a time.

    Args:
        model: on the CPU. The weights and caches may change their content, not their place.

    Attributes:
        dtype: of activations.
        hidden_size: elements of a row of activations.

    Raises:
        ValueError: shapes, dtypes or strides do not fit each other.
        RuntimeError: the kernels are not built.
    """

    def __init__(self, model: FusedModel) -> None:
        library = require_cpu_kernels("a fused decoder needs")
        _check_model(model)
        self._model = model
        self.dtype = model.final_norm.dtype
        self.hidden_size = model.final_norm.shape[0]
        kernels, structs = library.of[self.dtype], library.structs
        self._forward = kernels.decoder_forward
        self._scratch_bytes = kernels.decoder_scratch_bytes
        self._layers = (structs.DecoderLayer * len(model.layers))()
        for struct, layer in zip(self._layers, model.layers, strict=True):
            _fill_layer(struct, layer)
        self._struct = structs.DecoderModel(**_model_fields(model, self._layers))
        self._launch = structs.DecoderLaunch()
        self._addresses = ctypes.addressof(self._struct), ctypes.addressof(self._launch)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_for = (0, 0)  # tokens, threads

    @property
    def address(self) -> int:
        """Of the DecoderModel that kernels take, valid as long as this object lives."""
        return self._addresses[0]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_decodes: int,
    ) -> Tensor:
        """One ragged launch of T tokens of B requests, decodes of one token first.

        Args:
            input_ids: [T] int64.
            positions: [T] int64.
            slot_mapping: [T] int64: where keys and values go; negative: nowhere.
            block_tables: [B, max_blocks] int32, rows dense.
            seq_lens: [B] int32: tokens of a request, this launch's included.
            query_start_loc: [B + 1] int32: where the tokens of each request begin.
            num_decodes: requests that are decodes; their tokens are the first.

        Returns:
            [T, hidden], after the final norm.

        Raises:
            ValueError: dtypes, shapes, strides or devices do not fit, or the number of decodes.
            IndexError: a token, position, slot, length or block is out of range.
            MemoryError: there is no scratch memory.
        """
        num_tokens, num_requests = len(input_ids), len(seq_lens)
        _check_vector("input_ids", input_ids, torch.int64, num_tokens)
        _check_vector("positions", positions, torch.int64, num_tokens)
        _check_vector("slot_mapping", slot_mapping, torch.int64, num_tokens)
        _check_vector("seq_lens", seq_lens, torch.int32, num_requests)
        _check_vector("query_start_loc", query_start_loc, torch.int32, num_requests + 1)
        _check_tables(block_tables, num_requests)
        if not 0 <= num_decodes <= min(num_requests, num_tokens) or (
            num_decodes == num_requests != num_tokens
        ):
            raise ValueError(
                f"{num_decodes} of {num_requests} requests are decodes, with {num_tokens} tokens"
            )
        num_threads = _num_threads()
        out = torch.empty(num_tokens, self.hidden_size, dtype=self.dtype)
        launch = self._launch
        launch.input_ids = input_ids.data_ptr()
        launch.positions = positions.data_ptr()
        launch.slot_mapping = slot_mapping.data_ptr()
        launch.block_tables = block_tables.data_ptr()
        launch.seq_lens = seq_lens.data_ptr()
        launch.query_start_loc = query_start_loc.data_ptr()
        launch.out = out.data_ptr()
        launch.num_tokens, launch.num_requests = num_tokens, num_requests
        launch.num_decodes = num_decodes
        launch.max_blocks, launch.table_stride = block_tables.shape[1], block_tables.stride(0)
        if num_tokens > self._scratch_for[0] or num_threads != self._scratch_for[1]:
            self._grow(num_tokens, num_threads)
        status = self._forward(*self._addresses, num_threads)
        if status != DecoderStatus.DONE:
            self._refuse(
                DecoderStatus(status), input_ids, positions, slot_mapping, block_tables, seq_lens
            )
        return out

    def _grow(self, num_tokens: int, num_threads: int) -> None:
        num_bytes = self._scratch_bytes(self._addresses[0], num_tokens, num_threads)
        self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        address = self._scratch.data_ptr()
        self._launch.scratch = address + -address % 64
        self._scratch_for = num_tokens, num_threads

    def _refuse(
        self,
        status: DecoderStatus,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
    ) -> NoReturn:
        """Say why a launch was not computed."""
        bad, model = self._launch.bad_index, self._struct
        if status is DecoderStatus.NO_MEMORY:
            raise MemoryError("no scratch memory for a decoder")
        if status is DecoderStatus.BAD_START:
            raise ValueError(
                f"{bad} requests are decodes of one token, but the first prefill does not begin "
                f"at row {bad}"
            )
        if status is DecoderStatus.BAD_TOKEN:
            raise IndexError(f"input_ids[{bad}] is {input_ids[bad]} of {model.vocab_size} rows")
        if status is DecoderStatus.BAD_POSITION:
            raise IndexError(
                f"positions[{bad}] is {positions[bad]}, cos_sin has {model.max_positions} rows"
            )
        if status is DecoderStatus.BAD_SLOT:
            num_slots = model.num_blocks * model.block_size
            raise IndexError(f"slot_mapping[{bad}] is {slot_mapping[bad]} of {num_slots} slots")
        raise IndexError(
            f"request {bad} has {seq_lens[bad]} tokens and the blocks "
            f"{block_tables[bad].tolist()} of {model.block_size} tokens; the cache has "
            f"{model.num_blocks} blocks"
        )


def _check_vector(name: str, x: Tensor, dtype: torch.dtype, size: int) -> None:
    if x.dtype != dtype or x.shape != (size,) or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}, "
            f"it must be {dtype} [{size}], dense on cpu"
        )


def _check_tables(block_tables: Tensor, num_requests: int) -> None:
    shape, dtype = block_tables.shape, block_tables.dtype
    is_dense = len(shape) == 2 and (shape[1] <= 1 or block_tables.stride(1) == 1)
    is_fitting = is_dense and shape[0] == num_requests and block_tables.is_cpu
    if dtype != torch.int32 or not is_fitting:
        raise ValueError(
            f"block_tables is {dtype} {list(shape)} with strides {list(block_tables.stride())} "
            f"on {block_tables.device}, it must be torch.int32 [{num_requests}, max_blocks] "
            f"with dense rows on cpu"
        )


def _pointer(x: Tensor | PackedWeight | None) -> int | None:
    if x is None:
        return None
    return x.address if isinstance(x, PackedWeight) else x.data_ptr()


def _fill_layer(struct: Any, layer: FusedLayer) -> None:
    for name in (*_WEIGHTS, *_TENSORS):
        setattr(struct, name, _pointer(getattr(layer, name)))
    struct.scale = layer.scale
    struct.sliding_window = min(layer.sliding_window or 0, _MAX_WINDOW)


def _model_fields(model: FusedModel, layers: "ctypes.Array[Any]") -> dict[str, Any]:
    first = model.layers[0]
    num_blocks, block_size, num_kv_heads, head_size = first.key_cache.shape
    is_packed = isinstance(model.embedding, PackedWeight)
    return {
        "layers": ctypes.addressof(layers),
        "embedding": None if is_packed else _pointer(model.embedding),
        "packed_embedding": _pointer(model.embedding) if is_packed else None,
        "final_norm": _pointer(model.final_norm),
        "cos_sin": _pointer(model.cos_sin),
        "num_layers": len(model.layers),
        "vocab_size": _shape(model.embedding)[0],
        "hidden_size": model.final_norm.shape[0],
        "intermediate_size": first.down.in_features,
        "num_heads": first.output.in_features // head_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "rot_dim": model.cos_sin.shape[1],
        "max_positions": model.cos_sin.shape[0],
        "num_blocks": num_blocks,
        "block_size": block_size,
        "norm_eps": model.norm_eps,
    }


def _shape(x: Tensor | PackedWeight) -> tuple[int, ...]:
    return (x.out_features, x.in_features) if isinstance(x, PackedWeight) else tuple(x.shape)


def _check_model(model: FusedModel) -> None:
    """All shapes follow from those of the first layer; all dtypes are that of the final norm."""
    dtype, (hidden_size,) = model.final_norm.dtype, model.final_norm.shape
    if dtype not in _DTYPES or not model.layers:
        raise ValueError(f"{len(model.layers)} layers of {dtype}, not of bfloat16 or float32")
    first = model.layers[0]
    _, _, num_kv_heads, head_size = first.key_cache.shape
    size, q_size, kv_size = (
        first.down.in_features,
        first.output.in_features,
        num_kv_heads * head_size,
    )
    rot_dim = model.cos_sin.shape[1]
    if q_size % kv_size or rot_dim % 2 or rot_dim > head_size:
        raise ValueError(
            f"queries of {q_size}, keys of {kv_size} and rotations of {rot_dim} elements do not "
            f"fit heads of {head_size}"
        )
    shapes = {
        "qkv": (q_size + 2 * kv_size, hidden_size),
        "output": (hidden_size, q_size),
        "gate_up": (2 * size, hidden_size),
        "down": (hidden_size, size),
        **dict.fromkeys(("input_norm", "attention_norm"), (hidden_size,)),
        **dict.fromkeys(("query_norm", "key_norm"), (head_size,)),
        **dict.fromkeys(("key_cache", "value_cache"), tuple(first.key_cache.shape)),
    }
    shapes |= {f"{name}_bias": shapes[name][:1] for name in _WEIGHTS}
    for index, layer in enumerate(model.layers):
        for name, shape in shapes.items():
            operand, kind = getattr(layer, name), PackedWeight if name in _WEIGHTS else Tensor
            if operand is None and name in _OPTIONAL:
                continue
            if not isinstance(operand, kind):
                raise ValueError(
                    f"{name} of layer {index} is a {type(operand).__name__}, not a {kind.__name__}"
                )
            _check_operand(f"{name} of layer {index}", operand, shape, dtype)
    _check_operand("final_norm", model.final_norm, (hidden_size,), dtype)
    _check_operand("embedding", model.embedding, (_shape(model.embedding)[0], hidden_size), dtype)
    _check_operand("cos_sin", model.cos_sin, tuple(model.cos_sin.shape), torch.float32)


def _check_operand(
    name: str, x: Tensor | PackedWeight, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if isinstance(x, PackedWeight):
        kind: object = x.weight_format.name
        fits = x.weight_format is not WeightFormat.FLOAT32 or dtype is torch.float32
    else:
        kind = x.dtype
        fits = x.dtype == dtype and x.is_cpu and x.is_contiguous()
    if not fits or _shape(x) != shape:
        place = "" if isinstance(x, PackedWeight) else f" on {x.device}"
        raise ValueError(
            f"{name} is {kind} {list(_shape(x))}{place}, it must be {dtype} {list(shape)}, dense "
            "on cpu"
        )
