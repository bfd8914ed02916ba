"""Run recurrent layers on a batch without padding.

A recurrent state cannot return to an earlier token. So a sequence with drafts runs on a copy of its
state, and the layer keeps its inputs. In the next forward pass of the sequence the result is known,
and the layer first replays the inputs of the accepted tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm.attention.state import StateLayer, StateRows, States
from vllm.messages import IntArray
from vllm.utils.ragged import positions_within

_NO_KEPT: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class StateCopies:
    """Copies between the states of running requests and cached states, which are further entries in
    the same tensors.

    Attributes:
        restored: (batch index, cached state) of requests that begin with a cached state.
        kept: position of a request in the batch -> (n, cached state) for states to cache after n of
            its tokens, n ascending; if n is 0 or less, before the last -n of its replayed tokens.
    """

    restored: tuple[tuple[int, int], ...] = ()
    kept: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of_rows(
        cls, rows: IntArray, restored: IntArray | None, kept: IntArray | None
    ) -> "StateCopies":
        """Create the copies for a batch of these requests; `restored` and `kept` as in
        `SchedulerOutput`.
        """
        if restored is None and kept is None:
            return NO_COPIES
        pairs = () if restored is None else tuple((row, kept) for row, kept in restored.tolist())
        by_index: dict[int, list[tuple[int, int]]] = {}
        if kept is not None:
            index_of = {row: index for index, row in enumerate(rows.tolist())}
            for row, count, number in kept.tolist():
                by_index.setdefault(index_of[row], []).append((count, number))
        return cls(pairs, by_index)


NO_COPIES = StateCopies()


@dataclass(frozen=True)
class StateLaunch:
    """The requests of a batch, as the scheduler sends them: decodes, then requests with drafts,
    then prefills. All arrays are on the host.
    """

    rows: IntArray
    """[B] rows of the batch."""
    num_computed_tokens: IntArray
    """[B] 0 for a request that begins."""
    query_start_loc: IntArray
    """[B + 1] the tokens of row b are query_start_loc[b] up to [b + 1]."""
    num_decodes: int
    """The number of rows with one token each."""
    num_drafts: IntArray | None = None
    """[B] drafts of each row; None: no row has any."""
    num_replayed: IntArray | None = None
    """[B] see `SchedulerOutput.num_replayed_tokens`."""
    copies: StateCopies = NO_COPIES

    @property
    def num_drafted(self) -> int:
        """Number of requests with drafts."""
        return 0 if self.num_drafts is None else int(np.count_nonzero(self.num_drafts))


def _state_rows(rows: IntArray, counts: IntArray, device: torch.device) -> StateRows:
    """Return state indices in this order. The numbers of tokens must not ascend."""
    return StateRows(
        torch.from_numpy(rows.astype(np.int64)).to(device),
        torch.zeros(len(rows), dtype=torch.bool, device=device),
        torch.from_numpy(counts.astype(np.int64)).to(device),
        tuple(int((counts > token).sum()) for token in range(int(counts[0]))),
    )


@dataclass(frozen=True)
class Replay:
    """Replays accepted tokens of drafts for B requests, and then copies some of their states to
    cached states.
    """

    rows: StateRows
    tokens: Tensor
    """[B, L] int64 indices of the tokens in the provisional inputs of their rows."""
    launched: Tensor
    """[B * L] int64 a token of the same request in the launch, which has its adapter."""
    kept: tuple[tuple[int, int], ...]
    """(row, kept state)"""

    @classmethod
    def of_launch(cls, launch: StateLaunch, device: torch.device) -> "tuple[Replay, ...]":
        """Create the replays of a batch: for all requests up to where some states are cached, and
        then for the rest of the latter.
        """
        if launch.num_replayed is None:
            return ()
        pieces: list[list[tuple[int, int, int, int | None]]] = []
        """For each replay: index of the row in the launch, first token, end, kept state."""
        for index in np.flatnonzero(launch.num_replayed).tolist():
            begin, end = 0, int(launch.num_replayed[index])
            kept = [(end + n, k) for n, k in launch.copies.kept.get(index, _NO_KEPT) if n <= 0]
            stops: list[tuple[int, int | None]] = [*kept]
            if not kept or kept[-1][0] < end:
                stops.append((end, None))
            for number, (stop, kept_state) in enumerate(stops):
                if number == len(pieces):
                    pieces.append([])
                pieces[number].append((index, begin, stop, kept_state))
                begin = stop
        return tuple(cls._of_pieces(each, launch, device) for each in pieces)

    @classmethod
    def _of_pieces(
        cls,
        pieces: list[tuple[int, int, int, int | None]],
        launch: StateLaunch,
        device: torch.device,
    ) -> "Replay":
        pieces.sort(key=lambda piece: piece[1] - piece[2])
        indices, begins, ends = (np.array(x, np.int32) for x in list(zip(*pieces, strict=True))[:3])
        rows, counts = launch.rows[indices], ends - begins
        tokens = begins[:, None] + np.arange(counts[0], dtype=np.int64)
        launched = np.repeat(launch.query_start_loc[indices].astype(np.int64), counts[0])
        return cls(
            _state_rows(rows, counts, device),
            torch.from_numpy(np.minimum(tokens, ends[:, None] - 1)).to(device),
            torch.from_numpy(launched).to(device),
            tuple(
                (int(launch.rows[index]), number)
                for index, _, _, number in pieces
                if number is not None
            ),
        )

    def run(self, layer: StateLayer) -> None:
        """Run the replayed tokens through a layer, which changes its states."""
        inputs = tuple(x[self.rows.indices[:, None], self.tokens] for x in layer.provisional)
        with layer.of_tokens(self.launched):
            layer.advance_rows(inputs, self.rows, layer.kv_caches)
        for row, number in self.kept:
            _copy_state(layer.kv_caches, row, number)


@dataclass(frozen=True)
class DraftedRows:
    """B requests with drafts, which run on copies of their states."""

    sequences: StateRows
    """Sequences of the copied states."""
    rows: Tensor
    """[B] int64 rows of the batch, in the order of the copies."""
    tokens: Tensor
    """[B, L] int64 indices of their tokens in the launch, padded with the last one."""
    order: Tensor
    """[T] int64 which of the B * L are the tokens of the launch, in its order."""

    @classmethod
    def of_launch(cls, launch: StateLaunch, device: torch.device) -> "DraftedRows | None":
        """Return the requests of a batch that have drafts; None if there are none."""
        num_rows = launch.num_drafted
        if not num_rows:
            return None
        part = slice(launch.num_decodes, launch.num_decodes + num_rows)
        bounds = launch.query_start_loc[part.start : part.stop + 1].astype(np.int64)
        counts = np.diff(bounds)
        sorting = np.argsort(-counts, kind="stable")
        length = int(counts.max())
        rank = np.empty_like(sorting)
        rank[sorting] = np.arange(num_rows)
        tokens = np.minimum(np.arange(length), counts[sorting, None] - 1)
        order = np.repeat(rank * length, counts) + positions_within(counts)
        return cls(
            _state_rows(np.arange(num_rows, dtype=np.int32), counts[sorting], device),
            torch.from_numpy(launch.rows[part][sorting].astype(np.int64)).to(device),
            torch.from_numpy(bounds[:-1][sorting, None] + tokens).to(device),
            torch.from_numpy(order.astype(np.int64)).to(device),
        )

    def run(self, layer: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the tokens of these requests, and keep their inputs for a replay.

        Args:
            layer: layer whose states are only read.
            inputs: [T, ...] each, of the whole batch.

        Returns:
            [T of these requests, ...]
        """
        taken = tuple(x[self.tokens] for x in inputs)
        for memory, x in zip(layer.provisional, taken, strict=True):
            memory[self.rows, : x.shape[1]] = x.to(memory.dtype)
        copies = tuple(cache.index_select(0, self.rows) for cache in layer.kv_caches)
        with layer.of_tokens(self.tokens.flatten()):
            out = layer.advance_rows(taken, self.sequences, copies)
        return out.flatten(0, 1).index_select(0, self.order)


