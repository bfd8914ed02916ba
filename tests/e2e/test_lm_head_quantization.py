"""Test `--lm-head-quantization int8` with other features that split, share or change the output
head.
"""

import pytest
from huggingface_hub import constants

from tests.e2e.ranks import ENGINE, assert_same, generate
from tests.executor.thread_ranks import ThreadRanks
from tests.lora_files import write_adapter
from tests.reach import core_of, draft_model_of, stats_of, worker_of
from tests.speculators import make_speculator, make_target
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.engine import engine_core
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.cpu_methods import PackedTable
from vllm.model_executor.layers.embedding import ParallelLMHead
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.weights.weight_format import WeightFormat

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

HEAD = {"lm_head_quantization": "int8"}
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "skip_tokenizer_init": True}
IDS = [*range(3, 16), 5, 7, 9]
NAMES = ("embed_tokens", "lm_head")


def greedy(llm: LLM, adapter: LoRARequest | None = None) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0)
    prompt = {"prompt_token_ids": IDS}
    (output,) = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)
    sample = output.outputs[0]
    ids = list(sample.token_ids)
    return ids, [row[i].logprob for i, row in zip(ids, sample.logprobs, strict=True)]


def head_formats(model) -> list[WeightFormat]:
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    methods = [getattr(head.method, "inner", head.method) for head in heads]
    assert all(isinstance(method, PackedTable) for method in methods)
    return [method.packed.weight_format for method in methods]


@pytest.mark.parametrize(
    ("family", "split", "dtype", "tolerance"),
    [
        # A change in the last bit of the sum over ranks may change the rounding of an int8 input.
        ("granite_code", {"tensor_parallel_size": 2}, "float32", 0.02),
        ("llama", {"tensor_parallel_size": 2}, "float32", 0.02),
        ("granite_code", {"pipeline_parallel_size": 2}, "bfloat16", 0.0),
    ],
)
def test_ranks_and_stages_have_the_tokens_of_one_process(
    family, split, dtype, tolerance, tmp_path, monkeypatch
):
    """In granite_code, the head is tied to the embedding. A vocabulary of 4097 tokens needs padding
    on a rank.
    """
    folder = str(make_tiny_model(family, tmp_path, vocab_size=4097, dtype=dtype))
    # Use a cache without preemption: tokens that are computed again as a prompt are rounded at
    # other points.
    engine = ENGINE | {"dtype": dtype, "num_gpu_blocks_override": 60} | HEAD
    want = generate(LLM(folder, **engine))
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    llm = LLM(folder, **engine, **split)
    assert_same(generate(llm), want, tolerance)
    core_of(llm).shutdown()


def test_adapters_change_a_head_of_int8(tmp_path):
    folders = [write_adapter(tmp_path / m, BUNDLED_MODEL, 3, 8, (m,), size=0.2) for m in NAMES]
    adapters = [LoRARequest(f.name, i, str(f)) for i, f in enumerate(folders, 1)]
    plain = greedy(LLM(**SMALL, **HEAD))
    assert plain != greedy(LLM(**SMALL))
    llm = LLM(enable_lora=True, max_loras=2, **SMALL, **HEAD)
    assert head_formats(worker_of(llm).model) == [WeightFormat.INT8]
    assert greedy(llm) == plain
    rounded = [greedy(llm, adapter) for adapter in adapters]
    dense = LLM(enable_lora=True, max_loras=2, **SMALL)
    for adapter, found in zip(adapters, rounded, strict=True):
        want = greedy(dense, adapter)
        assert plain != found != want
        assert found[1][0] == pytest.approx(want[1][0], abs=0.1)


@pytest.mark.parametrize("method", ["eagle3", "medusa", "draft_model"])
def test_heads_of_drafts_are_int8_too_and_change_no_token(method, tmp_path):
    if method == "draft_model":
        target, config = str(BUNDLED_MODEL), {"model": str(BUNDLED_MODEL), "method": method}
        config["num_speculative_tokens"] = 3
    else:
        made = make_speculator(method, make_target(tmp_path / "target"), tmp_path / "drafts")
        target, config = str(made.target), dict(made.config)
    want = greedy(LLM(target, **SMALL, **HEAD))
    config["adaptive"] = False
    llm = LLM(target, speculative_config=config, **SMALL, **HEAD)
    formats = head_formats(draft_model_of(worker_of(llm)))
    assert formats and set(formats) == {WeightFormat.INT8}
    assert greedy(llm)[0] == want[0]
    assert stats_of(llm).drafts.num_draft_tokens


def test_a_gguf_file_with_a_dense_head_has_one_of_int8(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from tests.gguf_files import Type, write_gguf

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))

    def kind(name: str) -> Type:
        return Type.F16 if name == "token_embd.weight" else Type.Q8_0

    llm = LLM(str(write_gguf(BUNDLED_MODEL, tmp_path, kind)), **SMALL, **HEAD)
    model = worker_of(llm).model
    assert head_formats(model) == [WeightFormat.INT8]
    assert model.lm_head.method is model.model.embed_tokens.method
    assert len(greedy(llm)[0]) == 16
