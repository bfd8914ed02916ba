"""Test models whose layers have sliding windows: the tokens of `transformers`, in fewer blocks."""

import pytest

from tests.e2e.reference import TransformersReference, assert_all_greedy
from tests.reach import core_of, decode_step_of, runner_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.messages import NULL_BLOCK_ID
from vllm.outputs import RequestOutput

WINDOW, BLOCK_SIZE, MAX_TOKENS = 16, 16, 20
ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# All prompts have a common prefix; their lengths are near multiples of the block and window sizes.
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
    reference = TransformersReference(tmp_path)
    few_blocks = CHUNKS | {"num_gpu_blocks_override": 11 * len(windows)}
    for settings in ({}, CHUNKS, few_blocks):
        llm = make_llm(tmp_path, **settings)
        core = core_of(llm)
        assert core.executor.cache_windows == windows
        for _ in range(2):  # the second time with the cached prefixes of the first
            for index, prompt in enumerate(PROMPTS):
                llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy())
            outputs: dict[str, RequestOutput] = {}
            fewest = 1.0
            while llm.llm_engine.has_unfinished_requests():
                for output in llm.llm_engine.step():
                    outputs[output.request_id] = output
                for request in core.scheduler.running.requests:
                    table = [request.block_ids, *request.more_block_ids][-1]
                    num_held = len(table) - table.count(NULL_BLOCK_ID)
                    fewest = min(fewest, num_held / len(table))
                    if len(request.token_ids) > len(request.spec.prompt_token_ids) + 1:
                        assert num_held <= WINDOW // BLOCK_SIZE + 2
            by_prompt = [outputs[str(index)] for index in range(len(PROMPTS))]
            assert_all_greedy(by_prompt, PROMPTS, greedy(), reference)
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


def test_up_to_its_window_a_model_computes_the_same_without_it(models):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    prompts = [list(range(5, 5 + length)) for length in (1, 7, 10)]
    found = []
    for without in (False, True):
        llm = LLM(
            model=str(models("mistral")),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=16,
            num_gpu_blocks_override=40,
            disable_sliding_window=without,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs])
    assert found[0] == found[1]
