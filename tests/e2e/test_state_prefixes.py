"""Test that cached prefixes and drafts of models with recurrent state change no token, in any
batch.
"""

import random
from typing import Any

import pytest

from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.lora_files import write_adapter
from tests.reach import executor_of, stats_of
from tests.tiny_models import STATE_FAMILIES
from vllm import LLM, SamplingParams
from vllm.core.drafting.lookup_drafts import NgramDrafts
from vllm.lora.request import LoRARequest
from vllm.request import Request

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 160,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 40,
    "block_size": 16,
    "kv_cache_memory_bytes": 2**27,
}
EXHAUSTIVE = pytest.mark.exhaustive


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 4000) for _ in range(count)]


def run_random_load(
    llm: LLM, adapters: list[LoRARequest], seen: dict[tuple[int, ...], list[int]] | None = None
) -> tuple[list[list[int]], int]:
    """Run requests that share documents, and their follow-up turns, with salts and adapters.

    Args:
        llm: the engine.
        adapters: adapters of some of the requests.
        seen: receives the longest output of each prompt, with any adapter.

    Returns:
        The tokens of each output, and the number of prompt tokens that were found in the cache.
    """
    rng = random.Random(5)
    documents = [_random_tokens(rng, rng.randrange(16, 60)) for _ in range(3)]
    choices = [None, *adapters]
    tokens: list[list[int]] = []
    num_cached = 0
    for _ in range(2):
        turn = []
        for _ in range(7):
            document = rng.choice(documents)
            prompt = document[: rng.randrange(1, len(document) + 1)]
            prompt = prompt + _random_tokens(rng, rng.choice([0, 0, 1, 3, 20]))
            turn.append((prompt, rng.choice([None, None, "salt"]), rng.choice(choices)))
        for _ in range(2):
            lengths = [rng.choice([1, 2, 5, 17, 33]) for _ in turn]
            outputs = llm.generate(
                [
                    {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
                    for prompt, salt, _ in turn
                ],
                [SamplingParams(temperature=0, max_tokens=n, detokenize=False) for n in lengths],
                use_tqdm=False,
                lora_request=[adapter for *_, adapter in turn] if adapters else None,
            )
            found = [list(output.outputs[0].token_ids) for output in outputs]
            tokens += found
            for (prompt, *_), output in zip(turn, found, strict=True) if seen is not None else ():
                seen[tuple(prompt)] = max(seen.get(tuple(prompt), []), output, key=len)
            num_cached += sum(output.num_cached_tokens or 0 for output in outputs)
            turn = [
                ((prompt + output + _random_tokens(rng, 1))[:110], salt, adapter)
                for (prompt, salt, adapter), output in zip(turn, found, strict=True)
            ]
    return tokens, num_cached


@pytest.mark.parametrize(
    ("family", "settings", "modules"),
    [
        ("bamba", {"num_scheduler_steps": 4}, ("in_proj", "o_proj")),
        pytest.param("bamba", {"tensor_parallel_size": 2}, (), marks=EXHAUSTIVE),
        pytest.param("qwen3_next", {"tensor_parallel_size": 2}, (), marks=EXHAUSTIVE),
        pytest.param("bamba", {"pipeline_parallel_size": 2}, (), marks=EXHAUSTIVE),
        # one of the stages has attention layers only
        pytest.param("bamba", {"pipeline_parallel_size": 4}, (), marks=EXHAUSTIVE),
        pytest.param("qwen3_next", {"max_num_seqs": 1}, (), marks=EXHAUSTIVE),
        pytest.param("mamba", {"long_prefill_token_threshold": 1}, (), marks=EXHAUSTIVE),
        pytest.param("mamba", {"num_kept_states": 3}, ("out_proj",), marks=EXHAUSTIVE),
        pytest.param("bamba", {"num_gpu_blocks_override": 14}, (), marks=EXHAUSTIVE),
        *(pytest.param(family, {}, (), marks=EXHAUSTIVE) for family in STATE_FAMILIES),
    ],
)
def test_prefixes_change_no_token(family, settings, modules, models, tmp_path):
    folder = str(models(family))
    adapters = [
        LoRARequest(f"adapter{n}", n, str(write_adapter(tmp_path / str(n), folder, n, 8, modules)))
        for n in ((1, 2) if modules else ())
    ]
    asked = SETTINGS | settings | ({"enable_lora": True, "max_loras": 2} if modules else {})
    results = []
    for is_on in (False, True):
        llm = LLM(folder, **asked, enable_prefix_caching=is_on)
        results.append(run_random_load(llm, adapters))
        executor_of(llm).shutdown()
    (want, _), (found, num_cached) = results
    assert num_cached > 100
    assert found == want


ON_CARD = [
    pytest.param(*case, marks=[] if case == ("bamba", "HPU graphs") else EXHAUSTIVE)
    for case in [
        *(("bamba", mode) for mode in MODES),
        *((family, "lazy") for family in STATE_FAMILIES if family != "bamba"),
    ]
]


@pytest.mark.parametrize(("family", "mode"), ON_CARD)
def test_the_simulated_card_finds_prefixes_and_compiles_nothing(family, mode, models):
    folder, asked = str(models(family)), SETTINGS | {"num_gpu_blocks_override": 80}
    llm = LLM(folder, **asked, enable_prefix_caching=False)
    want, _ = run_random_load(llm, [])
    executor_of(llm).shutdown()
    lazy, is_eager = MODES[mode]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **FEW_BUCKETS) as bridge:
        llm = LLM(folder, **asked, enforce_eager=is_eager)
        before = bridge.counters().compilations
        found, num_cached = run_random_load(llm, [])
        assert bridge.counters().compilations == before
        assert stats_of(llm).num_prefix_hits == num_cached > 100
    assert found == want


