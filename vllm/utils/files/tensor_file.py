"""Read the single tensor of an untrusted `torch.save` or safetensors file.

`torch.load` is not used, not even with `weights_only=True`: it builds any tensor that the file
describes (sparse, quantized, nested, with any sizes and strides) before anyone can check it. This
module reads the description as data, and checks it before it reads any value; nothing is unpickled
or called. It does not need torch.
"""

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_MAX_ENTRIES = 64
"""Files inside a `torch.save` file of one tensor; there are seven today."""
_MAX_PICKLE_BYTES = 4096
"""Maximum size of the description of a tensor; a plain tensor needs some 200."""
_MAX_DIMENSIONS = 8
_ENTRY_SIGN = b"PK\1\2"
"""Begins each entry of the list at the end of a zip file."""

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64")
_NUMPY_TYPES = {
    "float16": "<f2",
    "bfloat16": "<u2",
    "float32": "<f4",
    "float64": "<f8",
    "int32": "<i4",
    "int64": "<i8",
}
"""numpy has no bfloat16: its bits."""
_STORAGE_DTYPES = {
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch FloatStorage": "float32",
    "torch DoubleStorage": "float64",
    "torch IntStorage": "int32",
    "torch LongStorage": "int64",
}
_SAFETENSORS_DTYPES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "I32": "int32",
    "I64": "int64",
}
_REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils _rebuild_parameter"
_ORDERED_DICT = "collections OrderedDict"
_GLOBALS = {_REBUILD_TENSOR, _REBUILD_PARAMETER, _ORDERED_DICT, *_STORAGE_DTYPES}

_UNKNOWN = "does not describe its tensor as torch.save does: save the tensor again with torch.save"


class TensorFileError(ValueError):
    """The file does not contain one tensor of a supported type. The message says what it
    contains.
    """


class RawTensor(NamedTuple):
    """A dense tensor as plain data, independent of the library that made it."""

    dtype: str
    """One of `FLOATS` or `INTEGERS`."""
    shape: tuple[int, ...]
    data: bytes
    """Elements in row-major order, little-endian."""


class _OtherDtypeError(Exception):
    """The dtype of the tensor is not supported. The message says what the file has."""


class _Storage(NamedTuple):
    dtype: str
    key: str


