"""Rules of the bridge's compiler for a graph: its operators, and which writes are done in place.

The compiler gets a graph after functionalisation: a mutating operator has become a copy, and the
new value of an input is copied back at the end. A pass restores writes in place that it recognises:
an `index_copy` or `index_put` on an input itself. It ignores views of inputs, so a write through a
view copies the whole tensor in every run.

The operators and dtypes are from the vendor's list; the rules from the published sources of builds
1.19 and later. It uses only torch graphs, of any device, and works with every torch we know.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gaudi_sim.operators import needs_host
from vllm.cost_model.work import base_name

_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_FLOAT = {torch.float32, torch.bfloat16, torch.float16}
_INT = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_NUMBER = _FLOAT | _INT | {torch.bool}
_ANY = _NUMBER | _FP8
_MATRIX = _FLOAT | _FP8

_TYPES: dict[frozenset[torch.dtype], tuple[str, ...]] = {
    frozenset(_ANY): (
        *("add", "alias", "amax", "cat", "clamp", "clamp_max", "clamp_min", "clone", "copy"),
        *("constant_pad_nd", "embedding", "empty", "empty_like", "fill", "flip", "full"),
        *("full_like", "index_copy", "index_select", "max", "maximum", "min", "minimum"),
        *("new_empty", "new_full", "reciprocal", "rsub", "scalar_tensor", "scatter", "sub", "sum"),
        *("to_copy", "unsafe_view", "where"),
    ),
    frozenset(_ANY - {torch.bool}): ("mul",),
    frozenset(_ANY - {torch.int16}): ("masked_fill", "repeat"),
    frozenset(_ANY - {torch.int64}): ("new_zeros", "ones", "ones_like", "zeros", "zeros_like"),
    frozenset(_NUMBER): (
        *("abs", "all", "any", "arange", "cos", "div", "exp", "exp2", "floor", "gather"),
        *("isfinite", "isinf", "isnan", "log", "log2", "nan_to_num", "ne", "neg", "pow"),
        *("remainder", "round", "rsqrt", "scatter_add", "sigmoid", "sin", "sqrt", "tanh"),
    ),
    frozenset(_NUMBER - {torch.int16}): (
        *("argmax", "argmin", "cumsum", "eq", "ge", "gt", "index", "le", "logical_and", "lt"),
    ),
    frozenset(_NUMBER - {torch.int64}): ("logical_not",),
    frozenset(_INT | {torch.bool}): (
        *("bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or"),
        *("bitwise_right_shift", "bitwise_xor", "lshift", "rshift"),
    ),
    frozenset(_FLOAT): (
        *("gelu", "log_softmax", "mean", "native_layer_norm", "relu", "silu", "softmax", "var"),
        *("rms_norm", "rotary_pos_embedding"),
    ),
    frozenset(_FLOAT | {torch.int64, torch.int32}): ("index_reduce",),
    frozenset(_FLOAT | {torch.int16}): ("sort", "topk"),
    frozenset({torch.float32, torch.bfloat16, torch.int32}): ("index_put",),
    frozenset({torch.float32, torch.bfloat16, torch.int32, torch.int16}): ("stack",),
    frozenset({torch.float32, torch.bfloat16}): (
        *("logsumexp", "block_softmax", "block_softmax_adjustment"),
    ),
    frozenset({torch.int32}): ("convert_from_uint4",),
    frozenset(_MATRIX): (
        *("addmm", "baddbmm", "bmm", "mm", "sdpa_recomp_fwd", "fp8_gemm_v2", "cast_from_fp8"),
        *("cast_to_fp8_v2", "fp8_sdpa_recomp_fwd", "mixture_of_experts"),
    ),
}
NATIVE = {name: types for types, names in _TYPES.items() for name in names}
"""Operators that are documented to run on the device, and the types of their first operand (or,
without one, of what they return). Views are no operators there."""

COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt", "logical_and", "logical_not", "isfinite")
"""The bridge's shape functions fix bool as their type."""

_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "remainder", "cumsum", "sum", "neg", "pow")
"""An int64 computation takes several operators, or wraps; int32 is meant."""

_INDEXED_WRITES = {
    torch.ops.aten.index_copy.default: torch.ops.aten.index_copy_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
}
_COPY_BACK = torch.ops.aten.copy_.default


