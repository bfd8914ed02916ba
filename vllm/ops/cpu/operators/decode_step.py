"""A whole step of decodes in one C++ call.

It builds inputs, runs decoder and output head, samples, verifies drafts, and records the new
tokens. It knows only the arrays of the running requests, no requests and no scheduler. The meaning
of these arrays is documented in `vllm.worker.batch.input_batch` and `vllm.sample.state`.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from vllm.messages import IntArray
from vllm.ops.cpu.library import require_cpu_kernels
from vllm.ops.cpu.operators.program import Program
from vllm.ops.lora_weights import AdaptedRows

_WORD_BITS = 32
_num_threads = torch.get_num_threads


@dataclass(frozen=True, kw_only=True)
class RowArrays:
    """The arrays that a step reads and writes, for R requests.

    They are dense and never replaced.
    """

    token_ids: IntArray
    """[R, max_model_len]"""
    num_tokens: IntArray
    """[R] number of known tokens of each request."""
    num_prompt_tokens: IntArray
    """[R] number of prompt tokens of each request."""
    position_offsets: IntArray
    """[R] position minus index of tokens after the prompt."""
    end_tokens: IntArray
    """[R, E] tokens that end a row; -1: none."""
    block_tables: IntArray
    """[G, R, max_blocks], for G groups of layers."""
    item_slots: npt.NDArray[np.int64]
    """[R] address of the slots that the output of each row sees by cross-attention."""
    num_item_slots: IntArray
    """[R] how many; 0: none."""
    features: IntArray
    """[R or more] bits of the sampling features that a row needs."""
    params: npt.NDArray[np.float32]
    """[params, R or more] of the sampler, in the order of `vllm.sample.features.Param`."""
    keys: npt.NDArray[np.uint64]
    """[R or more] keys of random numbers."""
    masks: IntArray
    """[R or more, W] the tokens that each row with a mask may sample after its first token: bit t %
    32 of word t // 32 allows token t."""
    first_times: IntArray
    """[R or more] the first time token of rows with a mask that have rules for time tokens. Their
    masks hold for one decode. For other rows it is not in the vocabulary."""


