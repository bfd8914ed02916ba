"""Fills every parameter of a model from checkpoint tensors, exactly once. It is the only loader.

Data decide where a tensor belongs: module names, the layers' slices, and the renames of the model
class. Independent of files.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm.config.quantization.settings_error import SettingsMismatch
from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.logger import init_logger
from vllm.model_executor.layers.embedding import ParallelLMHead
from vllm.model_executor.layers.slice import (
    DENSE_DTYPES,
    CheckpointTensor,
    NamedTensors,
    ParamTarget,
    SlicedModule,
)
from vllm.model_executor.layers.weight_method import MethodLayer
from vllm.model_executor.loader.kv_scales import load_kv_scale
from vllm.model_executor.loader.stage import absent_prefixes
from vllm.model_executor.models.interface import LoadableModel
from vllm.utils.files.weight_files import name_some

logger = init_logger(__name__)

_SCALE_OF_ATTENTION = re.compile(r"\.self_attn\.(attn\.|q_proj\.)?(q|prob)_scale$")
"""Names of scales for FP8 matmuls of queries and of probabilities, which run in bfloat16 in this
package."""


_OF_TRAINING = ("optimizer", "lr_scheduler", "v_head.", "value_head.")
"""Beginnings of the names of tensors that programs for training save with a model."""
_PREDICTION = re.compile(r"(^|\.)mtp(_\w+)?\.")
"""Part of the names of layers for multi-token prediction, in most families."""
_LAYER = re.compile(r"(?P<layer>.*(^|\.)\d+\.)(?P<inner>(eh_proj|enorm|hnorm|shared_head)\.)?")
"""Beginning of the name of a tensor in a decoder layer. Only layers for multi-token prediction have
the modules that are named here."""
_LORA = re.compile(r"\.lora_|\.base_layer\.")
_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale")


@dataclass
class _Targets:
    """The tensors that a checkpoint must have, and the parameters that they fill."""

    by_name: dict[str, ParamTarget] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of tied parameters -> the names that are read. A checkpoint may have both, or
    only the other name."""
    unused: set[str] = field(default_factory=set)
    """Tensors that a checkpoint may have, and that no method reads."""
    elsewhere: set[str] = field(default_factory=set)
    """Beginnings of the names of tensors that only other ranks have, up to a dot."""

    def is_elsewhere(self, name: str) -> bool:
        """Return whether only other ranks need the tensor."""
        parts = name.split(".") if self.elsewhere else []
        return any(".".join(parts[:end]) in self.elsewhere for end in range(len(parts)))


ModuleHook = Callable[[nn.Module], None]


@torch.no_grad()
def load_weights(
    model: LoadableModel,
    tensors: NamedTensors,
    tp: TPGroup,
    *,
    prepare: ModuleHook = lambda module: None,
    finish: ModuleHook = lambda module: None,
) -> None:
    """Fill every parameter of `model`, converting to its dtype.

    Args:
        model: whose parameters have memory, or get it from `prepare`.
        tensors: tensors of the checkpoint, by their names there.
        tp: the ranks that share the model.
        prepare: called before each tensor with the module whose parameter it fills.
        finish: called with each module that has parameters of its own, once they are filled; it
            may replace them. A parameter that two modules share belongs to the first.

    Raises:
        WeightLoadError: a tensor has the wrong shape, occurs twice or is unknown, or a parameter
            has no tensor. The message names them.
    """
    _fill(model, _converted(tensors, model), _find_targets(model), tp, prepare, finish)


@torch.no_grad()
def load_parameters(
    model: LoadableModel,
    tensors: NamedTensors,
    *,
    prepare: ModuleHook = lambda module: None,
    finish: ModuleHook = lambda module: None,
) -> None:
    """Fill every parameter of one rank's `model` from a tensor of the same name and shape.

    For the arguments and errors see `load_weights`.
    """
    entries = ((name, name, source, source.path) for name, source in tensors)
    targets = _Targets(
        {name: ParamTarget(module, param, None) for name, module, param in own_parameters(model)}
    )
    _fill(model, entries, targets, TPGroup(), prepare, finish)


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (full name, module, name in the module) of every parameter; shared parameters once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                yield f"{path}.{name}" if path else name, module, name


