"""Models whose layers have sliding windows: the tokens of `transformers`, in fewer blocks."""

import pytest

from tests.e2e.reference import assert_same_tokens, generate
from tests.reach import core_of, decode_step_of, runner_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.messages import NULL_BLOCK_ID

WINDOW, BLOCK_SIZE, MAX_TOKENS = 16, 16, 20
ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# One prefix for all; lengths around those of blocks and windows.
PROMPTS = [
    [3 + (7 * i) % 90 for i in range(32)] + [100 + length] * length
    for length in (1, 15, 16, 17, 40, 3, 1, 63)
]
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 24}


def make_llm(folder, **settings) -> LLM:
    defaults = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_gpu_blocks_override": 300}
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=160,
        max_num_seqs=8,
        **defaults | settings,
    )


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize(
    ("family", "values", "windows"),
    [("qwen2", ALTERNATING, (None, WINDOW)), ("mistral", {}, (WINDOW,))],
)
def test_tokens_equal_transformers_and_windows_that_have_passed_hold_no_blocks(
    family, values, windows, tmp_path
):
    make_tiny_model(family, tmp_path, **values)
    want = generate(tmp_path, PROMPTS, MAX_TOKENS)
    few_blocks = CHUNKS | {"num_gpu_blocks_override": 11 * len(windows)}
    for settings in ({}, CHUNKS, few_blocks):
        llm = make_llm(tmp_path, **settings)
        core = core_of(llm)
        assert core.executor.cache_windows == windows
        for _ in range(2):  # the second finds the prefixes of the first
            for index, prompt in enumerate(PROMPTS):
                llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy())
            tokens: dict[str, list[int]] = {}
            fewest = 1.0
            while llm.llm_engine.has_unfinished_requests():
                for output in llm.llm_engine.step():
                    tokens[output.request_id] = output.outputs[0].token_ids
                for request in core.scheduler.running.requests:
                    table = [request.block_ids, *request.more_block_ids][-1]
                    num_held = len(table) - table.count(NULL_BLOCK_ID)
                    fewest = min(fewest, num_held / len(table))
                    if len(request.token_ids) > len(request.spec.prompt_token_ids) + 1:
                        assert num_held <= WINDOW // BLOCK_SIZE + 2
            for index, reference in enumerate(want):
                assert_same_tokens(tokens[str(index)], reference)
            assert fewest < 0.5
        assert core.scheduler.stats().num_prefix_hits
        assert (core.scheduler.num_preemptions > 0) == (settings is few_blocks)


def test_groups_of_layers_run_in_one_call_with_the_tokens_of_the_modules(tmp_path, monkeypatch):
    make_tiny_model("qwen2", tmp_path, **ALTERNATING)

    def generate_all(is_fused: bool) -> list[list[int]]:
        llm = make_llm(tmp_path, dtype="bfloat16", **CHUNKS)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        core = core_of(llm)
        assert core.executor.cache_windows == (None, WINDOW)
        assert (decode_step_of(runner_of(core)) is not None) == is_fused
        return [output.outputs[0].token_ids for output in outputs]

    fused = generate_all(is_fused=True)
    monkeypatch.setattr("vllm.worker.cpu.launches.fuse", lambda *args: None)
    assert fused == generate_all(is_fused=False)
