"""Sampling and log-probabilities with the C++ kernels: fills in their checked arguments.

The meaning of the arguments is in csrc/cpu/sampling_args.h. The parameters of a request
are documented in `vllm.sample`, which uses this if the logits are on the host.
"""

import functools
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.ops.cpu.library import CPUKernels, load_cpu_kernels

Int64Array = npt.NDArray[np.int64]

_NO_NUMBERS = 2
"""Status of the kernel if random sampling has no random numbers."""

_num_threads = torch.get_num_threads


@dataclass(frozen=True)
class RowNumbers:
    """Random values for n requests: the values, or the keys and positions to compute them from."""

    keys: npt.NDArray[np.uint64] | None = None
    """[n] keys of the random generator."""
    positions: Int64Array | None = None
    """[n] positions in the random stream of the key."""
    exponentials: Tensor | None = None
    """[n, K] float32 above 0; the first ones for the blocks, the last 128 inside a block."""


@dataclass(frozen=True)
class RowChanges:
    """Changes of the logits of some of n requests, in this order: edits, masks, penalties."""

    changed: npt.NDArray[np.bool_]
    """[n] rows that are changed; the fields below are ignored for other rows."""
    edits: tuple[Tensor, Tensor] | None = None
    """[n, E] int32 token ids and float32 values to add to their logits."""
    masks: tuple[npt.NDArray[np.int32], Tensor] | None = None
    """[n] index of the row's mask, or -1; [masks, W] int32, a bit for each token that may come."""
    penalties: tuple[Tensor, Tensor] | None = None
    """[n, T] int32 token ids, padded with those outside the vocabulary, and float32 counts."""


