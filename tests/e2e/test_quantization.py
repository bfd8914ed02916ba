"""Test `--quantization` on the CPU, from a dense checkpoint to tokens, embeddings and a server."""

import json

import numpy as np
import pytest
import torch

from tests.e2e.server import start_server
from tests.model_executor.helpers import load, logits_of, pack_weights, prompt_of
from tests.tiny_pooling_models import make_pooling_model
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.ops.cpu.library import load_cpu_kernels

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

PROMPT = prompt_of(20).tolist()
NUM_TOKENS = 12


def greedy(model):
    """Return greedy tokens, and the log-probability of the first."""
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(logits_of(model, torch.tensor(ids))[-1].argmax()))
    first = logits_of(model, torch.tensor(PROMPT))[-1].log_softmax(-1).max()
    return ids[len(PROMPT) :], float(first)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_tokens_are_those_of_the_rounded_weights(name, load_format):
    model = load(BUNDLED_MODEL, load_format=load_format)
    _, dense_logprob = greedy(model)
    pack_weights(model, name)
    want, want_logprob = greedy(model)
    llm = LLM(
        quantization=name,
        dtype="float32",
        load_format=load_format,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=300,
        use_tqdm_on_load=False,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    sample = output.outputs[0]
    assert list(sample.token_ids) == want
    # A change in the last bit of attention may change the rounding of an input; both round inputs
    # to int8.
    logprob = sample.logprobs[0][want[0]].logprob
    assert logprob == pytest.approx(want_logprob, abs=0.1)
    assert abs(logprob - dense_logprob) > 2e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_of_an_int8_model_are_near_those_of_the_dense_one(tmp_path, dtype):
    folder = str(make_pooling_model("BertModel", tmp_path))

    def embed(quantization):
        llm = LLM(
            folder,
            quantization=quantization,
            dtype=dtype,
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
        )
        (output,) = llm.embed({"prompt_token_ids": PROMPT}, use_tqdm=False)
        return np.array(output.outputs.embedding)

    dense, rounded = embed(None), embed("int8")
    assert 0.95 < dense @ rounded / np.linalg.norm(dense) / np.linalg.norm(rounded) <= 1.0001
    assert not np.array_equal(dense, rounded)


# Exhaustive: tests/engine/test_arg_utils.py tests that flags become settings.
@pytest.mark.exhaustive
@pytest.mark.e2e
def test_a_server_takes_the_flag():
    with start_server("--quantization", "int4") as server:
        body = {"prompt": "import os", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        status, _, answer = server.request("POST", "/v1/completions", body)
        assert status == 200
        assert json.loads(answer)["usage"]["completion_tokens"] == 4
