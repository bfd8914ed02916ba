"""Create a folder with the quantized version of a model."""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from vllm.config.families import FAMILIES, Family, family_of
from vllm.entrypoints.calibration.dataset import read_texts, split_samples
from vllm.entrypoints.quantize.checkpoint_layers import CheckpointLayers, CheckpointWeight
from vllm.entrypoints.quantize.formats import (
    awq_settings,
    awq_tensors,
    compressed_settings,
    fp8_tensors,
    gptq_settings,
    gptq_tensors,
    int8_tensors,
)
from vllm.entrypoints.quantize.input_scaling import divide, pairs_of
from vllm.entrypoints.quantize.layerwise import Inputs, linear_layers, quantize_layers
from vllm.entrypoints.quantize.linear_modules import use_linear_modules
from vllm.entrypoints.quantize.rounding import Grid, input_scales, round_by_gptq, round_to_nearest
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.layers.slice import Features
from vllm.transformers_utils.hf_config import read_hf_config
from vllm.transformers_utils.hub import resolve_model_folder
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.transformers_utils.transformers_version import dtype_argument
from vllm.utils.files.weight_files import find_files

logger = init_logger(__name__)

_SHARD_BYTES = 4 << 30
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")
_ROUND_ROWS = {"fp8": fp8_tensors, "int8": int8_tensors}
_MAX_TARGETS, _MAX_ROWS = 16, 4096
"""Maximum number of layers with the same inputs, and of rows of these inputs, that are used to
choose the factors of AWQ."""


