"""Test that the CPU runner gives the tokens of the modules, and runs steps that cannot be fused."""

from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import exhaustive
from tests.reach import program_of, runner_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.ops.cpu.operators import load_cpu_kernels
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep
from vllm.sample import cpu_sampler, logprobs
from vllm.worker.cpu import launches as cpu_launches

GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "detokenize": False}
# All prompts have a common prefix; their lengths are near multiples of the block and chunk sizes.
PROMPTS = [
    {"prompt_token_ids": [3 + (7 * i) % 90 for i in range(32)] + [100 + length] * length}
    for length in (1, 15, 16, 17, 40, 3, 1, 63)
]
# Log-probabilities of the prompt need the forward pass of all its tokens, so such a request uses no
# cached prefix.
PARAMS = [
    SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=1 if i == 0 else None)
    for i in range(len(PROMPTS))
]
FEW_BLOCKS = {"num_gpu_blocks_override": 20}
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 24}


def make_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=160,
        max_num_seqs=8,
        # The times of steps decide when the engine schedules ahead, which changes when requests
        # are preempted. Tokens that are computed again as a prompt are rounded at other points.
        async_scheduling=False,
        **{"dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 200} | settings,
    )


def outputs(llm: LLM) -> list[Any]:
    generated = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in generated]


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
# Exhaustive: tests/model_executor/test_fusion.py compares biases and norms of heads with modules.
@pytest.mark.parametrize("family", ["llama", "mistral", exhaustive("qwen2"), exhaustive("qwen3")])
def test_tokens_and_logprobs_are_those_of_the_modules(family, tmp_path, monkeypatch):
    make_tiny_model(family, tmp_path)
    num_groups = 2 if family == "qwen2" else 1
    few_blocks = {name: count * num_groups for name, count in FEW_BLOCKS.items()}
    for settings in ({}, few_blocks, CHUNKS, CHUNKS | few_blocks | {"enable_prefix_caching": True}):
        llm = make_llm(tmp_path, **settings)
        # The second run finds the cached prefixes of the first.
        got = [outputs(llm) for _ in range(2)]
        assert program_of(runner_of(llm)) is not None
        with monkeypatch.context() as patch:
            patch.setattr(cpu_launches, "fuse", lambda *args: None)
            llm = make_llm(tmp_path, **settings)
            assert got == [outputs(llm) for _ in range(2)]


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_decodes_in_one_call_give_the_tokens_of_several(family, tmp_path, monkeypatch):
    """Requests are random and greedy, some want log-probabilities or allowed tokens only, some need
    more of the sampler, some are preempted, and some find their prefix in the cache.
    """
    make_tiny_model(family, tmp_path)
    params = [
        SamplingParams(
            **GREEDY | {"temperature": 0 if i % 3 == 0 else 1.5, "max_tokens": 12 + 3 * i},
            seed=i,
            top_p=0.9 if i % 2 else 1,
            top_k=30 if i == 4 else 0,
            min_p=0.05 if i == 5 else 0,
            presence_penalty=0.5 if i == 7 else 0,
            logprobs={1: 2, 3: 0}.get(i),
            allowed_token_ids=list(range(i, 100, 3)) if i in (2, 6) else None,
        )
        for i in range(len(PROMPTS))
    ]
    num_runs = 0
    run = FusedDecodeStep.run

    def counted(self, *args, **options):
        nonlocal num_runs
        tokens = run(self, *args, **options)
        num_runs += tokens is not None
        return tokens

    def tokens_of(llm):
        return [
            (output.outputs[0].token_ids, output.outputs[0].logprobs)
            for chosen in (params, [*params[:7], params[0]])
            for output in llm.generate(PROMPTS, chosen, use_tqdm=False)
        ]

    monkeypatch.setattr(FusedDecodeStep, "run", counted)
    for settings in ({}, FEW_BLOCKS, CHUNKS | FEW_BLOCKS | {"enable_prefix_caching": True}):
        before = num_runs
        got = tokens_of(make_llm(tmp_path, **settings))
        assert num_runs - before > 10
        with monkeypatch.context() as patch:
            patch.setattr(cpu_launches, "fuse_head", lambda model, forward: None)
            before = num_runs
            assert got == tokens_of(make_llm(tmp_path, **settings))
            assert num_runs == before


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_log_probabilities_of_prompts_are_those_of_torch_without_its_operators(
    tmp_path, monkeypatch
):
    make_tiny_model("llama", tmp_path)

    def of_prompt() -> tuple[list[Any], list[float]]:
        """Return (token, rank) of each token of the prompt, and all log-probabilities."""
        positions = outputs(make_llm(tmp_path))[0][2][1:]
        given = [next(iter(position.items())) for position in positions]
        numbers = [entry.logprob for position in positions for entry in position.values()]
        return [(token, entry.rank) for token, entry in given], numbers

    with monkeypatch.context() as patch:
        patch.setattr(cpu_sampler, "load_sampling_kernels", lambda: None)
        want_given, want_numbers = of_prompt()
    monkeypatch.setattr(logprobs, "block_max", None)
    got_given, got_numbers = of_prompt()
    assert len(got_given) == len(PROMPTS[0]["prompt_token_ids"]) - 1
    assert got_given == want_given
    assert got_numbers == pytest.approx(want_numbers, rel=1e-5, abs=1e-5)


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_a_float32_model_runs_as_one_program(tmp_path):
    make_tiny_model("llama", tmp_path)
    llm = make_llm(tmp_path, dtype="float32")
    assert len(outputs(llm)) == len(PROMPTS)
    assert program_of(runner_of(llm)) is not None


def test_a_model_that_cannot_be_fused_runs_by_its_modules(tmp_path):
    make_tiny_model("llama", tmp_path)
    llm = make_llm(tmp_path, dtype="float16")
    assert len(outputs(llm)) == len(PROMPTS)
    assert program_of(runner_of(llm)) is None
