"""Two simulated cards, each a process, give the tokens of the CPU. Strict mode."""

import pytest

from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, simulated_hpu
from tests.quantized_checkpoints import write
from tests.tiny_models import ALL_FAMILIES, make_tiny_model
from vllm import LLM, SamplingParams, envs

PROMPTS = [{"prompt_token_ids": list(range(20, 20 + n))} for n in (1, 7, 18, 40, 90)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_moe", {"enable_expert_parallel": True}),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.exhaustive),
        pytest.param("llama", {}, marks=pytest.mark.exhaustive),
        pytest.param("gptq-4", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_two_cards_give_the_tokens_of_the_cpu(name, settings, tmp_path, monkeypatch):
    is_family = name in ALL_FAMILIES
    folder, dense = (make_tiny_model(name, tmp_path),) * 2 if is_family else write(name, tmp_path)
    settings = SMALL_ENGINE | {"skip_tokenizer_init": True} | settings
    want = tokens_of(LLM(str(dense), device="cpu", **settings))
    for name, value in envs.rank_variables(0, 1).items():
        monkeypatch.setenv(name, value)  # an engine sets them; they are put back afterwards
    with simulated_hpu(
        PT_HPU_LAZY_MODE=1, PT_HPU_ENABLE_LAZY_COLLECTIVES=True, **FEW_BUCKETS
    ) as bridge:
        llm = LLM(
            str(folder),
            device="hpu",
            tensor_parallel_size=2,
            worker_extension_cls="tests.executor.late_compilations.LateCompilations",
            **settings,
        )
        executor = llm.llm_engine.engine_core.executor
        compilations = bridge.counters().compilations
        assert tokens_of(llm) == want
        assert bridge.counters().compilations == compilations
        assert bridge.counters().graph_replays
        assert executor.collective_rpc("late_compilations") == [0, 0]
        executor.shutdown()


def test_a_card_of_one_engine_is_not_one_of_several(monkeypatch, tmp_path):
    for name, value in envs.rank_variables(0, 1).items():
        monkeypatch.setenv(name, value)
    folder = str(make_tiny_model("llama", tmp_path))
    with (
        simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS),
        pytest.raises(ValueError, match="has opened its card for an engine of one card already"),
    ):
        LLM(folder, device="hpu", tensor_parallel_size=2, skip_tokenizer_init=True, **SMALL_ENGINE)
