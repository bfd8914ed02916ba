"""A model of the runner, which checks every read of the KV cache.

`FakeRunner` has no access to the scheduler: it follows `SchedulerOutput`s as a worker does. Its KV
cache stores for each slot a hash of everything that determines the content of the slot
(`tests.core.reference`). Each read asserts that it finds the right hash.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from sys import maxsize

import numpy as np

from tests.core.reference import (
    FAILED,
    FAILED_IMAGE,
    VOCAB_SIZE,
    keys_at,
    next_content,
    next_token,
    next_tokens,
    root_content,
)
from vllm.messages import (
    DRAFT_OF_WORKER,
    NULL_BLOCK_ID,
    BlockMoves,
    EngineRequest,
    LogprobRows,
    MediaItem,
    ModelRunnerOutput,
    SchedulerOutput,
)

WRONG = -1
"""Content of slots that depend on an image that could not be encoded."""


def replayed_of(step: SchedulerOutput) -> dict[int, int]:
    """Return batch index -> number of tokens that the recurrent state of the request replays."""
    if step.num_replayed_tokens is None:
        return {}
    return dict(zip(step.rows.tolist(), step.num_replayed_tokens.tolist(), strict=True))


@dataclass
class FakeRow:
    """The state of one request in the runner."""

    spec: EngineRequest
    token_ids: list[int]
    block_ids: list[int]
    """Block table of the request for the first group of layers."""
    more_block_ids: list[list[int]] = field(default_factory=list)
    """Block tables of the request for the other groups of layers."""
    num_computed: int | None = None
    """None until it runs for the first time."""
    contents: list[int] = field(default_factory=list)
    """Right content of each position whose token is known."""
    wrong_from: int = maxsize
    """First position whose content comes of an image that could not be encoded."""
    error: str | None = None
    """Error of the request in each of its steps."""

    @property
    def tables(self) -> list[list[int]]:
        return [self.block_ids, *self.more_block_ids]

    def content(self, position: int) -> int:
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else root_content(self.spec)
            last = len(self.contents)
            keys = keys_at(self.spec, last)
            self.contents.append(next_content(before, self.token_ids[last], keys))
        return self.contents[position]

    def written(self, position: int) -> int:
        """Return the content that the runner writes at a position, right or wrong."""
        return WRONG if position >= self.wrong_from else self.content(position)

    def accept(self, drafts: list[int], token_ids: list[int]) -> None:
        """Replace the drafts by the sampled tokens that are output: up to and including the first
        that differs from its draft.
        """
        count = next((i for i, d in enumerate(drafts) if token_ids[i] != d), len(drafts)) + 1
        num_known = len(self.token_ids) - len(drafts)
        self.token_ids[num_known:] = token_ids[:count]
        self.take_back(num_known - 1 + count)

    def take_back(self, num_tokens: int) -> None:
        """Count only the first `num_tokens` tokens as computed."""
        del self.contents[num_tokens:]
        self.num_computed = num_tokens


def drafts_of(step: SchedulerOutput) -> dict[int, list[int]]:
    """Return batch index -> drafts, for the requests with drafts."""
    if step.num_draft_tokens is None:
        assert step.draft_token_ids is None
        return {}
    assert step.draft_token_ids is not None
    parts = np.split(step.draft_token_ids, np.cumsum(step.num_draft_tokens))
    assert not len(parts[-1])
    pairs = zip(step.rows.tolist(), parts[:-1], strict=True)
    return {row: part.tolist() for row, part in pairs if len(part)}


class FakeRunner:
    """Executes steps against a model of the KV cache.

    Args:
        block_size: tokens per block.
        is_split: one forward pass for the decodes, then one per prefill, as on a device with static
            shapes; False: one forward pass for everything, which writes before it reads.
        fails_at: request id -> number of output tokens after which its sampling fails.
        windows: sliding window of each group of layers.
        stalls_every: one of this many requests with drafts gets no token; 0: all get one.
        reads_tokens: stop further decodes of a step after one that finishes a request; False: run
            all of them, as on a card that keeps the tokens.
        guesses: makes the drafts of the runner, which may be wrong.
        has_states: each request also has a recurrent state, which is a hash of all tokens that it
            has run.
        max_embeddings: largest number of image embeddings that are kept.
        max_encoded: largest number of embeddings that a step with more than one image makes.
        divides: steps with decodes encode parts of images.
        fails_to_encode: returns whether encoding the image with this key fails now; None: no image
            fails.
    """

    def __init__(
        self,
        block_size: int,
        is_split: bool = True,
        fails_at: dict[str, int] | None = None,
        windows: Sequence[int | None] = (None,),
        stalls_every: int = 0,
        reads_tokens: bool = True,
        guesses: random.Random | None = None,
        has_states: bool = False,
        max_embeddings: int = 0,
        max_encoded: int = 0,
        divides: bool = False,
        fails_to_encode: Callable[[str], bool] | None = None,
    ) -> None:
        self.fails_to_encode = fails_to_encode
        self.images: dict[str, int] = {}
        self.begun: dict[str, int] = {}
        """Key of each image that is not whole yet -> its parts that are encoded."""
        self.parts: list[tuple[str, int, int]] = []
        """(key, first, end) of the parts that were encoded."""
        self.max_embeddings, self.max_encoded = max_embeddings, max_encoded
        self.divides = divides
        self.num_encoded = 0
        self.states: dict[int, int | None] = {}
        self.provisional: dict[int, tuple[int, int]] = {}
        """Row -> position of the first token that ran with drafts in its last step, and how many
        tokens ran. Its state has none of them."""
        self.num_replayed = 0
        self.num_kept_of_replays = 0
        self.num_restored = 0
        self.has_states = has_states
        self.guesses = guesses or random.Random(0)
        self.stalls_every = stalls_every
        self.reads_tokens = reads_tokens
        self.num_further_decodes = 0
        self.num_verified = 0
        self.num_moved = 0
        self.num_shortened_behind_windows = 0
        self.block_size = block_size
        self.windows = windows
        self.is_split = is_split
        self.fails_at = fails_at or {}
        self.rows: dict[int, FakeRow] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.last_step_id = -1

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step in the documented order: move, shorten, free, place, add blocks, run."""
        assert step.step_id > self.last_step_id
        self.last_step_id = step.step_id
        if step.block_moves is not None:
            self._move_blocks(step.block_moves)
        for row, num_blocks in step.shortened_tables:
            assert num_blocks < len(self.rows[row].block_ids)
            for table in self.rows[row].tables:
                self.num_shortened_behind_windows += table[0] == NULL_BLOCK_ID
                del table[num_blocks:]
        for row in step.freed_rows:
            del self.rows[row]
        for new in step.new_requests:
            assert new.row not in self.rows, f"row {new.row} is given twice"
            token_ids = new.request.prompt_token_ids + new.output_token_ids
            first, *more = np.array(new.block_ids).reshape(len(self.windows), -1).tolist()
            self.rows[new.row] = FakeRow(new.request, token_ids, first, more)
        num_runs = len([row for row, _ in groupby(step.block_rows.tolist())])
        assert num_runs == len(set(step.block_rows.tolist())), "the blocks of a row are apart"
        block_ids = step.block_ids.reshape(-1, len(self.windows)).tolist()
        for row, of_row in zip(step.block_rows.tolist(), block_ids, strict=True):
            for table, block_id in zip(self.rows[row].tables, of_row, strict=True):
                table.append(block_id)
        for row, index, count in step.passed_blocks:
            self.rows[row].tables[index][:count] = [NULL_BLOCK_ID] * count
        self._check_tables()
        self._restore_states(step)
        self._encode(step)
        begins = step.num_computed_tokens.tolist()
        drafts = drafts_of(step)
        for row, guess in drafts.items():
            if guess[0] == DRAFT_OF_WORKER:
                drafts[row] = self._guess(self.rows[row], len(guess))
            self.rows[row].token_ids += drafts[row]
        outputs: list[ModelRunnerOutput] = []
        replayed = replayed_of(step)
        for index in range(step.num_decodes):
            starts = [begin + index for begin in begins]
            counts = step.num_scheduled_tokens.tolist()
            work = list(zip(step.rows.tolist(), starts, counts, strict=True))
            for launch in self._launches(work):
                self._run(launch)
                if self.has_states:
                    self._run_states(launch, replayed, drafts)
                    self._keep_states(launch, step, replayed, drafts)
            outputs.append(self._sample(step, work, drafts))
            if step.num_decodes > 1 and self._is_last(outputs[-1]):
                break
        return outputs[0] if step.num_decodes == 1 else self._join(step, outputs)

    def _encode(self, step: SchedulerOutput) -> None:
        """Drop and encode images, then check that the step has all embeddings that its tokens
        need.
        """
        for key in step.dropped_media:
            found = self.images.pop(key, None), self.begun.pop(key, None)
            assert found != (None, None) or self.fails_to_encode is not None
        self._check_work(step)
        for row, index, first, end in step.encoded_media:
            item = self.rows[row].spec.media[index]
            assert item.key not in self.images, "an image is encoded twice"
            self._make(self.rows[row], item, range(first, end))
        assert sum(self.images.values()) <= self.max_embeddings
        ends = (step.num_computed_tokens + step.num_scheduled_tokens).tolist()
        for row, start, end in zip(
            step.rows.tolist(), step.num_computed_tokens.tolist(), ends, strict=True
        ):
            for item in self.rows[row].spec.media:
                if item.start < end and item.end > start and item.key not in self.images:
                    assert self.fails_to_encode is not None, "an image is not encoded"
                    self.begun.pop(item.key, None)
                    self._make(self.rows[row], item, range(item.num_parts))

    def _check_work(self, step: SchedulerOutput) -> None:
        """Check that a step does not encode too much: a single image, or with decodes a single
        part of one, may exceed the limit.
        """
        found = [
            (row, index, self.rows[row].spec.media[index], end - first)
            for row, index, first, end in step.encoded_media
        ]
        if not found:
            return
        work = sum(item.num_embeddings * count // item.num_parts for _, _, item, count in found)
        new_rows = {new.row for new in step.new_requests}
        starts = zip(step.rows.tolist(), step.num_computed_tokens.tolist(), strict=True)
        has_decodes = any(
            row not in new_rows and start >= len(self.rows[row].spec.prompt_token_ids)
            for row, start in starts
        )
        # The items that one request needs at the same time are encoded in one step.
        together = {(row, 0 if item.num_states else index) for row, index, item, _ in found}
        num_units = len(together)
        if has_decodes and self.divides:
            num_units = sum(count for *_, count in found)
        assert num_units < 2 or work <= self.max_encoded, "a step encodes too much"

    def _make(self, row: FakeRow, item: MediaItem, parts: range) -> None:
        """Encode parts of an image. Nothing else of a request is encoded after one has failed."""
        if row.error is None and not (self.fails_to_encode and self.fails_to_encode(item.key)):
            if self.begun.pop(item.key, 0) != parts.start:
                assert self.fails_to_encode is not None, "a part is missing"
                return
            self.parts.append((item.key, parts.start, parts.stop))
            if parts.stop < item.num_parts:
                self.begun[item.key] = parts.stop
                return
            self.images[item.key] = item.num_embeddings
            self.num_encoded += 1
            return
        row.error = FAILED_IMAGE
        row.wrong_from = min(row.wrong_from, item.start)

    def _restore_states(self, step: SchedulerOutput) -> None:
        assert self.has_states or (step.restored_states is None and step.kept_states is None)
        new_rows = {new.row for new in step.new_requests}
        self.states.update(dict.fromkeys(new_rows))
        for row in new_rows:
            self.provisional.pop(row, None)
        for row, number in [] if step.restored_states is None else step.restored_states.tolist():
            assert row in new_rows
            self.states[row] = self.states[number]
            if self.states[row] == WRONG:
                self.rows[row].wrong_from = 0
            self.num_restored += 1

    def _run_states(
        self,
        launch: list[tuple[int, int, int]],
        replayed: dict[int, int],
        drafts: dict[int, list[int]],
    ) -> None:
        """Apply the replayed tokens, and then the tokens of the step without drafts, to the state
        of each request.
        """
        for row_id, start, count in launch:
            row, num_replayed = self.rows[row_id], replayed.get(row_id, 0)
            begin = start - num_replayed
            first, most = self.provisional.pop(row_id, (begin, 0))
            assert begin == first and num_replayed <= most, "what is replayed has not run"
            before = row.written(begin - 1) if begin else None
            assert self.states[row_id] == before, f"{row.spec.request_id}: wrong state"
            self.num_replayed += num_replayed
            if row_id in drafts:
                self.provisional[row_id] = start, count
                self.states[row_id] = row.written(start - 1)
            else:
                self.states[row_id] = row.written(start + count - 1)

    def _keep_states(
        self,
        launch: list[tuple[int, int, int]],
        step: SchedulerOutput,
        replayed: dict[int, int],
        drafts: dict[int, list[int]],
    ) -> None:
        kept = [] if step.kept_states is None else step.kept_states.tolist()
        assert len({number for _, _, number in kept}) == len(kept), "a state is written twice"
        for row, place, number in kept:
            for start, count in ((start, n) for row_id, start, n in launch if row_id == row):
                most = 0 if row in drafts else count
                assert -replayed.get(row, 0) < place <= most, "a state that nobody has computed"
                self.states[number] = self.rows[row].written(start + place - 1)
                self.num_kept_of_replays += place <= 0

    def _guess(self, row: FakeRow, count: int) -> list[int]:
        guess = next_tokens(row.spec, row.token_ids, count)
        first_wrong = self.guesses.choice([count, count, 0, self.guesses.randint(0, count)])
        return guess[:first_wrong] + [(t + 1) % VOCAB_SIZE for t in guess[first_wrong:]]

    def _is_last(self, output: ModelRunnerOutput) -> bool:
        """Return whether no further decode follows this one in the step."""
        if output.errors or not self.reads_tokens:
            return self.reads_tokens
        pairs = zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)
        return any(token in self.rows[row].spec.end_token_ids for row, token in pairs)

    def _join(self, step: SchedulerOutput, outputs: list[ModelRunnerOutput]) -> ModelRunnerOutput:
        """Join the outputs of several decodes. A request that fails after its first token keeps the
        tokens before.
        """
        assert (step.num_scheduled_tokens == 1).all()
        self.num_further_decodes += len(outputs) - 1
        counts, token_ids = [], []
        for place, row_id in enumerate(outputs[0].rows.tolist()):
            good = [row_id not in output.errors for output in outputs]
            count = max(1, (*good, False).index(False))
            row = self.rows[row_id]
            num_known = len(row.token_ids) - len(outputs) + count
            row.take_back(num_known - 1)
            del row.token_ids[num_known:]
            counts.append(count)
            token_ids += [int(output.token_ids[place]) for output in outputs[:count]]
        return ModelRunnerOutput(
            step_id=step.step_id,
            rows=outputs[0].rows,
            token_ids=np.array(token_ids, np.int32),
            num_tokens=np.array(counts, np.int32),
            errors=outputs[0].errors,
        )

    def _move_blocks(self, moves: BlockMoves) -> None:
        """Move two blocks at a time, as the message allows."""
        self.num_moved += len(moves.copied)
        places = dict(moves.renamed.tolist())
        assert len({*places, *places.values()}) == 2 * len(places), "a place in two exchanges"
        for row in self.rows.values():
            row.block_ids = [places.get(block_id, block_id) for block_id in row.block_ids]
        copied = moves.copied.tolist()
        for pair in (copied[i : i + 2] for i in range(0, len(copied), 2)):
            read = [
                (target, offset, self.slots.get((source, offset)))
                for source, target in pair
                for offset in range(self.block_size)
            ]
            for target, offset, content in read:
                if content is None:
                    self.slots.pop((target, offset), None)
                else:
                    self.slots[target, offset] = content

    def _launches(self, work: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
        if not self.is_split:
            return [work]
        decodes = [entry for entry in work if entry[2] == 1]
        return [decodes, *([entry] for entry in work if entry[2] > 1)]

    def _run(self, launch: list[tuple[int, int, int]]) -> None:
        written = set()
        for row_id, start, count in launch:
            row = self.rows[row_id]
            known = start if row.num_computed is None else row.num_computed
            assert start == known, f"{row.spec.request_id}: position {start}, not {known}"
            row.num_computed = start + count
            assert row.num_computed <= len(row.token_ids), "a token that nobody has sampled"
            for index, table in enumerate(row.tables):
                for position in range(start, start + count):
                    slot = self._slot(table, position)
                    assert slot[0] != NULL_BLOCK_ID, "a token without a block"
                    assert slot not in written, f"slot {slot} is written twice in a launch"
                    written.add(slot)
                    self.slots[slot] = index, row.written(position)
        for row_id, start, count in launch:
            self._check_reads(self.rows[row_id], start, start + count)

    def _check_reads(self, row: FakeRow, start: int, end: int) -> None:
        for index, (table, window) in enumerate(zip(row.tables, self.windows, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                found = self.slots.get(self._slot(table, position))
                if found == (index, WRONG) and position < start:
                    row.wrong_from = min(row.wrong_from, start)
                elif position < row.wrong_from:
                    assert found == (index, row.content(position)), (
                        f"{row.spec.request_id}: wrong content at position {position}, "
                        f"block {table[position // self.block_size]}"
                    )
        if row.wrong_from < end:
            for index, table in enumerate(row.tables):
                for position in range(max(start, row.wrong_from), end):
                    self.slots[self._slot(table, position)] = index, WRONG

    def _check_tables(self) -> None:
        for row in self.rows.values():
            assert len({len(table) for table in row.tables}) == 1
            for table, window in zip(row.tables, self.windows, strict=True):
                num_null = table.count(NULL_BLOCK_ID)
                assert table[:num_null] == [NULL_BLOCK_ID] * num_null
                assert num_null == 0 or window is not None
            held = [b for table in row.tables for b in table if b != NULL_BLOCK_ID]
            assert len(set(held)) == len(held), "a block twice in the tables of a row"

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        return table[index], offset

    def _sample(
        self,
        step: SchedulerOutput,
        work: list[tuple[int, int, int]],
        drafts: dict[int, list[int]],
    ) -> ModelRunnerOutput:
        token_ids: dict[int, list[int]] = {}
        logprobs: dict[int, LogprobRows] = {}
        prompt_logprobs: dict[int, LogprobRows] = {}
        errors: dict[int, str] = {}
        for row_id, start, count in work:
            row = self.rows[row_id]
            if row.error is not None:
                errors[row_id] = row.error
            params, num_prompt = row.spec.sampling_params, len(row.spec.prompt_token_ids)
            if params.prompt_logprobs is not None:
                positions = range(start, min(start + count, num_prompt - 1))
                if positions:
                    targets = [row.token_ids[position + 1] for position in positions]
                    prompt_logprobs[row_id] = _logprob_rows(targets, list(positions))
            if start + count < len(row.token_ids):
                continue
            guess = drafts.get(row_id, [])
            num_known = len(row.token_ids) - len(guess)
            num_output = num_known - num_prompt
            tokens = self._verify(row, num_known, guess)
            if row.wrong_from < num_known and tokens:
                tokens = [(tokens[0] + 1) % VOCAB_SIZE]
            if not tokens:
                errors[row_id] = FAILED
                tokens = [0]
            elif self._stalls(guess):
                tokens = []
            if params.logprobs is not None and tokens and row_id not in errors:
                positions = range(num_output, num_output + len(tokens))
                logprobs[row_id] = _logprob_rows(tokens, list(positions))
            row.take_back(num_known - 1 + len(tokens))
            row.token_ids[num_known:] = tokens
            token_ids[row_id] = tokens
        counts = [len(tokens) for tokens in token_ids.values()]
        return ModelRunnerOutput(
            step_id=step.step_id,
            rows=np.array(list(token_ids), np.int32),
            token_ids=np.array([t for tokens in token_ids.values() for t in tokens], np.int32),
            num_tokens=None if set(counts) <= {1} else np.array(counts, np.int32),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )

    def _verify(self, row: FakeRow, num_known: int, guess: list[int]) -> list[int]:
        """Return the tokens of a request, up to the first that differs from its draft. Empty if the
        first one fails.
        """
        num_prompt = len(row.spec.prompt_token_ids)
        tokens: list[int] = []
        for draft in [*guess, None]:
            num_output = num_known + len(tokens) - num_prompt
            if self.fails_at.get(row.spec.request_id) == num_output:
                break
            content = row.content(num_known + len(tokens) - 1)
            tokens.append(next_token(row.spec, content, num_output))
            if tokens[-1] != draft:
                break
        return tokens

    def _stalls(self, guess: list[int]) -> bool:
        """Return whether a request gets no token in this step, although it has no error."""
        if not guess:
            return False
        self.num_verified += 1
        return bool(self.stalls_every) and self.num_verified % self.stalls_every == 0


def _logprob_rows(token_ids: list[int], positions: list[int]) -> LogprobRows:
    """Return log-probabilities whose values are the positions, so that a test can identify them."""
    return LogprobRows(
        token_ids=np.array(token_ids, np.int32)[:, None],
        logprobs=-np.array(positions, np.float32)[:, None],
        ranks=np.array(positions, np.int32) + 1,
    )
