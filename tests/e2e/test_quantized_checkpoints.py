"""Test checkpoints of each kind of format, from files to tokens, on the CPU and a simulated
Gaudi.
"""

import pytest
import torch

from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, simulated_hpu
from tests.model_executor.helpers import prompt_of
from tests.quantized_checkpoints import FORMATS, made_once, write
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.ops.cpu.library import load_cpu_kernels

PROMPT = prompt_of(20).tolist()
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a function that writes a checkpoint. FP8 checkpoints have their output head in FP8."""
    others, fp8 = (
        made_once(tmp_path_factory.mktemp("quantized"), stores_head=stores_head)
        for stores_head in (False, True)
    )
    return lambda name: (fp8 if name.startswith("fp8") else others)(name)


def greedy(folder, **settings):
    """Return greedy tokens, and the log-probability of the first."""
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        **(SMALL_ENGINE | settings),
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    sample = output.outputs[0]
    return list(sample.token_ids), sample.logprobs[0][sample.token_ids[0]].logprob


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("fp8-block", "fp8"),
        ("fp8-channel-ignored", None),
        ("gptq-8-order", "gptq"),
        ("gptq-4", "gptq_hpu"),
        ("awq", "awq_hpu"),
        ("ct-fp8-static", "compressed-tensors"),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ("nvfp4", "modelopt_fp4"),
                ("bnb-int8", "bitsandbytes"),
                ("awq-gemv", "awq"),
                ("mlx-4", "mlx"),
                ("hqq-4", "hqq"),
                ("torchao-w8a16", "torchao"),
                ("ct-sparse", "compressed-tensors"),
            )
        ),
    ],
)
def test_tokens_on_the_cpu_are_those_of_the_dequantized_weights(checkpoint, name, quantization):
    folder, dense = checkpoint(name)
    got, got_logprob = greedy(folder, quantization=quantization)
    want, want_logprob = greedy(dense)
    assert got == want
    # With int4 weights, inputs are rounded to int8.
    assert got_logprob == pytest.approx(
        want_logprob, abs=0.2 if FORMATS[name].is_rounding_inputs else 1e-4
    )


@pytest.mark.parametrize(
    ("name", "card"),
    [
        *(("fp8-block", "gaudi2"), ("gptq-4-order", "gaudi2")),
        pytest.param("fp8-static", "gaudi3", marks=pytest.mark.exhaustive),
        pytest.param("gptq-8-order", "gaudi2", marks=pytest.mark.exhaustive),
        pytest.param("gptq-8", "gaudi3", marks=pytest.mark.exhaustive),
        pytest.param("ct-w8a8", "gaudi2", marks=pytest.mark.exhaustive),
        pytest.param("gptq-3", "gaudi3", marks=pytest.mark.exhaustive),
        *(
            pytest.param(name, "gaudi2", marks=pytest.mark.exhaustive)
            for name in ("nvfp4", "ct-mxfp4", "bnb-nf4", "awq-gemv", "mlx-4", "hqq-4", "ct-sparse")
        ),
    ],
)
def test_tokens_on_a_simulated_card_are_those_of_the_dequantized_weights(checkpoint, name, card):
    """On a card, FP8 checkpoints round inputs to FP8, and other formats round their scales. So only
    the first tokens are compared.
    """
    folder, dense = checkpoint(name)
    settings = {"dtype": "bfloat16"}
    with simulated_hpu(has_profiling_run=False, card=card, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        got, got_logprob = greedy(folder, **settings)
    with simulated_hpu(has_profiling_run=False, card=card, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        want, want_logprob = greedy(dense, **settings)
    is_rounded = name.startswith("fp8") or FORMATS[name].rounding > 0
    num_compared = 4 if is_rounded else NUM_TOKENS
    assert got[:num_compared] == want[:num_compared]
    assert got_logprob == pytest.approx(want_logprob, abs=0.15)


def prompt_logprobs(folder, **settings):
    """Return the log-probabilities of prompt tokens, and the types of the expert weights."""
    llm = LLM(str(folder), skip_tokenizer_init=True, **(SMALL_ENGINE | settings))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    places = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([each[token].logprob for token, each in places]), llm.apply_model(dtypes)[0]


def dtypes(model):
    return {
        str(param.dtype)
        for name, param in model.named_parameters()
        if ".experts." in name and "scale" not in name and not name.endswith("zeros")
    }


FP8_EXPERTS = ("fp8-block", {"torch.float8_e4m3fn"})
INT8_EXPERTS = ("ct-w8a8", {"torch.int8"})
UINT4_EXPERTS = ("gptq-4", {"torch.int32"})


@pytest.mark.parametrize(
    ("stored", "mode", "card"),
    [
        (FP8_EXPERTS, "HPU graphs", "gaudi2"),
        pytest.param(FP8_EXPERTS, "torch.compile", "gaudi3", marks=pytest.mark.exhaustive),
        pytest.param(FP8_EXPERTS, "eager", "gaudi2", marks=pytest.mark.exhaustive),
        pytest.param(INT8_EXPERTS, "HPU graphs", "gaudi2", marks=pytest.mark.exhaustive),
        (UINT4_EXPERTS, "HPU graphs", "gaudi3"),
        pytest.param(UINT4_EXPERTS, "torch.compile", "gaudi3", marks=pytest.mark.exhaustive),
        pytest.param(UINT4_EXPERTS, "eager", "gaudi2", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_experts_stay_so_on_a_simulated_card(tmp_path, stored, mode, card):
    """The card is strict. It computes all experts with one operator, or one matmul after the
    other.
    """
    name, wanted = stored
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 192}
    folder, dense = write(name, tmp_path, make_tiny_model("qwen3_moe", tmp_path, **sizes))
    is_lazy, enforce_eager = MODES[mode]
    settings = {"dtype": "bfloat16", "enforce_eager": enforce_eager}
    with simulated_hpu(has_profiling_run=False, card=card, PT_HPU_LAZY_MODE=is_lazy, **FEW_BUCKETS):
        got, types = prompt_logprobs(folder, **settings)
    assert types == wanted
    want, _ = prompt_logprobs(dense)
    # The difference is larger if the router chooses another expert for a token, so compare the
    # median.
    assert (got - want).abs().median() < 0.2


@pytest.mark.parametrize("card", ["cpu", "gaudi2"])
def test_fp8_is_made_while_loading(checkpoint, card):
    _, dense = checkpoint("fp8-block")
    settings = {"dtype": "bfloat16", "quantization": "fp8"}
    if card == "cpu":
        (got, logprob), (want, want_logprob) = greedy(dense, **settings), greedy(dense)
    else:
        with simulated_hpu(has_profiling_run=False, card=card, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
            got, logprob = greedy(dense, **settings)
        want, want_logprob = greedy(dense)
    assert got[:2] == want[:2]
    assert logprob == pytest.approx(want_logprob, abs=0.2)
    assert logprob != pytest.approx(want_logprob, abs=1e-4)
