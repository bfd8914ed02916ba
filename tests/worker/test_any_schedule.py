"""Test that every step of the scheduler becomes correct forward passes, in any configuration.

Scheduler, batch arrays, planner and packing run without a model. The configurations are so small
that prompts and decodes exceed their buckets, blocks run out, and prefixes are found. Some engines
verify drafts, which are right, wrong or in between. In 44,000 steps, each forward pass must have a
bucket of the catalog; in a few thousand more, the test also checks what each one reads.
"""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.core.fake_runner import FakeRow, drafts_of
from tests.core.helpers import make_request
from tests.core.reference import GuessSource, expected_result, next_token, root_content
from tests.exhaustive import exhaustive
from tests.worker.fake_card import FakeCard, RowRun
from tests.worker.hpu_helpers import (
    entries,
    input_sizes,
    joined,
    random_plan,
    run_load,
    warmed_shapes,
)
from vllm.attention.backends.hpu_metadata import count_decode_blocks
from vllm.bucketing import Phase
from vllm.bucketing.bucket import Bucket
from vllm.core import scheduler
from vllm.messages import NULL_BLOCK_ID, IntArray, SchedulerOutput
from vllm.planning.replay import ScheduleLoop, sampled_rows
from vllm.request import Request
from vllm.worker.hpu.launches.planner import PaddedLaunch

NUM_SEEDS = 4
NUM_ENGINES = 125
STEPS_PER_ENGINE = 100
DRAFT_STEPS_PER_ENGINE = 50
"""Of an engine that verifies drafts, as about a quarter of them do: 44,000 steps in all."""


@pytest.fixture(autouse=True)
def silent_preemptions(monkeypatch):
    monkeypatch.setattr(scheduler.logger, "disabled", True)


# ---- every batch has a bucket --------------------------------------------------------------------


