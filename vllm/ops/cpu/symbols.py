"""Stand-ins for the tensors of a launch, with which a model is run once to record its operations.

They know their shape and nothing of their content. What a model does with one is either recorded
or raises `NotFusibleError`, so a recording never differs from what the modules compute.
"""

from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from vllm.ops.cpu.recorder import Recorder


class NotFusibleError(ValueError):
    """Something of a model cannot be recorded; the message says what."""


class Symbol:
    """A tensor with a row per token of a launch. Everything that it does not define is refused."""

    is_cpu = False
    """Operators check it before they read memory, and there is none."""

    def __init__(self, recorder: "Recorder") -> None:
        self.recorder = recorder

    def __getattr__(self, name: str) -> NoReturn:
        raise NotFusibleError(f"{name} of a tensor of a launch cannot be recorded")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        symbols = [x for x in args if isinstance(x, Symbol)]
        record = symbols[0].recorder.torch_functions.get(function) if symbols else None
        if record is None:
            name = getattr(function, "__name__", function)
            raise NotFusibleError(f"the torch function {name} cannot be recorded")
        return record(*args, **kwargs or {})


def _refuse(name: str) -> Any:
    def method(self: Symbol, *args: Any) -> NoReturn:
        raise NotFusibleError(f"{name} of a tensor of a launch cannot be recorded")

    return method


for _name in ("len", "bool", "iter", "int", "float", "index", "setitem", "iadd", "imul"):
    setattr(Symbol, f"__{_name}__", _refuse(_name))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "pow", "matmul", "lt"):
    setattr(Symbol, f"__{_name}__", _refuse(_name))


class Ids(Symbol):
    """Token ids or positions, [T] int64.

    Args:
        recorder: of the operations that use them.
        is_position: False for token ids.
        offset: what is added to every one.
        num_rows: of this rank's part of a table, where other ids than those below are looked up by
            other ranks; 0: tables are whole.
    """

    dtype = torch.int64

    def __init__(
        self, recorder: "Recorder", is_position: bool, offset: int = 0, num_rows: int = 0
    ) -> None:
        super().__init__(recorder)
        self.is_position = is_position
        self.offset = offset
        self.num_rows = num_rows

    def __add__(self, other: Any) -> "Ids":
        if not isinstance(other, int):
            raise NotFusibleError("ids and positions can only be added to numbers")
        return Ids(self.recorder, self.is_position, self.offset + other, self.num_rows)

    def dim(self) -> int:
        return 1


class Buffer:
    """Where an operation puts its result: a row per token.

    Args:
        width: elements of a row.
    """

    def __init__(self, width: int) -> None:
        self.width = width


class Rows(Symbol):
    """Some or all elements of the rows of a buffer, [T, *sizes].

    Args:
        recorder: of the operations that use them.
        buffer: that has them.
        sizes: of the dimensions after the first.
        offset: the element of a row of the buffer where they begin.
    """

    def __init__(
        self, recorder: "Recorder", buffer: Buffer, sizes: tuple[int, ...], offset: int = 0
    ) -> None:
        super().__init__(recorder)
        self.buffer = buffer
        self.sizes = sizes
        self.offset = offset

    @property
    def width(self) -> int:
        """Elements of a row."""
        return torch.Size(self.sizes).numel()

    @property
    def is_whole(self) -> bool:
        """Whether they are all elements of the buffer."""
        return self.width == self.buffer.width

    @property
    def dtype(self) -> torch.dtype:
        return self.recorder.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        return (Symbol(self.recorder), *self.sizes)

    def dim(self) -> int:
        return 1 + len(self.sizes)

    def is_contiguous(self) -> bool:
        return self.is_whole

    def split(self, sizes: list[int], dim: int = -1) -> list["Rows"]:
        """Parts of the last dimension of rows [T, W]."""
        if len(self.sizes) != 1 or dim not in (-1, 1) or sum(sizes) != self.width:
            raise NotFusibleError(f"rows of {self.sizes} cannot be split into {sizes}")
        starts = [self.offset + sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Rows(self.recorder, self.buffer, (size,), start)
            for size, start in zip(sizes, starts, strict=True)
        ]

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "Rows":
        """The last dimension as several, one of which may be -1."""
        if dim not in (-1, len(self.sizes)):
            raise NotFusibleError(f"dimension {dim} of rows of {self.sizes} cannot be unflattened")
        last = torch.empty(self.sizes[-1], device="meta").unflatten(0, sizes).shape
        return Rows(self.recorder, self.buffer, (*self.sizes[:-1], *last), self.offset)

    def flatten(self, start_dim: int = 0) -> "Rows":
        """All dimensions after the first as one."""
        if start_dim != 1:
            raise NotFusibleError("the dimension of tokens cannot be flattened")
        return Rows(self.recorder, self.buffer, (self.width,), self.offset)

    def clamp(self, least: float, largest: float) -> "Rows":
        """Elements within symmetric limits."""
        if least != -largest or largest <= 0:
            raise NotFusibleError(f"limits of {least} and {largest} cannot be recorded")
        return self.recorder.clip(self, largest)

    def __getitem__(self, index: Any) -> "Rows":
        if index == (..., slice(None, self.sizes[-1])):
            return self  # nothing is cut off
        end: Any = None
        if isinstance(index, tuple) and isinstance(index[-1], slice):
            end = index[-1].stop
        is_first_part = isinstance(end, int) and end > 0 and index == (..., slice(None, end))
        if not is_first_part or len(self.sizes) != 1:
            raise NotFusibleError(f"the part {index} of rows of {self.sizes} cannot be recorded")
        return Rows(self.recorder, self.buffer, (min(end, self.width),), self.offset)

    def __add__(self, other: Any) -> "Rows":
        return self.recorder.add(self, other)

    def __mul__(self, other: Any) -> "Rows":
        return self.recorder.scale(self, other)

    __radd__, __rmul__ = __add__, __mul__
