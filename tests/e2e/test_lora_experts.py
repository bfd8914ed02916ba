"""Test LoRA adapters of experts with ranks, packed weights, and requests without adapters in one
batch.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_lora_features import ENGINE, GREEDY, TOKENS, assert_merged, generate
from tests.executor.thread_ranks import ThreadRanks
from tests.exhaustive import exhaustive
from tests.lora_files import (
    run_on_engine,
    write_adapter,
    write_expert_adapter,
    write_stacked_expert_adapter,
)
from tests.reach import core_of
from tests.tiny_models import make_tiny_model
from vllm import LLM
from vllm.engine import engine_core
from vllm.lora.request import LoRARequest


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model("mixtral", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory) -> LoRARequest:
    folder = write_expert_adapter(tmp_path_factory.mktemp("adapter"), model, 1, 4, size=0.2)
    return LoRARequest("experts", 1, str(folder))


@pytest.fixture(scope="module")
def attention(model, tmp_path_factory) -> LoRARequest:
    folder = write_adapter(tmp_path_factory.mktemp("adapter"), model, 2, 8, ("q_proj",), size=0.2)
    return LoRARequest("attention", 2, str(folder))


@pytest.mark.parametrize("is_whole", [False, True])
def test_ranks_give_what_merged_weights_give(is_whole, model, adapter, tmp_path, monkeypatch):
    """Each rank has a part of every expert, or all of some experts."""
    folders = write_down_projections(tmp_path, Path(adapter.path))
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": is_whole}
    llm = LLM(str(model), **ranks, **ENGINE)
    base, found, again = generate(llm, [None, adapter, None])
    assert_merged(found, model, Path(adapter.path))
    assert base[0] == again[0] != found[0]
    assert base[1] == pytest.approx(again[1], abs=1e-4)
    down, stacked = [LoRARequest(f.name, n, str(f)) for n, f in enumerate(folders, 2)]
    found = generate(llm, [down, None, stacked])
    assert found[0][0] == found[2][0] != base[0]
    assert found[0][1] == pytest.approx(found[2][1], abs=1e-4)
    core_of(llm).shutdown()


@pytest.mark.parametrize(
    ("family", "is_whole"),
    [
        ("gpt_oss", False),
        ("llama4", True),
        exhaustive("gpt_oss", True),
        exhaustive("llama4", False),
    ],
)
def test_ranks_share_parameters_of_all_experts(family, is_whole, tmp_path, monkeypatch):
    """gpt_oss has biases, which are added only once; llama4 has A on the side of the outputs."""
    model = make_tiny_model(family, tmp_path / "model")
    folder = write_stacked_expert_adapter(tmp_path / "adapter", model, 1, 4, size=0.3)
    adapter = LoRARequest("experts", 1, str(folder))
    want = generate(LLM(str(model), **ENGINE), [None, adapter])
    assert want[0][0] != want[1][0]
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": is_whole}
    llm = LLM(str(model), **ranks, **ENGINE)
    for got, wanted in zip(generate(llm, [None, adapter]), want, strict=True):
        assert got[0] == wanted[0]
        assert got[1] == pytest.approx(wanted[1], abs=1e-4)
    core_of(llm).shutdown()


def write_down_projections(folder: Path, source: Path) -> list[Path]:
    """Write two adapters with only the down projections of another one: matrix by matrix, and as
    one parameter for all experts.
    """
    given = load_file(source / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    given = {name: tensor for name, tensor in given.items() if ".w2." in name}
    stacked = {}
    for path in {name.partition(".experts.")[0] for name in given}:
        a, b = (
            [given[f"{path}.experts.{n}.w2.lora_{part}.weight"] for n in range(4)] for part in "AB"
        )
        stacked[f"{path}.experts.lora_A.weight"] = torch.cat(a)
        stacked[f"{path}.experts.lora_B.weight"] = torch.stack(b, dim=-1).flatten(1)
    folders = [folder / "down", folder / "stacked"]
    names = {}, {"target_parameters": ["experts.down_proj"]}
    for each, tensors, options in zip(folders, (given, stacked), names, strict=True):
        each.mkdir()
        save_file(tensors, each / "adapter_model.safetensors")
        (each / "adapter_config.json").write_text(json.dumps(config | options))
    return folders


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_packed_experts_keep_the_bits_of_other_rows(
    quantization, model, adapter, attention, tmp_path
):
    """In bfloat16, the steps with an adapter of experts run module by module, and other steps in
    one call.
    """
    engine = ENGINE | {"dtype": "bfloat16", "quantization": quantization, "max_loras": 2}
    llm = LLM(str(model), enable_prefix_caching=False, **engine)
    base, other = generate(llm, [None, attention])
    again, found, other_again = generate(llm, [None, adapter, attention])
    assert [again, other_again] == [base, other]
    assert found not in (base, other)
    assert generate(llm, [adapter])[0] == found
    nothing = write_expert_adapter(tmp_path / "nothing", model, 1, 4, size=0)
    (without,) = generate(llm, [LoRARequest("nothing", 3, str(nothing))])
    # The same weights, rounded at other points of the computation.
    assert without[1] == pytest.approx(base[1], abs=0.03)


def reason(llm: LLM, folder: Path) -> str:
    """Return the reason why an adapter is refused, and check that a request without an adapter
    continues.
    """
    prompts = [{"prompt_token_ids": TOKENS}] * 2
    mixed = [LoRARequest("broken", 9, str(folder)), None]
    outputs = run_on_engine(llm, prompts, GREEDY, mixed)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    return outputs[0].outputs[0].stop_reason


def test_wrong_adapters_of_experts_are_refused(model, adapter, tmp_path):
    llm = LLM(str(model), **ENGINE)
    given = load_file(Path(adapter.path) / "adapter_model.safetensors")
    config = json.loads((Path(adapter.path) / "adapter_config.json").read_text())
    of_first = next(name for name in given if ".0.w1.lora_A" in name)
    path = of_first.partition(".0.w1.")[0]
    all_a, all_b = given[of_first].repeat(3, 1), given[of_first].T.repeat(1, 3)
    whole = {f"{path}.lora_A.weight": all_a, f"{path}.lora_B.weight": all_b}
    parameters = config | {"target_parameters": ["experts.gate_up_proj"]}
    for tensors, options, message in (
        (
            given | {of_first: given[of_first][:, 1:]},
            config,
            "experts.0.gate_proj.lora_A has the shape",
        ),
        (whole, config, "is missing in target_parameters of the adapter's config ([])"),
        (whole, parameters, "rank 4 of 4 experts needs [16, 64] and [352, 16]"),
    ):
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, tmp_path / "adapter_model.safetensors"
        )
        (tmp_path / "adapter_config.json").write_text(json.dumps(options))
        assert message in reason(llm, tmp_path)