def _fill(
    model: LoadableModel,
    entries: Iterable["_Entry"],
    targets: _Targets,
    tp: TPGroup,
    prepare: ModuleHook,
    finish: ModuleHook,
) -> None:
    """Fill the targets from entries (name in the checkpoint, name in the model, tensor, file).

    Raises:
        WeightLoadError: tensors are missing or unknown.
    """
    todo, absent = dict(targets.by_name), absent_prefixes(model)
    unexpected = []
    paths = set()
    num_empty = Counter(target.module for target in todo.values())
    copies = _Copies(targets.aliases)
    for checkpoint_name, name, source, path in copies.left_out(entries):
        paths.add(path)
        if name in targets.unused or name.startswith(absent):
            continue
        with _naming(path):
            is_scale = load_kv_scale(model, name, source, tp)
        if is_scale or _SCALE_OF_ATTENTION.search(name):
            continue
        target = todo.pop(name, None)
        if target is None:
            if not (_is_zero_bias(name, targets, source) or targets.is_elsewhere(name)):
                unexpected.append(checkpoint_name)
            continue
        prepare(target.module)
        with _naming(path):
            if isinstance(target.module, MethodLayer):
                target.module.load(target, checkpoint_name, source, tp)
            else:
                target.fill(checkpoint_name, source, tp)
        num_empty[target.module] -= 1
        if not num_empty[target.module]:
            # The tensors of one layer may come from several files.
            with _naming(path if len(paths) == 1 else None):
                finish(target.module)
    for name, target in list(todo.items()):
        layer = target.module
        if not isinstance(layer, MethodLayer):
            continue
        if target.param_name in layer.method.optional_parameters:
            prepare(layer)
            layer.method.fill_missing(target)
            del todo[name]
    of_training = [name for name in unexpected if name.startswith(_OF_TRAINING)]
    if of_training:
        unexpected = [name for name in unexpected if name not in of_training]
        logger.warning("%d tensors of the training are not read: %s", *_some(of_training))
    of_prediction = _of_prediction(unexpected, targets)
    if of_prediction:
        unexpected = [name for name in unexpected if name not in of_prediction]
        logger.info(
            "%d tensors of layers for multi-token prediction are not read: %s",
            *_some(sorted(of_prediction)),
        )
    if todo or unexpected:
        raise _mismatch(model, todo, unexpected, paths)


def _of_prediction(names: Sequence[str], targets: _Targets) -> set[str]:
    """Return the unknown tensors that belong to layers for multi-token prediction.

    Such layers draft tokens. Some checkpoints have them after the decoder layers, with similar
    names (`model.layers.61.eh_proj.weight`).

    Args:
        names: unknown tensors.
        targets: the tensors that the model has.
    """
    found = [_LAYER.match(name) for name in names]
    own = {match["layer"] for match in found if match is not None and match["inner"]}
    own = {layer for layer in own if not any(name.startswith(layer) for name in targets.by_name)}
    return {name for name in names if _PREDICTION.search(name) or name.startswith(tuple(own))}


