"""Symbols: replacements for tensors, with which a model runs once to record its operations.

They have a shape but no values. Each operation on a symbol is either recorded or raises
`NotFusibleError`, so a recording never differs from the computation of the modules.
"""

import builtins
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch


class NotFusibleError(ValueError):
    """A part of a model cannot be recorded; the message says which."""


class SymbolRecorder(Protocol):
    """The methods of a recorder that symbols, and code that may be given symbols, call.

    Its methods raise NotFusibleError for operations that the kernels do not support.
    """

    dtype: torch.dtype
    """Data type of recorded tensors that name no other."""

    @property
    def torch_functions(self) -> Mapping[Any, Callable[..., Any]]:
        """torch functions that can be recorded, and the methods that record them."""
        ...

    def cat(self, parts: Any, dim: int = -1) -> Any:
        """Record a concatenation along the last dimension."""
        ...

    def widen(self, x: Any) -> Any:
        """Record a conversion to float32."""
        ...

    def clip(self, x: Any, limit: float) -> Any:
        """Record clipping of elements to [-limit, limit]."""
        ...

    def add(self, x: Any, y: Any) -> Any:
        """Record an addition of two tensors, at least one of them recorded."""
        ...

    def scale(self, x: Any, factor: Any) -> Any:
        """Record a multiplication by a scalar."""
        ...

    def row_operation(self, kind: str, x: Any, y: Any = None, **arguments: Any) -> Any:
        """Record a row operation, with the arguments of `RowOperations`."""
        ...

    def lookup(self, ids: Any, table: Any, dtype: torch.dtype | None = None) -> Any:
        """Record a lookup of rows in a table."""
        ...

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        """Record a matmul with a packed weight."""
        ...

    def multiply_heads(self, x: Any, heads: Any, appended: Any = None) -> Any:
        """Record a matmul of each head with its packed matrix."""
        ...

    def experts(self, experts: Any, x: Any, ids: Any, weights: Any) -> Any:
        """Record the packed experts of each token."""
        ...

    def all_reduce(self, x: Any, collectives: Any) -> Any:
        """Record a sum over the ranks."""
        ...

    def all_gather(self, x: Any, collectives: Any) -> Any:
        """Record a concatenation of the tensors of all ranks."""
        ...


class Symbol:
    """A tensor without values whose first dimension is tokens.

    Undefined operations raise an error.
    """

    is_cpu = False
    """Operators check this before they read memory, and a symbol has no memory."""

    def __init__(self, recorder: SymbolRecorder) -> None:
        self.recorder = recorder

    def __getattr__(self, name: str) -> NoReturn:
        raise NotFusibleError(f"{name} of a recorded tensor is not supported")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Torch.cat takes a list of tensors.
        parts = args[0] if args and isinstance(args[0], (tuple, list)) else ()
        symbols = [x for x in (*args, *parts) if isinstance(x, Symbol)]
        record = symbols[0].recorder.torch_functions.get(function) if symbols else None
        if record is None:
            name = getattr(function, "__name__", function)
            raise NotFusibleError(f"the torch function {name} cannot be recorded")
        return record(*args, **kwargs or {})


def _refuse(name: str) -> Any:
    def method(self: Symbol, *args: Any) -> NoReturn:
        raise NotFusibleError(f"{name} of a recorded tensor is not supported")

    return method


for _name in ("len", "bool", "iter", "int", "float", "index", "setitem", "iadd", "imul"):
    setattr(Symbol, f"__{_name}__", _refuse(_name))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "pow", "matmul", "lt"):
    setattr(Symbol, f"__{_name}__", _refuse(_name))


class Ids(Symbol):
    """Token ids, positions or token types of a forward pass, [T] int64.

    Args:
        recorder: records the operations that use them.
        is_position: False for token ids and types.
        offset: is added to every one.
        num_rows: size of this rank's part of a table; other ranks look up ids outside of it.
            0: tables are not split.
        is_type: True for token types.
    """

    dtype = torch.int64

    def __init__(
        self,
        recorder: SymbolRecorder,
        is_position: bool,
        offset: int = 0,
        num_rows: int = 0,
        *,
        is_type: bool = False,
    ) -> None:
        super().__init__(recorder)
        self.is_position, self.is_type = is_position, is_type
        self.offset = offset
        self.num_rows = num_rows

    def __add__(self, other: Any) -> "Ids":
        if not isinstance(other, int):
            raise NotFusibleError("only integers can be added to token ids and positions")
        if self.is_type:
            raise NotFusibleError("integers cannot be added to types of tokens")
        return Ids(self.recorder, self.is_position, self.offset + other, self.num_rows)

    def dim(self) -> int:
        return 1


class Buffer:
    """The buffer for the result of an operation: `width` elements per token.

    Args:
        width: elements per token.
    """

    def __init__(self, width: int) -> None:
        self.width = width


