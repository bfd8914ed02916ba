"""Computes from measured rates how much `--quantization int8` would gain on this machine.

For processors without bfloat16 instructions, on which int8 matmuls are the fastest.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.weight_format import DENSE_FORMATS, WeightFormat

HAS_BF16 = frozenset({"amx", "amx_portable", "avx512_bf16", "arm_bf16"})
"""Instruction sets of the kernels that multiply bfloat16 numbers."""

MIN_GAIN = 1.1
"""Speed with int8, relative to that without, that is worth a line."""

_SIZE = 512
"""Inputs and outputs of the weight that is measured; the second-level cache holds it."""

_PROMPT_ROWS = 32
_READ_BYTES = 16 << 20
_NUM_CALLS = 3


@dataclass(frozen=True)
class LinearRates:
    """Seconds of one thread for a matmul whose weight is in the processor's cache.

    Attributes:
        decode_s: seconds for each element with one input vector.
        prompt_s: seconds for each element and input vector with many of them.
        num_bytes: bytes of an element in memory.
    """

    decode_s: float
    prompt_s: float
    num_bytes: float


@dataclass(frozen=True)
class MachineRates:
    """Rates of linear layers, dense and in int8, and of memory.

    Attributes:
        dense: rate with weights in the model's dtype.
        int8: rate with the same weights in int8.
        read_bytes_per_s: rate at which all threads together read memory.
        num_threads: number of threads of the engine.
    """

    dense: LinearRates
    int8: LinearRates
    read_bytes_per_s: float
    num_threads: int

    def decode_gain(self) -> float:
        """Return the decode speed of one request with int8, relative to dense weights."""
        return self._decode_s(self.dense) / self._decode_s(self.int8)

    def prompt_gain(self) -> float:
        """Return the prompt speed with int8, relative to dense weights."""
        return self.dense.prompt_s / self.int8.prompt_s

    def _decode_s(self, rates: LinearRates) -> float:
        """Return the decode time per element in seconds: the larger one of computing and reading
        memory.
        """
        return max(rates.decode_s / self.num_threads, rates.num_bytes / self.read_bytes_per_s)


def is_worth_measuring(isa: str, dtype: torch.dtype) -> bool:
    """Return whether int8 may gain: kernels support the dtype, but have no bfloat16 instructions.

    Args:
        isa: instruction set of the kernels; "torch": there are no kernels.
        dtype: data type of the model.
    """
    return isa != "torch" and isa not in HAS_BF16 and dtype in DENSE_FORMATS


def int8_advice(rates: MachineRates, isa: str) -> str | None:
    """Return the log line about int8 on this machine; None if it gains nothing."""
    gains = {"decodes": rates.decode_gain(), "prompts": rates.prompt_gain()}
    texts = [f"{what} {gain:.1f} times as fast" for what, gain in gains.items() if gain >= MIN_GAIN]
    if not texts:
        return None
    return (
        f"this processor has no bfloat16 instructions (kernels: {isa}): measured at this start, "
        f"--quantization int8 would make {' and '.join(texts)}"
    )


def measure_rates(dtype: torch.dtype, storages: Sequence[Tensor]) -> MachineRates:
    """Measure the rates of this machine, which takes 2 to 10 ms if it is idle.

    Args:
        dtype: data type of the model, float32 or bfloat16.
        storages: uint8, all memory of the model.
    """
    num_threads = torch.get_num_threads()
    read_bytes_per_s = _read_rate(storages)
    plain = torch.linspace(-1, 1, _SIZE * _SIZE).view(_SIZE, _SIZE).to(dtype)
    torch.set_num_threads(1)
    try:
        int8 = PackedWeight.quantize(plain, WeightFormat.INT8)
        rates = [_linear_rates(weight, dtype) for weight in (PackedWeight.pack(plain), int8)]
    finally:
        torch.set_num_threads(num_threads)
    return MachineRates(rates[0], rates[1], read_bytes_per_s, num_threads)


def _read_rate(storages: Sequence[Tensor]) -> float:
    """Measure the bytes that all threads read per second; infinite if caches hold the model."""
    parts, num_bytes = [], 0
    for storage in storages:
        part = storage[: min(storage.numel(), _READ_BYTES - num_bytes) // 8 * 8]
        parts.append(part.view(torch.int64))
        num_bytes += part.numel()
    if num_bytes < _READ_BYTES // 2:
        return float("inf")
    start = time.perf_counter()
    for part in parts:
        part.sum()
    return num_bytes / (time.perf_counter() - start)


def _linear_rates(weight: PackedWeight, dtype: torch.dtype) -> LinearRates:
    num_elements = _SIZE * _SIZE
    seconds = [
        _best_s(weight, torch.full((rows, _SIZE), 0.5, dtype=dtype)) for rows in (1, _PROMPT_ROWS)
    ]
    return LinearRates(
        seconds[0] / num_elements,
        seconds[1] / num_elements / _PROMPT_ROWS,
        weight.num_bytes / num_elements,
    )


def _best_s(weight: PackedWeight, x: Tensor) -> float:
    times = []
    for _ in range(_NUM_CALLS):
        start = time.perf_counter()
        weight.linear(x)
        times.append(time.perf_counter() - start)
    return min(times)
