"""Weights that were split over ranks beforehand: each rank reads only its own file.

A file contains the parameters of one rank by their names in the model, before they are converted to
the layout that runs. So it does not depend on the device. Its metadata says which rank and stage it
is for.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.attention.backends.cache_scales import is_one_number
from vllm.distributed import RankLayout, Stage, TPGroup, place_in_engine
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.loader.checkpoint import iterate_tensors
from vllm.model_executor.loader.weights import load_weights, own_parameters
from vllm.model_executor.models.interface import LoadableModel
from vllm.utils.files.weight_files import find_files, shard_name


def shards_of(
    files: list[Path], tp: TPGroup, stage: Stage, *, last_embeds: bool = False
) -> list[Path]:
    """Return the files that this rank reads: its own, and the one with the embedding if needed.

    Args:
        files: files of all ranks.
        tp: tensor-parallel position of this rank.
        stage: pipeline stage of this rank.
        last_embeds: see `keep_stage`.

    Raises:
        WeightLoadError: the files are for another number of ranks or stages.
    """
    layout = RankLayout(tensor_size=tp.size, pipeline_size=stage.count)
    names = [path.name for path in files]
    again = "Save them again with tools/save_sharded_state.py"
    if sorted(names) != sorted(shard_name(rank) for rank in range(layout.world_size)):
        raise WeightLoadError(
            f"{files[0].parent} has weights for {len(files)} ranks ({', '.join(sorted(names))}), "
            f"but --tensor-parallel-size is {tp.size} and --pipeline-parallel-size is "
            f"{stage.count}. {again} for {layout.world_size} ranks"
        )
    file = files[names.index(_file_name(tp, stage))]
    found, wanted = _read_part(file), _part(tp, stage)
    if found and found != wanted:
        raise WeightLoadError(
            f"{file} has the part {_named(found)} of the model, but this rank needs the part "
            f"{_named(wanted)}. {again} for these sizes, or use the sizes that they were saved for"
        )
    if not last_embeds or not stage.is_last or stage.is_first:
        return [file]
    first = layout.tensor_groups[0][tp.rank]
    return [file, files[names.index(shard_name(first))]]


def tensors_once(
    tensors: NamedTensors,
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield only the first tensor of each name.

    Two files may both contain an embedding that is also the output head.
    """
    seen: set[str] = set()
    for name, source in tensors:
        if name not in seen:
            seen.add(name)
            yield name, source


def _file_name(tp: TPGroup, stage: Stage) -> str:
    return shard_name(place_in_engine(tp, stage)[0])


def _part(tp: TPGroup, stage: Stage) -> dict[str, str]:
    """Return the metadata of a rank's file: which part of the model it contains."""
    return {
        "tensor_parallel_size": str(tp.size),
        "tensor_parallel_rank": str(tp.rank),
        "first_layer": str(stage.first_layer),
        "last_layer": str(stage.end_layer - 1),
    }


def _read_part(file: Path) -> dict[str, str]:
    """Read the metadata that `_part` wrote to a file; empty if the file has none."""
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise WeightLoadError(f"{file} is damaged or not a safetensors file: {error}") from error
    return {name: metadata[name] for name in _part(TPGroup(), Stage(0, 1)) if name in metadata}


def _named(part: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in part.items())


@torch.no_grad()
def save_shard(
    model: LoadableModel,
    tp: TPGroup,
    stage: Stage,
    source: Path,
    target: Path,
    prepare: Callable[[nn.Module], None],
) -> Path:
    """Read one rank's weights from a checkpoint, and write them to its file.

    Args:
        model: the model of this rank, with only the layers of its stage, on the meta device.
        tp: the rank in its tensor-parallel group; needs no process group.
        stage: stage of the rank.
        source: folder of the checkpoint.
        target: folder for the file.
        prepare: allocates the parameters of a module.

    Returns:
        The path of the file.

    Raises:
        WeightLoadError: the checkpoint is missing, damaged or does not fit the model.
    """
    files = find_files(source, "auto")
    with closing(iterate_tensors(files, show_progress=False)) as tensors:
        load_weights(model, tensors, tp, prepare=prepare)
    state: dict[str, Tensor] = {
        name: getattr(module, param).detach() for name, module, param in own_parameters(model)
    }
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            for of, scales in (("k", module.key_scales), ("v", module.value_scales)):
                if not (scales == 1).all():
                    state[f"{path}.{of}_scale"] = scales[:1] if is_one_number(scales) else scales
    file = target / _file_name(tp, stage)
    save_file(state, file, metadata=_part(tp, stage))
    return file