def _mismatch(
    model: LoadableModel,
    missing: Mapping[str, ParamTarget],
    unexpected: Sequence[str],
    paths: Iterable[Path | None],
) -> WeightLoadError:
    """Create the error about a checkpoint whose tensors are not the ones of the model."""
    problems = [
        f"{len(names)} {what}: {name_some(sorted(names))}"
        for names, what in (
            (list(missing), "tensors missing from the checkpoint"),
            (unexpected, "tensors unknown to the model or given twice"),
        )
        if names
    ]
    folders = sorted({str(path.parent) for path in paths if path is not None})
    where = f" {', '.join(folders)}" if folders else ""
    hint = ""
    if any(isinstance(target.module, ParallelLMHead) for target in missing.values()):
        hint = (
            ". The output head is missing: if it shares the weights of the token embeddings, "
            "set tie_word_embeddings to true in config.json or with hf_overrides"
        )
    elif any(_LORA.search(name) for name in unexpected):
        hint = (
            ". The checkpoint has weights of a LoRA adapter: merge them into its weights "
            "(merge_and_unload of peft), and save the result"
        )
    elif any(name.endswith(_QUANTIZED) for name in missing) and any(
        name.endswith("_proj.weight") for name in unexpected
    ):
        hint = (
            ". Weights are missing in the format of quantization_config, but are there without "
            'quantization: remove the key, or give hf_overrides={"quantization_config": null}'
        )
    return WeightLoadError(
        f"checkpoint{where} and {type(model).__name__} do not match: {'; '.join(problems)}{hint}"
    )


def _some(names: list[str]) -> tuple[int, str]:
    return len(names), name_some(sorted(names))


_Entry = tuple[str, str, CheckpointTensor, Path | None]
"""Name in the checkpoint, name in the model, tensor, file."""


