"""Test several strict simulated cards, one process for each: they give the tokens of the CPU."""

import pytest

from tests.e2e.ranks import assert_same, generate
from tests.e2e.test_transformers_model import make, needs_backend
from tests.gpt_oss_checkpoint import write_gpt_oss
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, simulated_hpu
from tests.quantized_checkpoints import write
from tests.reach import core_of, executor_of
from tests.tiny_models import ALL_FAMILIES, ONE_STAGE, make_tiny_model
from tests.worker.test_hpu_warmup import LARGE_BUCKETS, LONG_PROMPTS
from vllm import LLM, SamplingParams
from vllm.env import ranks as env_ranks
from vllm.platforms.hpu import HPUPlatform

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def assert_cards_are_the_cpu(name, settings, mode, tmp_path, monkeypatch) -> None:
    """Check that several cards give the tokens of the CPU.

    `name` is a family or a format of quantized checkpoints. It may also be two folders: a model,
    and the equal model for the CPU.
    """
    if name == "gpt-oss-mxfp4":
        dense, folder = write_gpt_oss(tmp_path)
    elif name in ALL_FAMILIES:
        folder = dense = make_tiny_model(name, tmp_path)
    else:
        folder, dense = write(name, tmp_path) if isinstance(name, str) else name
    engine = SMALL_ENGINE | {
        "skip_tokenizer_init": True,
        "sampling_warmup": "all",
        # Layers with windows have KV blocks of their own, so more blocks are needed.
        "num_gpu_blocks_override": 65,
    }
    want = generate(LLM(str(dense), device="cpu", **engine))
    for name, value in env_ranks.rank_variables(0, 1).items():
        # An engine changes these variables; monkeypatch restores them afterwards.
        monkeypatch.setenv(name, value)
    is_lazy, enforce_eager = MODES[mode]
    with simulated_hpu(
        PT_HPU_LAZY_MODE=is_lazy, PT_HPU_ENABLE_LAZY_COLLECTIVES=True, **FEW_BUCKETS
    ) as bridge:
        llm = LLM(
            str(folder),
            device="hpu",
            enforce_eager=enforce_eager,
            worker_extension_cls="tests.executor.late_compilations.LateCompilations",
            **engine | settings,
        )
        executor = executor_of(llm)
        compilations = bridge.counters().compilations
        assert_same(generate(llm), want)
        assert bridge.counters().compilations == compilations
        if mode == "HPU graphs":
            assert bridge.counters().graph_replays
        assert set(executor.collective_rpc("late_compilations")) == {0}
        first, *others = executor.collective_rpc("warmed_buckets")
        assert first and others == [first] * len(others)
        executor.shutdown()


@pytest.mark.parametrize(
    ("name", "settings", "mode"),
    [
        # Exhaustive: test_parallel_hpu_faults.py runs a Llama on two cards in every run.
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in [
                ("qwen3_moe", {"enable_expert_parallel": True}, "HPU graphs"),
                ("gpt-oss-mxfp4", {}, "HPU graphs"),
                ("gpt-oss-mxfp4", {"enable_expert_parallel": True}, "HPU graphs"),
                ("qwen3_moe", {}, "HPU graphs"),
                *(("llama", {}, mode) for mode in MODES),
                ("gptq-4-order", {}, "HPU graphs"),
            ]
        ),
    ],
)
def test_two_cards_give_the_tokens_of_the_cpu(name, settings, mode, tmp_path, monkeypatch):
    settings = {"tensor_parallel_size": 2} | settings
    assert_cards_are_the_cpu(name, settings, mode, tmp_path, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_blocks_of_fp8_may_be_on_two_cards(family, tmp_path, monkeypatch):
    """Each card rounds its inputs with its own scales, so log-probabilities differ a little."""
    sizes = {"llama": {"intermediate_size": 192}, "qwen3_moe": {"moe_intermediate_size": 192}}
    folder, dense = write("fp8-block", tmp_path, make_tiny_model(family, tmp_path, **sizes[family]))

    def prompt_logprobs(model, device: str, size: int) -> list[float]:
        engine = SMALL_ENGINE | {"skip_tokenizer_init": True, "device": device}
        llm = LLM(str(model), tensor_parallel_size=size, **engine)
        ids = list(range(20, 60))
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        core_of(llm).shutdown()
        places = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        return [each[token].logprob for token, each in places]

    want = prompt_logprobs(dense, "cpu", 1)
    for name, value in env_ranks.rank_variables(0, 1).items():
        monkeypatch.setenv(name, value)
    with simulated_hpu(PT_HPU_LAZY_MODE=1, PT_HPU_ENABLE_LAZY_COLLECTIVES=True, **FEW_BUCKETS):
        got = prompt_logprobs(folder, "hpu", 2)
    differences = [abs(a - b) for a, b in zip(got, want, strict=True)]
    spread = max(want) - min(want)
    assert sum(differences) / len(want) < 0.05 * spread


@pytest.mark.parametrize(
    ("name", "settings", "mode"),
    [
        ("llama", {"speculative_config": NGRAM}, "HPU graphs"),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in [
                ("llama", {"tensor_parallel_size": 2}, "HPU graphs"),
                ("llama", {"pipeline_parallel_size": 3}, "torch.compile"),
                ("llama", {}, "lazy"),
                ("gptq-4", {}, "eager"),
            ]
        ),
    ],
)
@pytest.mark.usefixtures("new_interpreters")
def test_stages_on_cards_give_the_tokens_of_the_cpu(name, settings, mode, tmp_path, monkeypatch):
    settings = {"pipeline_parallel_size": 2} | settings
    assert_cards_are_the_cpu(name, settings, mode, tmp_path, monkeypatch)


