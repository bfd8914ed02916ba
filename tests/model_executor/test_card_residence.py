"""Test how quantized weights are stored in the memory of a simulated card.

Also which operators multiply them, against the table of docs/quantization_tables.md. Each format
is a tiny model; all run in one process.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gaudi_sim.bridge import SimBridge
from tests.gpt_oss_checkpoint import write_gpt_oss
from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, captured_log, simulated_hpu
from tests.model_executor.helpers import make_config
from tests.model_executor.inc_models import load_inc, measure, quantize_config
from tests.quantized_checkpoints import FORMATS, made_once, write
from tests.reach import replace_kernels
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.distributed import TPGroup
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.latent import LatentUpProjection
from vllm.model_executor.layers.linear import ColumnParallelLinear, ParallelLinear
from vllm.model_executor.layers.stored.stored_linear import RoundedLinear
from vllm.model_executor.loader import load_model
from vllm.model_executor.loader.model_loader import log_dequantized
from vllm.model_executor.quantization.registry import FORMATS as ALL_FORMATS
from vllm.ops import get_ops, set_ops
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.hpu.quantized import HPUNarrowWeight
from vllm.ops.native.operators import NativeOps
from vllm.ops.stored_weight import GroupedWeight
from vllm.platforms.habana.kernels import FusedKernels
from vllm.transformers_utils.gguf.folder import unpack

PAGE = Path(__file__).parents[2] / "docs" / "quantization_tables.md"
OPERATORS = {
    "cast_to_fp8": "cast_to_fp8_v2",
    "fp8_gemm": "fp8_gemm_v2",
    "from_uint4": "convert_from_uint4",
    "moe": "mixture_of_experts.fused_weights",
    "bias_moe": "mixture_of_experts.bias_fused_weights",
    "bias_mxfp4_moe": "mixture_of_experts.bias_mxfp4_fused_weights",
    "mxfp4_moe": "mixture_of_experts.mxfp4_fused_weights",
    "fp8_moe": "mixture_of_experts.fp8_fused_weights_dynamic",
}
"""Method of the bridge -> operator of the card."""
FP8 = torch.float8_e4m3fn


class Recorder(TorchFunctionMode):
    """The kernels of a card. It records which kernels were called, and whether torch multiplied."""

    def __init__(self, kernels: Any) -> None:
        super().__init__()
        self._kernels = kernels
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in OPERATORS:
            self.called.add(OPERATORS[name])
        return getattr(self._kernels, name)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (F.linear, Tensor.matmul, Tensor.__matmul__):
            self.called.add("matmul")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Found:
    """The properties of one layer."""

    bits: float
    """Bits of an element in memory, without its scales."""
    all_bits: float
    """Bits with everything that its matmul reads."""
    operators: frozenset[str]


def bits_of(packed: torch.nn.Module, num_weights: int) -> tuple[float, float]:
    numbers = [
        p.nbytes
        for name, p in packed.named_parameters()
        if name.rpartition(".")[2] in ("weight", "words", "numbers", "gate_up", "down")
    ]
    total = sum(p.nbytes for p in packed.parameters())
    return 8 * sum(numbers) / num_weights, 8 * total / num_weights


@dataclass
class Card:
    """A simulated card with the operators of this process."""

    name: str
    quantized: Callable[[str], tuple[Path, Path]]
    folder: Path

    def __post_init__(self) -> None:
        self.bridge = SimBridge(self.name, is_lazy=True, is_strict=True)
        self.ops = HPUOps(self.bridge)
        set_ops(self.ops)

    def load(self, folder: Path, quantization: str | None = None, **load: Any):
        config = make_config(folder, "bfloat16", **load)
        config = replace(config, model=replace(config.model, quantization=quantization))
        return load_model(config, TPGroup(), self.bridge.device)

    @torch.inference_mode()
    def layers_of(self, model: Any) -> Iterator[tuple[str, Found]]:
        """Yield the quantized layers of a model, each run once."""
        for name, layer in model.named_modules():
            packed = getattr(getattr(layer, "method", None), "packed", None)
            if packed is None or not isinstance(layer, ParallelLinear | Experts):
                continue
            for parameter in packed.parameters():
                # FP8 weights must be in the range that the card can read.
                if parameter.dtype == FP8:
                    assert parameter.cpu().float().abs().max() <= self.bridge.fp8_max
            yield name, self._run(layer, packed)

    def _run(self, layer: Any, packed: Any) -> Found:
        recorder = Recorder(self.bridge.kernels)
        for module in packed.modules():
            replace_kernels(module, recorder)
        if isinstance(layer, Experts):
            ids = torch.zeros(3, 2, dtype=torch.int64).to("hpu")
            given = [ids, torch.ones(3, 2).to("hpu")]
            num_in, size = layer.hidden_size, layer.intermediate_size
            num_weights = 3 * len(layer.expert_ids) * num_in * size
        else:
            given, num_in = [None], layer.input_size
            num_weights = num_in * layer.output_size
        x = torch.randn(3, num_in).bfloat16().to("hpu")
        with recorder:
            layer.method.apply(layer, x, *given)
        bits, all_bits = bits_of(packed, num_weights)
        return Found(bits, all_bits, frozenset(recorder.called))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    return made_once(tmp_path_factory.mktemp("quantized"))


@pytest.fixture
def make_card(quantized, tmp_path, monkeypatch) -> Iterator[Callable[[str], Card]]:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    before = get_ops()

    def make(name: str) -> Card:
        folder = tmp_path / name
        folder.mkdir()
        return Card(name, quantized, folder)

    yield make
    set_ops(before)


def of_checkpoint(name: str) -> Callable[[Card], Any]:
    return lambda card: card.load(card.quantized(name)[0])


def of_checkpoints(pattern: str) -> list[Callable[[Card], Any]]:
    return [of_checkpoint(name) for name in FORMATS if re.search(pattern, name)]


def of_dense(quantization: str) -> Callable[[Card], Any]:
    return lambda card: card.load(card.quantized("gptq-4")[1], quantization)


def of_gguf(kind: str) -> Callable[[Card], Any]:
    def load(card: Card) -> Any:
        gguf_files = pytest.importorskip("tests.gguf_files", reason="gguf is not installed")
        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
        source = make_tiny_model("llama", card.folder / f"{kind}-source", **sizes)
        target = card.folder / kind
        target.mkdir()
        path = gguf_files.write_gguf(source, target, lambda _: gguf_files.Type[kind])
        return card.load(unpack(path))

    return load


def of_experts(name: str) -> Callable[[Card], Any]:
    def load(card: Card) -> Any:
        sizes = {"moe_intermediate_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
        source = make_tiny_model("qwen3_moe", card.folder / f"{name}-source", **sizes)
        return card.load(write(name, card.folder, source)[0])

    return load


def of_gpt_oss(card: Card) -> Any:
    (card.folder / "gpt_oss").mkdir()
    return card.load(write_gpt_oss(card.folder / "gpt_oss")[1])


def of_inc(method: str) -> Callable[[Card], Any]:
    def load(card: Card) -> Any:
        dense = card.quantized("gptq-4")[1]
        set_ops(NativeOps())
        measure(dense, card.folder)
        set_ops(card.ops)
        of_card = {"device_for_scales": card.name.upper(), "scale_method": method}
        inc = quantize_config(card.folder, **of_card)
        return load_inc(dense, inc, device="hpu", dtype="bfloat16")

    return load


CASES: dict[str, list[Callable[[Card], Any]]] = {
    "FP8": [
        *(of_checkpoint(name) for name in FORMATS if "fp8" in name or name == "modelopt"),
        of_experts("mxfp8"),
        of_dense("fp8"),
        of_inc("maxabs_hw"),
        of_inc("act_maxabs_pow2_weights_pcs_opt_pow2"),
        of_inc("maxabs_pcs_pow2"),
        of_experts("fp8-block"),
        of_experts("ct-fp8-static"),
    ],
    "2 to 4 bits": [
        *of_checkpoints("gptq-[234]|awq(?!-factors)|w4a16|torchao-int4$|quark-u?int4"),
        of_dense("int4"),
        of_dense("bitsandbytes"),
        of_gguf("Q4_0"),
        of_experts("gptq-4"),
    ],
    "8 bits": [
        *of_checkpoints("gptq-8|w8a|bnb|mlx-8|hqq-8|torchao-(int8|w8a16)|axis-0|quark-int8"),
        of_dense("int8"),
        *(of_gguf(kind) for kind in ("Q5_0", "Q6_K", "Q8_0")),
        of_experts("ct-w8a8"),
    ],
    "4 bits with minimums": [
        *(of_gguf(kind) for kind in ("Q2_K", "Q3_K", "Q4_1", "Q4_K")),
        *(of_checkpoint(name) for name in ("mlx-3", "mlx-4", "hqq-3", "hqq-4")),
        of_checkpoint("torchao-int4-tiles"),
    ],
    "5 bits with minimums": [
        *(of_gguf(kind) for kind in ("Q5_1", "Q5_K")),
        of_checkpoint("mlx-5"),
    ],
    "MXFP4": [
        of_gpt_oss,
        of_checkpoint("mxfp4"),
        of_checkpoint("ct-mxfp4"),
        of_checkpoint("quark-mxfp4"),
        of_checkpoint("mlx-mxfp4"),
    ],
    "NVFP4": [of_checkpoint("nvfp4"), of_checkpoint("ct-nvfp4"), of_experts("nvfp4")],
}
"""Row of the table -> what its numbers hold for."""


def table() -> dict[str, list[str]]:
    """Return the lines of the table below the heading of the page, by the first cell of each
    line.
    """
    _, _, section = PAGE.read_text().partition("## What is in the memory of a card")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("kind", CASES)
def test_a_quantized_layer_is_in_memory_and_multiplied_as_the_table_says(make_card, kind):
    _, bits, linear, experts = table()[kind]
    cards = ("gaudi2", "gaudi3") if kind == "FP8" else ("gaudi2",)
    for card in map(make_card, cards):
        for load in CASES[kind]:
            model = load(card)
            found = dict(card.layers_of(model))
            assert found
            for name, layer in found.items():
                is_experts = name.endswith("experts")
                wanted = set(re.findall("`(.*?)`", experts if is_experts else linear))
                assert layer.bits == float(bits), name
                assert layer.all_bits < 16 * 0.75, name
                assert layer.operators == wanted, name


def test_the_table_has_every_format():
    named = {name for names, *_ in table().values() for name in re.findall("`(.*?)`", names)}
    assert named == set(ALL_FORMATS)
    assert table().keys() >= CASES.keys()


def test_a_projection_that_attention_absorbs_has_the_numbers_of_the_checkpoint(make_card):
    """This does not depend on the scale with which its inputs are rounded."""
    card = make_card("gaudi2")
    source = make_tiny_model("deepseek_v2", card.folder / "source", num_hidden_layers=1)
    stored, dense = write("fp8-static", card.folder, source)
    got, want = (
        next(m for m in card.load(folder).modules() if isinstance(m, LatentUpProjection))
        for folder in (stored, dense)
    )
    assert torch.equal(got.key_up.dense().cpu(), want.key_up.dense().cpu())
    assert torch.equal(got.value_up.dense().cpu(), want.value_up.dense().cpu())


CACHES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "per tensor": ("gptq-8", {"kv_cache_dtype": "fp8"}, FP8),
    "per head": ("gptq-8", {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, FP8),
    "e5m2": ("gptq-8", {"kv_cache_dtype": "fp8_e5m2"}, torch.float8_e5m2),
    "latent": ("deepseek_v2", {"kv_cache_dtype": "fp8_inc"}, FP8),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_in_fp8_is_cast_by_the_card_and_the_log_says_what_is_widened(
    kind, quantized, tmp_path, monkeypatch
):
    name, settings, dtype = CACHES[kind]
    folder = quantized(name)[0] if name in FORMATS else make_tiny_model(name, tmp_path / "model")
    called = set()
    for operator in ("cast_to_fp8", "cast_from_fp8"):
        real = getattr(FusedKernels, operator)

        def noted(self, *args, real=real):
            called.add(real.__name__)
            return real(self, *args)

        monkeypatch.setattr(FusedKernels, operator, noted)
    card = {"PT_HPU_LAZY_MODE": 1, "has_profiling_run": False, **FEW_BUCKETS}
    with simulated_hpu(**card) as bridge, captured_log() as messages:
        engine = SMALL_ENGINE | {"dtype": "bfloat16", "skip_tokenizer_init": True} | settings
        llm = LLM(str(folder), **engine)
        compilations = bridge.counters().compilations
        params = SamplingParams(max_tokens=3, detokenize=False)
        llm.generate({"prompt_token_ids": list(range(5, 25))}, params, use_tqdm=False)
        assert bridge.counters().compilations == compilations
        assert llm.collective_rpc(cache_dtypes) == [{dtype}]
    assert called == {"cast_to_fp8", "cast_from_fp8"}
    (line,) = (message for message in messages if "forward pass converts" in message)
    assert f"the KV cache in {str(dtype).removeprefix('torch.')} to " in line
    assert ("8 quantized weights" in line) == (name in FORMATS)


def cache_dtypes(worker) -> set[torch.dtype]:
    layers = worker.runner.attention_layers
    return {getattr(layer, name).dtype for layer in layers for name in layer.cache_names}


def test_a_layer_that_no_card_has_a_form_for_is_named_in_the_log(make_card):
    """With act-order, the card has to add columns of zeros. With a zero point of 16, no 4-bit value
    means 0.
    """
    card = make_card("gaudi2")
    weight = GroupedWeight(
        words=torch.zeros(8, 16, dtype=torch.int32),
        bits=4,
        scales=torch.ones(2, 16),
        zeros=torch.full((2, 16), 16, dtype=torch.int16),
        groups=torch.tensor([0] * 30 + [1] * 34, dtype=torch.int32),
    )
    method = RoundedLinear("layer", lambda dense: weight)
    model = torch.nn.Module()
    model.layer = ColumnParallelLinear(64, {"": 16}, TPGroup())
    model.layer.use_method(method)
    model.layer.finish()
    with captured_log() as messages:
        log_dequantized(model)
    assert messages == [
        "1 quantized layers are dequantized in memory, because this device has no kernel for their "
        "format: layer. They take as much memory as unquantized layers; docs/quantization.md lists "
        "the formats that stay small"
    ]
    # Without an order of its inputs, the card keeps the weight as bytes.
    in_order = replace(weight, groups=None)
    assert isinstance(card.ops.prepare_weight(in_order, torch.bfloat16), HPUNarrowWeight)
