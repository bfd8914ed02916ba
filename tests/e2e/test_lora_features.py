"""Test LoRA adapters of more families and with other features: they give the outputs of merged
weights.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.thread_ranks import ThreadRanks
from tests.lora_files import ALL, greedy, merged_model, run_on_engine, write_adapter
from tests.reach import (
    core_of,
    decode_step_of,
    leave_modules_alone,
    program_of,
    runner_of,
    stats_of,
)
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.engine import engine_core
from vllm.lora.request import LoRARequest
from vllm.sampling_params import GuidedDecodingParams

TOKENS = list(range(20, 27))
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "enable_lora": True,
}


def seen(output) -> tuple[list[int], list[float]]:
    sample = output.outputs[0]
    ids = list(sample.token_ids)
    return ids, [row[i].logprob for i, row in zip(ids, sample.logprobs, strict=True)]


def generate(llm: LLM, adapters: list[LoRARequest | None]) -> list[tuple[list[int], list[float]]]:
    prompts = [{"prompt_token_ids": TOKENS}] * len(adapters)
    return [seen(o) for o in llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters)]


def assert_merged(found, model: Path, folder: Path) -> None:
    ids, logprobs = greedy(merged_model(model, folder), TOKENS, GREEDY.max_tokens)
    assert found[0] == ids
    assert found[1] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("gpt2", ("c_attn", "c_proj", "c_fc")),
        ("gpt_neox", ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
        ("falcon_40b", ("query_key_value", "dense")),
        ("mpt", ("Wqkv", "up_proj")),
        ("qwen2", ALL),
        ("gemma2", ALL),
        ("mixtral", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("deepseek_v2", ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    ],
)
def test_families_give_what_merged_weights_give(family, modules, tmp_path):
    """Some families store projections jointly, transposed or by heads; adapters are converted like
    their weights.
    """
    model = make_tiny_model(family, tmp_path / "model")
    folder = write_adapter(tmp_path / "adapter", model, 1, 4, modules, size=0.2)
    llm = LLM(str(model), **ENGINE)
    base, adapted, again = generate(llm, [None, LoRARequest("a", 1, str(folder)), None])
    assert_merged(adapted, model, folder)
    assert base == again != adapted


@pytest.mark.parametrize(("family", "size"), [("llama", 4), ("phi3", 2), ("deepseek_v2", 2)])
def test_ranks_give_what_one_gives(family, size, tmp_path, monkeypatch):
    """llama has fewer KV heads than ranks, so ranks share a head and its adapter."""
    model = make_tiny_model(family, tmp_path / "model")
    modules = ("qkv_proj", "kv_b_proj", "o_proj", "gate_up_proj", "down_proj")
    if family == "llama":
        modules = (*ALL, "embed_tokens", "lm_head")
    folders = [
        write_adapter(tmp_path / str(n), model, n, rank, modules, size=0.1)
        for n, rank in enumerate((3, 16))
    ]
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    llm = LLM(str(model), tensor_parallel_size=size, fully_sharded_loras=True, **ENGINE)
    adapters = [LoRARequest(f.name, n + 1, str(f)) for n, f in enumerate(folders)]
    found = generate(llm, [adapters[0], None, adapters[1]])
    for got, folder in zip((found[0], found[2]), folders, strict=True):
        assert_merged(got, model, folder)
    core_of(llm).shutdown()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_give_what_one_gives(family, tmp_path, monkeypatch):
    """In gpt2, the head of the last stage is tied to the embedding of the first stage."""
    model = make_tiny_model(family, tmp_path / "model")
    names = ("wte", "c_attn", "c_proj") if family == "gpt2" else (*ALL, "embed_tokens", "lm_head")
    folder = write_adapter(tmp_path / "adapter", model, 1, 4, names, size=0.1)
    adapter = LoRARequest("a", 1, str(folder))
    want = generate(LLM(str(model), **ENGINE), [adapter, None])
    broken = write_adapter(tmp_path / "broken", model, 1, 4, names[-1:], size=0.1)
    weights = broken / "adapter_model.safetensors"
    tensors = load_file(weights)
    (last,) = (n for n in tensors if "lora_B" in n and ("lm_head" in n or "h.1.mlp" in n))
    save_file(tensors | {last: torch.zeros(3, 4)}, weights)
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    llm = LLM(str(model), pipeline_parallel_size=2, **ENGINE)
    found = generate(llm, [adapter, None])
    for got, wanted in zip(found, want, strict=True):
        assert got[0] == wanted[0]
        assert got[1] == pytest.approx(wanted[1], abs=1e-4)
    # An error on one stage fails the request on all stages.
    prompts = [{"prompt_token_ids": TOKENS}] * 2
    mixed = [LoRARequest("broken", 2, str(broken)), adapter]
    outputs = run_on_engine(llm, prompts, GREEDY, mixed)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "has the shape [3, 4]" in outputs[0].outputs[0].stop_reason
    core_of(llm).shutdown()


@pytest.fixture(scope="module")
def coder(tmp_path_factory) -> LoRARequest:
    """Return an adapter of the bundled model with small weights, which changes its answers a
    little.
    """
    folder = tmp_path_factory.mktemp("adapter") / "coder"
    write_adapter(folder, BUNDLED_MODEL, 3, 8, ALL, size=0.04)
    return LoRARequest("coder", 1, str(folder))


PROMPT = "def main(args):\n    "
TEXT = "def add(a, b):\n    return a + b\n\n\n" * 3


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_packed_weights_keep_the_bits_of_other_rows(quantization, coder):
    """Prompts and decodes run in the fused program, next to requests with any adapters."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    engine = {"max_model_len": 128, "quantization": quantization, "max_num_seqs": 4}
    plain = LLM(**engine).generate([PROMPT, TEXT], params, use_tqdm=False)
    llm = LLM(enable_lora=True, **engine)
    mixed = [None, coder, None, coder]
    found = llm.generate([PROMPT, PROMPT, TEXT, TEXT], params, use_tqdm=False, lora_request=mixed)
    assert [seen(found[0]), seen(found[2])] == [seen(output) for output in plain]
    assert seen(found[1]) != seen(found[0]) and seen(found[3]) != seen(found[2])
    runner = runner_of(llm)
    assert program_of(runner) is not None and decode_step_of(runner) is not None
    # A request with an adapter gets exactly the same log-probabilities in every batch.
    alone = llm.generate([TEXT], params, use_tqdm=False, lora_request=coder)[0]
    assert seen(alone) == seen(found[3])


