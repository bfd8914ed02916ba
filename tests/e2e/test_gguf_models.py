"""Test a GGUF file as users have one: given as the model, on the CPU and on a simulated Gaudi."""

import pytest
from huggingface_hub import constants

from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, simulated_hpu
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL

pytest.importorskip("gguf")

from tests.gguf_files import Type, write_gguf

PROMPTS = ["def read_file(path):", "class Stack:", "import"]


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield


def written(folder, kind):
    return write_gguf(BUNDLED_MODEL, folder, lambda name: Type[kind])


def greedy(model, **settings):
    llm = LLM(str(model), use_tqdm_on_load=False, **(SMALL_ENGINE | settings))
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_texts_are_those_of_the_dequantized_weights(tmp_path):
    path = written(tmp_path, "Q8_0")
    dense = {"model": tmp_path / "dense", "tokenizer": str(BUNDLED_MODEL)}
    want = greedy(**dense)
    assert greedy(path, quantization="gguf") == want
    assert greedy(path, dtype="float32", tokenizer=str(BUNDLED_MODEL)) == want
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        assert greedy(path, dtype="float32") == want


def test_a_file_can_be_quantized_again(tmp_path):
    path = written(tmp_path, "F16")
    assert greedy(path, quantization="int8") == greedy(BUNDLED_MODEL, quantization="int8")