@pytest.mark.exhaustive
@needs_backend
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_the_modules_of_transformers_on_two_cards(sizes, tmp_path, monkeypatch):
    folder = make("smollm3", tmp_path)
    settings = {"model_impl": "transformers", **sizes}
    assert_cards_are_the_cpu((folder, folder), settings, "HPU graphs", tmp_path, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
@pytest.mark.parametrize("family", [f for f in ALL_FAMILIES if f not in ONE_STAGE])
def test_cards_with_every_family_give_the_tokens_of_the_cpu(family, sizes, tmp_path, monkeypatch):
    assert_cards_are_the_cpu(family, sizes, "HPU graphs", tmp_path, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "name", "tensor", "stages", "values"),
    [
        ("llama", None, 4, 1, {}),
        ("granite_code", None, 2, 2, {}),  # this family has tied embeddings
        ("bamba", None, 2, 2, {}),
        ("mamba", None, 4, 1, {}),
        ("qwen3_moe", None, 2, 3, {"enable_expert_parallel": True}),
        ("deepseek_v3", None, 2, 2, {"enable_expert_parallel": True}),
        ("llama", None, 2, 2, {"speculative_config": NGRAM}),
        ("llama", "gptq-4", 2, 1, {}),
        ("llama", "awq", 1, 3, {}),
        ("llama", "ct-w4a16-asym-order", 2, 2, {}),
        ("mixtral", "gptq-4", 2, 1, {"enable_expert_parallel": True}),
        ("qwen3_moe", "ct-w8a16-channel", 2, 3, {"enable_expert_parallel": True}),
    ],
)
def test_layers_are_divided_over_cards_in_both_ways(
    family, name, tensor, stages, values, tmp_path, monkeypatch
):
    """`name` is the format of a quantized checkpoint."""
    widths = {} if name is None else {"intermediate_size": 192}
    folders = (make_tiny_model(family, tmp_path / "source", **widths),) * 2
    if name is not None:
        folders = write(name, tmp_path, folders[0])
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    assert_cards_are_the_cpu(folders, sizes | values, "HPU graphs", tmp_path, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool_mib", [60, 100])
def test_a_card_with_less_memory_decides_which_launches_all_cards_run(pool_mib, monkeypatch):
    """Rank 1 is a different process, whose card has all of its memory."""
    for name, value in env_ranks.rank_variables(0, 1).items():
        monkeypatch.setenv(name, value)
    variables = LARGE_BUCKETS | {"VLLM_GRAPH_RESERVED_MEM": 0.65, "VLLM_GRAPH_PROMPT_RATIO": 0.4}
    prompts = [{"prompt_token_ids": list(range(20, 20 + n))} for n in (200, 30)]
    params = SamplingParams(temperature=0, max_tokens=5)
    want = LLM(**LONG_PROMPTS).generate(prompts, params, use_tqdm=False)
    with simulated_hpu(
        pool_bytes=pool_mib * 2**20,
        PT_HPU_LAZY_MODE=1,
        PT_HPU_ENABLE_LAZY_COLLECTIVES=True,
        **variables,
    ):
        llm = LLM(tensor_parallel_size=2, distributed_timeout_s=30.0, **LONG_PROMPTS)
        got = llm.generate(prompts, params, use_tqdm=False)
        core_of(llm).shutdown()
    assert_same(got, want)


def test_a_card_of_one_engine_is_not_one_of_several(monkeypatch, tmp_path):
    for name, value in env_ranks.rank_variables(0, 1).items():
        monkeypatch.setenv(name, value)
    folder = str(make_tiny_model("llama", tmp_path))
    with (
        simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS),
        pytest.raises(ValueError, match="has opened its card for an engine of one card already"),
    ):
        LLM(folder, device="hpu", tensor_parallel_size=2, skip_tokenizer_init=True, **SMALL_ENGINE)


# Exhaustive: tests/platforms/test_sim_collectives.py tests the collectives of a step.
@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_without_a_step_before_each_collective_a_strict_card_refuses_them(
    sizes, tmp_path, monkeypatch
):
    """Only this rank leaves out the step; the other rank would take it."""
    for name, value in env_ranks.rank_variables(0, 1).items():
        monkeypatch.setenv(name, value)
    folder = str(make_tiny_model("llama", tmp_path))
    monkeypatch.setattr(HPUPlatform, "before_collective", None)
    with (
        simulated_hpu(PT_HPU_LAZY_MODE=1, PT_HPU_ENABLE_LAZY_COLLECTIVES=True, **FEW_BUCKETS),
        pytest.raises(RuntimeError, match="call mark_step before it"),
    ):
        LLM(folder, device="hpu", skip_tokenizer_init=True, **SMALL_ENGINE | sizes)
