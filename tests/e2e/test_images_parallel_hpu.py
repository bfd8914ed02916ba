"""Test images on several strict simulated cards, one process for each: they give the tokens of the
CPU.
"""

import pytest

from tests.e2e.test_images import ENGINE, GREEDY, requests_of, tokens_of
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import executor_of
from tests.tiny_images import make_tiny_images
from vllm import LLM
from vllm.env import ranks as env_ranks

CASES = [
    ("qwen2_vl", {"pipeline_parallel_size": 2}, "HPU graphs"),
    ("qwen2_vl", {"tensor_parallel_size": 2}, "HPU graphs"),
    ("qwen3_vl", {"pipeline_parallel_size": 2}, "lazy"),
    ("qwen3_vl", {"tensor_parallel_size": 2}, "HPU graphs"),
    ("llava_next", {"tensor_parallel_size": 2}, "lazy"),
    ("llava", {"pipeline_parallel_size": 2}, "torch.compile"),
    ("llava", {"tensor_parallel_size": 2}, "eager"),
    ("gemma3", {"pipeline_parallel_size": 2}, "lazy"),
    ("gemma3", {"tensor_parallel_size": 2}, "HPU graphs"),
    ("mllama", {"tensor_parallel_size": 2}, "HPU graphs"),
    ("mllama", {"tensor_parallel_size": 2}, "torch.compile"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "sizes", "mode"), CASES)
def test_cards_give_the_tokens_of_the_cpu(family, sizes, mode, tmp_path, monkeypatch):
    requests = requests_of(family)
    folder = str(make_tiny_images(family, tmp_path))
    expected = tokens_of(LLM(folder, device="cpu", **ENGINE).generate(requests, GREEDY))
    for name, value in env_ranks.rank_variables(0, 1).items():
        # An engine changes these variables; monkeypatch restores them afterwards.
        monkeypatch.setenv(name, value)
    is_lazy, enforce_eager = MODES[mode]
    with simulated_hpu(
        PT_HPU_LAZY_MODE=is_lazy, PT_HPU_ENABLE_LAZY_COLLECTIVES=True, **FEW_BUCKETS
    ):
        llm = LLM(
            folder,
            device="hpu",
            enforce_eager=enforce_eager,
            worker_extension_cls="tests.executor.late_compilations.LateCompilations",
            **ENGINE,
            **sizes,
        )
        executor = executor_of(llm)
        # An image that one rank cannot encode fails on all ranks, and all other requests succeed.
        for rank in range(sizes.get("tensor_parallel_size", 0)):
            executor.collective_rpc("break_encoder", args=(rank, True))
            outputs = llm.generate(requests, GREEDY)
            is_text = [not request["multi_modal_data"]["image"] for request in requests]
            reasons = [output.outputs[0].finish_reason for output in outputs]
            assert reasons == ["length" if each else "error" for each in is_text]
            for output, tokens, reads_text in zip(outputs, expected, is_text, strict=True):
                assert tokens_of([output]) == [tokens if reads_text else []]
        executor.collective_rpc("break_encoder", args=(0, False))
        assert tokens_of(llm.generate(requests, GREEDY)) == expected
        assert set(executor.collective_rpc("late_compilations")) == {0}
        executor.shutdown()