def draft_what_was_seen(seen: dict[tuple[int, ...], list[int]], most: int) -> Any:
    """Return `NgramDrafts.propose_for` with some right drafts, followed by wrong ones."""
    rng = random.Random(3)

    def propose(source: NgramDrafts, request: Request) -> list[int]:
        prompt, num_output = request.spec.prompt_token_ids, len(request.output_token_ids)
        right = seen[tuple(prompt)][num_output:][: rng.randint(0, most)]
        return right + [rng.randrange(3, 4000)] * rng.randint(0, most - len(right))

    return propose


def guess_what_a_load_says(folder, modules, most, tmp_path, monkeypatch):
    """Run the random load without drafts; from then on, n-grams guess its outputs.

    Returns:
        its outputs, its adapters, and the arguments of an engine with such drafts.
    """
    adapters = [
        LoRARequest(f"adapter{n}", n, str(write_adapter(tmp_path / str(n), folder, n, 8, modules)))
        for n in ((1, 2) if modules else ())
    ]
    seen: dict[tuple[int, ...], list[int]] = {}
    monkeypatch.setattr(NgramDrafts, "propose_for", draft_what_was_seen(seen, most))
    asked = SETTINGS | ({"enable_lora": True, "max_loras": 2} if modules else {})
    llm = LLM(folder, **asked, enable_prefix_caching=False)
    want, _ = run_random_load(llm, adapters, seen)
    executor_of(llm).shutdown()
    drafts = {"method": "ngram", "num_speculative_tokens": most, "adaptive": False}
    return want, adapters, asked | {"speculative_config": drafts}


@pytest.mark.parametrize(
    ("family", "settings", "modules"),
    [
        ("bamba", {}, ("in_proj", "o_proj")),
        ("qwen3_next", {"num_gpu_blocks_override": 14}, ()),
        ("lfm2", {"enable_prefix_caching": False}, ()),
        pytest.param("mamba", {"num_kept_states": 3}, ("out_proj",), marks=EXHAUSTIVE),
        pytest.param("bamba", {"tensor_parallel_size": 2}, (), marks=EXHAUSTIVE),
        pytest.param("mamba", {"tensor_parallel_size": 2}, (), marks=EXHAUSTIVE),
        pytest.param("kimi_linear", {"tensor_parallel_size": 2}, (), marks=EXHAUSTIVE),
        # one of the stages has attention layers only
        pytest.param("bamba", {"pipeline_parallel_size": 4}, (), marks=EXHAUSTIVE),
        *(pytest.param(family, {}, (), marks=EXHAUSTIVE) for family in STATE_FAMILIES),
    ],
)
def test_drafts_change_no_token(family, settings, modules, models, tmp_path, monkeypatch):
    folder = str(models(family))
    want, adapters, asked = guess_what_a_load_says(folder, modules, 5, tmp_path, monkeypatch)
    llm = LLM(folder, **asked | settings)
    found, num_cached = run_random_load(llm, adapters)
    stats = stats_of(llm).drafts
    executor_of(llm).shutdown()
    assert found == want
    assert bool(num_cached) == settings.get("enable_prefix_caching", True)
    assert 100 < sum(stats.accepted) < stats.num_draft_tokens


@pytest.mark.parametrize(
    ("family", "mode", "settings", "modules"),
    [
        ("bamba", "HPU graphs", {}, ("in_proj", "o_proj")),
        pytest.param("qwen3_next", "torch.compile", {}, (), marks=EXHAUSTIVE),
        pytest.param("mamba", "lazy", {"num_kept_states": 3}, ("out_proj",), marks=EXHAUSTIVE),
        pytest.param("lfm2", "eager", {"enable_prefix_caching": False}, (), marks=EXHAUSTIVE),
        *(pytest.param(family, "lazy", {}, (), marks=EXHAUSTIVE) for family in STATE_FAMILIES),
    ],
)
def test_drafts_change_no_token_on_a_card(
    family, mode, settings, modules, models, tmp_path, monkeypatch
):
    folder = str(models(family))
    want, adapters, asked = guess_what_a_load_says(folder, modules, 3, tmp_path, monkeypatch)
    lazy, is_eager = MODES[mode]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **FEW_BUCKETS) as bridge:
        llm = LLM(folder, **asked | settings, enforce_eager=is_eager)
        before = bridge.counters().compilations
        found, num_cached = run_random_load(llm, adapters)
        assert bridge.counters().compilations == before
        stats = stats_of(llm).drafts
    assert found == want
    assert bool(num_cached) == settings.get("enable_prefix_caching", True)
    assert 100 < sum(stats.accepted) < stats.num_draft_tokens
