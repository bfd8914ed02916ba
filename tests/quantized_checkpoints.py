"""Write tiny checkpoints in each quantized format, and dense checkpoints with the same weights.

Random weights are written by the public description of the format. The dense weights are computed
by its formula in float32. Neither uses code of the package.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]

CONFIG = transformers.LlamaConfig(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Format:
    """The writer of one checkpoint format, and its properties."""

    settings: dict[str, Any]
    quantize: Callable[[Tensor], tuple[Tensors, Tensor]]
    """A dense weight [out, in] -> tensors by the last part of their names, and what they mean."""
    is_rounding_inputs: bool = False
    """The CPU multiplies it with inputs that are rounded to int8."""
    skipped: tuple[str, ...] = ()
    """Parts of names of layers that stay dense."""
    rounding: float = 0.0
    """Largest change of a weight where no device has the format, relative to the largest one."""

    def check(self, got: Tensor, want: Tensor, what: str = "") -> None:
        """Check that loaded weights have the values of the format."""
        if not self.rounding:
            assert torch.equal(got, want), what
        else:
            assert (got - want).abs().max() <= self.rounding * want.abs().max(), what


def made_once(folder: Path, **options: Any) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that calls `write` for this folder, once for each format."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = write(name, folder, **options)
        return made[name]

    return get


_DENSE = re.compile(r"norm|ln_|embed|router|conv1d|gate\.weight|A_log")
"""In the names of matrices that no format stores."""


_SKIP_KEYS = {
    "hqq": "skip_modules",
    "compressed-tensors": "ignore",
    "modelopt": "ignore",
    "bitsandbytes": "llm_int8_skip_modules",
    "quark": "exclude",
}
"""Method -> key of the list of layers that stay dense."""


def is_linear(key: str, tensor: Tensor) -> bool:
    """Return whether a tensor is the weight of a linear layer of a decoder layer."""
    is_weight = key.endswith(".weight") and tensor.dim() == 2 and re.search(r"\.\d+\.", key)
    return bool(is_weight) and _DENSE.search(key) is None


def write(
    name: str,
    folder: Path,
    source: Path | None = None,
    skipped: tuple[str, ...] = (),
    stores_head: bool = False,
) -> tuple[Path, Path]:
    """Write a checkpoint and a dense checkpoint with the same weights; return both folders.

    Args:
        name: name of the format.
        folder: folder for both checkpoints.
        source: a dense checkpoint; None: a tiny Llama.
        skipped: names of further layers that remain dense.
        stores_head: quantize the output head as well.
    """
    torch.manual_seed(0)
    config = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    if source is None:
        tensors = transformers.LlamaForCausalLM(CONFIG).state_dict()
        for key, weight in tensors.items():
            scale = 0.08 if weight.dim() == 2 else 0.3
            tensors[key] = torch.randn(weight.shape) * scale + (weight.dim() == 1)
    else:
        tensors = load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
    format_ = FORMATS[name]
    is_transposed = config.get("model_type") == "gpt2"
    stored, dense = {}, {}
    for key, tensor in tensors.items():
        stored[key] = dense[key] = tensor
        is_skipped = any(part in key for part in (*format_.skipped, *skipped))
        is_head = stores_head and key == "lm_head.weight"
        if (is_linear(key, tensor) or is_head) and not is_skipped:
            del stored[key]
            parts, dense[key] = format_.quantize(tensor.T if is_transposed else tensor)
            if is_transposed:
                dense[key] = dense[key].T
                parts |= {"weight": parts["weight"].T} if "weight" in parts else {}
            stem = key.removesuffix("weight")
            stored |= {stem + part: values for part, values in parts.items()}
    folders = folder / name, folder / f"{name}-dense"
    settings = dict(format_.settings)
    if skipped:
        key = _SKIP_KEYS.get(settings["quant_method"], "modules_to_not_convert")
        settings[key] = [*(settings.get(key) or []), *skipped]
    if stores_head:
        settings |= {
            key: [each for each in settings[key] or [] if each != "lm_head"]
            for key in ("ignore", "modules_to_not_convert")
            if key in settings
        }
        if settings["quant_method"] in ("gptq", "awq"):
            settings["lm_head"] = True
    for path, values, added in zip(
        folders, (stored, dense), ({"quantization_config": settings}, {}), strict=True
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | added))
        save_file({k: t.contiguous() for k, t in values.items()}, path / "model.safetensors")
    return folders


def _fp8_with(scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 values, and the dense weight that they give with `scales`, which broadcast to its
    shape.
    """
    numbers = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers, numbers.float() * scales


