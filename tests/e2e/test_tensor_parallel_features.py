"""Test features that users combine with several ranks: the outputs are the same as with one
rank.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_tensor_parallel import ENGINE, PROMPTS, assert_same, generate
from tests.executor.thread_ranks import ThreadRanks
from tests.exhaustive import exhaustive
from tests.model_executor.helpers import prompt_of
from tests.quantized_checkpoints import write
from tests.reach import core_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.engine import engine_core
from vllm.model_executor import fusion
from vllm.model_executor.quantization.formats import fp8
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep
from vllm.sampling_params import GuidedDecodingParams

needs_kernels = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 16,
}
"""Prompts in chunks, and a cache that six requests overflow."""

CODE = "def area(w, h):\n    return w * h\n\ndef volume(w, h, d):\n    return w * h * d\n\n"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
REQUESTS = [
    (CODE + CODE, SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, logprobs=1)),
    (CODE, SamplingParams(max_tokens=40, temperature=0.9, seed=5, top_p=0.9, n=2)),
    (CODE + "def area(w, h):", SamplingParams(max_tokens=30, temperature=0, prompt_logprobs=2)),
    ("import os\n", SamplingParams(max_tokens=30, temperature=0, repetition_penalty=1.1)),
    (
        "data = ",
        SamplingParams(
            max_tokens=60,
            temperature=0.7,
            seed=2,
            guided_decoding=GuidedDecodingParams(json=PERSON),
        ),
    ),
    (CODE + CODE, SamplingParams(max_tokens=40, temperature=0.3, seed=1, min_tokens=20)),
]


def run(llm: LLM) -> list[Any]:
    prompts, params = zip(*REQUESTS, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def seen_by_user(outputs: list[Any]) -> list[Any]:
    return [
        [(tuple(s.token_ids), s.text, s.finish_reason) for s in output.outputs]
        for output in outputs
    ]


def prompt_logprobs_of(outputs: list[Any]) -> list[float]:
    positions = [p for p in outputs[2].prompt_logprobs if p is not None]
    return [entry.logprob for entries in positions for entry in entries.values()]


def test_drafts_grammars_prefixes_and_preemption_together():
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    want = run(LLM(**SMALL))
    llm = LLM(
        tensor_parallel_size=2, speculative_config=speculative, disable_log_stats=False, **SMALL
    )
    try:
        for got in (run(llm), run(llm)):  # the second time from the prefix cache
            assert seen_by_user(got) == seen_by_user(want)
            assert prompt_logprobs_of(got) == pytest.approx(prompt_logprobs_of(want), abs=1e-4)
        person = json.loads(got[4].outputs[0].text)
        assert isinstance(person["age"], int)
        values = {
            metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
        }
        assert values["vllm:spec_decode_num_accepted_tokens"] > 10
        assert values["vllm:num_preemptions"] > 0
    finally:
        core_of(llm).shutdown()


PLAIN = [
    SamplingParams(temperature=0.9 * (n % 2), seed=n, max_tokens=12, ignore_eos=True)
    for n in range(len(PROMPTS))
]
"""Parameters that a step in one call supports, in addition to `PARAMS`."""


def generate_on(folder: Any, **settings: Any) -> list[Any]:
    llm = LLM(str(folder), **(ENGINE | {"num_gpu_blocks_override": 25} | settings))
    try:
        plain = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PLAIN, use_tqdm=False)
        return [*plain, *generate(llm)]
    finally:
        core_of(llm).shutdown()


@needs_kernels
@pytest.mark.parametrize(
    ("family", "size", "settings"),
    [
        ("llama", 4, {}),  # ranks share KV heads; the vocabulary is padded
        ("qwen3_moe", 4, {"enable_expert_parallel": True}),  # each rank has one or two experts
        ("granite_code", 2, {"quantization": "int4"}),
    ],
)
def test_steps_in_one_call_have_the_tokens_of_the_modules(
    family, size, settings, tmp_path, monkeypatch
):
    """In bfloat16 all layers are packed, so that a whole step is one call."""
    folder = make_tiny_model(family, tmp_path, vocab_size=4097, dtype="bfloat16")
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    settings = settings | {"dtype": "bfloat16", "tensor_parallel_size": size}
    num_steps, run_step = 0, FusedDecodeStep.run

    def counted(self: FusedDecodeStep, *args: Any, **options: Any) -> Any:
        nonlocal num_steps
        found = run_step(self, *args, **options)
        num_steps += found is not None
        return found

    monkeypatch.setattr(FusedDecodeStep, "run", counted)
    got = generate_on(folder, **settings)
    assert num_steps >= 10 * size
    monkeypatch.setattr(fusion, "load_cpu_kernels", lambda: None)  # nothing is fused
    assert_same(got, generate_on(folder, **settings))


def write_wide(name: str, folder: Path) -> Path:
    """Write a quantized checkpoint of which each block is on one rank."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return write(name, folder, make_tiny_model("llama", folder, **wide))[0]


