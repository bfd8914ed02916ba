"""Test LoRA adapters on a strict simulated card: they give the tokens of the CPU, and nothing
compiles after the warm-up for any mix of adapters.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gaudi_sim.bridge import SimBridge
from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, simulated_hpu
from tests.lora_files import (
    ALL,
    base_model,
    write_adapter,
    write_expert_adapter,
    write_stacked_expert_adapter,
)
from tests.reach import stats_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.env import ranks as env_ranks
from vllm.errors import RequestError
from vllm.lora.request import LoRARequest

ENGINE = SMALL_ENGINE | {"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2}
PROMPTS = [{"prompt_token_ids": list(range(20, 20 + n))} for n in (1, 7, 18, 40, 90, 7)]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
WARM_LATER = FEW_BUCKETS | {
    "VLLM_DECODE_BLOCK_BUCKET_MIN": 8,
    "VLLM_DECODE_BLOCK_BUCKET_STEP": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [
        write_adapter(root / str(n), folder, n, rank, modules)
        for n, (rank, modules) in enumerate(
            [(4, ALL), (16, ALL), (1, ("q_proj", "down_proj")), (8, ("embed_tokens", "lm_head"))]
        )
    ]
    table, head = (base_model(folder).get_submodule(n) for n in ("model.embed_tokens", "lm_head"))
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": -table.weight[20:25]}
    ids = {"trainable_token_indices": list(range(20, 25))}
    folders.append(write_adapter(root / "rows", folder, 9, 4, ("q_proj",), **ids))
    add_tensors(folders[-1], rows)
    kept = head.weight.detach().clone()
    kept[100:116] *= -1
    add_tensors(folders[2], {"lm_head.modules_to_save.default.weight": kept})
    return [LoRARequest(f"adapter {n}", n + 1, str(f)) for n, f in enumerate(folders)]


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add trained rows of tables to the file of an adapter."""
    path = folder / "adapter_model.safetensors"
    given = {f"base_model.model.{name}": tensor.detach() for name, tensor in tensors.items()}
    save_file(load_file(path) | given, path)


def outputs_of(llm: LLM, adapters: list[LoRARequest | None]) -> list[tuple[list, list]]:
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters)
    samples = [output.outputs[0] for output in found]
    return [
        (
            list(s.token_ids),
            [row[t].logprob for t, row in zip(s.token_ids, s.logprobs, strict=True)],
        )
        for s in samples
    ]


def assert_same_without_compilation(
    bridge: SimBridge,
    llm: LLM,
    mixes: list[list[LoRARequest | None]],
    want: list[list[tuple[list, list]]],
) -> None:
    compilations = bridge.counters().compilations
    for mix, expected in zip(mixes, want, strict=True):
        for got, wanted in zip(outputs_of(llm, mix), expected, strict=True):
            assert got[0] == wanted[0]
            assert got[1] == pytest.approx(wanted[1], abs=1e-4)
    assert bridge.counters().compilations == compilations


@pytest.fixture(scope="module")
def mixes(adapters) -> list[list[LoRARequest | None]]:
    a, b, c, d, e = adapters
    one = [[a, None, b, c, None, d], [d, c, None, None, a, a], [None] * 6]
    return [*one, [e, None, e, c, c, None]]


@pytest.fixture(scope="module")
def want(folder, mixes) -> list[list[tuple[list, list]]]:
    llm = LLM(folder, device="cpu", **ENGINE)
    return [outputs_of(llm, mix) for mix in mixes]


@pytest.mark.parametrize(
    ("mode", "is_merged"),
    [
        ("HPU graphs", False),
        pytest.param("HPU graphs", True, marks=pytest.mark.exhaustive),
        pytest.param("eager", False, marks=pytest.mark.exhaustive),
        pytest.param("lazy", False, marks=pytest.mark.exhaustive),
        pytest.param("torch.compile", False, marks=pytest.mark.exhaustive),
    ],
)
def test_mixed_adapters_give_what_the_cpu_gives_and_compile_nothing(
    mode, is_merged, folder, mixes, want, tmp_path
):
    is_lazy, is_eager = MODES[mode]
    settings = FEW_BUCKETS | {"VLLM_MERGED_PREFILL": is_merged, "VLLM_HPU_SIM_STRICT": 1}
    card = simulated_hpu(PT_HPU_LAZY_MODE=is_lazy, has_profiling_run=False, **settings)
    with card as bridge:
        llm = LLM(folder, device="hpu", enforce_eager=is_eager, sampling_warmup="all", **ENGINE)
        assert_same_without_compilation(bridge, llm, mixes, want)
        assert want[0] != want[2]
        assert want[1][1] != want[2][1] and want[3][0] != want[2][0]
        whole = Path(write_adapter(tmp_path / "whole", folder, 9, 4, ("q_proj",)))
        add_tensors(whole, {"lm_head.weight": torch.ones(4096, 64)})
        with pytest.raises(
            RequestError, match="replaces the weights of 4096 tokens in lm_head: on"
        ):
            outputs_of(llm, [LoRARequest("whole", 9, str(whole)), *[None] * 5])