class _Copies:
    """Handles tensors that a checkpoint may have under two names, because the model ties them.

    Args:
        aliases: other names -> the names that are read.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases
        self._usual = frozenset(aliases.values())
        self._rows: dict[str, tuple[torch.Size, Tensor]] = {}
        """Shape, and some rows, of the tied tensors that have been read."""

    def left_out(self, entries: Iterable[_Entry]) -> Iterator[_Entry]:
        """Yield the entries without copies. A tensor that has only its other name gets the name
        that is read.
        """
        held: dict[str, _Entry] = {}
        for entry in entries:
            name, usual = entry[1], self._aliases.get(entry[1])
            if usual is None:
                if name in self._usual:
                    self._rows[name] = _some_rows(entry[2])
                    if (copy := held.pop(name, None)) is not None:
                        self._compare(copy, name)
                yield entry
            elif usual in self._rows:
                self._compare(entry, usual)
            elif entry[2].dtype in DENSE_DTYPES:  # the tensor can be read only now
                held[usual] = entry[0], usual, _in_memory(entry[2]), entry[3]
        yield from held.values()

    def _compare(self, copy: _Entry, usual: str) -> None:
        """Log a warning if a copy has other values than the tensor that is read."""
        shape, rows = self._rows[usual]
        own_shape, own_rows = _some_rows(copy[2])
        if shape != own_shape or not torch.equal(rows, own_rows):
            logger.warning(
                "%s has other values than %s in this checkpoint, and is not used, because "
                "tie_word_embeddings is true. If outputs are wrong, set it to false in config.json "
                "or with hf_overrides",
                *(copy[0], usual),
            )


_ROWS_COMPARED = 8


def _some_rows(source: CheckpointTensor) -> tuple[torch.Size, Tensor]:
    """Return the shape of a tensor, and some of its rows in float32."""
    middle = source.shape[0] // 2 if source.shape else 0
    index = (slice(middle, middle + _ROWS_COMPARED),) if source.shape else ()
    return source.shape, source.read(index).float()


def _in_memory(source: CheckpointTensor) -> CheckpointTensor:
    tensor = source.read(())
    return CheckpointTensor(
        source.shape,
        tensor.__getitem__,
        dtype=source.dtype,
        features=source.features,
        path=source.path,
        is_converted=source.is_converted,
    )


@contextmanager
def _naming(path: Path | None) -> Iterator[None]:
    """Add the name of the file to errors about a tensor while the context is open.

    None: no file.
    """
    try:
        yield
    except SettingsMismatch as error:
        raise SettingsMismatch(f"{path}: {error.args[0]}" if path else error.args[0]) from error
    except WeightLoadError as error:
        if path is None or str(path) in str(error):
            raise
        raise WeightLoadError(f"{path}: {error}") from error


def _is_zero_bias(name: str, targets: _Targets, source: CheckpointTensor) -> bool:
    """Return whether the tensor is an all-zero bias of a layer that has no bias.

    AutoGPTQ writes such a bias for all quantized layers.
    """
    stem, _, kind = name.rpartition(".")
    scales = targets.by_name.get(f"{stem}.scales")
    if kind != "bias" or scales is None or scales.slice is None:
        return False
    bias, expected = source.picked(name), scales.slice.checkpoint_shape(scales.param)[1:]
    return bias.shape == expected and not bool(bias.read(()).any())


def _converted(tensors: NamedTensors, model: LoadableModel) -> Iterator[_Entry]:
    """Yield (name in the checkpoint, name in the model, tensor, file), without ignored tensors."""
    for checkpoint_name, whole in tensors:
        if whole.is_converted:
            yield checkpoint_name, checkpoint_name, whole, whole.path
            continue
        inner = model.inner_name(checkpoint_name)
        if inner is not None and not model.is_ignored(inner):
            with _naming(whole.path):
                for name, source in model.convert(model.renamed(inner), whole):
                    yield checkpoint_name, name, source, whole.path
    model.check_tensors()


def names_in_checkpoint(name: str, model: LoadableModel) -> list[str]:
    """Return the names that a module may have in a checkpoint, if they differ from its name here.

    Args:
        name: name of the module in the model.
        model: model that has the parameter.
    """
    whole = f"{name}."  # rename only whole levels of a name
    found = {whole}
    for part, replacement in reversed(list(model.checkpoint_names.items())):
        found |= {each.replace(replacement, part) for each in found}
    for prefix, replacement in model.checkpoint_prefixes.items():
        found |= {
            prefix + each.removeprefix(replacement)
            for each in found
            if each.startswith(replacement)
        }
    if model.outer_names is not None:
        prefix, inner = model.outer_names
        found |= {prefix + each.removeprefix(inner) for each in found if each.startswith(inner)}
    found.remove(whole)
    return sorted(
        each.removesuffix(".")
        for each in found
        if model.renamed(model.inner_name(each) or each) == whole
    )


def targets_by_name(model: LoadableModel) -> dict[str, ParamTarget]:
    """Return name in the model -> parameter, for each tensor that a checkpoint must have."""
    return _find_targets(model).by_name


def _find_targets(model: LoadableModel) -> _Targets:
    targets = _Targets()
    seen: dict[int, dict[str, str]] = {}
    for path, module in model.named_modules():
        slices = module.slices if isinstance(module, SlicedModule) else {}
        if isinstance(module, SlicedModule):
            targets.elsewhere.update(f"{path}.{part}" for part in module.elsewhere)
        if isinstance(module, MethodLayer):
            parts = {part for of_param in slices.values() for part in of_param}
            targets.unused |= {
                checkpoint_name(path, part, tensor)
                for part in parts
                for tensor in module.method.unused_tensors
            }
        for param_name, param in module.named_parameters(recurse=False):
            tied = seen.get(id(param))
            own = seen.setdefault(id(param), {})
            for part_name, slice_ in slices.get(param_name, {"": None}).items():
                tensor = (slice_ and slice_.tensor) or param_name
                name = checkpoint_name(path, part_name, tensor)
                if tied is not None:
                    targets.aliases[name] = tied.get(part_name, next(iter(tied.values())))
                else:
                    own[part_name] = name
                    targets.by_name[name] = ParamTarget(module, param_name, slice_)
    return targets


def checkpoint_name(path: str, part_name: str, tensor: str) -> str:
    """Return the checkpoint name of a tensor of a module, or of one packed part of it.

    Packed parts are siblings: qkv_proj of a.b packs a.b.q_proj, a.b.k_proj, a.b.v_proj.
    """
    if part_name:
        parent = path.rpartition(".")[0]
        path = f"{parent}.{part_name}" if parent else part_name
    return f"{path}.{tensor}" if path else tensor
