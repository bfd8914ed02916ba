"""Test a latent cache on the CPU: a step in one call of C++ gives the tokens of the modules.

Outputs are compared with `transformers` in test_equal_to_transformers.py.
"""

from tests.e2e.reference import random_prompts
from tests.reach import decode_step_of, runner_of
from vllm import LLM, SamplingParams

SETTINGS = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "num_gpu_blocks_override": 24,
}
"""So few blocks that requests are preempted."""


def test_steps_run_in_one_call_with_the_tokens_of_the_modules(models, monkeypatch):
    prompts = random_prompts(12, 100, vocab_size=4096)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=32, ignore_eos=True)
    params.detokenize = False

    def generate_all(is_fused: bool) -> list[list[int]]:
        llm = LLM(model=str(models("deepseek_v3")), **SETTINGS)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runner = runner_of(llm)
        assert (decode_step_of(runner) is not None) == is_fused
        return [output.outputs[0].token_ids for output in outputs]

    fused = generate_all(is_fused=True)
    monkeypatch.setattr("vllm.worker.cpu.launches.fuse", lambda *args: None)
    assert fused == generate_all(is_fused=False)
