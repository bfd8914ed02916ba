"""Test reading one tensor from an untrusted file: files of torch and safetensors, and attacks."""

import io
import pickle
import random
import zipfile

import pytest
import safetensors.torch
import torch

from vllm.utils.files.tensor_file import TensorFileError, read_tensor_file


def saved(value, **options) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def rewritten(data: bytes, change, compression=zipfile.ZIP_STORED, suffix="/data.pkl") -> bytes:
    """Return a file of torch.save in which one entry is changed."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(file, "w", compression) as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith(suffix) else content)
    return file.getvalue()


def as_torch(raw) -> torch.Tensor:
    dtype = getattr(torch, raw.dtype)
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).view(raw.shape)


NUMBERS = torch.arange(24, dtype=torch.float32).view(4, 6) / 7


@pytest.mark.parametrize(
    "tensor",
    [
        *(NUMBERS, NUMBERS.half(), NUMBERS.bfloat16(), NUMBERS.double(), NUMBERS[None]),
        *(NUMBERS.t(), NUMBERS[1:3], NUMBERS[:, 2:4], NUMBERS[::2, ::3], NUMBERS[3]),
        *(torch.nn.Parameter(NUMBERS), NUMBERS.clone().requires_grad_()),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}{t.stride()}",
)
def test_a_dense_tensor_is_read_as_it_was_saved(tensor):
    files = [saved(tensor), saved(tensor, pickle_protocol=4)]
    files.append(safetensors.torch.save({"x": tensor.detach().contiguous()}))
    for file in files:
        raw = read_tensor_file(file)
        assert raw.dtype == str(tensor.dtype).removeprefix("torch.")
        assert torch.equal(as_torch(raw), tensor.detach())


class Attack:
    def __reduce__(self):
        return (pytest.fail, ("the file ran code",))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (NUMBERS.to_sparse(), "_rebuild_sparse_tensor"),
        (NUMBERS.long(), "unsupported dtype int64"),
        (NUMBERS.to(torch.complex64), "ComplexFloatStorage"),
        (NUMBERS.to(torch.float8_e4m3fn), "_rebuild_tensor_v3"),
        (NUMBERS.to("meta"), "_rebuild_meta_tensor"),
        (NUMBERS.view(4, *[1] * 9, 6), "at most 8 dimensions, got 11"),
        (NUMBERS[:1].expand(1000, 6), "shape \\[1000, 6\\], but has only 24"),
        ([NUMBERS], "must hold one dense tensor and nothing else"),
        ({"x": NUMBERS}, "must hold one dense tensor and nothing else"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (Attack(), "Attack|fail|_pytest"),
        ("text", "dense tensor, got str"),
        (5, "dense tensor, got int"),
    ],
    ids=lambda value: str(type(value)),
)
def test_anything_else_is_named_and_refused(value, message):
    with pytest.raises(TensorFileError, match=message):
        read_tensor_file(saved(value))


def test_a_safetensors_file_must_hold_one_floating_point_tensor():
    two = safetensors.torch.save({"a": NUMBERS, "b": NUMBERS.clone()})
    integers = safetensors.torch.save({"a": NUMBERS.long()})
    for file, message in (
        (two, "must hold one tensor, got 2"),
        (integers, "unsupported dtype int64"),
    ):
        with pytest.raises(TensorFileError, match=message):
            read_tensor_file(file)


SHAPE = b"K\x04K\x06\x86"
STRIDES = b"K\x06K\x01\x86"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SHAPE, b"K\x05K\x06\x86"),  # one row more than the file has
        (SHAPE, b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"),
        (SHAPE, b"J\xff\xff\xff\xffK\x06\x86"),  # a size of -1
        (SHAPE, b"K\x04\x85"),  # fewer sizes than strides
        (SHAPE, b"N"),
        (STRIDES, b"K\x07K\x01\x86"),
        (STRIDES, b"J\xff\xff\xff\xffK\x01\x86"),
        (STRIDES, b"J\xff\xff\xff\x7fK\x01\x86"),
        (b"QK\x00", b"QK\x01"),  # begins one element later, and ends after the last element
        (b"QK\x00", b"QJ\xff\xff\xff\x7f"),
        (b"QK\x00", b"QJ\xff\xff\xff\xff"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007"),  # a storage that the file does not have
        (b"FloatStorage", b"DoubleStorage"),  # elements of this storage are larger
        (b"torch\nFloatStorage", b"os\nsystem"),
        (b"\nOrderedDict", b"\nUserDict"),
    ],
)
def test_a_description_that_leaves_its_storage_is_refused(old, new):
    def change(content):
        assert old in content
        return content.replace(old, new, 1)

    with pytest.raises(TensorFileError):
        read_tensor_file(rewritten(saved(NUMBERS), change))


def test_a_large_storage_cannot_be_hidden_in_a_small_file():
    zeros = saved(torch.zeros(1000, 1000))
    small = rewritten(zeros, lambda content: content, zipfile.ZIP_DEFLATED)
    assert len(small) < 10_000
    with pytest.raises(TensorFileError, match="compressed"):
        read_tensor_file(small)
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as archive:
        for index in range(100):
            archive.writestr(str(index), b"")
    with pytest.raises(TensorFileError, match=r"not a torch\.save file"):
        read_tensor_file(many.getvalue())
    number = b"d\0d\0"  # the number of entries, stored twice: the file may state a wrong number
    assert number in many.getvalue()
    with pytest.raises(TensorFileError, match=r"not a torch\.save file"):
        read_tensor_file(many.getvalue().replace(number, b"\1\0\1\0"))
    long = rewritten(saved(NUMBERS), lambda content: content + bytes(5000))
    with pytest.raises(TensorFileError, match="too large"):
        read_tensor_file(long)


# Sixty tuples, each of which contains the tuple before it twice: written as text, they would never
# end.
TOWER = b")" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(60))
FLOATS = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x18tQ"


@pytest.mark.parametrize(
    "description",
    [
        TOWER + b"\x94h\0\x93.",  # the tuples as the name of a function
        b"h\0".join([TOWER + b"\x94", b"\x93."]),
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + FLOATS + b"K\0" + TOWER + b"K\x01\x85tR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + FLOATS + b"K\0K\x01\x85" + TOWER + b"tR.",
    ],
    ids=["module", "name", "shape", "strides"],
)
def test_values_that_hold_one_another_are_never_written_out(description):
    file = rewritten(saved(NUMBERS), lambda _: b"\x80\x04" + description)
    with pytest.raises(TensorFileError) as refusal:
        read_tensor_file(file)
    assert len(str(refusal.value)) < 200


def test_numbers_of_another_byte_order_are_refused():
    other = rewritten(saved(NUMBERS), lambda content: b"big", suffix="/byteorder")
    with pytest.raises(TensorFileError, match="must be little-endian"):
        read_tensor_file(other)


@pytest.mark.parametrize(
    "data",
    [b"", b"P", b"PK", b"PK\3\4" * 20, bytes(100), b"x" * 100, pickle.dumps(NUMBERS), b"\xff" * 64],
    ids=["nothing", "P", "PK", "headers", "zeros", "text", "pickle", "ones"],
)
def test_bytes_that_are_no_such_file_are_refused(data):
    with pytest.raises(TensorFileError):
        read_tensor_file(data)
    with pytest.raises(TensorFileError):
        read_tensor_file(saved(NUMBERS, _use_new_zipfile_serialization=False))


def test_damaged_files_are_refused_or_give_as_many_numbers_as_they_have():
    """Random damage is to the whole file, or to the description with a matching checksum."""
    rng = random.Random(0)
    whole = saved(NUMBERS)
    files = [whole, safetensors.torch.save({"x": NUMBERS})]

    def damage(content: bytes) -> bytes:
        broken = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        return bytes(broken[: rng.randint(1, len(broken))] if rng.random() < 0.2 else broken)

    num_read = 0
    for index in range(3000):
        data = rewritten(whole, damage) if index % 3 == 0 else damage(files[index % 2])
        try:
            raw = read_tensor_file(data)
        except TensorFileError:
            continue
        num_read += 1
        assert as_torch(raw).numel() <= 24 if raw.data else 0 in raw.shape
    assert num_read  # some files can still be read: only values or names are damaged