@dataclass(frozen=True)
class RaggedStates:
    """The recurrent states of a batch without padding."""

    launch: StateLaunch
    decodes: StateRows
    """Rows with one token."""
    drafted: DraftedRows | None
    """Rows with drafts."""
    replays: tuple[Replay, ...]
    """Tokens that are run again before the tokens of the forward pass."""

    @classmethod
    def build(cls, launch: StateLaunch, device: torch.device) -> "RaggedStates":
        """Prepare the tensors of a batch on its device."""
        num_decodes = launch.num_decodes
        decode_rows = torch.from_numpy(launch.rows[:num_decodes].astype("int64"))
        is_new = torch.from_numpy(launch.num_computed_tokens[:num_decodes] == 0)
        return cls(
            launch,
            StateRows(decode_rows.to(device), is_new.to(device)),
            DraftedRows.of_launch(launch, device),
            Replay.of_launch(launch, device),
        )

    def run(self, layer: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the tokens of a batch through a layer, from the states of their requests.

        Args:
            layer: layer with the caches.
            inputs: [T, ...] each.

        Returns:
            [T, ...]
        """
        launch, caches, outputs = self.launch, layer.kv_caches, []
        for row, number in launch.copies.restored:
            _copy_state(caches, number, row)
        for replay in self.replays:
            replay.run(layer)
        if num_decodes := launch.num_decodes:
            tokens = tuple(x[:num_decodes, None] for x in inputs)
            with layer.of_tokens(slice(0, num_decodes)):
                outputs.append(layer.advance_rows(tokens, self.decodes, caches)[:, 0])
            for index, kept in launch.copies.kept.items():
                for count, number in kept if index < num_decodes else ():
                    if count > 0:
                        _copy_state(caches, int(launch.rows[index]), number)
        if self.drafted is not None:
            outputs.append(self.drafted.run(layer, inputs))
        for index in range(num_decodes + launch.num_drafted, len(launch.rows)):
            outputs += self._run_prefill(layer, inputs, index)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run_prefill(
        self, layer: StateLayer, inputs: tuple[Tensor, ...], index: int
    ) -> list[Tensor]:
        """Run the tokens of one prompt, in several pieces if states are cached in the middle."""
        launch = self.launch
        start, end = launch.query_start_loc[index : index + 2].tolist()
        row, outputs = int(launch.rows[index]), []
        stored = tuple(cache[row : row + 1] for cache in layer.kv_caches)
        states = stored
        if not launch.num_computed_tokens[index]:
            states = tuple(torch.zeros_like(state) for state in stored)
        kept = [(start + n, number) for n, number in launch.copies.kept.get(index, _NO_KEPT)]
        ends = sorted({stop for stop, _ in kept} | {end})
        for stop in ends:
            with layer.of_tokens(slice(start, stop)):
                piece = tuple(x[None, start:stop] for x in inputs)
                out, states = layer.advance(piece, None, states)
            outputs.append(out[0])
            for position, number in kept:
                if position == stop:
                    for cache, state in zip(layer.kv_caches, states, strict=True):
                        cache[number].copy_(state[0])
            start = stop
        for cache, state in zip(stored, states, strict=True):
            cache.copy_(state)
        return outputs


def _copy_state(caches: States, source: int, target: int) -> None:
    """Copy a state from one index to another."""
    for cache in caches:
        cache[target].copy_(cache[source])
