"""Test that steps are short while streams wait: prompts get only the tokens that fit the time
limit.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.core.helpers import Result, make_request, make_scheduler, num_scheduled
from tests.exhaustive import seeds
from tests.reach import scheduled_steps_of
from vllm.core.media import EncoderCache
from vllm.core.pacing.step_bound import PromptBudget, StepBound, num_pairs
from vllm.core.pacing.step_time import StepTimes, StepWork
from vllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput

BOUND_S = 0.3
ENGINE = {
    "num_blocks": 400,
    "block_size": 64,
    "max_model_len": 8192,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
}


@dataclass
class Machine:
    """A simulated machine: the time that each of its steps takes, and its clock."""

    base_s: float = 0.05
    request_s: float = 0.001
    token_s: float = 0.002
    pair_s: float = 0.0
    image_s: float = 0.0
    noise: random.Random | None = None
    now: float = 0.0
    times: list[tuple[float, int, bool]] = field(default_factory=list)
    """Of each step: its seconds, its prompt tokens, and whether a stream waited for it."""

    def run(self, step: SchedulerOutput, num_prompts: dict[int, int]) -> None:
        seconds, num_tokens, has_stream = self.base_s, 0, False
        seconds += self.image_s * len(step.encoded_media)
        rows = zip(
            step.rows.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_scheduled_tokens.tolist(),
            strict=True,
        )
        for row, start, count in rows:
            if count > 1:
                num_tokens += count
                seconds += self.token_s * count + self.pair_s * num_pairs(start, count)
            else:
                seconds += self.request_s
                has_stream |= start >= num_prompts[row]
        if self.noise is not None:
            seconds *= self.noise.uniform(0.95, 1.05)
        self.now += seconds
        self.times.append((seconds, num_tokens, has_stream))

    def bounded(self) -> list[float]:
        """Return the seconds of the steps that ran prompts while streams waited."""
        return [seconds for seconds, count, has_stream in self.times if count and has_stream]


class TimedLoop:
    """Runs each step on a simulated machine, which always samples the same token.

    test_any_load checks what steps read and write with a time limit.
    """

    def __init__(self, machine: Machine, bound: StepBound | None, **settings: Any) -> None:
        self.scheduler = make_scheduler(
            **{**ENGINE, **settings}, step_bound=bound, clock=lambda: machine.now
        )
        self.machine = machine
        self.results: dict[str, Result] = {}
        self.steps: list[dict[str, int]] = []
        self.num_encoded = 0

    def add(self, *specs: EngineRequest) -> None:
        for spec in specs:
            self.scheduler.add_request(spec)
            self.results[spec.request_id] = Result()

    def step(self) -> dict[str, int]:
        """Run one step. Returns the tokens that each request got."""
        step = self.scheduler.schedule()
        if not len(step.rows):
            assert not self.scheduler.num_unfinished_requests, "stuck"
            return {}
        self.steps.append(num_scheduled(self.scheduler, step))
        self.num_encoded += len(step.encoded_media)
        num_prompts = dict(enumerate(self.scheduler.running.num_prompt.tolist()))
        self.machine.run(step, num_prompts)
        rows = scheduled_steps_of(self.scheduler)[-1].rows
        output = self.scheduler.update(
            ModelRunnerOutput(
                step_id=step.step_id, rows=rows, token_ids=np.full(len(rows), 5, np.int32)
            )
        )
        for name, token_id in zip(output.request_ids, output.token_ids, strict=True):
            self.results[name].token_ids.append(token_id)
        return self.steps[-1]

    def run(self, max_steps: int = 2000) -> dict[str, Result]:
        """Run steps until no request is left."""
        for _ in range(max_steps):
            if not self.scheduler.num_unfinished_requests:
                return self.results
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")


def with_streams(bound: StepBound | None, machine: Machine | None = None) -> TimedLoop:
    """Return a loop with two requests that generate, after prompts from which the step times are
    known."""
    loop = TimedLoop(machine or Machine(), bound)
    loop.add(make_request("first", 4, 1))
    loop.run()
    loop.add(make_request("a", 600, 3000), make_request("b", 20, 3000))
    for _ in range(4):
        loop.step()
    return loop


def measured(bound_s: float) -> StepBound:
    """Return a bound that has measured the time of a step of 256 tokens."""
    bound = StepBound(bound_s)
    for _ in range(2):
        bound.record(StepWork(256, 0.0, has_decodes=False), 0.55)
    return bound


def test_a_long_prompt_is_divided_so_that_streams_get_a_token_in_time():
    loop = with_streams(StepBound(BOUND_S))
    loop.add(make_request("c", 1500, 4))
    chunks = []
    while not loop.results["c"].token_ids:
        step = loop.step()
        assert step["a"] == step["b"] == 1
        chunks.append(step["c"])
    assert sum(chunks) == 1500
    # The decodes take 0.052 s. The rest of the time bound is enough for about 100 prompt tokens of
    # 2 ms.
    assert all(60 <= count <= 125 for count in chunks[2:-1]), chunks
    assert max(loop.machine.bounded()) <= BOUND_S


def test_a_prompt_runs_at_full_speed_while_nobody_waits_for_a_token():
    loop = TimedLoop(Machine(), StepBound(BOUND_S))
    loop.add(make_request("a", 5000, 4))
    assert [loop.step()["a"] for _ in range(3)] == [2048, 2048, 904]
    loop.run()
    loop.add(make_request("b", 2000, 4), make_request("c", 40, 4))
    assert loop.step() == {"b": 2000, "c": 40}


def test_attention_to_a_long_context_counts():
    loop = with_streams(StepBound(BOUND_S), Machine(pair_s=1e-6))
    loop.add(make_request("c", 7000, 4))
    chunks = []
    while not loop.results["c"].token_ids:
        chunks.append(loop.step()["c"])
    assert sum(chunks) == 7000
    early, late = chunks[5:15], chunks[-11:-1]
    assert sum(late) < 0.5 * sum(early), "a token takes 9 ms at the end instead of 2"
    assert max(loop.machine.bounded()[5:]) <= BOUND_S


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_the_time_of_any_load_stays_below_the_bound_and_every_prompt_ends(seed):
    rng = random.Random(seed)
    machine = Machine(
        base_s=rng.uniform(0.001, 0.15),
        request_s=rng.uniform(0, 0.002),
        token_s=10 ** rng.uniform(-5, -2.3),
        pair_s=rng.choice([0, 10 ** rng.uniform(-8, -6)]),
        noise=rng,
    )
    loop = TimedLoop(machine, StepBound(BOUND_S))
    num_requests = 0
    for _ in range(150):
        if rng.random() < 0.15 and num_requests < 14:
            length = int(10 ** rng.uniform(0.3, 3.6))
            loop.add(make_request(str(num_requests), length, rng.randint(1, 60)))
            num_requests += 1
        loop.step()
    results = loop.run(max_steps=20000)
    assert all(result.token_ids for result in results.values())
    times = [
        (seconds, count)
        for seconds, count, has_stream in machine.times
        if count > 16 and has_stream
    ]
    # In the first steps the scheduler only measures how long a step takes.
    late = [seconds for seconds, _ in times[8:]]
    assert all(seconds <= 1.3 * BOUND_S for seconds in late), max(late)
    assert sum(seconds > BOUND_S for seconds in late) <= 1 + 0.02 * len(late)


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_the_expected_time_of_a_step_is_within_its_bound(seed):
    rng = random.Random(seed)
    times = StepTimes()
    times.record(StepWork(), 9.0)
    times.record(StepWork(), rng.uniform(0, 0.5))
    for _ in range(rng.randint(1, 30)):
        start, count = rng.randrange(8000), rng.randint(2, 2048)
        work = StepWork(count, num_pairs(start, count), rng.random() < 0.7)
        times.record(work, rng.uniform(1e-4, 2))
    least = rng.choice([1, 16])
    budget = PromptBudget(times, BOUND_S, least)
    spent, first = 0.0, None
    for _ in range(5):
        start, wanted = rng.randrange(8000), rng.randint(2, 2048)
        count = budget.most(start, wanted)
        assert 0 <= count <= wanted
        if first is None:
            first = count
            assert count >= min(wanted, least), "a prompt always advances"
        budget.spend(start, count)
        spent += times.prompt_s(count, num_pairs(start, count))
    left = 0.85 * BOUND_S - times.decode_s
    room = max(left, 0.1 * BOUND_S, min(-left, times.decode_s / 2))
    assert spent <= room * (1 + 1e-9) or first <= least


def test_prompts_advance_where_decodes_alone_take_all_of_the_time():
    loop = with_streams(StepBound(BOUND_S), Machine(base_s=0.5))
    loop.add(make_request("c", 400, 4))
    chunks = []
    while not loop.results["c"].token_ids:
        chunks.append(loop.step()["c"])
    assert sum(chunks) == 400
    assert min(chunks[:-1]) >= 15, "a tenth of the bound, or the least"


def test_a_bound_follows_a_machine_that_becomes_slower():
    machine = Machine()
    loop = with_streams(StepBound(BOUND_S), machine)
    loop.add(make_request("c", 1500, 4))
    for _ in range(5):
        loop.step()
    machine.token_s *= 3
    for _ in range(5):
        loop.step()
    machine.times.clear()
    while not loop.results["c"].token_ids:
        loop.step()
    assert max(machine.bounded()) <= BOUND_S
    assert max(machine.bounded()) >= 0.5 * BOUND_S


def test_unknown_times_are_learned_from_few_tokens():
    loop = TimedLoop(Machine(token_s=0.01), StepBound(BOUND_S))
    loop.add(make_request("a", 1, 2000))
    loop.step()
    loop.step()
    loop.add(make_request("b", 700, 4))
    assert loop.step()["b"] == 64
    while not loop.results["b"].token_ids:
        loop.step()
    assert max(loop.machine.bounded()[2:]) <= BOUND_S


def test_the_first_step_of_a_process_says_nothing_about_others():
    machine = Machine(base_s=30)
    loop = TimedLoop(machine, StepBound(BOUND_S))
    loop.add(make_request("a", 5, 1000))
    loop.step()
    machine.base_s = 0.05
    loop.step()
    loop.add(make_request("b", 60, 4))
    assert loop.step()["b"] == 60


@pytest.mark.parametrize("seed", seeds(4, 6))
def test_without_a_bound_and_with_a_far_one_steps_are_the_same(seed):
    def load(bound: StepBound | None) -> list[dict[str, int]]:
        rng = random.Random(seed)
        loop = TimedLoop(Machine(), bound, max_num_batched_tokens=256)
        loop.add(make_request("first", 256, 30))
        for number in range(40):
            if rng.random() < 0.3:
                loop.add(make_request(str(number), rng.randint(1, 900), rng.randint(1, 20)))
            loop.step()
        loop.run()
        return loop.steps

    assert load(None) == load(measured(1e9))
    assert load(None) != load(measured(BOUND_S))


def test_stages_of_a_pipeline_have_a_part_of_the_time():
    whole, half = StepBound(BOUND_S), StepBound(BOUND_S, num_pipelined_steps=2)
    for bound in (whole, half):
        bound.record(StepWork(1, 0.0, False), 1.0)
        bound.record(StepWork(1000, 0.0, False), 1.0)
    counts = [bound.budget().most(0, 10_000) for bound in (whole, half)]
    assert counts[1] == pytest.approx(counts[0] / 2, abs=1)


def test_a_step_with_streams_encodes_the_images_for_which_it_has_time():
    media = EncoderCache(1000, budget=1000)
    loop = TimedLoop(Machine(image_s=0.6 * BOUND_S), StepBound(BOUND_S), media=media)
    images = [(index, 5, f"image {index}") for index in range(0, 40, 10)]
    loop.add(make_request("alone", 60, 200, media=images))
    loop.step()
    assert loop.num_encoded == 4
    images = [(index, 5, f"other image {index}") for index in range(0, 40, 10)]
    loop.add(make_request("later", 60, 4, media=images))
    encoded = []
    while not loop.results["later"].token_ids:
        before = loop.num_encoded
        loop.step()
        encoded.append(loop.num_encoded - before)
    assert sum(encoded) == 4
    assert max(encoded) == 1


def chunks_of_images(image_s: float, most_whole: int | None = None) -> tuple[Machine, list[int]]:
    """Run prompts with images while a request generates.

    Return the machine, and the prompt tokens of each step of the last prompt.
    """
    machine = Machine(image_s=image_s)
    media = EncoderCache(5000, budget=5000, most_whole=most_whole)
    loop = TimedLoop(machine, StepBound(BOUND_S), media=media)
    loop.add(make_request("a", 600, 3000))
    for _ in range(3):
        loop.step()
    chunks: list[int] = []
    for number in range(6):
        name, chunks = f"image {number}", []
        loop.add(make_request(name, 700, 2, media=[(60, 576, name)]))
        machine.times.clear()
        while not loop.results[name].token_ids:
            chunks.append(loop.step().get(name, 0))
    return machine, chunks


def test_a_step_has_the_prompt_tokens_for_which_its_encoder_leaves_time():
    machine, chunks = chunks_of_images(image_s=0.1)
    assert sum(chunks) == 700
    assert max(machine.bounded()) <= BOUND_S
    assert max(machine.bounded()) >= 0.6 * BOUND_S


def test_few_prompt_tokens_run_with_an_encoder_that_takes_all_of_the_time():
    machine, chunks = chunks_of_images(image_s=0.5)
    assert chunks[:2] == [60, 16], "the text before the image, then the image"
    longest, *others = sorted(machine.bounded(), reverse=True)
    assert longest <= 0.5 + machine.base_s + machine.request_s + 16 * machine.token_s + 1e-9
    assert max(others) <= BOUND_S


def test_an_image_that_runs_whole_runs_in_the_step_of_its_encoder():
    _, chunks = chunks_of_images(image_s=0.5, most_whole=600)
    assert chunks[:2] == [60, 576]


def test_an_image_that_runs_whole_is_not_divided():
    media = EncoderCache(1000, budget=1000, most_whole=200)
    loop = TimedLoop(Machine(token_s=0.01), StepBound(BOUND_S), media=media)
    loop.add(make_request("a", 20, 200))
    for _ in range(3):
        loop.step()
    loop.add(make_request("b", 300, 4, media=[(50, 150, "image")]))
    chunks = []
    while not loop.results["b"].token_ids:
        chunks.append(loop.step()["b"])
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    assert 50 in starts and chunks[starts.index(50)] >= 150, chunks
    assert sum(chunks) == 300


def test_a_prompt_that_waits_for_its_image_leaves_the_time_to_others():
    media = EncoderCache(100, budget=100)
    loop = TimedLoop(
        Machine(token_s=0.01), StepBound(BOUND_S), media=media, max_num_partial_prefills=2
    )
    loop.add(make_request("a", 20, 3000))
    for _ in range(3):
        loop.step()
    loop.add(make_request("b", 300, 4, media=[(200, 90, "image")]))
    while not loop.num_encoded:
        loop.step()
    # The image embeddings of b leave no room for the embeddings of c, which is before d in the
    # queue.
    loop.add(make_request("c", 40, 4, media=[(20, 20, "other image")]), make_request("d", 40, 4))
    while not loop.results["b"].token_ids:
        step = loop.step()
        assert sum(step.get(name, 0) for name in "bcd") >= 16, step
    loop.scheduler.abort_requests(["a"])
    assert all(result.token_ids for result in loop.run().values())


@pytest.mark.parametrize("stalls_at", [1, 2, 3, 5])
def test_prompts_advance_after_a_step_that_took_a_minute(stalls_at):
    machine = Machine()
    loop = TimedLoop(machine, StepBound(BOUND_S))
    loop.add(make_request("a", 20, 3000))
    usual = machine.base_s
    for number in range(8):
        machine.base_s = 60.0 if number == stalls_at else usual
        if number == 2:
            loop.add(make_request("b", 4000, 4))
        loop.step()
    chunks = []
    while not loop.results["b"].token_ids:
        chunks.append(loop.step()["b"])
    assert min(chunks[:-1]) >= 16
    assert max(chunks) >= 90, "the stall is forgotten"
    assert len(chunks) < 100
