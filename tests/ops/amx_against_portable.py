"""Compare the kernels for AMX with the kernels for portable tiles, bit by bit, and print JSON.

If the processor has no AMX, `amx_emulator.cpp` is preloaded. Then the program also reports what
happens if the permission is refused, or if the instructions give wrong results.
"""

import ctypes
import errno
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ops.test_stored_weights import fp8, in_table, minimums, mxfp4, nibbles, whole
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.cpu.library import LIBRARY_PATH, CPUKernels, require_cpu_kernels
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.moe import PackedExperts
from vllm.ops.cpu.weights.stored import pack_stored, pack_stored_experts
from vllm.ops.cpu.weights.weight_format import WeightFormat

ROWS = (1, 6, 7, 15, 16, 17, 33, 49, 70)
LIBRARY = require_cpu_kernels("this program needs")


def linear_layers() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    formats = {"bf16": None, "int8": WeightFormat.INT8, "int4": WeightFormat.INT4}
    for num_out, num_in in ((70, 1096), (64, 40), (64, 8)):
        weight = 16 * torch.randn(num_out, num_in).bfloat16()
        x = torch.randn(max(ROWS), num_in).bfloat16()
        half = num_in // 2
        weight[:, half:], x[::2, half:] = (
            -weight[:, :half],
            x[::2, :half],
        )  # the halves cancel each other, so only rounding errors are left
        x[1, 3], x[2, 4] = float("nan"), float("inf")
        # inputs that count as zero, and inputs whose products count as zero
        x[3], x[5] = 2**-130, 2**-126
        packed = {
            name: PackedWeight.pack(weight.clone())
            if weight_format is None
            else PackedWeight.quantize(weight, weight_format)
            for name, weight_format in formats.items()
        }
        if num_in == 1096:
            packed["gptq"] = pack_stored(nibbles(128, 1024, 128))
            packed["gptq in groups of 8"] = pack_stored(nibbles(128, 1032, 8))
            packed["fp8 in blocks"] = pack_stored(fp8(70, 1024, 128))
            packed["fp8 in small blocks"] = pack_stored(fp8(64, 512, 16))
            packed["fp8"] = pack_stored(fp8(70, 1096, 1096))
            packed["8 bits"] = pack_stored(whole(64, 1024, 64, is_ordered=True))
            packed["codes of a table"] = pack_stored(in_table(70, 1024, 64))
            packed["codes of a table, long groups"] = pack_stored(in_table(64, 1096, 1096))
            packed["mxfp4"] = pack_stored(mxfp4(128, 1088))
            packed["4 bits with minimums"] = pack_stored(minimums(128, 768, 4, 16, 256))
            packed["5 bits with minimums"] = pack_stored(minimums(128, 1024, 5, 32, 256))
        for name, of_format in packed.items():
            for rows in ROWS:
                part = x[:rows, : of_format.in_features]
                run = partial(of_format.linear, part)
                yield f"linear {name} [{num_out}, {num_in}] {rows} rows", run


def experts() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    num_tokens, num_experts, hidden, size = 40, 3, 72, 80
    gate_up = torch.randn(num_experts, 2 * size, hidden).bfloat16()
    down = torch.randn(num_experts, hidden, size).bfloat16()
    x = torch.randn(num_tokens, hidden).bfloat16()
    ids, weights = torch.randint(0, num_experts, (num_tokens, 2)), torch.rand(num_tokens, 2)
    for weight_format in (None, WeightFormat.INT8, WeightFormat.INT4):
        packed = PackedExperts.pack(gate_up.clone(), down.clone(), weight_format)
        yield f"experts {weight_format}", partial(packed.forward, x, ids, weights)
    for block in (8, hidden):
        gates, ups = ([fp8(size, hidden, block) for _ in range(num_experts)] for _ in range(2))
        downs = [fp8(hidden, size, 16) for _ in range(num_experts)]
        of_fp8 = pack_stored_experts(gates, ups, downs)
        yield f"experts fp8, {block} inputs", partial(of_fp8.forward, x, ids, weights)


def prompts() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    ops, lens, block_size = CPUOps(), [5, 90, 1], 16
    for head_size in (64, 80, 33):
        blocks = torch.randn(2, 24, block_size, 2, head_size).bfloat16()
        query = torch.randn(sum(lens), 6, head_size).bfloat16()
        tables = torch.randperm(24).int().view(3, 8)
        starts, ends = [0, 5, 95, 96], [12, 120, 77]
        for window, cap in ((None, None), (20, 3.0)):
            options = AttentionOptions(0.125, window, cap)
            run = partial(
                ops.paged_attention_prefill, query, *blocks, tables, starts, ends, options
            )
            yield f"prompt attention, heads of {head_size}, window {window}", run


def differing() -> tuple[int, list[str]]:
    """Return the number of compared kernels, and the names of the ones whose bits differ."""
    cases = [*linear_layers(), *experts(), *prompts()]
    wrong = []
    for number, (name, run) in enumerate(cases):
        torch.set_num_threads(1 + number % 2)
        results = []
        for isa in ("amx", "amx_portable"):
            assert LIBRARY.set_isa(isa)
            results.append(run())
        got, want = (out.nan_to_num(nan=1.25e37).view(torch.int16) for out in results)
        if not torch.equal(got, want):
            wrong.append(name)
    return len(cases), wrong


class Emulator:
    """Controls `amx_emulator.cpp`, which is preloaded into this process."""

    def __init__(self) -> None:
        self._functions: Any = ctypes.CDLL(None)
        self._functions.amx_emulator_counters.restype = ctypes.POINTER(ctypes.c_int64)
        self._functions.amx_emulator_is_configured.restype = ctypes.c_bool

    def start(self, *, refuses: int = 0, errs: bool = False) -> str:
        """Return the instruction set that is chosen if the request for tiles fails with this errno,
        or if matmuls give wrong results.
        """
        self._functions.amx_emulator_behave(refuses, errs)
        ctypes.CDLL(str(LIBRARY_PATH)).vllm_cpu_assume_amx()
        return CPUKernels(LIBRARY_PATH).isa

    def counters(self) -> dict[str, int]:
        names = ("configured", "released", "tdpbf16ps", "tdpbusd", "tdpbssd")
        return dict(zip(names, self._functions.amx_emulator_counters()[: len(names)], strict=True))

    def is_configured(self) -> bool:
        """Return whether this thread still has a tile configuration."""
        return bool(self._functions.amx_emulator_is_configured())


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    emulator = None if LIBRARY.set_isa("amx") else Emulator()
    if emulator is not None:
        found["refused"] = emulator.start(refuses=errno.EPERM)
        found["no room"] = emulator.start(refuses=errno.ENOSPC)
        found["wrong"] = emulator.start(errs=True)
        found["granted"] = emulator.start()
    found["compared"], found["differing"] = differing()
    if emulator is not None:
        found["counters"], found["is_configured"] = emulator.counters(), emulator.is_configured()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
