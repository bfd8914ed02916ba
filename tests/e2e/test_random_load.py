"""Test many different requests with a cache that is too small: no request changes the output of
another one.
"""

import random

import pytest

from tests.exhaustive import exhaustive
from tests.reach import executor_of, scheduler_of
from vllm import LLM, SamplingParams
from vllm.engine import engine_core
from vllm.engine.async_scheduling import AsyncSchedulingPolicy
from vllm.executor import uniproc

PIECES = [
    "import os\n",
    "class Node:\n    ",
    "def read(path):\n",
    "# comment\n",
    "x = [1, 2]\n",
    "\n\n",
]


COMMON = {"dtype": "float32", "max_model_len": 256}


def random_params(rng: random.Random) -> SamplingParams:
    params = {"max_tokens": rng.randint(1, 40), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.4:
        params["temperature"] = 0.0
    else:
        params.update(temperature=rng.choice([0.5, 1.0, 1.4]), seed=rng.randrange(1000))
        params.update(rng.choice([{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}]))
        if rng.random() < 0.2:
            params["n"] = 2
    params.update(
        rng.choice(
            [
                {},
                {},
                {"repetition_penalty": 1.2},
                {"presence_penalty": 0.7, "frequency_penalty": 0.3},
                {"stop": ["\n\n", "self"]},
                {"bad_words": ["import"]},
                {"logprobs": 2},
                {"prompt_logprobs": 1},
                {"min_tokens": 1},
                {"logit_bias": {300: 2.0}},
            ]
        )
    )
    return SamplingParams(**params)


def seen_by_user(output) -> list:
    return [
        (list(s.token_ids), s.text, s.finish_reason, s.stop_reason, s.logprobs is None)
        for s in output.outputs
    ]


@pytest.fixture(scope="module")
def requests_alone():
    """Return prompts, their parameters, the output of each in an engine of its own, and the state
    of the generator after this.
    """
    rng = random.Random(5)
    prompts = ["".join(rng.choices(PIECES, k=rng.randint(1, 30))) for _ in range(60)]
    params = [random_params(rng) for _ in prompts]
    alone = LLM(
        async_scheduling=False,
        max_num_seqs=2,
        num_gpu_blocks_override=40,
        enable_prefix_caching=False,
        **COMMON,
    )
    want = [
        seen_by_user(alone.generate(prompt, p, use_tqdm=False)[0])
        for prompt, p in zip(prompts, params, strict=True)
    ]
    return prompts, params, want, rng.getstate()


def count_decodes(engine) -> list[int]:
    """Return a list to which each step appends its number of decodes."""
    found, schedule = [], scheduler_of(engine).schedule

    def scheduled():
        step = schedule()
        found.append(step.num_decodes)
        return step

    scheduler_of(engine).schedule = scheduled
    return found


@pytest.fixture(params=[pytest.param("waits", marks=pytest.mark.exhaustive), "runs ahead"])
def is_ahead(request, monkeypatch):
    """Return whether every step is scheduled before the result of the last one is known."""
    ahead = request.param == "runs ahead"
    monkeypatch.setattr(
        engine_core,
        "AsyncSchedulingPolicy",
        lambda allowed: AsyncSchedulingPolicy(allowed and ahead, 0),
    )
    monkeypatch.setattr(uniproc, "has_core_to_spare", lambda: ahead)
    return ahead


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({"max_num_seqs": 16, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 48}, True),
        exhaustive(
            {
                "max_num_seqs": 64,
                "num_gpu_blocks_override": 400,
                "block_size": 8,
                "max_step_ms": 1,
            },
            False,
        ),
        ({"max_num_seqs": 8, "num_gpu_blocks_override": 200, "num_scheduler_steps": 6}, False),
    ],
)
def test_a_request_gets_the_same_in_a_crowd_as_alone(settings, preempts, is_ahead, requests_alone):
    prompts, params, want, state = requests_alone
    rng = random.Random()
    rng.setstate(state)
    llm = LLM(**settings, **COMMON)
    engine = llm.llm_engine
    num_decodes = count_decodes(engine)
    todo = list(range(len(prompts)))
    rng.shuffle(todo)
    got, victims = {}, set(rng.sample(todo, 10))
    while todo or engine.has_unfinished_requests():
        for _ in range(min(len(todo), rng.randint(0, 6))):
            index = todo.pop()
            engine.add_request(str(index), prompts[index], params[index])
            if index in victims and rng.random() < 0.5:
                engine.abort_request(str(index))
        if victims and rng.random() < 0.2:
            engine.abort_request(str(rng.choice(sorted(victims))))
        for output in engine.step():
            if output.finished:
                got[int(output.request_id)] = seen_by_user(output)

    assert set(got) >= set(range(len(prompts))) - victims
    for index, found in got.items():
        assert found == want[index], (prompts[index], params[index])
    scheduler = scheduler_of(engine)
    assert (scheduler.num_preemptions > 0) == preempts
    assert executor_of(engine).is_asynchronous == is_ahead
    assert (max(num_decodes) > 1) == ("num_scheduler_steps" in settings)
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable_blocks