@pytest.mark.exhaustive
def test_adapters_come_and_go_while_buckets_warm_up(folder, mixes, want):
    card = simulated_hpu(PT_HPU_LAZY_MODE=1, has_profiling_run=False, **WARM_LATER)
    with card:
        first = {"ready_when": "first", "first_buckets": 1, "warm_up_share": 0.5}
        llm = LLM(folder, device="hpu", sampling_warmup="all", **ENGINE | first)
        before = stats_of(llm).warm_up
        for _ in range(4):
            for mix, expected in zip(mixes, want, strict=True):
                for got, wanted in zip(outputs_of(llm, mix), expected, strict=True):
                    assert got[0] == wanted[0]
                    assert got[1] == pytest.approx(wanted[1], abs=1e-4)
        stats = stats_of(llm)
        assert before.num_warm < stats.warm_up.num_warm
        assert stats.runner.num_late_compilations == stats.runner.num_bucket_misses == 0


def test_rows_without_an_adapter_keep_their_bits(folder, mixes):
    assert_base_rows_keep_their_bits(folder, mixes)


def assert_base_rows_keep_their_bits(
    folder: str, mixes: list[list[LoRARequest | None]], **options: Any
) -> None:
    """Check that requests without an adapter have the same bits in every mix.

    The settings let the scheduler run the same steps, so forward passes have the same shapes. The
    softmax subtracts a constant, so requests do not share a maximum of their scores.
    """
    settings = ENGINE | {"max_loras": 4, "enable_prefix_caching": False} | options
    card = FEW_BUCKETS | {"VLLM_SOFTMAX_CONST_NORM": 1, "has_profiling_run": False}
    with simulated_hpu(PT_HPU_LAZY_MODE=1, **card):
        plain = LLM(folder, device="hpu", **{**settings, "enable_lora": False})
        alone = outputs_of(plain, [None] * len(PROMPTS))
    with simulated_hpu(PT_HPU_LAZY_MODE=1, **card):
        llm = LLM(folder, device="hpu", **settings)
        for mix in mixes:
            found = zip(PROMPTS, mix, outputs_of(llm, mix), alone, strict=True)
            for prompt, adapter, got, wanted in found:
                # Results of a prompt in chunks depend on other requests.
                is_whole = len(prompt["prompt_token_ids"]) <= 32
                assert not is_whole or (got == wanted) == (adapter is None)


WITH_EXPERTS = ["o_proj", "experts"]


def with_experts(family: str, root: Path) -> tuple[str, list[list[LoRARequest | None]]]:
    """Return a model with experts, and adapters for each request: two for experts, one for other
    layers, or none.
    """
    model = make_tiny_model(family, root / "model")
    write = write_expert_adapter if family == "mixtral" else write_stacked_expert_adapter
    folders = [write(root / str(n), model, n, rank, size=0.2) for n, rank in enumerate((4, 16))]
    return str(model), mixes_of(model, root, folders)


def mixes_of(model: Path, root: Path, folders: list[Path]) -> list[list[LoRARequest | None]]:
    other = write_adapter(root / "other", model, 2, 8, ("o_proj",), size=0.2)
    requests = [LoRARequest(f.name, n, str(f)) for n, f in enumerate([*folders, other], 1)]
    a, b, c = requests
    return [[a, None, b, b, None, a], [c, a, None, c, b, None], [None] * 6]