class _View(NamedTuple):
    """A tensor as `torch.save` describes it: a view of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(str):
    """The name of a function or class in a pickle, which is never looked up."""


def read_tensor_file(data: bytes, dtypes: Sequence[str] = FLOATS) -> RawTensor:
    """Return the tensor of a `torch.save` file or of a safetensors file with one tensor.

    Args:
        data: content of the file.
        dtypes: accepted dtypes; some of `FLOATS` and `INTEGERS`.

    Raises:
        TensorFileError: it is neither kind of file, its tensor is not dense, has another dtype, or
            describes elements that the file does not have.
    """
    try:
        found = _read_torch(data) if data[:2] == b"PK" else _read_safetensors(data)
        if found.dtype not in dtypes:
            raise _OtherDtypeError(f"holds a tensor of the unsupported dtype {found.dtype}")
        return found
    except TensorFileError:
        raise
    except _OtherDtypeError as error:
        raise TensorFileError(f"{error}; it must be one of {', '.join(dtypes)}") from None
    # Errors that the zip and pickle readers raise for damaged files.
    except (
        *(zipfile.BadZipFile, KeyError, ValueError, TypeError, IndexError, EOFError),
        *(OSError, RuntimeError, NotImplementedError, OverflowError, struct.error),
    ) as error:
        raise TensorFileError(
            f"is neither a torch.save file nor a safetensors file ({type(error).__name__})"
        ) from None


def _read_torch(data: bytes) -> RawTensor:
    _check_num_entries(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (pickle_name,) = [n for n in archive.namelist() if n.endswith("/data.pkl")]
        folder = pickle_name.removesuffix("data.pkl")
        view = _read_description(_read_entry(archive, pickle_name, _MAX_PICKLE_BYTES))
        if folder + "byteorder" in archive.namelist():
            order = _read_entry(archive, folder + "byteorder", 16)
            if order != b"little":
                raise TensorFileError("must be little-endian: save it on a little-endian machine")
        stored = _read_entry(archive, f"{folder}data/{view.storage.key}", len(data))
    return _gather(view, stored)


def _check_num_entries(data: bytes) -> None:
    """Check the number of zip entries before their list is read, because the list may be as long as
    the file.

    The number that the file states is not used, because `zipfile` does not rely on it.
    """
    if data.count(_ENTRY_SIGN) > _MAX_ENTRIES:
        raise TensorFileError("is a zip file, but not a torch.save file")


def _read_entry(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise TensorFileError(f"has an entry {name!r} that is compressed or too large")
    return archive.read(entry)


def _gather(view: _View, stored: bytes) -> RawTensor:
    """Return the elements of a view in row-major order. All of them must be inside its storage."""
    kind = np.dtype(_NUMPY_TYPES[view.storage.dtype])
    elements = np.frombuffer(stored, kind, len(stored) // kind.itemsize)
    if math.prod(view.shape) > len(elements):
        raise TensorFileError(
            f"describes a tensor of shape {list(view.shape)}, but has only {len(elements)} "
            "elements; if the tensor was expanded, save `tensor.contiguous()`"
        )
    last = view.offset + sum(
        (size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)
    )
    if 0 in view.shape:
        return RawTensor(view.storage.dtype, view.shape, b"")
    if last >= len(elements):
        raise TensorFileError(
            f"has {len(elements)} elements, but its tensor needs at least {last + 1}"
        )
    strides = [stride * kind.itemsize for stride in view.strides]
    gathered = np.lib.stride_tricks.as_strided(elements[view.offset :], view.shape, strides)
    return RawTensor(view.storage.dtype, view.shape, gathered.tobytes())


def _read_safetensors(data: bytes) -> RawTensor:
    from safetensors import SafetensorError, deserialize

    try:
        found = deserialize(data)
    except SafetensorError as error:
        raise ValueError from error
    if len(found) != 1:
        raise TensorFileError(f"must hold one tensor, got {len(found)}")
    ((_, tensor),) = found
    dtype = _SAFETENSORS_DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise _OtherDtypeError(f"holds a tensor of the unsupported dtype {tensor['dtype']}")
    _check_dimensions(len(tensor["shape"]))
    return RawTensor(dtype, tuple(tensor["shape"]), bytes(tensor["data"]))


def _check_dimensions(count: int) -> None:
    """Refuse more dimensions than numpy supports. They would also fill the error message."""
    if count > _MAX_DIMENSIONS:
        raise TensorFileError(
            f"must hold a tensor of at most {_MAX_DIMENSIONS} dimensions, got {count}"
        )


# ---- the description of a tensor by torch.save ------------------------------------------------


def _read_description(data: bytes) -> _View:
    """Read the pickle of a tensor as data.

    A pickle is a program for a stack machine. Only the operations that push numbers, strings and
    tuples are supported; a call is read as a description of its result.
    """
    if b"\\" in data:  # escape sequences are refused: names of tensors do not need them
        raise TensorFileError(_UNKNOWN)
    reader = _DescriptionReader()
    for operation, argument, _ in pickletools.genops(data):
        if operation.name == "STOP":
            break
        reader.run(operation.name, argument)
    (found,) = reader.stack
    if not isinstance(found, _View):
        raise TensorFileError(f"must hold one dense tensor, got {_name(found)}")
    return found


class _DescriptionReader:
    """Executes the operations of a pickle on its own stack and memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Execute one operation.

        Raises:
            TensorFileError: the operation is not part of the description of a dense tensor.
        """
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLE_SIZES:
            size = _TUPLE_SIZES[name]
            self._put(len(self.stack) - size, tuple)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise TensorFileError(f"must hold one dense tensor and nothing else (found {name})")

    def _put(self, start: int, make: Callable[[list[Any]], Any]) -> None:
        """Replace the items of the stack from `start` on by one object made of them."""
        if start < 0:
            raise IndexError("the stack is empty")
        self.stack[start:] = [make(self.stack[start:])]

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def _tuple(self, _: Any) -> None:
        self._put(self._marks.pop(), tuple)

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _global(self, name: str) -> None:
        if name not in _GLOBALS:
            raise TensorFileError(f"must hold one dense tensor, got {name.replace(' ', '.')!r}")
        self.stack.append(_Global(name))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TensorFileError(_UNKNOWN)
        self._global(f"{module} {name}")

    def _persistent_id(self, _: Any) -> None:
        self._put(len(self.stack) - 1, lambda top: _storage_of(top[0]))

    def _reduce(self, _: Any) -> None:
        self._put(len(self.stack) - 2, lambda top: _result_of(*top))


_PUSHED = {*("BININT", "BININT1", "BININT2", "LONG1", "LONG4"), *("BINUNICODE", "SHORT_BINUNICODE")}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ACTIONS: dict[str, Callable[[_DescriptionReader, Any], None]] = {
    "MARK": _DescriptionReader._mark,
    "TUPLE": _DescriptionReader._tuple,
    "MEMOIZE": _DescriptionReader._memoize,
    "GLOBAL": _DescriptionReader._global,
    "STACK_GLOBAL": _DescriptionReader._stack_global,
    "BINPERSID": _DescriptionReader._persistent_id,
    "REDUCE": _DescriptionReader._reduce,
}


def _storage_of(saved_id: Any) -> _Storage:
    """Check the description of a storage, which is ("storage", type, key, location, number of
    elements), and return its dtype and key.
    """
    word, kind, key, *_ = saved_id
    dtype = _STORAGE_DTYPES.get(kind) if isinstance(kind, _Global) else None
    if word != "storage" or dtype is None or not isinstance(key, str):
        raise _OtherDtypeError("has a storage of an unsupported type")
    return _Storage(dtype, key)


def _result_of(function: Any, arguments: Any) -> Any:
    """Return what a call of one of the functions in `_GLOBALS` describes."""
    if not isinstance(function, _Global):
        raise TensorFileError(_UNKNOWN)
    if function == _ORDERED_DICT and arguments == ():
        return _Global(_ORDERED_DICT)  # a dict without hooks
    if function == _REBUILD_PARAMETER and isinstance(arguments[0], _View):
        return arguments[0]
    if function != _REBUILD_TENSOR:
        raise TensorFileError(
            f"calls {_name(function)} with arguments that torch.save never writes"
        )
    storage, offset, shape, strides, *rest = arguments
    if not isinstance(storage, _Storage) or len(rest) > 2 or not _are_sizes((offset,)):
        raise TensorFileError(_UNKNOWN)
    # Only lists of integers are shown in errors: tuples that contain each other may never end.
    if not _are_sizes(shape) or not _are_sizes(strides):
        raise TensorFileError("describes a tensor whose shape or strides are not valid sizes")
    _check_dimensions(len(shape))
    if len(shape) != len(strides):
        raise TensorFileError(
            f"must have one stride per dimension, got {len(shape)} sizes and {len(strides)} strides"
        )
    return _View(storage, offset, shape, strides)


def _are_sizes(values: Any) -> bool:
    """Return whether the values are possible sizes of a numpy array."""
    return isinstance(values, tuple) and all(
        type(value) is int and 0 <= value < 2**48 for value in values
    )


def _name(found: Any) -> str:
    """Return a short name for an object that is not a tensor, for messages."""
    return repr(str(found)) if isinstance(found, _Global) else type(found).__name__