def test_an_adapted_embedding_or_head_leaves_other_rows_as_they_are(coder, tmp_path):
    """Steps with such an adapter run module by module, and other steps in one call."""
    engine = {"max_model_len": 128, "max_num_seqs": 4, "enable_lora": True, "max_loras": 3}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    llm = LLM(enable_prefix_caching=False, **engine)
    plain = [coder, None]
    want = llm.generate([TEXT] * 2, params, use_tqdm=False, lora_request=plain)
    found = [seen(output) for output in want]
    for number, module in enumerate(("embed_tokens", "lm_head"), 2):
        folder = write_adapter(tmp_path / module, BUNDLED_MODEL, 3, 8, (module,), size=0.2)
        mixed = [*plain, LoRARequest(module, number, str(folder))]
        outputs = llm.generate([TEXT] * 3, params, use_tqdm=False, lora_request=mixed)
        first, second, changed = map(seen, outputs)
        assert [first, second] == found
        assert changed not in found


def test_the_fused_program_computes_what_modules_compute(coder, monkeypatch):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    llm = LLM(max_model_len=128, enable_lora=True, enable_prefix_caching=False)
    want = seen(llm.generate([TEXT], params, use_tqdm=False, lora_request=coder)[0])
    leave_modules_alone(runner_of(llm))
    got = seen(llm.generate([TEXT], params, use_tqdm=False, lora_request=coder)[0])
    assert got == want


def test_drafts_and_grammars_know_the_adapter(coder):
    engine = {"max_model_len": 256, "dtype": "float32", "enable_lora": True}
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts, mixed = [TEXT, TEXT], [coder, None]
    plain = LLM(**engine)
    want = plain.generate(prompts, params, use_tqdm=False, lora_request=mixed)
    drafted = LLM(**engine, speculative_config={"method": "ngram"})
    got = drafted.generate(prompts, params, use_tqdm=False, lora_request=mixed)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    assert stats_of(drafted).drafts.num_draft_tokens
    guided = GuidedDecodingParams(json={"type": "object", "properties": {"a": {"enum": [1, 2]}}})
    params = SamplingParams(max_tokens=40, temperature=0, guided_decoding=guided)
    for output in plain.generate(prompts, params, use_tqdm=False, lora_request=mixed):
        if output.outputs[0].finish_reason == "stop":
            json.loads(output.outputs[0].text)


def test_adapters_of_an_absorbed_projection_keep_the_bits_of_other_rows(tmp_path):
    """kv_b_proj of latent attention is multiplied into queries and outputs, and steps run in one
    call.
    """
    model = make_tiny_model("deepseek_v2", tmp_path / "model")
    folder = write_adapter(tmp_path / "adapter", model, 1, 4, ("kv_b_proj",), size=0.3)
    llm = LLM(str(model), **ENGINE | {"dtype": "bfloat16"})
    (alone,) = generate(llm, [None])
    first, adapted, last = generate(llm, [None, LoRARequest("a", 1, str(folder)), None])
    assert first == last == alone != adapted
    runner = runner_of(llm)
    assert program_of(runner) is not None and decode_step_of(runner) is not None