class SamplingKernels:
    """The sampling kernels of all dtypes; made by `load_sampling_kernels`."""

    def __init__(self, kernels: CPUKernels) -> None:
        self._of = kernels.of
        self._draw_exponentials = kernels.plain.draw_exponentials
        self.params = tuple(param.name for param in kernels.plain.Param)
        """The parameters of a row as C++ names them, in their order."""

    def supports(self, logits: Tensor) -> bool:
        """Return whether the kernels support these logits: float32 or bfloat16 on the host."""
        return logits.dtype in self._of and logits.is_cpu

    def _readable(self, logits: Tensor) -> Tensor:
        """Check the logits, and return them with dense rows."""
        if not self.supports(logits) or logits.dim() != 2 or logits.shape[1] < 1:
            raise ValueError(
                "logits must be [n, V] float32 or bfloat16 on the host, V at least 1, got "
                f"{logits.dtype} {list(logits.shape)} on {logits.device}"
            )
        return logits if logits.stride(1) == 1 else logits.contiguous()

    def sample(
        self,
        logits: Tensor,
        out: tuple[Tensor, Tensor],
        *,
        rows: Int64Array | None = None,
        params: Tensor | None = None,
        numbers: RowNumbers | None = None,
        changes: RowChanges | None = None,
    ) -> None:
        """Sample one token for each request.

        Args:
            logits: [n, V], supported ones, V at least 1; only read.
            out: [n] and [n] int32 to write to: token ids, always in the vocabulary, and the same
                with -1 for requests whose logits contain NaN or +inf or allow no token.
            rows: [m] the requests to sample, each below n; None: all of them.
            params: [params, n] float32 in the order of `vllm.sample.features.Param`; None: all
                requests are greedy and have no penalty.
            numbers: random values of requests that are not greedy; None: all are greedy.
            changes: changes of the logits before anything else; None: none.

        Raises:
            ValueError: a shape or dtype is wrong.
            MemoryError: there is no scratch memory.
        """
        logits = self._readable(logits)
        n, vocab_size = logits.shape
        kernels = self._of[logits.dtype]
        for written in out:
            _check("out", written, torch.int32, (n,))
        if params is not None:
            _check("params", params, torch.float32, (len(self.params), n))
        args = kernels.SampleArgs(
            logits=logits.data_ptr(),
            rows=_row_address(rows, n),
            params=None if params is None else params.data_ptr(),
            token_ids=out[0].data_ptr(),
            host_ids=out[1].data_ptr(),
            n=n,
            num_rows=n if rows is None else len(rows),
            vocab_size=vocab_size,
            row_stride=logits.stride(0),
        )
        if numbers is not None:
            _fill_numbers(args, numbers, kernels.kVocabBlock)
        if changes is not None:
            _fill_changes(args, changes)
        status = kernels.sample(byref(args), _num_threads())
        if status == _NO_NUMBERS:
            raise ValueError("random sampling needs keys of a random generator, or exponentials")
        if status:
            raise MemoryError(f"not enough memory to sample from {vocab_size} tokens")

    def gather_logprobs(
        self, logits: Tensor, token_ids: Tensor, num_logprobs: int, rows: Int64Array | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather log-probabilities of given tokens and of the most likely ones.

        Args:
            logits: [n, V], supported ones, V at least 1.
            token_ids: [n] the given tokens, int32 or int64.
            num_logprobs: k most likely tokens, at most V; equal ones in order of their ids.
            rows: [m] of the n, each below n, in the order of the result; None: all of them.

        Returns:
            [m, 1 + k] int32 token ids, the given one first; [m, 1 + k] float32 log-probabilities;
            [m] int32 ranks of the given tokens, 1 + the number of tokens with a larger logit.

        Raises:
            ValueError: a shape or dtype is wrong.
            IndexError: a token is not in the vocabulary.
            MemoryError: there is no scratch memory.
        """
        logits = self._readable(logits)
        n, vocab_size = logits.shape
        if num_logprobs < 0:
            raise ValueError(f"num_logprobs must not be negative, got {num_logprobs}")
        given = token_ids
        # Clamped, so that ids beyond int32 stay outside the vocabulary.
        if given.dtype == torch.int64:
            given = given.clamp(-1, vocab_size)
        given = given.int().contiguous()
        _check("token_ids", given, torch.int32, (n,))
        k = min(num_logprobs, vocab_size)
        m = n if rows is None else len(rows)
        ids = torch.empty(m, 1 + k, dtype=torch.int32)
        logprobs = torch.empty(m, 1 + k, dtype=torch.float32)
        ranks = torch.empty(m, dtype=torch.int32)
        kernels = self._of[logits.dtype]
        args = kernels.LogprobArgs(
            logits=logits.data_ptr(),
            rows=_row_address(rows, n),
            token_ids=given.data_ptr(),
            out_ids=ids.data_ptr(),
            out_logprobs=logprobs.data_ptr(),
            out_ranks=ranks.data_ptr(),
            num_rows=m,
            vocab_size=vocab_size,
            row_stride=logits.stride(0),
            num_likeliest=k,
        )
        bad = kernels.gather_logprobs(byref(args), _num_threads())
        if bad >= 0:
            raise IndexError(
                f"token_ids[{bad}] must be a token of the vocabulary of {vocab_size}, got "
                f"{token_ids[bad]}"
            )
        if bad != -1:
            raise MemoryError(f"not enough memory for a vocabulary of {vocab_size} tokens")
        return ids, logprobs, ranks

    def exponentials(
        self, keys: npt.NDArray[np.uint64], positions: Int64Array, count: int
    ) -> npt.NDArray[np.float32]:
        """Compute exponential random values [n, count], as `vllm.sample.random.exponentials_at`
        does.

        The last bits may differ.
        """
        _check_pairs(keys, positions, len(keys))
        out = np.empty((len(keys), count), np.float32)
        self._draw_exponentials(
            _address("keys", keys, np.uint64),
            _address("positions", positions, np.int64),
            len(keys),
            count,
            out.ctypes.data,
            _num_threads(),
        )
        return out


@functools.cache
def load_sampling_kernels() -> SamplingKernels | None:
    """Return the sampling kernels, or None if the library was not built."""
    library = load_cpu_kernels()
    return None if library is None else SamplingKernels(library)


def _fill_numbers(args: Any, numbers: RowNumbers, vocab_block: int) -> None:
    least = args.vocab_size // vocab_block + 1 + vocab_block
    if numbers.exponentials is not None:
        num_draws = numbers.exponentials.shape[-1]
        _check("exponentials", numbers.exponentials, torch.float32, (args.n, num_draws))
        if num_draws < least:
            raise ValueError(f"each request needs at least {least} random numbers, got {num_draws}")
        args.exponentials, args.num_draws = numbers.exponentials.data_ptr(), num_draws
        return
    if numbers.keys is None or numbers.positions is None:
        raise ValueError("random numbers need keys and positions")
    _check_pairs(numbers.keys, numbers.positions, args.n)
    args.keys = _address("keys", numbers.keys, np.uint64)
    args.positions = _address("positions", numbers.positions, np.int64)
    args.num_draws = least


def _fill_changes(args: Any, changes: RowChanges) -> None:
    if len(changes.changed) != args.n:
        raise ValueError(
            f"changed must have one entry for each of the {args.n} requests, got "
            f"{len(changes.changed)}"
        )
    args.changed = _address("changed", changes.changed, np.bool_)
    if changes.edits is not None:
        token_ids, values = changes.edits
        args.num_edits = token_ids.shape[-1]
        _check("token_ids of edits", token_ids, torch.int32, (args.n, args.num_edits))
        _check("values of edits", values, torch.float32, (args.n, args.num_edits))
        args.edit_ids, args.edit_values = token_ids.data_ptr(), values.data_ptr()
    if changes.masks is not None:
        mask_of, words = changes.masks
        args.num_words = words.shape[-1]
        _check("words of masks", words, torch.int32, (len(words), args.num_words))
        if len(mask_of) != args.n or mask_of.max(initial=-1) >= len(words):
            raise ValueError(
                f"mask_of must have one entry for each of the {args.n} requests, got "
                f"{len(mask_of)} for {len(words)} masks"
            )
        if 32 * args.num_words < args.vocab_size:
            raise ValueError(
                f"a mask of {args.num_words} words is too short for {args.vocab_size} tokens"
            )
        args.mask_of, args.mask_words = _address("mask_of", mask_of, np.int32), words.data_ptr()
    if changes.penalties is not None:
        token_ids, counts = changes.penalties
        args.num_penalties = token_ids.shape[-1]
        if args.params is None:
            raise ValueError("params must be given if there are penalties, got None")
        _check("token_ids of penalties", token_ids, torch.int32, (args.n, args.num_penalties))
        _check("counts of penalties", counts, torch.float32, (args.n, args.num_penalties))
        args.penalty_ids, args.penalty_counts = token_ids.data_ptr(), counts.data_ptr()


def _check_pairs(keys: npt.NDArray[np.uint64], positions: Int64Array, num_rows: int) -> None:
    if not len(keys) == len(positions) == num_rows:
        raise ValueError(
            f"keys ({len(keys)}) and positions ({len(positions)}) must have one entry for each of "
            f"the {num_rows} requests"
        )


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name} must be dense {dtype} {list(shape)} on the host, got {x.dtype} "
            f"{list(x.shape)} on {x.device}"
        )


def _row_address(rows: Int64Array | None, n: int) -> int | None:
    address = _address("rows", rows, np.int64)
    if rows is not None and len(rows):
        # One comparison finds negative ids too: as unsigned they are large.
        unsigned = rows.view(np.uint64)
        if unsigned.max() >= n:
            raise ValueError(f"request index {rows[unsigned.argmax()]} must be below {n}")
    return address


def _address(name: str, x: npt.NDArray[Any] | None, dtype: type[np.generic]) -> int | None:
    if x is None:
        return None
    if x.dtype != dtype or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"{name} must be a dense vector of {dtype.__name__}, got {x.dtype}")
    return torch.from_numpy(x).data_ptr()  # takes half the time of x.ctypes.data