@needs_kernels
# Exhaustive: tests/model_executor/test_quantized_programs.py divides every format.
@pytest.mark.parametrize(
    "name",
    [
        "fp8-block",
        "gptq-8-order",
        *map(exhaustive, ("fp8-static", "ct-w8a16-int8", "ct-fp8-static")),
    ],
)
def test_quantized_checkpoints_have_the_tokens_of_one_rank(name, tmp_path, monkeypatch):
    folder = write_wide(name, tmp_path)
    want = generate_on(folder)
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    assert_same(generate_on(folder, tensor_parallel_size=2), want)


def prompt_logprobs_on(folder: Path, **settings: Any) -> list[float]:
    llm = LLM(str(folder), **(ENGINE | settings))
    prompt = {"prompt_token_ids": prompt_of(30).tolist()}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    core_of(llm).shutdown()
    positions = [p for p in output.prompt_logprobs if p is not None]
    return [next(iter(entries.values())).logprob for entries in positions]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "quantization", "tolerance"),
    [
        ("gptq-4", None, 0.02),
        ("gptq-4-order", None, 0.1),
        ("ct-w8a8", None, 0.1),
        ("llama", "int4", 0.25),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                ("awq", None, 0.02),
                ("ct-w4a16", None, 0.02),
                ("llama", "int8", 0.25),
                ("llama", "fp8", 0.25),
            )
        ),
    ],
)
def test_rounded_inputs_differ_a_little(name, quantization, tolerance, tmp_path, monkeypatch):
    """Rounding depends on the part of a rank: int4 rounds inputs by groups, which a rank may have
    in part; int8 and FP8 use one scale for all weights of a rank.
    """
    write_model = write_wide if quantization is None else make_tiny_model
    folder = write_model(name, tmp_path)
    want = prompt_logprobs_on(folder, quantization=quantization)
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    got = prompt_logprobs_on(folder, quantization=quantization, tensor_parallel_size=2)
    differences = [abs(a - b) for a, b in zip(got, want, strict=True)]
    assert sum(differences) / len(want) < tolerance


@needs_kernels
@pytest.mark.parametrize(
    ("name", "family", "size"),
    [("fp8-block", "llama", 2), ("ct-fp8-block", "llama", 4), ("fp8-block", "qwen3_moe", 2)],
)
def test_blocks_of_fp8_may_be_on_several_ranks(name, family, size, tmp_path, monkeypatch):
    """A rank has 96 or 48 inputs of down_proj, whose blocks have 128."""
    sizes = {"intermediate_size": 192}
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = 192
    folder, _ = write(name, tmp_path, make_tiny_model(family, tmp_path, **sizes))
    want = generate_on(folder)
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    found = set()
    read = fp8.Fp8Linear.stored_weight

    def noted(self: fp8.Fp8Linear, layer: Any) -> Any:
        weight = read(self, layer)
        found.add((self.name.rpartition(".")[2], weight.block_inputs))
        return weight

    monkeypatch.setattr(fp8.Fp8Linear, "stored_weight", noted)
    assert_same(generate_on(folder, tensor_parallel_size=size), want)
    assert ("down_proj", 64 // size) in found