class FusedDecodeStep:
    """Runs decode steps of one model in one C++ call each.

    The tokens are the same as with separate calls of the decoder, the head and the sampler.

    Keeps the arrays alive, and scratch memory for its largest step. One call at a time.

    Args:
        decoder: decoder from token ids, or from hidden states of another pipeline stage, to hidden
            states.
        head: function from hidden states to logits.
        arrays: arrays of the running requests.
        known_features: the bits of `arrays.features` that a step supports; their values are in
            `arrays.params` and `arrays.keys`.
        random_feature: the bit of requests that do not sample greedily.
        mask_features: the bits of requests that have a mask.
        gives_hidden: `hidden`, and `tapped` of the decoder, are wanted.

    Attributes:
        hidden: output of the decoder for the tokens of the last step, [T, width].
        logits: output of the head for the tokens of the last step that asked for it, [T, V]; -inf
            for tokens that masks forbid. The next step overwrites it.

    Raises:
        ValueError: shapes, dtypes or strides do not fit each other.
        RuntimeError: the kernels are not built.
    """

    def __init__(
        self,
        decoder: Program,
        head: Program,
        arrays: RowArrays,
        *,
        known_features: int,
        random_feature: int,
        mask_features: int = 0,
        gives_hidden: bool = False,
    ) -> None:
        library = require_cpu_kernels("a fused step needs")
        if head.given_width != decoder.width or head.dtype != decoder.dtype:
            raise ValueError(
                f"the output head ({head.dtype}, hidden size {head.given_width}) must have the "
                f"dtype and hidden size of the decoder ({decoder.dtype}, {decoder.width})"
            )
        kernels = library.of[decoder.dtype]
        _check(arrays, decoder.num_groups, len(kernels.Param))
        if mask_features and _WORD_BITS * arrays.masks.shape[1] < head.width:
            raise ValueError(
                f"masks must have a bit for each of the {head.width} tokens, got "
                f"{arrays.masks.shape[1]} words"
            )
        self._decoder, self._head, self._arrays = decoder, head, arrays
        self._step = kernels.decode_step
        self._gives_hidden = gives_hidden
        self.hidden = torch.empty(0, decoder.width, dtype=decoder.dtype)
        self.logits = torch.empty(0, head.width, dtype=head.dtype)
        self._kept_logits = torch.empty(0, head.buffer_width, dtype=head.dtype)
        self._status, self._not_plain = kernels.ProgramStatus, kernels.kNotPlain
        self._scratch_bytes = kernels.decode_step_scratch_bytes
        num_rows, max_tokens = arrays.token_ids.shape
        self._rows = kernels.DecodeStepRows(
            **{name: getattr(arrays, name).ctypes.data for name in _ARRAY_DTYPES},
            num_rows=num_rows,
            max_tokens=max_tokens,
            max_blocks=arrays.block_tables.shape[2],
            num_params=arrays.params.shape[1],
            num_ends=arrays.end_tokens.shape[1],
            num_words=arrays.masks.shape[1],
            known_features=known_features,
            random_feature=random_feature,
            mask_features=mask_features,
        )
        self._launch = kernels.DecodeStepLaunch()
        self._addresses = (
            decoder.address,
            head.address,
            ctypes.addressof(self._rows),
            ctypes.addressof(self._launch),
        )
        self._vectors: IntArray = np.empty((4, 0), np.int32)
        self._token_ids: IntArray = np.empty(0, np.int32)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # Sizes for which scratch memory exists: tokens, decodes, threads.
        self._scratch_for = (0, 0, 0)

    def run(
        self,
        rows: IntArray,
        num_computed: IntArray,
        num_scheduled: IntArray,
        adapted: AdaptedRows | None = None,
        *,
        num_drafts: int = 0,
        num_decodes: int = 1,
        given: torch.Tensor | None = None,
        gives_logits: bool = False,
    ) -> tuple[IntArray, IntArray] | None:
        """Run one step, if every request of it is a plain decode; else return None.

        A plain decode runs the newest token, which is an output token, and its drafts, samples
        after each of them, and uses only supported sampling features. With rules for time tokens it
        has no drafts and is the only decode.

        Args:
            rows: [n] batch indices, none twice.
            num_computed: [n] tokens of each whose keys and values are in the cache.
            num_scheduled: [n] tokens to run: the newest one, and drafts, which follow it in
                `token_ids` and are not counted in `num_tokens`.
            adapted: the adapters of the tokens; None: no request has one.
            num_drafts: number of drafts of all requests.
            num_decodes: how many decodes to run one after another, without drafts. The first that
                finishes a request is the last. Must be 1 with `given`.
            given: [T, given_width of the decoder] hidden states of the T tokens, which a step that
                runs may overwrite; None: the decoder takes token ids.
            gives_logits: `logits` is wanted; num_decodes must then be 1.

        Returns:
            (token_ids, counts): the new tokens, request by request, and [n] their number. With
            drafts these are the sampled tokens up to and including the first that differs from its
            draft, otherwise one token for each decode that has run. They are stored in `token_ids`
            of the requests and counted in `num_tokens`. If logits contain NaN or +inf, the output
            ends before that token; if it is the first token, it is returned as -1 and stored as 0.
            None: a request is not a plain decode, and nothing was done.

        Raises:
            ValueError: the arguments differ in length, or `given` does not fit the decoder.
            IndexError: a token or a block is out of range.
            MemoryError: there is no scratch memory.
            CollectiveError: another rank has failed, or was not ready in time.
        """
        n, num_threads = len(rows), _num_threads()
        if not n == len(num_computed) == len(num_scheduled):
            raise ValueError(
                f"num_computed ({len(num_computed)}) and num_scheduled ({len(num_scheduled)}) "
                f"must have one entry for each request ({n})"
            )
        num_tokens = n + num_drafts
        self._launch.given = self._address_of(given, num_tokens)
        most_tokens, max_decodes, threads = self._scratch_for
        if num_tokens > most_tokens or num_decodes > max_decodes or num_threads != threads:
            self._grow(max(num_tokens, most_tokens), max(num_decodes, max_decodes), num_threads)
        vectors, launch = self._vectors, self._launch
        vectors[0, :n] = rows
        vectors[1, :n] = num_computed
        vectors[2, :n] = num_scheduled
        launch.n, launch.num_tokens, launch.num_decodes = n, num_tokens, num_decodes
        packed = self._decoder.pack_rows(adapted, num_tokens)
        launch.adapted = None if packed is None else packed.address
        taps = None
        if self._gives_hidden:
            width, dtype = self._decoder.buffer_width, self._decoder.dtype
            hidden = torch.empty(num_tokens, width, dtype=dtype)
            taps = self._decoder.take_taps(num_tokens)
            launch.hidden, launch.taps = hidden.data_ptr(), ctypes.addressof(taps)
            self.hidden = hidden[:, : self._decoder.width]
        launch.logits = None
        if gives_logits:
            if num_tokens > len(self._kept_logits):
                self._kept_logits = self._kept_logits.new_empty(num_tokens, self._head.buffer_width)
            launch.logits = self._kept_logits.data_ptr()
            self.logits = self._kept_logits[:num_tokens, : self._head.width]
        status = self._step(*self._addresses, num_threads)
        if status == 0:
            return self._token_ids[: launch.num_new].copy(), vectors[3, :n].copy()
        if status != self._not_plain:
            self._refuse(self._status(status), rows)
        return None

    def _address_of(self, given: torch.Tensor | None, num_tokens: int) -> int | None:
        width = self._decoder.given_width
        shape = None if given is None else given.shape
        if shape != ((num_tokens, width) if width else None):
            raise ValueError(
                f"the hidden states given must be [{num_tokens}, {width}] for this decoder, got "
                f"{shape}"
            )
        if given is None:
            return None
        if given.dtype != self._decoder.dtype or not given.is_contiguous():
            raise ValueError(
                f"hidden states must be contiguous and {self._decoder.dtype}, got {given.dtype} "
                f"with strides {given.stride()}"
            )
        return given.data_ptr()

    @property
    def num_invalid(self) -> int:
        """Number of requests of the last step whose first token is -1 (invalid logits)."""
        return self._launch.num_invalid

    @property
    def num_done(self) -> int:
        """Number of decodes of the last step that have run."""
        return self._launch.num_done

    def _refuse(self, status: Any, rows: IntArray) -> NoReturn:
        if status is self._status.kNoMemory:
            raise MemoryError("not enough memory for a step of decodes")
        for program in (self._decoder, self._head):
            program.check_exchange(status, self._launch.bad_index)
        row, index = int(rows[self._launch.bad_row]), self._launch.bad_token
        arrays = self._arrays
        position = index + arrays.position_offsets[row]
        tables = ", ".join(str(table) for table in arrays.block_tables[:, row].tolist())
        raise IndexError(
            f"{status.name[1:]}: request {row} has the token {arrays.token_ids[row, index]} at "
            f"position {position} and the blocks {tables}"
        )

    def _grow(self, num_tokens: int, num_decodes: int, num_threads: int) -> None:
        """Enlarge the scratch memory for steps of this size."""
        launch = self._launch
        # Arguments are copied into these arrays, whose addresses are read once, because reading the
        # address of an array is slow.
        self._vectors = np.empty((4, num_tokens), np.int32)
        addresses = [vector.ctypes.data for vector in self._vectors]
        launch.rows, launch.num_computed, launch.num_scheduled, launch.counts = addresses
        self._token_ids = np.empty(num_tokens * num_decodes, np.int32)
        launch.token_ids = self._token_ids.ctypes.data
        num_bytes = self._scratch_bytes(*self._addresses[:3], num_tokens, num_decodes, num_threads)
        self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        address = self._scratch.data_ptr()
        launch.scratch = address + -address % 64
        self._scratch_for = num_tokens, num_decodes, num_threads