def _fp8_per_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    numbers, dense = _fp8_with(scale, weight)
    parts = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.05)}
    return parts, dense


def _fp8_per_channel(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    numbers, dense = _fp8_with(scales, weight)
    return {"weight": numbers, "weight_scale": scales}, dense


def _fp8_block(weight: Tensor, size: int = 128) -> tuple[Tensors, Tensor]:
    num_out, num_in = weight.shape
    scales = torch.rand(-(-num_out // size), -(-num_in // size)) * 0.001 + 0.0005
    wide = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[:num_out, :num_in]
    numbers, dense = _fp8_with(wide, weight)
    return {"weight": numbers, "weight_scale_inv": scales}, dense


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack each row of integers into 32-bit words without gaps: [R, N] -> [R, N * bits / 32]."""
    stream = (numbers.long()[..., None] >> torch.arange(bits) & 1).flatten(1).unflatten(1, (-1, 32))
    words = (stream << torch.arange(32)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


@dataclass(frozen=True)
class Grouped:
    """Quantized integers with a zero point and a scale per group of inputs."""

    numbers: Tensor
    """[out, in]"""
    zeros: Tensor
    """[G, out]"""
    scales: Tensor
    """[G, out] float16"""
    groups: Tensor
    """[in]"""

    @classmethod
    def round(cls, weight: Tensor, bits: int, size: int, is_symmetric: bool) -> "Grouped":
        num_out, num_in = weight.shape
        groups = torch.arange(num_in) // size
        shape = num_in // size, num_out
        zeros = torch.full(shape, 2 ** (bits - 1))
        if not is_symmetric:
            zeros = torch.randint(1, 2**bits, shape)
        scales = (weight.abs().amax() / 2 ** (bits - 1) * (0.5 + torch.rand(shape))).half()
        steps = (weight / scales.float()[groups].T).round().int() + zeros[groups].T
        return cls(steps.clamp(0, 2**bits - 1), zeros, scales, groups)

    def dense(self) -> Tensor:
        return (self.numbers - self.zeros[self.groups].T).float() * self.scales.float()[
            self.groups
        ].T


def _gptq(
    bits: int, size: int, is_symmetric: bool, is_v2: bool = False, is_ordered: bool = False
) -> Format:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        grouped = Grouped.round(weight, bits, size if size > 0 else weight.shape[1], is_symmetric)
        if is_ordered:  # all parts of a layer have the same order, since they have the same inputs
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
            grouped = Grouped(grouped.numbers, grouped.zeros, grouped.scales, grouped.groups[order])
        parts = {
            "qweight": pack(grouped.numbers, bits).T,
            "qzeros": pack(grouped.zeros - (0 if is_v2 else 1), bits),
            "scales": grouped.scales,
            "g_idx": grouped.groups.int(),
        }
        return parts, grouped.dense()

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": is_ordered,
        "sym": is_symmetric,
        "checkpoint_format": "gptq_v2" if is_v2 else "gptq",
    }
    return Format(settings, quantize, is_rounding_inputs=bits <= 4)


def _awq(weight: Tensor, is_symmetric: bool = False) -> tuple[Tensors, Tensor]:
    grouped = Grouped.round(weight, 4, 32, is_symmetric)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(numbers: Tensor) -> Tensor:
        return pack(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    parts = {
        "qweight": words(grouped.numbers.T),
        "qzeros": words(grouped.zeros),
        "scales": grouped.scales,
    }
    if is_symmetric:
        del parts["qzeros"]
    return parts, grouped.dense()


def _awq_gemv(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Store the inputs of each output in words, and zero points and scales padded to 32 groups."""
    grouped = Grouped.round(weight, 4, 32, is_symmetric=False)

    def padded(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values.T, (0, 32 - len(values)))

    parts = {
        "qweight": pack(grouped.numbers, 4),
        "qzeros": pack(padded(grouped.zeros), 4),
        "scales": padded(grouped.scales),
    }
    return parts, grouped.dense()


def _mlx(weight: Tensor, bits: int, size: int = 32) -> tuple[Tensors, Tensor]:
    """Store a scale, which may be negative, and a bias for each group."""
    groups = weight.unflatten(1, (-1, size))
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales, biases = ((most - least) / (2**bits - 1)).half(), least.half()
    scales[::2], biases[::2] = -scales[::2], most[::2].half()
    numbers = ((groups - biases.float()) / scales.float()).round().clamp(0, 2**bits - 1)
    words = pack(numbers.flatten(1), bits).view(torch.uint32)
    parts = {"weight": words, "scales": scales[..., 0], "biases": biases[..., 0]}
    return parts, (numbers * scales.float() + biases.float()).flatten(1)


def _mlx_mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    parts, dense = _mxfp4(weight)
    return {"weight": parts["weight"].view(torch.uint32), "scales": parts["weight_scale"]}, dense


def _hqq(weight: Tensor, bits: int, axis: int = 1) -> tuple[Tensors, Tensor]:
    """Store groups of 64 elements as rows (axis 1) or as columns (axis 0). The first rows are in
    the highest bits of a byte, or of a word of ten elements.
    """
    groups = weight.reshape(-1, 64) if axis else weight.reshape(64, -1)
    least, most = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
    scales = (most - least) / (2**bits - 1)
    zeros = -least / scales
    numbers = (groups / scales + zeros).round().clamp(0, 2**bits - 1)
    per_word = 10 if bits == 3 else 8 // bits
    dtype = torch.int32 if bits == 3 else torch.uint8
    padded = torch.nn.functional.pad(numbers.to(dtype), (0, 0, 0, -len(numbers) % per_word))
    words = torch.zeros(len(padded) // per_word, groups.shape[1], dtype=dtype)
    for place, rows in enumerate(padded.chunk(per_word)):
        words |= rows << bits * (per_word - 1 - place)
    parts = {"W_q": words, "scale": scales, "zero": zeros, "nbits": torch.tensor(bits)}
    return parts, ((numbers - zeros) * scales).view(weight.shape)


def _sparse(weight: Tensor, is_fp8: bool) -> tuple[Tensors, Tensor]:
    """Store two of every four elements, and a bit mask of the kept ones."""
    fours = weight.unflatten(1, (-1, 4))
    is_kept = torch.zeros(fours.shape, dtype=torch.bool)
    is_kept = is_kept.scatter(-1, fours.abs().topk(2).indices, True).flatten(1)
    parts, dense = _fp8_per_channel(weight * is_kept) if is_fp8 else ({}, weight * is_kept)
    values = parts.pop("weight").view(torch.int8) if is_fp8 else dense
    compressed = values[is_kept].view(len(weight), -1)
    parts["compressed"] = compressed.view(torch.float8_e4m3fn) if is_fp8 else compressed
    bits = is_kept.unflatten(1, (-1, 8)) << torch.arange(8)
    parts["bitmask"] = bits.sum(-1).to(torch.uint8)
    return parts | {"shape": torch.tensor(weight.shape)[:, None]}, dense


def _torchao(weight: Tensor, kind: str) -> tuple[Tensors, Tensor]:
    """Store each element in a byte, whatever its bits."""
    size = 32 if kind == "int4" else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    largest = {"int4": 7, "int8": 127, "fp8": 448}[kind]
    scales = groups.abs().amax(-1, keepdim=True) / largest
    if kind == "fp8":
        numbers = (groups / scales).to(torch.float8_e4m3fn)
        parts = {"_weight_qdata": numbers.flatten(1), "_weight_scale": scales[..., 0]}
        return parts, (numbers.float() * scales).flatten(1)
    scales = scales.bfloat16().float()
    zeros = torch.randint(-3, 4, scales.shape) if kind == "int4" else torch.zeros(scales.shape)
    numbers = (groups / scales + zeros).round().clamp(-largest - 1, largest)
    parts = {
        "_weight_qdata": numbers.flatten(1).to(torch.int8),
        "_weight_scale": scales[..., 0].bfloat16(),
        "_weight_zero_point": zeros[..., 0].to(torch.int8),
    }
    return parts, ((numbers - zeros) * scales).flatten(1)


def _quark_int4(weight: Tensor, has_signs: bool) -> tuple[Tensors, Tensor]:
    """Store words like AWQ; with signs, the highest bit of each element is inverted."""
    parts, dense = _awq(weight)
    if has_signs:
        parts |= {name: parts[name] ^ -0x77777778 for name in ("qweight", "qzeros")}
    names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
    return {names[name]: tensor for name, tensor in parts.items()}, dense


def _quark_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1) / 127
    numbers = (weight / scales[:, None]).round()
    zeros = torch.zeros(len(weight), dtype=torch.int8)
    parts = {"weight": numbers.to(torch.int8), "weight_scale": scales, "weight_zero_point": zeros}
    return parts, numbers * scales[:, None]


def _quark(weight: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "algo_config": None,
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }


def _torchao_tiles(weight: Tensor, size: int = 32) -> tuple[Tensors, Tensor]:
    """Store torchao's tiles, with outputs padded to 8 and inputs to 1024.

    A word has eight elements of one lane, from the lowest bits on: the inputs 2 (lane % 4) and the
    next one, in four blocks of eight out of 32 inputs.
    """
    groups = weight.unflatten(1, (-1, size))
    least, most = groups.amin(-1), groups.amax(-1)
    scales = ((most - least) / 15).bfloat16().float()
    zeros = (least + 8 * scales).bfloat16().float()
    numbers = ((groups - zeros[..., None]) / scales[..., None] + 8).round().clamp(0, 15)
    dense = ((numbers - 8) * scales[..., None] + zeros[..., None]).flatten(1)
    (num_out, num_in), pad = weight.shape, torch.nn.functional.pad
    more_out, more_in = -num_out % 8, -num_in % 1024
    padded = pad(numbers.flatten(1).long(), (0, more_in, 0, more_out))
    words = torch.zeros(len(padded) // 8, padded.shape[1] // 128, 32, 4, dtype=torch.long)
    for lane in range(32):
        for place in range(8):
            first = 8 * (place % 4) + 2 * (lane % 4) + place // 4
            words[:, :, lane] |= (
                padded[lane // 4 :: 8, first::32].unflatten(1, (-1, 4)) << 4 * place
            )
    both = torch.stack((scales, zeros), -1).transpose(0, 1)
    parts = {
        "_weight_qdata": torch.where(words < 2**31, words, words - 2**32).int(),
        "_weight_scale_and_zero": pad(both, (0, 0, 0, more_out, 0, more_in // size)).bfloat16(),
    }
    return parts, dense


def _torchao_settings(config: str, **data: Any) -> dict[str, Any]:
    quant_type = {"default": {"_type": config, "_version": 2, "_data": data}}
    return {"quant_method": "torchao", "quant_type": quant_type, "modules_to_not_convert": None}


def _compressed(
    layout: str, weights: dict[str, Any], inputs: Any, quantize: Any, **kw: Any
) -> Format:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers[.]9"],
    }
    return Format(settings, quantize, **kw)


def _words(bits: int, size: int, is_symmetric: bool, is_ordered: bool = False) -> Format:
    """Return the writer of `pack-quantized`, which packs the inputs of an output into words."""

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        grouped = Grouped.round(weight, bits, size if size > 0 else weight.shape[1], is_symmetric)
        if is_ordered:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
            grouped = replace(grouped, groups=grouped.groups[order])
        parts = {
            "weight_packed": pack(grouped.numbers, bits),
            "weight_scale": grouped.scales.T,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = pack(grouped.zeros, bits).T
        if is_ordered:
            parts["weight_g_idx"] = grouped.groups.int()
        return parts, grouped.dense()

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group" if size > 0 else "channel",
        "group_size": size if size > 0 else None,
        "actorder": "group" if is_ordered else None,
    }
    return _compressed("pack-quantized", weights, None, quantize, is_rounding_inputs=bits == 4)


def _int8_channel(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def _int8_static(weight: Tensor) -> tuple[Tensors, Tensor]:
    parts, dense = _int8_channel(weight)
    return parts | {"input_scale": torch.tensor([0.02])}, dense


def _fp8_ct_block(weight: Tensor) -> tuple[Tensors, Tensor]:
    parts, dense = _fp8_block(weight)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, dense


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """Return the index in the table of the element that is nearest to each."""
    return (numbers[..., None] - table).abs().argmin(-1)


def in_bytes(codes: Tensor, is_high_first: bool = False) -> Tensor:
    """Pack 4-bit values of each row, two in a byte."""
    first, second = codes[..., ::2], codes[..., 1::2]
    pair = first * 16 + second if is_high_first else first + second * 16
    return pair.to(torch.uint8)


def _nvfp4(weight: Tensor, is_compressed: bool = False) -> tuple[Tensors, Tensor]:
    """Store E2M1 elements, an e4m3 scale for each 16 inputs, and one factor or divisor for the
    tensor.
    """
    factor = weight.abs().max() / (6 * 448)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1, keepdim=True) / 6 / factor).to(torch.float8_e4m3fn)
    table = torch.cat((E2M1, -E2M1))
    codes = nearest(groups / (scales.float() * factor).clamp(min=1e-9), table)
    parts = {"weight_scale": scales[..., 0]}
    packed = in_bytes(codes.flatten(1))
    if is_compressed:
        divisor = (1 / factor).reshape(1)
        parts |= {"weight_packed": packed, "weight_global_scale": divisor}
        parts |= {"input_global_scale": torch.tensor([30.0])}
        factor = 1 / divisor
    else:
        parts |= {"weight": packed, "weight_scale_2": factor, "input_scale": torch.tensor(0.01)}
    return parts, (table[codes] * (scales.float() * factor)).flatten(1)


def _modelopt_awq(weight: Tensor, has_input_factors: bool = False) -> tuple[Tensors, Tensor]:
    """Quantize to signed integers with a scale for each 32 inputs; a byte has two outputs."""
    factors = torch.rand(weight.shape[1]) + 0.5 if has_input_factors else torch.ones(())
    groups = (weight / factors).unflatten(1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / 7
    numbers = (groups / scales).round().clamp(-8, 7)
    signed = numbers.flatten(1).to(torch.int8)
    packed = (signed[0::2] & 15 | signed[1::2] << 4).view(torch.uint8)
    parts = {"weight": packed, "weight_scale": scales[..., 0]}
    if has_input_factors:
        parts["pre_quant_scale"] = factors
    else:
        parts |= {"weight_scale_2": torch.tensor(0.1), "input_scale": torch.tensor(0.01)}
    return parts, (numbers * scales).flatten(1) * factors


def _powers(groups: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return the E8M0 exponents of groups, and the powers of two that they represent."""
    exponents = (groups.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-9).log2().ceil()
    return (exponents[..., 0] + 127).to(torch.uint8), exponents.exp2()


def _mxfp4(weight: Tensor, name: str = "weight") -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    scales, powers = _powers(groups, 6)
    table = torch.cat((E2M1, -E2M1))
    codes = nearest(groups / powers, table)
    parts = {name: in_bytes(codes.flatten(1)), "weight_scale": scales}
    return parts, (table[codes] * powers).flatten(1)


def _mxfp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    scales, powers = _powers(groups, 448)
    numbers = (groups / powers).to(torch.float8_e4m3fn)
    dense = (numbers.float() * powers).flatten(1)
    return {"weight": numbers.flatten(1), "weight_scale": scales}, dense


NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
FP4 = [0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25]


def _table(weight: Tensor, kind: str, is_nested: bool) -> tuple[Tensors, Tensor]:
    """Store elements in blocks of 64, each as an index into a table, with the largest magnitude of
    the block as scale.
    """
    table = torch.tensor(NF4 if kind == "nf4" else [*FP4, *(-x for x in FP4)])
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(-1)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
    parts = {"weight.absmax": scales, "weight.quant_map": table}
    if is_nested:
        offset = float(scales.mean())
        largest = torch.stack([each.abs().max() for each in (scales - offset).split(256)])
        of_scale, scale_table = (
            largest[torch.arange(len(scales)) // 256],
            torch.linspace(-1, 1, 256),
        )
        scale_codes = nearest((scales - offset) / of_scale, scale_table)
        scales = scale_table[scale_codes] * of_scale + offset
        parts |= {
            "weight.absmax": scale_codes.to(torch.uint8),
            "weight.nested_absmax": largest,
            "weight.nested_quant_map": scale_table,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = nearest(blocks / scales[:, None], table)
    in_json = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = in_json
    parts["weight"] = in_bytes(codes.flatten(), is_high_first=True)[:, None]
    return parts, (table[codes] * scales[:, None]).view(weight.shape)


def _llm_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    largest = weight.abs().amax(1)
    numbers = (weight / (largest / 127)[:, None]).round()
    parts = {"weight": numbers.to(torch.int8), "SCB": largest}
    dense = numbers * (largest / 127)[:, None]
    return parts | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, dense


_PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_PER_TOKEN = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
_FP8_PER_TOKEN = _PER_TOKEN | {"type": "float"}
_ONE_SCALE = {"num_bits": 8, "dynamic": False, "strategy": "tensor"}

_FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}

_QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
_QUARK_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_QUARK_INT4 = {"qscheme": "per_group", "group_size": 32, "ch_axis": -1, "symmetric": True}

_FP8 = {"quant_method": "fp8"}
_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}

CT_FP8 = _compressed(
    "float-quantized", _FLOAT8 | {"strategy": "channel"}, _FP8_PER_TOKEN, _fp8_per_channel
)
_SPARSITY = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}

FORMATS: dict[str, Format] = {
    "fp8-static": Format(_FP8 | {"activation_scheme": "static"}, _fp8_per_tensor),
    "fp8-block": Format(
        _FP8 | {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        _fp8_block,
    ),
    "fp8-channel-ignored": Format(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.1.mlp", "lm_head"]},
        _fp8_per_channel,
        skipped=("layers.1.mlp",),
    ),
    "modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, _fp8_per_tensor
    ),
    "gptq-4": _gptq(4, 32, is_symmetric=True),
    "gptq-4-order": _gptq(4, 32, is_symmetric=False, is_v2=True, is_ordered=True),
    "gptq-4-rows": _gptq(4, -1, is_symmetric=False),
    "gptq-8": _gptq(8, 32, is_symmetric=False),
    "gptq-8-order": _gptq(8, 64, is_symmetric=True, is_ordered=True),
    "gptq-3": _gptq(3, 32, is_symmetric=True),
    "gptq-2": _gptq(2, 64, is_symmetric=False, is_v2=True),
    "awq": Format(_AWQ | {"zero_point": True}, _awq, is_rounding_inputs=True),
    "awq-symmetric": Format(
        _AWQ | {"zero_point": False}, partial(_awq, is_symmetric=True), is_rounding_inputs=True
    ),
    "awq-gemv": Format(
        _AWQ | {"zero_point": True, "version": "gemv"}, _awq_gemv, is_rounding_inputs=True
    ),
    "ct-w4a16": _words(4, 32, is_symmetric=True),
    "ct-w4a16-16": _words(4, 16, is_symmetric=True),
    "ct-w4a16-asym-order": _words(4, 32, is_symmetric=False, is_ordered=True),
    "ct-w8a16-channel": _words(8, -1, is_symmetric=True),
    "ct-w8a8": _compressed(
        "int-quantized", _INT8, _PER_TOKEN, _int8_channel, is_rounding_inputs=True
    ),
    "ct-w8a8-static": _compressed(
        "int-quantized", _INT8, _ONE_SCALE, _int8_static, is_rounding_inputs=True
    ),
    "ct-w8a16-int8": _compressed("int-quantized", _INT8, None, _int8_channel),
    "ct-fp8-dynamic": CT_FP8,
    "ct-fp8-static": _compressed(
        "float-quantized", _FLOAT8 | {"strategy": "tensor"}, _ONE_SCALE, _fp8_per_tensor
    ),
    "ct-fp8-block": _compressed(
        "float-quantized",
        _FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
        _FP8_PER_TOKEN,
        _fp8_ct_block,
    ),
    "nvfp4": Format(
        _MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, _nvfp4, is_rounding_inputs=True
    ),
    "modelopt-w4a8-awq": Format(
        _MODELOPT | {"quant_algo": "W4A8_AWQ", "group_size": 32, "has_zero_point": False},
        _modelopt_awq,
        is_rounding_inputs=True,
    ),
    "modelopt-awq-factors": Format(
        _MODELOPT | {"quant_algo": "W4A16_AWQ", "group_size": 32, "pre_quant_scale": True},
        partial(_modelopt_awq, has_input_factors=True),
        rounding=2**-20,
    ),
    "mxfp4": Format(_MODELOPT | {"quant_algo": "MXFP4"}, _mxfp4, is_rounding_inputs=True),
    "mxfp8": Format(_MODELOPT | {"quant_algo": "MXFP8"}, _mxfp8),
    "ct-nvfp4": _compressed(
        "nvfp4-pack-quantized",
        _FLOAT4 | {"strategy": "tensor_group", "group_size": 16},
        _FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        partial(_nvfp4, is_compressed=True),
        is_rounding_inputs=True,
    ),
    "ct-mxfp4": _compressed(
        "mxfp4-pack-quantized",
        _FLOAT4 | {"strategy": "group", "group_size": 32},
        None,
        partial(_mxfp4, name="weight_packed"),
        is_rounding_inputs=True,
    ),
    "ct-mxfp8": _compressed(
        "mxfp8-quantized", _FLOAT8 | {"strategy": "group", "group_size": 32}, None, _mxfp8
    ),
    "bnb-nf4": Format(
        _BITSANDBYTES | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        partial(_table, kind="nf4", is_nested=True),
        rounding=2**-9,
    ),
    "bnb-fp4": Format(
        _BITSANDBYTES | {"bnb_4bit_quant_type": "fp4"},
        partial(_table, kind="fp4", is_nested=False),
        rounding=2**-9,
    ),
    "bnb-int8": Format(_BITSANDBYTES | {"load_in_4bit": False, "load_in_8bit": True}, _llm_int8),
    **{
        f"mlx-{bits}": Format(
            {"quant_method": "mlx", "group_size": 32, "bits": bits},
            partial(_mlx, bits=bits),
            is_rounding_inputs=bits < 8,
            rounding=0.008 if bits == 8 else 0.0,
        )
        for bits in (3, 4, 5, 8)
    },
    "mlx-mxfp4": Format(
        {"quant_method": "mlx", "group_size": 32, "bits": 4, "mode": "mxfp4"},
        _mlx_mxfp4,
        is_rounding_inputs=True,
    ),
    **{
        f"hqq-{name}": Format(
            {
                "quant_method": "hqq",
                "quant_config": {
                    "weight_quant_params": {"nbits": bits, "group_size": 64, "axis": axis},
                    "scale_quant_params": None,
                    "zero_quant_params": None,
                },
                "skip_modules": ["lm_head"],
            },
            partial(_hqq, bits=bits, axis=axis),
            is_rounding_inputs=bits < 8 and axis == 1,
            rounding=0.002 if bits < 8 and axis == 1 else 0.008,
        )
        for name, bits, axis in (
            ("3", 3, 1),
            ("4", 4, 1),
            ("8", 8, 1),
            ("4-axis-0", 4, 0),
            ("3-axis-0", 3, 0),
        )
    },
    "torchao-int8": Format(
        _torchao_settings("Int8DynamicActivationInt8WeightConfig", granularity=_PER_ROW),
        partial(_torchao, kind="int8"),
        is_rounding_inputs=True,
    ),
    "torchao-w8a16": Format(
        _torchao_settings("Int8WeightOnlyConfig", granularity=_PER_ROW),
        partial(_torchao, kind="int8"),
    ),
    "torchao-fp8": Format(
        _torchao_settings("Float8WeightOnlyConfig", granularity=_PER_ROW),
        partial(_torchao, kind="fp8"),
    ),
    "torchao-int4": Format(
        _torchao_settings(
            "IntxWeightOnlyConfig",
            granularity={"_type": "PerGroup", "_data": {"group_size": 32}},
            weight_dtype={"_type": "torch.dtype", "_data": "int4"},
            intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        ),
        partial(_torchao, kind="int4"),
        is_rounding_inputs=True,
    ),
    "quark-fp8": Format(_quark(_QUARK_FP8, _QUARK_FP8), _fp8_per_tensor),
    "quark-fp8-channel": Format(
        _quark(_QUARK_FP8 | {"qscheme": "per_channel", "ch_axis": 0}),
        _fp8_per_channel,
    ),
    "quark-mxfp4": Format(
        _quark(_QUARK_FP4, _QUARK_FP4 | {"is_dynamic": True}), _mxfp4, is_rounding_inputs=True
    ),
    "quark-int4": Format(
        _quark(_QUARK_INT4 | {"dtype": "int4"}),
        partial(_quark_int4, has_signs=True),
        is_rounding_inputs=True,
    ),
    "quark-uint4": Format(
        _quark(_QUARK_INT4 | {"dtype": "uint4", "symmetric": False}),
        partial(_quark_int4, has_signs=False),
        is_rounding_inputs=True,
    ),
    "quark-int8": Format(
        _quark({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}),
        _quark_int8,
    ),
    "torchao-int4-tiles": Format(
        _torchao_settings(
            "Int4WeightOnlyConfig",
            group_size=32,
            int4_packing_format={"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"},
            int4_tile_packed_ntile=8,
        ),
        _torchao_tiles,
        is_rounding_inputs=True,
        rounding=0.002,
    ),
    "ct-sparse": Format(
        {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": _SPARSITY},
        partial(_sparse, is_fp8=False),
    ),
    "ct-sparse-fp8": replace(
        CT_FP8,
        settings=CT_FP8.settings | {"sparsity_config": _SPARSITY},
        quantize=partial(_sparse, is_fp8=True),
    ),
}

_BY_ROWS = ("nvfp4", "mxfp", "bnb", "gemv", "mlx", "hqq", "torchao", "sparse", "quark")
"""Parts of the names of formats that divide their tensors in the same way."""
_RARE = (
    "mxfp8",
    "ct-mxfp",
    "bnb-fp4",
    "mlx-3",
    "mlx-5",
    "hqq-8",
    "hqq-3-axis",
    "torchao-w8a16",
    "quark-uint4",
    "quark-fp8-c",
)


def each_format(*left_out: str, is_costly: bool = False) -> list[Any]:
    """Return the names of the formats as parameters of a test.

    Args:
        left_out: names of formats to omit.
        is_costly: whether a usual run of the tests has only nvfp4 of the formats in `_BY_ROWS`.
    """

    def is_seldom(name: str) -> bool:
        is_alike = any(part in name for part in _BY_ROWS) and name != "nvfp4"
        return name.startswith(_RARE) or (is_costly and is_alike)

    return [
        pytest.param(name, marks=[pytest.mark.exhaustive] if is_seldom(name) else [])
        for name in FORMATS
        if name not in left_out
    ]