def quantize(args: argparse.Namespace) -> int:
    """Run `vllm quantize`.

    Raises:
        ConfigError: the model cannot be quantized, or the folder cannot be written.
    """
    out = Path(args.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {args.out} exists and is not empty; name a new folder")
    if args.method in ("awq", "gptq") and args.dataset is None:
        raise ConfigError(
            f"--method {args.method} needs --dataset FILE, the texts on which the model is measured"
        )
    folder = resolve_model_folder(args.model)
    config = read_hf_config(folder, {})
    if config.get("quantization_config"):
        raise ConfigError(f"--model {args.model} is quantized already; name the unquantized one")
    find_files(folder, "safetensors")
    if args.method in ("fp8", "int8"):
        changes = _Changes(CheckpointLayers(folder, lambda *sizes: True), _ROUND_ROWS[args.method])
    else:
        changes = _calibrate(folder, config, args)
    _write(folder, out, changes)
    settings = _settings(args, changes)
    text = json.dumps(config | {"quantization_config": settings}, indent=2)
    (out / "config.json").write_text(text)
    logger.info("wrote %s; serve it with: vllm serve %s", out, out)
    return 0


def _settings(args: argparse.Namespace, changes: "_Changes") -> dict[str, Any]:
    dense = sorted(changes.dense_layers)
    if args.method in ("fp8", "int8"):
        kind = "float" if args.method == "fp8" else "int"
        return compressed_settings(kind, [*dense, *changes.layers.heads()])
    if dense:
        logger.warning("%d layers were not quantized, for example %s", len(dense), dense[0])
    if args.method == "awq":
        return awq_settings(_grid_of(args), dense)
    return gptq_settings(_grid_of(args), args.desc_act, dense)


class _Changes:
    """Replaces tensors of the checkpoint by quantized ones.

    Args:
        layers: layers of the checkpoint.
        convert: function from the weight of a layer to the tensors that replace it; None: the
            tensors of each layer are in `stored` already.
    """

    def __init__(
        self, layers: CheckpointLayers, convert: Callable[[Tensor], dict[str, Tensor]] | None = None
    ) -> None:
        self.layers = layers
        self.convert = convert
        self.stored: dict[str, dict[str, Tensor]] = {}
        """Key of a layer -> its tensors."""
        self.dense: dict[str, Tensor] = {}
        """Name in the model of a tensor that stays dense -> its new values."""
        self.dense_layers: set[str] = set(layers.dense_experts())
        """Names in the checkpoint of layers that stay dense."""

    def apply(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors that replace a tensor of the checkpoint."""
        made: dict[str, Tensor] = {}
        for found in self.layers.weights_of(name, tensor):
            parts = self._tensors(found)
            if found.is_transposed and "weight" in parts:
                parts["weight"] = parts["weight"].T
            made |= {f"{found.name}.{part}": values for part, values in parts.items()}
        if made:
            return made
        stem, _, kind = name.rpartition(".")
        if kind == "weight" and self.layers.is_linear(self.layers.key(stem)):
            self.dense_layers.add(stem)
        changed = self.dense.pop(self.layers.key_of_tensor(name), None)
        return {name: tensor if changed is None else changed.to(tensor.dtype)}

    def _tensors(self, found: CheckpointWeight) -> dict[str, Tensor]:
        if self.convert is not None:
            return self.convert(found.weight)
        if found.key not in self.stored:
            raise ConfigError(
                f"transformers has no layer for {found.name} of the checkpoint, so its inputs "
                "cannot be measured; use --method fp8 or int8"
            )
        return self.stored.pop(found.key)


def _grid_of(args: argparse.Namespace) -> Grid:
    bits = 4 if args.bits is None else args.bits
    return Grid(bits=bits, group_size=args.group_size, is_symmetric=args.method != "awq")


def _calibrate(folder: Path, config: Mapping[str, Any], args: argparse.Namespace) -> _Changes:
    is_awq, family = args.method == "awq", family_of(config.get("model_type"))
    if is_awq and not family.awq_pairs:
        supported = ", ".join(name for name, each in FAMILIES.items() if each.awq_pairs)
        raise ConfigError(
            f"--method awq does not support models of the type {str(config.get('model_type'))!r}; "
            f"supported: {supported}. Use --method gptq"
        )
    grid = _grid_of(args)
    if is_awq and grid.bits != 4:
        raise ConfigError(
            f"--bits {grid.bits}: AWQ supports 4 bits only. Leave it out, or use --method gptq"
        )

    def fits(num_outputs: int, num_inputs: int, features: Features | None) -> bool:
        is_whole = features is None or features.in_words(grid.bits) is not None
        return is_whole and grid.fits(num_outputs, num_inputs)

    layers = CheckpointLayers(folder, fits)
    model = AutoModelForCausalLM.from_pretrained(folder, **dtype_argument("auto")).eval()
    text = model.config.get_text_config().to_dict()
    if text.get("hidden_size_per_layer_input") or text.get("num_kv_shared_layers"):
        raise ConfigError(
            f"--method {args.method} quantizes one layer after the other, so it cannot quantize "
            f"{type(model).__name__}, whose layers read the outputs of several earlier layers. Use "
            "--method fp8 or int8"
        )
    use_linear_modules(model)
    samples = _samples(folder, args)
    changes = _Changes(layers)

    def one_layer(name: str, layer: nn.Module, inputs: dict[str, Inputs]) -> None:
        quantized = {
            part: linear
            for part, linear in linear_layers(layer)
            if layers.is_quantized(layers.key(f"{name}.{part}"))
        }
        if is_awq:
            changed = scale_inputs(family, layer, inputs, grid, set(quantized))
            changes.dense |= {
                layers.key_of_tensor(f"{name}.{part}"): values for part, values in changed.items()
            }
        for part, linear in quantized.items():
            measured = inputs.get(part)  # an expert that no token reached has no measurement
            if is_awq or measured is None:
                rounded = round_to_nearest(linear.weight.data, grid)
            else:
                rounded = round_by_gptq(
                    linear.weight.data, measured.hessian, grid, by_activation=args.desc_act
                )
            tensors = awq_tensors(rounded) if is_awq else gptq_tensors(rounded, grid.bits)
            linear.weight.data = rounded.dequantize()
            changes.stored[layers.key(f"{name}.{part}")] = tensors

    quantize_layers(model, samples, one_layer)
    if not changes.stored:
        raise ConfigError(
            f"--group-size {args.group_size} does not divide the input features of any layer; "
            "name a smaller one, or -1"
        )
    return changes


def _samples(folder: Path, args: argparse.Namespace) -> list[list[int]]:
    """Return samples of token ids, all of the same length."""
    tokenizer = get_tokenizer(str(folder))
    texts = read_texts(args.dataset)
    text = "\n\n".join(texts)
    samples, held_out = split_samples([text], tokenizer.encode, args.sample_tokens, 1 << 30)
    whole = [s for s in (*samples, *held_out) if len(s) == args.sample_tokens]
    if not whole:
        raise ConfigError(
            f"--dataset {args.dataset} must have texts of at least {args.sample_tokens} tokens in "
            "total; add texts, or lower --sample-tokens"
        )
    return whole[: args.num_samples]


def scale_inputs(
    family: Family, layer: nn.Module, inputs: dict[str, Inputs], grid: Grid, quantized: set[str]
) -> dict[str, Tensor]:
    """Multiply weights by AWQ factors, and divide the outputs of the modules before them.

    Args:
        family: family of the model.
        layer: a decoder layer.
        inputs: statistics of the inputs of its linear layers.
        grid: values to which weights are rounded.
        quantized: names of the layers that will be rounded.

    Returns:
        Name and new values of each changed tensor that is not quantized.
    """
    changed: dict[str, Tensor] = {}
    for pair in pairs_of(family, layer):
        source = layer.get_parameter(f"{pair.source}.weight").data
        targets = {name: layer.get_parameter(f"{name}.weight").data for name in pair.targets}
        rounded = [name for name in targets if name in quantized and name in inputs]
        if not rounded or len(source) != targets[rounded[0]].shape[1]:
            continue  # no target is quantized, or several heads share these values
        measured = {id(inputs[name]): inputs[name] for name in rounded}
        rows = torch.cat([row for each in measured.values() for row in each.rows])
        weights = [targets[name] for name in rounded[:_MAX_TARGETS]]
        scales = input_scales(weights, rows[:_MAX_ROWS], grid)
        for weight in targets.values():
            weight *= scales
        divide(family, source, scales)
        touched = [pair.source, *targets]
        changed |= {
            f"{name}.weight": layer.get_parameter(f"{name}.weight").data.clone()
            for name in touched
            if name not in quantized
        }
        bias = getattr(layer.get_submodule(pair.source), "bias", None)
        if isinstance(bias, Tensor):
            bias.data /= scales
            changed[f"{pair.source}.bias"] = bias.data.clone()
    return changed


def _write(folder: Path, out: Path, changes: _Changes) -> None:
    """Write the checkpoint with its changes, and copy all other files."""
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
    left = {*changes.stored, *changes.dense}
    if left:
        raise ConfigError(
            f"the checkpoint in {folder} has no tensor for {min(left)}: its names differ from "
            "transformers' names, so it cannot be quantized with this method; use --method fp8 "
            "or int8"
        )
    flush()
    if len(set(index.values())) == 1:
        (out / "model-00001.safetensors").rename(out / "model.safetensors")
    else:
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=1)
        (out / "model.safetensors.index.json").write_text(text)