def value_of(x: Any) -> Any:
    """Return the fake tensor of a node; other values are returned unchanged."""
    return x.meta.get("val") if isinstance(x, fx.Node) else x


def operators_of(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the operators of a graph in order, views included."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield node


def is_view(node: fx.Node) -> bool:
    """Return whether a node moves no data: a view, or one of several results."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return node.target.is_view or base_name(node.target) == "unsafe_view"


# ---- writes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopiedWrite:
    """An input that is copied as a whole because of a write to it."""

    node: fx.Node
    """Node that copies the new value to the input."""
    reason: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the input."""
        return int(value_of(self.node.args[0]).nbytes)


def reinplace(graph: fx.Graph) -> list[CopiedWrite]:
    """Restore writes to inputs in place, as far as the bridge does.

    Args:
        graph: after functionalisation, with the values of its inputs copied back. Is changed.

    Returns:
        The writes that remain copies.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    copied = []
    for back in [node for node in operators_of(graph) if node.target is _COPY_BACK]:
        target, source = back.args[:2]
        assert isinstance(target, fx.Node)
        reason = _why_copied(target, source, back, order)
        if reason is not None:
            copied.append(CopiedWrite(back, reason))
            continue
        assert isinstance(source, fx.Node)
        source.target = _INDEXED_WRITES[source.target]  # type: ignore[index]
        back.replace_all_uses_with(source)
        graph.erase_node(back)
    return copied


def _why_copied(
    target: fx.Node, source: Any, back: fx.Node, order: dict[fx.Node, int]
) -> str | None:
    """Return why the write that `back` ends is not restored in place; None if it is."""
    if target.op != "placeholder":
        return f"{target} is no input of the graph"
    if not isinstance(source, fx.Node) or source.target not in _INDEXED_WRITES:
        return f"{target} is written by {getattr(source, 'target', source)}, through a view of it"
    if source.args[0] is not target:
        return f"{target} is written through {source.args[0]}, a view of it"
    late = [x for x in _readers(target) if order[x] > order[source] and x is not back]
    return f"{target} is read by {late[0]} after the write to it" if late else None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that use a node, or a view of it."""
    for user in node.users:
        yield user
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)


# ---- what a graph may not have ----------------------------------------------------------------


def operator_violations(graph: fx.Graph) -> list[str]:
    """Return the operators of a functionalised graph that the bridge does not run on the device.

    Each with the reason.
    """
    found = []
    for node in operators_of(graph):
        if node.target is not _COPY_BACK:
            found += [f"{node.name}: {text}" for text in _violations_of(node)]
    return found


def write_violations(graph: fx.Graph) -> list[str]:
    """List the writes of a functionalised graph that copy a whole input, each with the reason."""
    backs = [node for node in operators_of(graph) if node.target is _COPY_BACK]
    targets = [node.args[0] for node in backs]
    found = [f"{x} is written back more than once" for x in set(targets) if targets.count(x) > 1]
    order = {node: number for number, node in enumerate(graph.nodes)}
    for back in backs:
        target, source = back.args[:2]
        assert isinstance(target, fx.Node)
        reason = _why_copied(target, source, back, order)
        if reason is not None:
            found.append(f"{CopiedWrite(back, reason).num_bytes} bytes are copied: {reason}")
    return found


def _violations_of(node: fx.Node) -> Iterator[str]:
    op: Any = node.target
    name = base_name(op)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    results = [x for x in _leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    operands = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    sizes = [size for x in results for size in x.shape]
    if (
        not all(type(size) is int for size in sizes)
        or needs_host(op, args, kwargs, is_lazy=False) == "shape"
    ):
        yield f"the shape of {op} depends on data"
        return
    if is_view(node):
        return
    if op._schema.is_mutable:
        yield f"{op} is in place: the graph is not functionalised"
    if name not in NATIVE:
        yield f"{op} is not among the operators that are documented to run on the device"
        return
    value = operands[0] if operands else results[0]
    if value.dtype not in NATIVE[name]:
        yield f"{op} is not documented for {value.dtype}"
    elif needs_host(op, args, kwargs, is_lazy=False) == "kernel":
        yield f"{op} of {value.dtype} {list(value.shape)} runs on the host"
    if name in COMPARISONS and results[0].dtype is not torch.bool:
        yield f"{op} returns {results[0].dtype}, the bridge makes it bool"
    if name in _ARITHMETIC and results[0].dtype is torch.int64:
        yield f"{op} computes in int64"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