@pytest.mark.parametrize(
    ("family", "modes"),
    [
        ("mixtral", ("HPU graphs",)),
        # Exhaustive: for a card, it differs from mixtral only in the weights of the chosen experts.
        exhaustive("qwen3_moe", ("HPU graphs",)),
        pytest.param("gpt_oss", ("HPU graphs",), marks=pytest.mark.exhaustive),
        pytest.param("llama4", ("HPU graphs",), marks=pytest.mark.exhaustive),
        pytest.param("mixtral", ("lazy", "eager"), marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", ("torch.compile",), marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_of_experts_give_what_the_cpu_gives(family, modes, tmp_path):
    """The adapter of mixtral has each matrix separately, other adapters have parameters for all
    experts.
    """
    assert_as_on_the_cpu(*with_experts(family, tmp_path), modes, WITH_EXPERTS)


@pytest.mark.parametrize(
    "modes",
    [
        ("HPU graphs",),
        pytest.param(("lazy", "eager", "torch.compile"), marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_of_absorbed_projections_give_what_the_cpu_gives(modes, tmp_path):
    model = make_tiny_model("deepseek_v2", tmp_path / "model")
    folders = [
        write_adapter(tmp_path / str(n), model, n, rank, ("kv_b_proj", "o_proj"), size=0.2)
        for n, rank in enumerate((4, 16))
    ]
    mixes = mixes_of(model, tmp_path, folders)
    assert_as_on_the_cpu(str(model), mixes, modes, ["kv_b_proj", "o_proj"])


def assert_as_on_the_cpu(
    model: str, mixes: list[list[LoRARequest | None]], modes: tuple[str, ...], targets: list[str]
) -> None:
    plain = LLM(model, device="cpu", **ENGINE)
    want = [outputs_of(plain, mix) for mix in mixes]
    assert all(want[0][n] != want[2][n] for n in (0, 2, 3, 5))
    for mode in modes:
        is_lazy, is_eager = MODES[mode]
        card = FEW_BUCKETS | {"PT_HPU_LAZY_MODE": is_lazy, "has_profiling_run": False}
        with simulated_hpu(**card) as bridge:
            settings = ENGINE | {"enforce_eager": is_eager, "sampling_warmup": "all"}
            llm = LLM(model, device="hpu", lora_target_modules=targets, **settings)
            assert_same_without_compilation(bridge, llm, mixes, want)


@pytest.mark.exhaustive  # exhaustive: test_lora.py tests the message
def test_adapters_change_experts_on_a_card_only_if_asked_to(tmp_path):
    model, ((adapter, *_), *_) = with_experts("mixtral", tmp_path)
    with simulated_hpu(**FEW_BUCKETS, PT_HPU_LAZY_MODE=1, has_profiling_run=False):
        llm = LLM(model, device="hpu", enforce_eager=True, **ENGINE)
        wanted = "These as well if lora_target_modules names them: experts. Merge"
        with pytest.raises(RequestError, match=wanted):
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=adapter)


@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.exhaustive), "fp8"])
def test_rows_without_an_adapter_of_experts_keep_their_bits(quantization, tmp_path):
    model, mixes = with_experts("mixtral", tmp_path)
    options = {"dtype": "bfloat16", "quantization": quantization}
    options["lora_target_modules"] = WITH_EXPERTS
    assert_base_rows_keep_their_bits(model, mixes[:1], **options)


def tokens_of(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [20, 21, 22, 23] * n} for n in (1, 3, 5, 9, 2, 4)]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        # Exhaustive: test_speculators.py tests drafts with adapters on the CPU.
        pytest.param({"speculative_config": NGRAM}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_adapters_with_drafts_and_on_two_cards(settings, folder, mixes, monkeypatch):
    plain = LLM(folder, device="cpu", **ENGINE)
    mixes = mixes[:3]  # ranks cannot replace rows of the input embedding
    want = [tokens_of(plain, mix) for mix in mixes]
    for name, value in env_ranks.rank_variables(0, 1).items():
        # An engine changes these variables; monkeypatch restores them afterwards.
        monkeypatch.setenv(name, value)
    card = FEW_BUCKETS | {"VLLM_HPU_SIM_STRICT": 1, "PT_HPU_ENABLE_LAZY_COLLECTIVES": True}
    is_alone = "speculative_config" in settings
    with simulated_hpu(PT_HPU_LAZY_MODE=1, has_profiling_run=not is_alone, **card):
        llm = LLM(folder, device="hpu", sampling_warmup="all", **ENGINE | settings)
        for mix, expected in zip(mixes, want, strict=True):
            assert tokens_of(llm, mix) == expected
        drafts = stats_of(llm).drafts
        assert is_alone == bool(drafts.num_draft_tokens)
        llm.llm_engine.shutdown()