class AnyTokens:
    """Makes random guesses, some of which are longer than allowed.

    Args:
        rng: random generator.
        max_drafts: maximum number of drafts of a request.
    """

    def __init__(self, rng: random.Random, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._rng = rng

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return random drafts for each request; none for some of them."""
        most = self.max_drafts + 1
        return [self._rng.choices(range(4), k=self._rng.randint(0, most)) for _ in requests]

    def leave(self, request: Request) -> None:
        """Do nothing: this source stores nothing about a request."""


class BucketChecker:
    """Checks the forward passes of each step of one engine against its catalog.

    Args:
        rng: random generator for configuration and load.
        folder: folder for bucket files.
        seen: counts what occurred.
    """

    def __init__(self, rng: random.Random, folder: Path, seen: Counter[str]) -> None:
        config, self.num_blocks, self.plan = random_plan(rng, folder)
        self.rng = rng
        self.seen = seen
        self.size = config.cache.block_size
        max_drafts = config.scheduler.max_draft_tokens
        self.takes_drafts = max_drafts > 0
        source = AnyTokens(rng, max_drafts) if self.takes_drafts else None
        depth = rng.choice([0, 1])
        self.loop = ScheduleLoop(config, self.num_blocks, self.plan, depth, source)

    def run(self) -> None:
        """Run one load."""
        num_steps = DRAFT_STEPS_PER_ENGINE if self.takes_drafts else STEPS_PER_ENGINE
        run_load(self.rng, self.loop, num_steps, self.run_step)
        self.seen["preemption"] += self.loop.scheduler.num_preemptions

    def run_step(self, step: SchedulerOutput, launches: list[PaddedLaunch]) -> list[int]:
        """Check the forward passes of a step; return random tokens as its result."""
        work = entries(launches)
        arrays = (step.rows, step.num_computed_tokens, step.num_scheduled_tokens)
        asked = list(zip(*(array.tolist() for array in arrays), strict=True))
        assert joined(work) == asked, "not exactly the rows and tokens of the step, in their order"
        assert all(len(launch.rows) for launch in launches), "a launch of nothing"
        phases = [launch.bucket.phase for launch in launches]
        assert phases == sorted(phases, reverse=True), "decodes go before prefills"
        self.seen["prompt in pieces"] += len(work) > len(asked)
        self.seen["decodes in parts"] += phases.count(Phase.DECODE) > 1
        sampled = []
        for launch in launches:
            sampled += launch.rows[self.check_launch(launch)].tolist()
        rows = sampled_rows(step, self.loop.batch)
        assert sampled == rows.tolist(), "a row samples once, where its tokens end"
        self.loop.inputs.mark_sampled(rows)
        drafts = drafts_of(step)
        if not drafts:
            return self.rng.choices(range(4), k=len(rows))
        self.seen["drafts"] += 1
        token_ids = []
        for row in rows.tolist():
            right = drafts.get(row, [])
            right = right[: self.rng.randint(0, len(right))]
            num_others = len(drafts.get(row, ())) + 1 - len(right)
            token_ids += right + self.rng.choices(range(4), k=num_others)
        return token_ids

    def check_launch(self, launch: PaddedLaunch) -> IntArray:
        """Check that the bucket is in the catalog and large enough, and that the packed input
        agrees with it.
        """
        bucket, limits = launch.bucket, self.plan.limits
        assert bucket in self.plan.catalog, f"{bucket} is nobody's"
        shapes = warmed_shapes(bucket, limits, self.loop.merged_prompts)
        assert launch.shape in shapes, f"{launch.shape} is not warmed up"
        is_decode = bucket.phase is Phase.DECODE
        needed = self._decode_needs(launch) if is_decode else self._prefill_needs(launch)
        assert bucket.covers(needed), f"{bucket} for {needed}"
        packed, sampled = self.loop.inputs.pack(launch)
        assert packed.dtype == np.int32
        assert packed.shape == (sum(input_sizes(launch.shape)),)
        return sampled

    def _prefill_needs(self, launch: PaddedLaunch) -> Bucket:
        count, contexts = len(launch.rows), -(-launch.num_computed_tokens // self.size)
        self.seen["prompts merged" if launch.merged_prompts else "prompts together"] += count > 1
        if launch.merged_prompts:
            assert count <= launch.merged_prompts
            tokens = int(launch.num_scheduled_tokens.sum())
            return Bucket(Phase.PREFILL, 1, tokens, int(contexts.sum()))
        return Bucket(
            Phase.PREFILL, count, int(launch.num_scheduled_tokens.max()), int(contexts.max())
        )

    def _decode_needs(self, launch: PaddedLaunch) -> Bucket:
        num_drafts = launch.num_drafts if launch.num_drafts is not None else 0
        assert (launch.num_scheduled_tokens - num_drafts == 1).all()
        seq_lens = launch.num_computed_tokens + launch.num_scheduled_tokens
        tables = self.loop.batch.block_table[launch.rows]
        counts = count_decode_blocks(tables, seq_lens, self.size)
        self.seen["shared blocks"] += counts.shared > 0
        blocks = counts.references
        if self.plan.limits.contiguous_pa:
            self.seen["slice" if launch.is_contiguous else "no slice"] += 1
        if launch.is_contiguous:
            assert self.plan.limits.contiguous_pa
            assert launch.bucket.blocks <= self.num_blocks, "a slice beyond the cache"
            assert counts.shared <= launch.shape.num_shared
            blocks = counts.span
        query_len = int(launch.num_scheduled_tokens.max())
        return Bucket(Phase.DECODE, len(launch.rows), query_len, blocks)


@pytest.mark.parametrize(
    ("seed", "num_engines"),
    [(1, NUM_ENGINES // 3), *(exhaustive(seed, NUM_ENGINES) for seed in range(NUM_SEEDS))],
)
def test_every_launch_of_any_schedule_has_a_bucket(seed, num_engines, tmp_path):
    rng, seen = random.Random(seed), Counter[str]()
    for _ in range(num_engines):
        BucketChecker(rng, tmp_path, seen).run()
    for event in (
        "preemption",
        "prompt in pieces",
        "prompts together",
        "prompts merged",
        "decodes in parts",
        "shared blocks",
        "slice",
        "no slice",
        "drafts",
    ):
        assert seen[event] >= 5, f"{event} hardly ever happened: {seen}"


# ---- every forward pass reads and writes only the slots of its own requests ----------------------


class CardChecker:
    """Runs the forward passes of one engine on a card, and checks the reads and writes of each
    request.

    Args:
        rng: random generator for configuration and load.
        folder: folder for bucket files.
    """

    def __init__(self, rng: random.Random, folder: Path) -> None:
        config, num_blocks, plan = random_plan(rng, folder)
        self.rng = rng
        self.size = config.cache.block_size
        max_drafts = config.scheduler.max_draft_tokens
        source = GuessSource(rng, max_drafts) if max_drafts else None
        self.loop = ScheduleLoop(config, num_blocks, plan, rng.choice([0, 1]), source)
        root = root_content(make_request())
        self.card = FakeCard(num_blocks, self.size, config.scheduler.max_num_seqs, root)
        self.rows: dict[int, FakeRow] = {}

    def run(self) -> None:
        """Run one load to its end, and check that each request gets the tokens that it gets without
        other requests.
        """
        requests = run_load(self.rng, self.loop, STEPS_PER_ENGINE, self.run_step)
        while self.loop.scheduler.num_unfinished_requests:
            self.loop.step(self.run_step)
        for name, request in requests.items():
            result = self.loop.token_ids[name], self.loop.finished[name]
            assert result == expected_result(request)

    def run_step(self, step: SchedulerOutput, launches: list[PaddedLaunch]) -> list[int]:
        """Run the forward passes; return the tokens that follow from what they read."""
        for row_id, num_blocks in step.shortened_tables:
            del self.rows[row_id].block_ids[num_blocks:]
        for new in step.new_requests:
            token_ids = new.request.prompt_token_ids + new.output_token_ids
            self.rows[new.row] = FakeRow(new.request, token_ids, list(new.block_ids))
            self.card.forget(new.row)
        for row, block_id in zip(step.block_rows.tolist(), step.block_ids.tolist(), strict=True):
            self.rows[row].block_ids.append(block_id)
        drafts = drafts_of(step)
        for row_id, guess in drafts.items():
            self.rows[row_id].token_ids += guess
        sampled: dict[int, list[int]] = {}
        for launch in launches:
            sampled.update(self.run_launch(launch))
        for row_id, token_ids in sampled.items():
            self.rows[row_id].accept(drafts.get(row_id, []), token_ids)
        rows = sampled_rows(step, self.loop.batch).tolist()
        return [token_id for row_id in rows for token_id in sampled[row_id]]

    def run_launch(self, launch: PaddedLaunch) -> dict[int, list[int]]:
        """Run a forward pass. Return the sampled tokens of each request that has any: one, and one
        after each draft.
        """
        packed, indices = self.loop.inputs.pack(launch)
        runs = self.card.run(packed, launch.shape)
        written: list[int] = []
        for entry, run in zip(entries([launch]), runs, strict=False):
            written += self.check_row(run, *entry)
        assert len(set(written)) == len(written), "a slot is written twice"
        padding = [slot for run in runs for slot in run.slots if slot not in set(written)]
        assert all(slot // self.size == NULL_BLOCK_ID for slot in padding)
        assert not any(run.visible for run in runs[len(launch.rows) :]), "padding reads"
        sampled = {}
        for index in indices.tolist():
            row, run = self.rows[int(launch.rows[index])], runs[index]
            num_drafts = 0 if launch.num_drafts is None else int(launch.num_drafts[index])
            end, num_prompt = len(row.token_ids), len(row.spec.prompt_token_ids)
            sampled[int(launch.rows[index])] = [
                next_token(row.spec, run.contents[position - 1], position - num_prompt)
                for position in range(end - num_drafts, end + 1)
            ]
        self.card.keep(packed, launch.shape, {row: ids[0] for row, ids in sampled.items()})
        self.loop.inputs.mark_sampled(launch.rows[indices])
        return sampled

    def check_row(self, run: RowRun, row_id: int, start: int, count: int) -> list[int]:
        """Check that a request sees exactly its own tokens; return the slots that it writes."""
        row, end = self.rows[row_id], start + count
        slots = [self._slot(row, position) for position in range(end)]
        assert run.token_ids[:count] == row.token_ids[start:end]
        assert run.positions[:count] == list(range(start, end))
        assert run.slots[:count] == slots[start:]
        assert run.visible == dict(enumerate(slots))
        assert run.contents == {position: row.content(position) for position in range(end)}
        return run.slots[:count]

    def _slot(self, row: FakeRow, position: int) -> int:
        index, offset = divmod(position, self.size)
        return row.block_ids[index] * self.size + offset


@pytest.mark.parametrize(
    ("seed", "num_engines"),
    [(0, NUM_ENGINES // 8), *(exhaustive(seed, NUM_ENGINES // 4) for seed in (0, 1))],
)
def test_every_launch_reads_and_writes_what_is_its_own(seed, num_engines, tmp_path):
    rng = random.Random(seed)
    for _ in range(num_engines):
        CardChecker(rng, tmp_path).run()
