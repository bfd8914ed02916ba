"""Apply bit masks of the tokens that a request may generate: allowed_token_ids and structured
output.

A mask over a vocabulary of V tokens has W words of 32 bits, token t in bit t % 32 of word t // 32.
The words of a batch are copied to the device and converted to bools there.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.messages import IntArray

WORD_BITS = 32
_ROWS_PER_JOB = 8

RowDrafts = Mapping[int, Sequence[int]]
"""row -> guesses of the next tokens of its request."""


def num_words(vocab_size: int) -> int:
    """Return the number of words W of a mask."""
    return -(-vocab_size // WORD_BITS)


def pack_allowed(token_ids: Sequence[int], vocab_size: int) -> IntArray:
    """Return the mask [W] of the allowed tokens, which must be inside the vocabulary."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, np.uint8)
    bits[np.array(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def bit_values(device: torch.device) -> Tensor:
    """Return [32] int32: the value of each bit of a word."""
    return torch.from_numpy((1 << np.arange(WORD_BITS, dtype=np.int64)).astype(np.int32)).to(device)


@dataclass(frozen=True)
class TokenMasks:
    """Masks for some requests of a batch."""

    rows: npt.NDArray[np.int64]
    """[m] indices into the launch, on the host; the last may be repeated as padding."""
    words: Tensor
    """[m, W] int32 on the device; a bit that is set allows its token."""
    bits: Tensor
    """[32] int32 on the device, of `bit_values`."""
    device_rows: Tensor | None = None
    """[m] int64 `rows` on the device, where they are there already."""

    def select(self, indices: npt.NDArray[np.int64]) -> "TokenMasks | None":
        """Select the masks of requests by indices [k]; the requests are renumbered in this
        order.
        """
        index_of = {row: i for i, row in enumerate(self.rows.tolist())}
        found = [
            (new, index_of[old]) for new, old in enumerate(indices.tolist()) if old in index_of
        ]
        if not found:
            return None
        rows, chosen = np.array(found, np.int64).T
        words = self.words[torch.from_numpy(chosen.copy()).to(self.words.device)]
        return TokenMasks(rows.copy(), words, self.bits)

    def apply(self, logits: Tensor) -> None:
        """Set the logits [n, P] of all tokens that are not allowed to -inf, in place; P is V or
        more.
        """
        if logits.is_cpu:
            self._apply_on_host(logits)
            return
        rows = self.device_rows
        if rows is None:
            rows = torch.from_numpy(self.rows).to(logits.device)
        self.apply_on_card(logits, rows)

    def apply_on_card(self, logits: Tensor, rows: Tensor) -> None:
        """Forbid tokens with index tensors instead of slices: an offset in a slice is a new graph
        on Gaudi, and a write to a slice is a copy.
        """
        forbidden = ((self.words[:, :, None] & self.bits) == 0).flatten(1)
        lacking = logits.shape[-1] - forbidden.shape[-1]
        if lacking < 0:
            forbidden = forbidden[:, : logits.shape[-1]]
        elif lacking:
            # Padding by concatenation, because the device's documented pad operators do not support
            # bool.
            rest = forbidden.new_zeros(len(forbidden), lacking)
            forbidden = torch.cat([forbidden, rest], 1)
        chosen = logits.index_select(0, rows).masked_fill(forbidden, -np.inf)
        logits.index_copy_(0, rows, chosen)

    def _apply_on_host(self, logits: Tensor) -> None:
        """Forbid tokens without temporaries of the size of the logits, which is 20 times faster on
        a CPU.
        """
        forbidden = np.unpackbits((~self.words).numpy().view(np.uint8), axis=1, bitorder="little")
        masks = torch.from_numpy(forbidden).view(torch.bool)[:, : logits.shape[1]]
        if np.array_equal(self.rows, np.arange(len(logits))):
            logits[:, : masks.shape[1]].masked_fill_(masks, -np.inf)
            return
        for row, mask in zip(self.rows.tolist(), masks, strict=True):
            logits[row, : len(mask)].masked_fill_(mask, -np.inf)


class TokenMatcher(Protocol):
    """Follows one output and decides which tokens are allowed next."""

    @property
    def error(self) -> str | None:
        """The reason why the output cannot continue; the request fails with this error. None if it
        can.
        """
        ...

    def fill(self, mask: IntArray) -> None:
        """Write the mask [W] of the next token. Never raises; a failure is stored in `error`."""
        ...

    def fill_along(self, masks: IntArray, drafts: Sequence[int]) -> None:
        """Write the masks [1 + d, W] of the next token, and of the tokens after each of d drafts.

        A mask may allow no token if a draft cannot be accepted. Never raises; a failure is stored
        in `error`.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Add a generated token. Returns at once; `fill` processes it."""
        ...


class MaskFiller:
    """Fills the masks of structured outputs in threads while the device computes.

    Args:
        num_rows: maximum number of requests.
        vocab_size: V.
        num_threads: maximum number of threads.
    """

    def __init__(self, num_rows: int, vocab_size: int, num_threads: int = 1) -> None:
        self._shape = (num_rows, num_words(vocab_size))
        self._num_threads = num_threads
        self._matchers: dict[int, TokenMatcher] = {}
        self._pending: dict[int, Future[None]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._masks: IntArray = np.empty((0, self._shape[1]), np.int32)
        self._behind: dict[int, IntArray] = {}
        """[1 + d, W] masks of rows with d drafts, of the newest launch of each."""

    def __contains__(self, row: int) -> bool:
        return row in self._matchers

    def add(self, row: int, matcher: TokenMatcher) -> None:
        """Set the matcher of a request."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="token-masks")
            self._masks = np.empty(self._shape, np.int32)
        self._matchers[row] = matcher

    def remove(self, row: int) -> None:
        """Remove the matcher of a request, if it has one."""
        self._wait(row)
        self._matchers.pop(row, None)
        self._behind.pop(row, None)

    def accept(self, row: int, token_id: int) -> None:
        """Add a token that a request with a matcher has generated."""
        self._matchers[row].accept(token_id)

    def start(self, rows: IntArray, drafts: RowDrafts | None = None) -> None:
        """Start to fill the masks of these requests, in threads. Requests without a matcher are
        skipped.

        Args:
            rows: batch indices, without repeats.
            drafts: drafts of the requests that have any.
        """
        if not self._matchers:
            return
        assert self._threads is not None
        wanted = [row for row in rows.tolist() if row in self._matchers]
        drafts = drafts or {}
        size = max(_ROWS_PER_JOB, -(-len(wanted) // self._num_threads))
        for start in range(0, len(wanted), size):
            part = wanted[start : start + size]
            try:
                future = self._threads.submit(self._fill, part, drafts)
            except RuntimeError:  # the main thread has ended; `mask` then fills the masks itself
                return
            self._pending.update(dict.fromkeys(part, future))

    def masks(self, row: int, drafts: RowDrafts) -> IntArray:
        """Return the masks [1 + d, W] of a request: of its next token, and after each of its d
        drafts.

        Wait for the masks if their threads were started, else fill them now.
        """
        if row in self._pending:
            self._wait(row)
        else:
            self._fill([row], drafts)
        if row in drafts:
            return self._behind[row]
        return self._masks[row : row + 1]

    def errors(self, rows: IntArray) -> dict[int, str]:
        """Return batch index -> error, for each of these requests whose output cannot continue."""
        if not self._matchers:
            return {}
        found = {row: self._matchers[row].error for row in rows.tolist() if row in self._matchers}
        return {row: error for row, error in found.items() if error is not None}

    def _fill(self, rows: list[int], drafts: RowDrafts) -> None:
        for row in rows:
            own = drafts.get(row)
            if own is None:
                self._matchers[row].fill(self._masks[row])
                continue
            masks = self._behind[row] = np.empty((1 + len(own), self._shape[1]), np.int32)
            self._matchers[row].fill_along(masks, own)

    def _wait(self, row: int) -> None:
        future = self._pending.pop(row, None)
        if future is not None:
            future.result()
