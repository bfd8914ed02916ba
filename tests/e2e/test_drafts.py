"""Test drafts on a real engine: outputs are the same as without drafts, whatever a source
guesses.
"""

import random
from collections.abc import Sequence

from tests.e2e.test_random_load import PIECES, is_ahead, random_params  # noqa: F401
from vllm import LLM
from vllm.core.scheduler import Scheduler
from vllm.request import Request

COMMON = {"dtype": "float32", "max_model_len": 256}
FEW_BLOCKS = {"max_num_seqs": 12, "num_gpu_blocks_override": 18, "max_num_batched_tokens": 48}


class OracleSource:
    """A source that knows the outputs of all prompts. Some of its guesses are wrong, or go beyond
    the end.
    """

    max_drafts = 5

    def __init__(self, rng: random.Random, outputs: dict[tuple[int, ...], list[list[int]]]) -> None:
        self.num_right = 0
        self._rng = rng
        self._outputs = outputs

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def leave(self, request: Request) -> None:
        pass

    def _guess(self, request: Request) -> list[int]:
        known = request.output_token_ids
        outputs = self._outputs[tuple(request.spec.prompt_token_ids)]
        right = next((o for o in outputs if o[: len(known)] == known), known)[len(known) :]
        guess = [*right, *(self._rng.randrange(300) for _ in range(5))][: self._rng.randint(0, 5)]
        if guess and self._rng.random() < 0.4:
            guess[self._rng.randrange(len(guess))] = self._rng.randrange(300)
        self.num_right += guess[:1] == right[:1] != []
        return guess


def seen_by_user(output) -> list:
    """Return everything that a user sees, except the last digits of log-probabilities."""
    return [
        (
            list(sample.token_ids),
            sample.text,
            sample.finish_reason,
            sample.stop_reason,
            [[(t, p.rank) for t, p in entries.items()][:1] for entries in sample.logprobs or []],
        )
        for sample in output.outputs
    ]


def test_users_get_the_same_with_drafts_as_without(is_ahead):  # noqa: F811
    rng = random.Random(11)
    prompts = ["".join(rng.choices(PIECES, k=rng.randint(1, 20))) for _ in range(36)]
    params = [random_params(rng) for _ in prompts]
    alone = LLM(async_scheduling=False, num_gpu_blocks_override=200, **COMMON)
    outputs = alone.generate(prompts, params, use_tqdm=False)
    want = [seen_by_user(output) for output in outputs]
    known: dict[tuple[int, ...], list[list[int]]] = {}
    for output in outputs:
        found = known.setdefault(tuple(output.prompt_token_ids), [])
        found += [list(sample.token_ids) for sample in output.outputs]

    llm = LLM(**FEW_BLOCKS, **COMMON)
    engine = llm.llm_engine
    core, source = engine.engine_core, OracleSource(rng, known)
    core.scheduler = Scheduler(core.config.scheduler, core.scheduler.cache, source)
    todo, got = list(range(len(prompts))), {}
    victims = set(rng.sample(todo, 6))
    while todo or engine.has_unfinished_requests():
        for _ in range(min(len(todo), rng.randint(0, 4))):
            index = todo.pop()
            engine.add_request(str(index), prompts[index], params[index])
        if victims and rng.random() < 0.2:
            engine.abort_request(str(rng.choice(sorted(victims))))
        for output in engine.step():
            if output.finished:
                got[int(output.request_id)] = seen_by_user(output)
    assert set(got) >= set(range(len(prompts))) - victims
    for index in set(got) - victims:
        assert got[index] == want[index], (prompts[index], params[index])
    scheduler = core.scheduler
    assert source.num_right > 100
    assert scheduler.num_preemptions and scheduler.stats().num_prefix_hits
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable_blocks
