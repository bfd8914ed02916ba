"""Records the operations of a model, so that one call of the C++ kernels can run them.

While a model runs once on symbols (`vllm.ops.cpu.symbols`), a `Recorder` replaces the operator
table and the attention of forward passes. It knows tensors and packed weights, no modules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.attention_options import FP8_DTYPES
from vllm.ops.cpu.attention import cache_type, option_fields
from vllm.ops.cpu.collectives import SharedMemoryCollectives
from vllm.ops.cpu.operators.table import CPUOps
from vllm.ops.cpu.row_operations import ROUTINGS, choice_width, gated_size
from vllm.ops.cpu.symbols import Buffer, Ids, NotFusibleError, Rows, Symbol
from vllm.ops.cpu.weights.head_linear import PackedHeads
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.moe import PackedExperts
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.ops.expert_options import RoutingOptions
from vllm.ops.lora_weights import AdaptedExperts, AdaptedLayer, LoRAHeads
from vllm.ops.prepared import SingleExperts

Operand = Tensor | PackedWeight | PackedExperts | SharedMemoryCollectives
"""An operand of an operation that is no row."""

DTYPES = (torch.bfloat16, torch.float32)
"""Data types of activations."""

ON_PARTS_OF_HEADS = ("copy", "head_linear", "low_rank")
"""Operations whose rows may be parts of heads."""
_ON_FLOATS = ("widen", "linear", "route")
"""Operators whose tensors may be float32 in a program of bfloat16."""


@dataclass(frozen=True)
class Operation:
    """One recorded operation; csrc/cpu/row_operations.h documents what each kind does."""

    kind: str
    x: Rows | None
    y: Rows | None
    out: Rows
    operands: dict[str, Operand | None]
    """Operands by the names of the fields of its struct."""
    numbers: dict[str, float]
    """Scalar arguments of the operation, by name."""


class Recorder(CPUOps):
    """Records the operations of one forward pass, in their order.

    Its methods take and return recorded tensors, whose memory the program provides. They raise
    NotFusibleError for operations that the kernels do not support.

    Args:
        dtype: data type of all recorded tensors, bfloat16 or float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise NotFusibleError(f"activations must be bfloat16 or float32, got {dtype}")
        self.dtype = dtype
        self.operations: list[Operation] = []
        self.vocab_size = self.max_positions = self.num_types = 0
        """Exclusive limits of token ids, positions and types of tokens; 0: none are used."""
        self.num_positions = 1
        """Positions of a token that rotate its heads."""
        self.replaced_width = 0
        """Elements of the embeddings that a launch may bring."""
        self.cache_shape = (0, 0)
        """(blocks, tokens of a block)"""
        self.num_groups = 0
        """Groups of layers with block tables of their own."""
        self.item_layer: Callable[[int, int], Any] | None = None
        """Returns the layer that stores keys and values of items, for a number and size of heads;
        None: there are no items."""
        self.collectives: SharedMemoryCollectives | None = None
        """Collectives of the ranks that share the model; None: there is one rank."""

    @property
    def torch_functions(self) -> dict[Any, Callable[..., Any]]:
        """torch functions that can be recorded with the same bits, and the methods that record
        them.
        """
        return {
            F.embedding: self._embedding,
            F.pad: self._pad,
            F.relu: self._relu,
            torch.relu: self._relu,
            torch.add: self.add,
            torch.mul: self.scale,
            torch.cat: self.cat,
        }

    def given(self, width: int) -> Rows:
        """Return the recorded tensor for the program's input of `width` elements per token."""
        return Rows(self, Buffer(width), (width,))

    def lookup(
        self, ids: Ids, table: Tensor | PackedWeight, dtype: torch.dtype | None = None
    ) -> Rows:
        """Record a lookup of rows [T, W] in a table [N, W].

        `dtype` is None or the model's dtype.
        """
        if dtype not in (None, self.dtype):
            raise NotFusibleError(
                f"embedding: the result must have the dtype of the model ({self.dtype}), got "
                f"{dtype}"
            )
        operands: dict[str, Operand | None]
        if isinstance(table, PackedWeight):
            num_rows, width = table.out_features, table.in_features
            operands = {"packed": self._packed(table)}
        else:
            num_rows, width = table.shape
            operands = {"weight": self._dense(table, num_rows, width)}
        kind = "lookup_position" if ids.is_position else "lookup"
        if ids.is_type:
            kind, self.num_types = "lookup_type", num_rows
        elif ids.is_position:
            self.max_positions = min(self.max_positions or num_rows, num_rows - ids.offset)
        elif ids.num_rows:
            if ids.num_rows != num_rows:
                raise NotFusibleError(
                    f"embedding: all lookup tables by token ids must have {ids.num_rows} entries, "
                    f"got {num_rows}"
                )
        elif ids.offset:
            raise NotFusibleError(
                "embedding: a lookup by token ids plus an offset cannot be recorded"
            )
        else:
            self.vocab_size = min(self.vocab_size or num_rows, num_rows)
        return self._rows(
            kind, (width,), operands=operands, option=ids.offset, num_rows=ids.num_rows
        )

    def rows_of_part(
        self, embed: Callable[[Any], Any], ids: Any, first_id: int, num_rows: int
    ) -> Any:
        if not isinstance(ids, Ids):
            return super().rows_of_part(embed, ids, first_id, num_rows)
        return embed(Ids(self, ids.is_position, ids.offset - first_id, num_rows))

    def all_reduce(self, x: Rows, collectives: SharedMemoryCollectives) -> Rows:
        """Record a sum over the ranks, in place."""
        self._meet(x, collectives)
        self._in_place("all_reduce", x, operands={"arena": collectives})
        return x

    def all_gather(self, x: Rows, collectives: SharedMemoryCollectives) -> Rows:
        """Record a gather of [T, n] of each rank to [T, n * ranks]."""
        self._meet(x, collectives)
        sizes = (x.width * collectives.size,)
        return self._rows("all_gather", sizes, x, operands={"arena": collectives})

    def _meet(self, x: Rows, collectives: SharedMemoryCollectives) -> None:
        if not x.is_whole or len(x.sizes) != 1:
            raise NotFusibleError(
                "exchange between ranks: the tensor must be dense and have one dimension other "
                f"than the tokens, got sizes {x.sizes}"
            )
        self.collectives = collectives

    def put_into(self, rows: Any) -> Any:
        """Record that embeddings given with a forward pass replace some of the looked-up ones."""
        self.replaced_width = rows.width
        self._in_place("replace", rows)
        return rows

    def linear(self, x: Rows, weight: PackedWeight, bias: Tensor | None) -> Rows:
        """Record a matmul of [T, num_inputs] with the weight -> [T, out_features]."""
        if x.sizes != (weight.num_inputs,):
            raise NotFusibleError(
                f"linear: x must have {weight.num_inputs} input features, got {x.sizes}"
            )
        is_float = weight.weight_format is WeightFormat.FLOAT32
        if x.dtype != (torch.float32 if is_float else self.dtype):
            raise NotFusibleError(
                f"linear: a {weight.weight_format.name} weight cannot be applied to {x.dtype}"
            )
        size = weight.out_features
        added = None if bias is None else self._dense(bias, size, dtype=x.dtype)
        operands = {"packed": weight, "bias": added}
        return self._rows("linear", (size,), x, operands=operands, dtype=x.dtype)

    def multiply_heads(self, x: Any, heads: PackedHeads, appended: Any = None) -> Rows:
        """Record a matmul per head [T, H, in_features] -> [T, H, out_features].

        The part of `appended` is appended to each head.
        """
        if x.sizes != (heads.num_heads, heads.in_features):
            raise NotFusibleError(
                f"multiply_heads: x must have {heads.num_heads} heads, got {x.sizes}"
            )
        size, width = heads.out_features, 0
        if appended is not None:
            if not isinstance(appended, Rows) or appended.sizes[:-1] != x.sizes[:-1]:
                raise NotFusibleError(
                    "multiply_heads: the tensor to append must be a recorded tensor with as many "
                    "heads as x"
                )
            width = appended.sizes[-1]
        out = self._new_rows((heads.num_heads, size + width))
        result, *rest = out.split((size, width) if width else (size,))
        self._record("head_linear", x, None, result, {"packed": heads.weight})
        if rest:
            self._record("copy", appended, None, rest[0])
        return out

    def cat(self, parts: Any, dim: int = -1) -> Rows:
        """Record a concatenation along the last dimension, in a new buffer."""
        if not all(isinstance(part, Rows) for part in parts):
            raise NotFusibleError("cat: recorded tensors and plain tensors cannot be concatenated")
        *heads, _ = parts[0].sizes
        is_last = dim in (-1, 1 + len(heads))
        if not is_last or len(heads) > 1 or any(p.sizes[:-1] != (*heads,) for p in parts):
            raise NotFusibleError(
                f"cat: tensors of sizes {[part.sizes for part in parts]} cannot be concatenated"
            )
        sizes = [part.sizes[-1] for part in parts]
        out = self._new_rows((*heads, sum(sizes)))
        for part, target in zip(parts, out.split(sizes), strict=True):
            self._record("copy", part, None, target)
        return out

    def widen(self, x: Rows) -> Rows:
        """Record a conversion to float32."""
        if len(x.sizes) != 1:
            raise NotFusibleError(
                "widen: x must be a recorded tensor with one dimension other than the tokens, got "
                f"sizes {x.sizes}"
            )
        return self._rows("widen", x.sizes, x, dtype=torch.float32)

    def adapt(self, layer: AdaptedLayer, x: Any, y: Any) -> Any:
        """Record adding the low-rank updates of LoRA adapters for input x to y."""
        if x.sizes != (layer.in_features,) or y.width < layer.out_features:
            raise NotFusibleError(
                f"adapt: x {x.sizes} and y {y.sizes} do not fit the layer {layer}"
            )
        self._in_place("low_rank", y, x, first_part=layer.first_part, num_parts=len(layer.parts))
        return y

    def adapt_heads(self, layer: LoRAHeads, x: Any, y: Any) -> Any:
        """Record adding the low-rank updates of LoRA adapters for heads x to y."""
        count = len(layer.heads)
        if x.sizes != (count, layer.in_features) or y.sizes[:-1] != (count,):
            raise NotFusibleError(
                f"adapt_heads: x {x.sizes} and y {y.sizes} must have {count} heads"
            )
        self._in_place("low_rank", y, x, first_part=layer.first_part, num_parts=count)
        return y

    def adapt_experts(
        self, layer: AdaptedExperts, single: SingleExperts, x: Any, ids: Any, weights: Any, y: Any
    ) -> Any:
        """Return y unchanged: batches with adapters of experts do not run as a program."""
        return y

    def adapt_embeddings(self, table: AdaptedLayer, ids: Any, y: Any) -> Any:
        """Return y unchanged: batches with adapters of embeddings run layer by layer."""
        return y

    def clip(self, x: Rows, limit: float) -> Rows:
        """Record clipping of elements to [-limit, limit]."""
        return self.row_operation("clip", x, scalar=limit)

    def scale_rows(self, x: Any, factor: Any, is_gate: bool = False) -> Any:
        if not isinstance(x, Rows):
            return super().scale_rows(x, factor, is_gate)
        if not isinstance(factor, Rows) or factor.sizes != (1,):
            raise NotFusibleError(
                "scale_rows: factor must be a recorded tensor with one element for each token"
            )
        return self._rows("scale_rows", x.sizes, x, factor, option=is_gate)

    def route(
        self,
        logits: Any,
        options: RoutingOptions,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Any:
        if not isinstance(logits, Rows):
            return super().route(logits, options, bias, scales)
        (num_experts,), top_k, groups = logits.sizes, options.top_k, options.groups
        assert self._plain is not None, "programs are recorded only with the library of kernels"
        if not 1 <= top_k <= num_experts or not self._can_choose(options):
            raise NotFusibleError(
                f"route: cannot choose {top_k} of {num_experts} experts from {groups} "
                f"({options.weights})"
            )
        operands = {
            name: self._dense(x, num_experts, dtype=torch.float32)
            for name, x in (("table", bias), ("scales", scales))
            if x is not None
        }
        out = Rows(self, Buffer(choice_width(top_k, self.dtype)), (top_k,))
        self._record(
            "route",
            logits,
            None,
            out,
            operands,
            num_heads=1,
            head_size=num_experts,
            top_k=top_k,
            num_groups=groups.num_groups,
            top_groups=groups.top_groups,
            is_float=logits.dtype != self.dtype,
            option=self._plain.Routing[ROUTINGS[options.weights]],
            scalar=options.scale,
            second_scalar=options.tolerance,
        )
        return out, out  # one symbol represents both ids and weights

    def experts(self, experts: PackedExperts, x: Rows, ids: Any, weights: Any) -> Rows:
        """Record the experts of each token, as `route` has chosen them."""
        is_routed = isinstance(ids, Rows) and ids is weights
        if x.sizes != (experts.hidden_size,) or not is_routed:
            raise NotFusibleError(
                f"experts: x must have the hidden size {experts.hidden_size}, and the choice must "
                f"come from `route`; got {x.sizes}"
            )
        if self.dtype not in experts.dtypes:
            raise NotFusibleError(f"experts: float32 experts cannot be applied to {self.dtype}")
        return self._rows(
            "experts", x.sizes, x, ids, operands={"experts": experts}, top_k=ids.width
        )

    def _pad(self, x: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Rows:
        """Record appending zeros to the last dimension.

        The zeros are computed from x, so where x is NaN, NaN may be appended instead.
        """
        if tuple(pad[:1]) != (0,) or len(pad) != 2 or mode != "constant" or value:
            raise NotFusibleError(
                f"pad: only zeros at the end of the last dimension can be recorded, got {pad}"
            )
        *heads, size = x.sizes
        out = self._new_rows((*heads, size + pad[1]))
        zeros = self._relu(self.clip(x, 0.0))
        kept, rest = out.split((size, pad[1]))
        self._record("copy", x, None, kept)
        for start in range(0, pad[1], size):
            count = min(size, pad[1] - start)
            _, target, _ = rest.split((start, count, pad[1] - start - count))
            self._record("copy", zeros.split((count, size - count))[0], None, target)
        return out

    def _relu(self, x: Any, inplace: bool = False) -> Rows:
        if inplace:
            raise NotFusibleError("relu: inplace=True cannot be recorded")
        return self.row_operation("relu", x)

    def add(self, x: Any, y: Any) -> Rows:
        """Record an addition of two recorded tensors, or of a recorded tensor and one of token
        size.
        """
        if not isinstance(x, Rows):
            raise NotFusibleError(
                f"add: one operand must be a recorded tensor, got {type(x).__name__}"
            )
        if isinstance(y, Tensor):
            operands = {"weight": self._dense(y, *x.sizes)}
            return self._rows("add_weights", x.sizes, x, operands=operands)
        return self.row_operation("add", x, y)

    def scale(self, x: Any, factor: Any) -> Rows:
        """Record a multiplication by a scalar; a one-element tensor is read now and not again."""
        if isinstance(factor, Tensor) and not isinstance(factor, Symbol) and factor.numel() == 1:
            factor = factor.item()
        if not isinstance(x, Rows) or not isinstance(factor, (int, float)):
            raise NotFusibleError(
                "mul: the factor must be a recorded tensor or a number, got "
                f"{type(factor).__name__}"
            )
        return self.row_operation("scale", x, scalar=factor)

    def rotary_embedding(
        self,
        positions: Any,
        query: Any,
        key: Any,
        cos_sin_cache: Tensor,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> Any:
        if not isinstance(query, Symbol):
            return super().rotary_embedding(positions, query, key, cos_sin_cache, is_neox, sections)
        heads: Any
        num_positions, rot_dim = cos_sin_cache.shape
        if positions.offset or not positions.is_position:
            raise NotFusibleError("rotary_embedding: positions must be the positions of the tokens")
        kind = "rotate" if is_neox else "rotate_neighbours"
        table = self._dense(cos_sin_cache, num_positions, rot_dim, dtype=torch.float32)
        operands: dict[str, Any] = {"table": table}
        if sections is not None:
            operands["sections"] = self._dense(sections, rot_dim // 2, dtype=torch.int32)
            self.num_positions = max(self.num_positions, int(sections.max()) + 1)
        self.max_positions = min(self.max_positions or num_positions, num_positions)
        for heads in (query,) if key is None else (query, key):
            if rot_dim % 2 or rot_dim > heads.sizes[-1]:
                raise NotFusibleError(
                    f"rotary_embedding: rot_dim {rot_dim} does not fit heads of {heads.sizes}"
                )
            self._in_place(kind, heads, operands=dict(operands), option=rot_dim)
        return query, key

    def attend(
        self, layer: Any, query: Any, key: Any, value: Any = None, stores: bool = True
    ) -> Any:
        """Record storing keys and values, and attention to the cache of a layer."""
        if not isinstance(query, Rows):
            raise NotFusibleError("attend: the query must be a recorded tensor, got a plain one")
        caches = [layer.key_cache]
        shape, dtype = _check_heads(query, key, value, caches[0]), caches[0].dtype
        self._bind(shape[0], shape[1])
        if value is None:  # the value is a part of the key
            value_size: int = layer.value_cache
        else:
            value_size, caches = shape[3], [*caches, layer.value_cache]
        names = "key_cache", "value_cache"
        operands: dict[str, Any] = {
            n: self._dense(c, *shape, dtype=dtype if dtype in FP8_DTYPES else None)
            for n, c in zip(names, caches, strict=False)
        }
        group, of_cache = layer.cache_group, cache_type(self._plain, dtype)
        if of_cache:
            of_values = layer.key_scales if value is None else layer.value_scales
            for n, scales in (("key_scales", layer.key_scales), ("value_scales", of_values)):
                operands[n] = self._dense(scales, shape[2], dtype=torch.float32)
        self.num_groups = max(self.num_groups, group + 1)
        if stores:
            self._in_place(
                "write_cache", key, value, operands=dict(operands), group=group, cache_type=of_cache
            )
        operands.setdefault("value_cache", operands["key_cache"])
        by_head = {"table": layer.alibi_slopes, "sinks": layer.sinks}
        for name, given in by_head.items():
            if given is not None:
                operands[name] = self._dense(given, query.sizes[0], dtype=torch.float32)
        numbers: dict[str, Any] = option_fields(layer.options, shape[3])
        return self._rows(
            "attend",
            (query.sizes[0], value_size),
            query,
            operands=operands,
            head_size=shape[3],
            value_size=value_size,
            group=group,
            num_kv_heads=shape[2],
            scalar=numbers.pop("scale"),
            cache_type=of_cache,
            **numbers,
        )

    def attend_within_items(self, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        """Record attention to all tokens of the item that a token belongs to."""
        if self.item_layer is None or mask is not None or not isinstance(query, Rows):
            raise NotFusibleError(
                "attention within items: the recorder needs a layer for keys and values, and no "
                "mask can be recorded"
            )
        return self.attend(self.item_layer(*query.sizes), query, key, value)

    def attend_to_items(self, layer: Any, query: Any) -> Rows:
        """Record cross-attention to the item slots that each token sees."""
        keys, values = layer.item_keys, layer.item_values
        if not isinstance(keys, Tensor) or not isinstance(query, Rows):
            raise NotFusibleError(
                "cross-attention: the layer's cache must be bound, and the query must be a "
                "recorded tensor"
            )
        num_slots, num_kv_heads, head_size = keys.shape
        if len(query.sizes) != 2 or query.sizes[1] != head_size or query.sizes[0] % num_kv_heads:
            raise NotFusibleError(
                f"cross-attention: queries must fit keys of {list(keys.shape)}, got {query.sizes}"
            )
        numbers: dict[str, Any] = option_fields(layer.item_options, head_size)
        return self._rows(
            "attend_items",
            query.sizes,
            query,
            operands={
                "key_cache": self._dense(keys, *keys.shape),
                "value_cache": self._dense(values, *keys.shape),
            },
            head_size=head_size,
            value_size=head_size,
            num_kv_heads=num_kv_heads,
            num_rows=num_slots,
            scalar=numbers.pop("scale"),
            **numbers,
        )

    def clear_unseeing(self, x: Any) -> Any:
        """Record setting tokens to zero that see no item."""
        self._in_place("clear_unseeing", x)
        return x

    def _embedding(self, ids: Any, weight: Any, *args: Any, **options: Any) -> Rows:
        if not isinstance(ids, Ids) or options.get("max_norm") is not None:
            raise NotFusibleError("embedding: only a lookup by ids can be recorded")
        return self.lookup(ids, weight)

    def row_operation(
        self,
        kind: str,
        x: Rows,
        y: Any = None,
        *,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        is_gated: bool = False,
        in_place: bool = False,
        **numbers: float,
    ) -> Rows:
        """Record a row operation, with the arguments of `RowOperations`."""
        *heads, size = x.sizes
        if y is not None and (not isinstance(y, Rows) or y.sizes != x.sizes):
            found = f"rows of {y.sizes}" if isinstance(y, Rows) else f"a {type(y).__name__}"
            raise NotFusibleError(
                f"{kind}: operands of sizes {x.sizes} and {found} are not supported"
            )
        is_by_head = weight is not None and weight.dim() == 2
        operands = {
            "weight": self._operand(weight, *(x.sizes if is_by_head else (size,))),
            "bias": self._operand(bias, size),
        }
        out = gated_size(size) if is_gated else size
        return self._rows(kind, (*heads, out), x, y, operands=operands, dtype=None, **numbers)

    def _new_rows(self, sizes: tuple[int, ...], dtype: torch.dtype | None = None) -> Rows:
        """Return a recorded tensor in a new buffer."""
        width, unit = torch.Size(sizes).numel(), (dtype or self.dtype).itemsize
        return Rows(self, Buffer(width * unit // self.dtype.itemsize), sizes, dtype=dtype)

    def _rows(
        self,
        kind: str,
        sizes: tuple[int, ...],
        x: Rows | None = None,
        y: Rows | None = None,
        *,
        operands: dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        **numbers: float,
    ) -> Rows:
        """Record an operation with a new result, and return it."""
        out = self._new_rows(sizes, dtype)
        self._record(kind, x, y, out, operands, **numbers)
        return out

    def _in_place(
        self,
        kind: str,
        x: Rows,
        y: Rows | None = None,
        *,
        operands: dict[str, Any] | None = None,
        **numbers: float,
    ) -> None:
        """Record an operation that changes x, or that has no result."""
        self._record(kind, x, y, x, operands, **numbers)

    def _record(
        self,
        kind: str,
        x: Rows | None,
        y: Rows | None,
        out: Rows,
        operands: dict[str, Any] | None = None,
        **numbers: float,
    ) -> None:
        """Append an operation to the record; raise if its kernel does not support its tensors."""
        for rows in (x, y, out):
            if rows is None:
                continue
            if rows.head_stride is not None and kind not in ON_PARTS_OF_HEADS:
                raise NotFusibleError(f"{kind} of parts of heads cannot be recorded")
            if rows.dtype != self.dtype and kind not in _ON_FLOATS:
                raise NotFusibleError(f"{kind} of {rows.dtype} cannot be recorded")
        shape = {"num_heads": out.width // out.sizes[-1], "head_size": out.sizes[-1]}
        self.operations.append(Operation(kind, x, y, out, operands or {}, shape | numbers))

    def _bind(self, num_blocks: int, block_size: int) -> None:
        if self.cache_shape not in ((0, 0), (num_blocks, block_size)):
            raise NotFusibleError(
                f"all KV caches must have the same blocks, {self.cache_shape}, got "
                f"{num_blocks, block_size} (blocks, tokens per block)"
            )
        self.cache_shape = num_blocks, block_size

    def _packed(self, weight: PackedWeight) -> PackedWeight:
        if weight.weight_format is WeightFormat.FLOAT32 and self.dtype != torch.float32:
            raise NotFusibleError(f"linear: a float32 weight cannot be applied to {self.dtype}")
        return weight

    def _operand(self, x: Tensor | None, *shape: int) -> Tensor | None:
        return None if x is None else self._dense(x, *shape)

    def _dense(self, x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        wanted = dtype or self.dtype
        if not isinstance(x, Tensor) or x.dtype != wanted or tuple(x.shape) != shape:
            is_tensor = isinstance(x, Tensor)
            found = f"{x.dtype} {list(x.shape)}" if is_tensor else type(x).__name__
            raise NotFusibleError(f"an operand must be {wanted} {list(shape)}, got {found}")
        if not x.is_cpu or not x.is_contiguous():
            raise NotFusibleError(f"an operand of shape {list(shape)} must be dense on the CPU")
        return x.detach()


def _check_heads(query: Rows, key: Rows, value: Rows | None, cache: Any) -> tuple[int, ...]:
    """Check that queries, keys and values fit the cache, and return the cache's shape.

    The shape is [num_blocks, block_size, G, D]. value: None if it is a part of the key.
    """
    known = (*DTYPES, *FP8_DTYPES)
    if not isinstance(cache, Tensor) or cache.dim() != 4 or cache.dtype not in known:
        found = f"{cache.dtype}" if isinstance(cache, Tensor) else "not bound"
        raise NotFusibleError(f"a KV cache must be bfloat16, float32 or fp8, got {found}")
    num_kv_heads, head_size = cache.shape[2:]
    has_heads = key.sizes == (num_kv_heads, head_size)
    has_heads = has_heads and (value is None or value.sizes == key.sizes)
    is_grouped = len(query.sizes) == 2 and query.sizes[0] % num_kv_heads == 0
    if not has_heads or not is_grouped or query.sizes[1] != head_size:
        raise NotFusibleError(
            f"attend: queries {query.sizes}, keys {key.sizes} and values {value and value.sizes} "
            f"do not fit a cache with heads {num_kv_heads, head_size}"
        )
    return tuple(cache.shape)