class Rows(Symbol):
    """Some or all elements of each token in a buffer, [T, *sizes].

    Args:
        recorder: records the operations that use them.
        buffer: contains the elements.
        sizes: sizes of the dimensions after the first.
        offset: index of the first element among the elements of a token in the buffer.
        head_stride: elements from one head to the next, for sizes (H, D); None: heads are dense.
        dtype: None: the dtype of the recorder, in whose elements offsets and widths are counted.
    """

    def __init__(
        self,
        recorder: SymbolRecorder,
        buffer: Buffer,
        sizes: tuple[int, ...],
        offset: int = 0,
        head_stride: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(recorder)
        self.buffer = buffer
        self.sizes = sizes
        self.offset = offset
        self.head_stride = head_stride
        self.dtype = dtype or recorder.dtype

    @property
    def width(self) -> int:
        """Number of elements per token."""
        return torch.Size(self.sizes).numel()

    @property
    def is_whole(self) -> bool:
        """Whether the tensor contains all elements of the buffer."""
        return self.head_stride is None and self.width == self.buffer.width

    @property
    def head_distance(self) -> int:
        """Elements from one head to the next; 0: there are no heads."""
        return (self.head_stride or self.sizes[-1]) if len(self.sizes) > 1 else 0

    @property
    def shape(self) -> tuple[Any, ...]:
        return (Symbol(self.recorder), *self.sizes)

    def dim(self) -> int:
        return 1 + len(self.sizes)

    def is_contiguous(self) -> bool:
        return self.is_whole

    def contiguous(self) -> "Rows":
        """Return this tensor, or a copy if it is a part of another one."""
        return self if self.is_whole else self.recorder.cat((self,))

    def float(self) -> "Rows":
        """Convert to float32."""
        return self if self.dtype == torch.float32 else self.recorder.widen(self)

    def split(self, sizes: Sequence[int], dim: int = -1) -> list["Rows"]:
        """Split the last dimension of [T, W] or [T, H, D]."""
        last = self.sizes[-1]
        if len(self.sizes) > 2 or dim not in (-1, len(self.sizes)) or sum(sizes) != last:
            raise NotFusibleError(f"split: sizes {sizes} do not add up to {self.sizes}")
        heads = self.sizes[:-1]
        stride = (self.head_stride or last) if heads else None
        starts = [self.offset + sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Rows(self.recorder, self.buffer, (*heads, size), start, stride, self.dtype)
            for size, start in zip(sizes, starts, strict=True)
        ]

    def unsqueeze(self, dim: int) -> "Rows":
        """Return [T, W] as [T, 1, W]."""
        if dim != 1 or len(self.sizes) != 1:
            raise NotFusibleError(f"unsqueeze: {self.sizes} cannot get a dimension {dim}")
        return Rows(self.recorder, self.buffer, (1, self.width), self.offset, None, self.dtype)

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "Rows":
        """Split the last dimension into several sizes, one of which may be -1."""
        if dim not in (-1, len(self.sizes)) or self.head_stride is not None:
            raise NotFusibleError(
                f"unflatten: dimension {dim} of {self.sizes} cannot be unflattened"
            )
        last = torch.empty(self.sizes[-1], device="meta").unflatten(0, sizes).shape
        return Rows(self.recorder, self.buffer, (*self.sizes[:-1], *last), self.offset)

    def flatten(self, start_dim: int = 0) -> "Rows":
        """Join all dimensions after the first, which is dimension `start_dim`."""
        if start_dim not in (1, -len(self.sizes)) or self.head_stride is not None:
            raise NotFusibleError("the dimension of tokens, and parts of heads, cannot be changed")
        return Rows(self.recorder, self.buffer, (self.width,), self.offset)

    def clamp(self, least: builtins.float, largest: builtins.float) -> "Rows":
        """Clip elements to symmetric limits."""
        if least != -largest or largest <= 0:
            raise NotFusibleError(f"clamp: limits of {least} and {largest} cannot be recorded")
        return self.recorder.clip(self, largest)

    def __getitem__(self, index: Any) -> "Rows":
        if index == (..., slice(None, self.sizes[-1])):
            return self  # the slice keeps everything
        end: Any = None
        if isinstance(index, tuple) and isinstance(index[-1], slice):
            end = index[-1].stop
        is_first_part = isinstance(end, int) and end > 0 and index == (..., slice(None, end))
        if not is_first_part or len(self.sizes) > 2:
            raise NotFusibleError(f"the part {index} of {self.sizes} cannot be recorded")
        size = min(end, self.sizes[-1])
        return self.split((size, self.sizes[-1] - size))[0]

    def __add__(self, other: Any) -> "Rows":
        return self.recorder.add(self, other)

    def __mul__(self, other: Any) -> "Rows":
        return self.recorder.scale(self, other)

    __radd__, __rmul__ = __add__, __mul__
