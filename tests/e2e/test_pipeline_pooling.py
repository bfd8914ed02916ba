"""Test that a pipeline gives the results of pooling models in one process."""

from typing import Any

import numpy as np
import pytest

from tests.e2e.test_hpu_pooling import SHORT
from tests.e2e.test_pipeline_parallel import in_stages
from tests.e2e.test_pooling import CHUNKS, ENGINE
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, simulated_hpu
from tests.reach import executor_of
from tests.tiny_pooling_models import make_pooling_model
from vllm import LLM
from vllm.env import ranks as env_ranks
from vllm.errors import ConfigError

LENGTHS = (1, 7, 30, 18, 24, 29)


def prompts_of(architecture: str) -> list[Any]:
    prompts = [list(range(20, 20 + n)) for n in LENGTHS]
    if not architecture.startswith("Bert"):
        return prompts
    types = [[0] * (n // 2) + [1] * (n - n // 2) for n in LENGTHS]
    return [
        {"prompt_token_ids": p, "token_type_ids": t} for p, t in zip(prompts, types, strict=True)
    ]


def encode(llm: LLM, prompts: list[Any]) -> list[np.ndarray]:
    return [out.outputs.data.numpy() for out in llm.encode(prompts, use_tqdm=False)]


def assert_same(got: list[np.ndarray], want: list[np.ndarray], atol: float = 0.0) -> None:
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "sizes", "settings"),
    [
        ("LlamaModel", (1, 2), CHUNKS | {"max_num_seqs": 3}),
        ("MistralModel", (1, 2), {}),  # this family has windows
        ("Qwen2ForSequenceClassification", (2, 2), {}),
        ("Qwen2ForRewardModel", (1, 2), {}),
        ("Qwen2ForCausalLM", (1, 2), {"task": "embed"}),
        ("BertModel", (1, 2), {}),
        ("BertForSequenceClassification", (2, 2), {"dtype": "bfloat16"}),
        ("RobertaForSequenceClassification", (1, 2), {}),
    ],
)
def test_stages_pool_as_one_process(architecture, sizes, settings, tmp_path, monkeypatch):
    folder, prompts = str(make_pooling_model(architecture, tmp_path)), prompts_of(architecture)
    tensor, stages = sizes
    # With several ranks, sums have another order.
    tolerance = {"float32": 1e-5, "bfloat16": 0.02}[settings.get("dtype", "float32")]
    # 3 requests at a time, so that several steps run.
    values = {**ENGINE, "max_num_seqs": 3, **settings}
    want = encode(LLM(folder, **values), prompts)
    llm = in_stages(
        monkeypatch,
        folder,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **values,
    )
    for _ in range(2):  # the second time from the prefix cache, if the model has one
        assert_same(encode(llm, prompts), want, tolerance)
    assert executor_of(llm).most_in_flight == stages
    workers = executor_of(llm).workers
    total = sum(p.numel() for p in workers[0].model.parameters())
    assert total < sum(p.numel() for w in workers for p in w.model.parameters())
    executor_of(llm).shutdown()


def test_more_stages_than_layers_of_an_encoder_are_refused(tmp_path):
    folder = str(make_pooling_model("BertModel", tmp_path))
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size=3: the model has 2 layers"):
        LLM(folder, pipeline_parallel_size=3, **ENGINE)


@pytest.mark.exhaustive  # exhaustive: test_parallel_hpu.py tests stages on cards
@pytest.mark.parametrize(
    ("architecture", "mode", "settings"),
    [
        ("BertForSequenceClassification", "HPU graphs", SHORT),
        ("LlamaModel", "HPU graphs", SMALL_ENGINE),
        ("LlamaModel", "torch.compile", SMALL_ENGINE),
        ("Qwen2ForRewardModel", "lazy", SHORT),
    ],
)
def test_stages_on_cards_pool_as_the_cpu(architecture, mode, settings, tmp_path, monkeypatch):
    folder = str(make_pooling_model(architecture, tmp_path))
    prompts, values = prompts_of(architecture), {"skip_tokenizer_init": True, **settings}
    want = encode(LLM(folder, device="cpu", **values), prompts)
    for name, value in env_ranks.rank_variables(0, 1).items():
        # An engine changes these variables; monkeypatch restores them afterwards.
        monkeypatch.setenv(name, value)
    is_lazy, is_eager = MODES[mode]
    with simulated_hpu(
        PT_HPU_LAZY_MODE=is_lazy,
        PT_HPU_ENABLE_LAZY_COLLECTIVES=True,
        **FEW_BUCKETS | {"VLLM_PROMPT_BS_BUCKET_MAX": 2},
    ):
        llm = LLM(
            folder,
            device="hpu",
            pipeline_parallel_size=2,
            enforce_eager=is_eager,
            worker_extension_cls="tests.executor.late_compilations.LateCompilations",
            **values,
        )
        executor = executor_of(llm)
        assert_same(encode(llm, prompts), want, 1e-4)
        assert set(executor.collective_rpc("late_compilations")) == {0}
        executor.shutdown()