_ARRAY_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "num_tokens": np.int32,
    "num_prompt_tokens": np.int32,
    "position_offsets": np.int32,
    "end_tokens": np.int32,
    "block_tables": np.int32,
    "item_slots": np.int64,
    "num_item_slots": np.int32,
    "features": np.int32,
    "params": np.float32,
    "keys": np.uint64,
    "masks": np.int32,
    "first_times": np.int32,
}
"""The fields of the struct that are arrays."""
_NUM_DIMS = {"token_ids": 2, "end_tokens": 2, "params": 2, "masks": 2, "block_tables": 3}
"""Dimensions of the arrays that are not vectors."""


def _check(arrays: RowArrays, num_groups: int, num_params: int) -> None:
    num_rows = len(arrays.token_ids)
    if len(arrays.block_tables) < num_groups:
        raise ValueError(
            f"block_tables must have a table for each of the {num_groups} groups, got "
            f"{len(arrays.block_tables)}"
        )
    for name, dtype in _ARRAY_DTYPES.items():
        array = getattr(arrays, name)
        dims = _NUM_DIMS.get(name, 1)
        axis = {"params": 1, "block_tables": 1}.get(name, 0)
        if array.dtype != dtype or array.ndim != dims or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be dense {dtype.__name__} in {dims} dimensions")
        if array.shape[axis] < num_rows or (name == "params" and len(array) != num_params):
            raise ValueError(
                f"{name} must have room for {num_rows} requests, got the shape {list(array.shape)}"
            )
