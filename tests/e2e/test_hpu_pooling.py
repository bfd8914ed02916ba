"""Test pooling models on the simulated Gaudi: the results of transformers, and no late
compilation.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.reference import random_prompts
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, simulated_hpu
from tests.reach import runner_of, worker_of
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_pooling_models import class_logits, hidden_states, make_pooling_model
from vllm import LLM
from vllm.errors import ConfigError

PROMPTS = random_prompts(16, 90, VOCAB_SIZE)
WHOLE = SMALL_ENGINE | {"max_num_batched_tokens": 256}
"""For models that cannot run a prompt in parts."""
SHORT = WHOLE | {"max_model_len": 32}


def run(
    folder: Path, prompts: Any, mode: str = "HPU graphs", longest: int = 32, **settings: Any
) -> list[np.ndarray]:
    """Return results on a simulated card, after checking its compilations and padding."""
    lazy, is_eager = MODES[mode]
    buckets = FEW_BUCKETS | {"VLLM_PROMPT_SEQ_BUCKET_MAX": longest, "VLLM_PROMPT_BS_BUCKET_MAX": 2}
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **buckets):
        llm = LLM(str(folder), skip_tokenizer_init=True, enforce_eager=is_eager, **settings)
        outputs = llm.encode(prompts, use_tqdm=False)
        stats = worker_of(llm).stats()
        assert not runner_of(llm).launches.planner.catalog.decode
        llm.llm_engine.shutdown()
    assert (stats.num_bucket_misses, stats.num_late_compilations) == (0, 0)
    return [output.outputs.data.numpy() for output in outputs]


def assert_same(got: list[np.ndarray], want: list[torch.Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4, rtol=0)


def normalized(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=() if m != "torch.compile" else pytest.mark.exhaustive) for m in MODES],
)
def test_last_tokens_of_a_decoder(mode, tmp_path):
    folder = make_pooling_model("LlamaModel", tmp_path)
    # Most prompts run in two chunks. Single tokens are no decodes, which have no buckets here.
    prompts = [p[:48] for p in PROMPTS] + [PROMPTS[0][:33], PROMPTS[1][:1], PROMPTS[2][:1]]
    want = [normalized(hidden_states(folder, "LlamaModel", p)[-1]) for p in prompts]
    assert_same(run(folder, prompts, mode, **SMALL_ENGINE | {"max_model_len": 48}), want)


def test_a_decoder_classifies(tmp_path):
    architecture = "Qwen2ForSequenceClassification"
    folder = make_pooling_model(architecture, tmp_path)
    want = [class_logits(folder, architecture, p).softmax(-1) for p in PROMPTS]
    assert_same(run(folder, PROMPTS, **SMALL_ENGINE), want)


@pytest.mark.parametrize("mode", MODES)
def test_an_encoder_with_pairs(mode, tmp_path):
    architecture = "BertForSequenceClassification"
    folder = make_pooling_model(architecture, tmp_path)
    cut = [p[:32] for p in PROMPTS]
    typed = [(p, [0] * (len(p) // 2) + [1] * (len(p) - len(p) // 2)) for p in cut]
    prompts = [{"prompt_token_ids": p, "token_type_ids": t} for p, t in typed]
    want = [class_logits(folder, architecture, p, t).softmax(-1) for p, t in typed]
    assert_same(run(folder, prompts, mode, **SHORT), want)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        *(("BertModel", "LAST"), ("BertModel", "MEAN"), ("RobertaModel", "CLS")),
        *(("MistralModel", "CLS"), ("MistralModel", "MEAN"), ("MistralModel", "ALL")),
    ],
)
def test_every_kind_of_pooling(architecture, kind, tmp_path):
    folder = make_pooling_model(architecture, tmp_path)
    pick = {"CLS": lambda x: x[0], "MEAN": lambda x: x.mean(0), "LAST": lambda x: x[-1]}
    states = [hidden_states(folder, architecture, p) for p in PROMPTS]
    override = {"pooling_type": kind, "normalize": True}
    got = run(folder, PROMPTS, longest=128, override_pooler_config=override, **WHOLE)
    assert_same(got, [normalized(pick.get(kind, lambda x: x)(x)) for x in states])


def test_a_prompt_that_would_have_to_be_split_is_refused_at_the_start(tmp_path):
    folder = make_pooling_model("BertModel", tmp_path)
    with (
        simulated_hpu(PT_HPU_LAZY_MODE=1, VLLM_PROMPT_SEQ_BUCKET_MAX=64),
        pytest.raises(ConfigError, match=r"longest prompt bucket has 64 tokens.*=128"),
    ):
        LLM(str(folder), skip_tokenizer_init=True, **WHOLE)
