"""From a model folder to the folder of its quantized twin."""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from vllm.entrypoints.calibration.dataset import read_texts, split_samples
from vllm.entrypoints.quantize.formats import (
    awq_settings,
    awq_tensors,
    compressed_settings,
    fp8_tensors,
    gptq_settings,
    gptq_tensors,
    int8_tensors,
)
from vllm.entrypoints.quantize.layerwise import (
    Inputs,
    decoder_layers,
    linear_layers,
    quantize_layers,
)
from vllm.entrypoints.quantize.rounding import (
    Grid,
    input_scales,
    round_by_gptq,
    round_to_nearest,
)
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.transformers_utils.hf_config import read_hf_config
from vllm.transformers_utils.hub import resolve_model_folder
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.transformers_utils.transformers_version import dtype_argument
from vllm.transformers_utils.weight_files import find_files

logger = init_logger(__name__)

_SHARD_BYTES = 4 << 30
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")
_AWQ_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SCALED_BY = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "self_attn.v_proj": ("self_attn.o_proj",),
    "mlp.up_proj": ("mlp.down_proj",),
}
"""Module whose outputs can be divided -> the layers that have them as inputs."""


def quantize(args: argparse.Namespace) -> int:
    """Run `vllm quantize`.

    Raises:
        ConfigError: the model cannot be quantized, or the folder cannot be written.
    """
    out = Path(args.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {args.out}: it exists and is not empty; name a new folder")
    if args.method in ("awq", "gptq") and args.dataset is None:
        raise ConfigError(f"--method {args.method} needs texts to measure: --dataset FILE")
    folder = resolve_model_folder(args.model)
    config = read_hf_config(folder, {})
    if config.get("quantization_config"):
        raise ConfigError(f"--model {args.model} is quantized already; name the unquantized one")
    find_files(folder, "safetensors")
    if args.method in ("fp8", "int8"):
        tensors, settings = _round_rows(folder, args.method)
    else:
        tensors, settings = _calibrate(folder, config, args)
    _write(folder, out, tensors, config | {"quantization_config": settings})
    logger.info("wrote %s: vllm serve %s", out, out)
    return 0


def _round_rows(folder: Path, method: str) -> tuple["_Changes", dict[str, Any]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    path, layers = decoder_layers(model)
    names = {f"{path}.{name}" for name, _ in linear_layers(layers)}
    ignored = [name for name, _ in linear_layers(model) if name not in names]
    round_rows = fp8_tensors if method == "fp8" else int8_tensors
    kind = "float" if method == "fp8" else "int"
    return _Changes(names, round_rows), compressed_settings(kind, ignored)


class _Changes:
    """What takes the place of tensors of the checkpoint.

    Args:
        names: of the linear layers that are quantized.
        convert: makes the tensors of a layer of its weight; None: they are in `stored`.
    """

    def __init__(self, names: set[str], convert: Any = None) -> None:
        self.names = names
        self.convert = convert
        self.stored: dict[str, dict[str, Tensor]] = {}
        """Name of a layer -> its tensors."""
        self.dense: dict[str, Tensor] = {}
        """Name of a tensor that stays dense -> its new values."""

    def apply(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """What a tensor of the checkpoint becomes."""
        stem, _, kind = name.rpartition(".")
        if stem in self.names and kind == "weight":
            self.names.remove(stem)
            parts = self.stored.pop(stem) if self.convert is None else self.convert(tensor)
            return {f"{stem}.{part}": values for part, values in parts.items()}
        if name in self.dense:
            return {name: self.dense[name].to(tensor.dtype)}
        return {name: tensor}


def _calibrate(
    folder: Path, config: Mapping[str, Any], args: argparse.Namespace
) -> tuple[_Changes, dict[str, Any]]:
    is_awq = args.method == "awq"
    if is_awq and config.get("model_type") not in _AWQ_FAMILIES:
        raise ConfigError(
            f"--method awq: the model is of the type {config.get('model_type')!r}; supported: "
            f"{', '.join(_AWQ_FAMILIES)}. Use --method gptq"
        )
    bits = 4 if args.bits is None else args.bits
    if is_awq and bits != 4:
        raise ConfigError(f"--bits {bits}: AWQ has 4 bits. Leave it out, or use --method gptq")
    grid = Grid(bits=bits, group_size=args.group_size, is_symmetric=not is_awq)
    model = AutoModelForCausalLM.from_pretrained(folder, **dtype_argument("auto")).eval()
    samples = _samples(folder, args)
    changes = _Changes(set())
    dense: set[str] = set()

    def one_layer(name: str, layer: nn.Module, inputs: dict[str, Inputs]) -> None:
        if is_awq:
            changes.dense.update(_scale_inputs(name, layer, inputs, grid))
        for part, linear in linear_layers(layer):
            if not grid.fits(linear.out_features, linear.in_features):
                dense.add(part.rpartition(".")[2])
                continue
            weight = linear.weight.data
            if is_awq:
                rounded = round_to_nearest(weight, grid)
                tensors = awq_tensors(rounded)
            else:
                rounded = round_by_gptq(
                    weight, inputs[part].hessian, grid, by_activation=args.desc_act
                )
                tensors = gptq_tensors(rounded, bits)
            linear.weight.data = rounded.dequantize()
            changes.names.add(f"{name}.{part}")
            changes.stored[f"{name}.{part}"] = tensors

    quantize_layers(model, samples, one_layer)
    if not changes.names:
        raise ConfigError(
            f"--group-size {args.group_size} divides the input features of no layer; name a "
            f"smaller one, or -1"
        )
    if dense:
        logger.warning(
            "--group-size %d does not divide the features of %s, which stay as they are",
            args.group_size,
            ", ".join(sorted(dense)),
        )
    if is_awq:
        return changes, awq_settings(grid, sorted(dense))
    return changes, gptq_settings(grid, args.desc_act, sorted(dense))


def _samples(folder: Path, args: argparse.Namespace) -> list[list[int]]:
    """Samples of equal length."""
    tokenizer = get_tokenizer(str(folder))
    texts = read_texts(args.dataset)
    text = "\n\n".join(texts)
    samples, held_out = split_samples([text], tokenizer.encode, args.sample_tokens, 1 << 30)
    whole = [s for s in (*samples, *held_out) if len(s) == args.sample_tokens]
    if not whole:
        raise ConfigError(
            f"--dataset {args.dataset}: its texts have fewer than {args.sample_tokens} tokens; "
            f"add texts, or lower --sample-tokens"
        )
    return whole[: args.num_samples]


def _scale_inputs(
    name: str, layer: nn.Module, inputs: dict[str, Inputs], grid: Grid
) -> Iterator[tuple[str, Tensor]]:
    """Multiply weights by the factors of AWQ, and divide what makes their inputs.

    Returns:
        Name and new values of each tensor that stays dense and has changed.
    """
    for source_name, target_names in _SCALED_BY.items():
        source = layer.get_parameter(f"{source_name}.weight").data
        targets = [layer.get_parameter(f"{each}.weight").data for each in target_names]
        if not all(grid.fits(*target.shape) for target in targets):
            continue
        if len(source) != targets[0].shape[1]:  # values that several heads share
            continue
        scales = input_scales(targets, torch.cat(inputs[target_names[0]].rows), grid)
        for target in targets:
            target *= scales
        source /= scales if source.dim() == 1 else scales[:, None]
        yield f"{name}.{source_name}.weight", source.clone()
        bias = getattr(layer.get_submodule(source_name), "bias", None)
        if isinstance(bias, Tensor):
            bias.data /= scales
            yield f"{name}.{source_name}.bias", bias.data.clone()


def _write(folder: Path, out: Path, changes: _Changes, config: Mapping[str, Any]) -> None:
    """Write the checkpoint with its changes, and all other files as they are."""
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        is_weights = any(path.match(pattern) for pattern in _WEIGHT_FILES)
        if path.is_file() and not is_weights and path.name != "config.json":
            shutil.copy(path, out / path.name)
    index: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05}.safetensors"
        save_file(shard, out / name, {"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for path in tqdm(find_files(folder, "safetensors"), desc="Writing files"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                made = changes.apply(name, file.get_tensor(name))
                shard |= {key: values.contiguous() for key, values in made.items()}
                if sum(each.nbytes for each in shard.values()) > _SHARD_BYTES:
                    flush()
    if changes.names:
        raise ConfigError(
            f"the checkpoint in {folder} has no tensor {min(changes.names)}.weight: its names are "
            f"not those of transformers, so it cannot be quantized"
        )
    flush()
    if len(set(index.values())) == 1:
        (out / "model-00001.safetensors").rename(out / "model.safetensors")
    else:
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=1)
        (out / "model.safetensors.index.json").write_text(text)
    (out / "config.json").write_text(json.dumps(dict(config), indent=2))
