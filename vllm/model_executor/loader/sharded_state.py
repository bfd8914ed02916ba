"""Weights that were split over ranks beforehand: each rank reads its own file, and nothing else.

A file has the parameters of one rank by their names in the model, as they are before a layer brings
them into the layout that runs. So it does not depend on the device.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.attention.cache_scales import is_one_number
from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.loader.checkpoint import iterate_tensors
from vllm.model_executor.loader.weights import load_weights, own_parameters
from vllm.model_executor.models.interface import LoadableModel
from vllm.transformers_utils.weight_files import find_files, shard_name


def shard_of(files: list[Path], tp: TPGroup) -> Path:
    """The file of this rank, of all files of a folder.

    Raises:
        WeightLoadError: they are for another number of ranks.
    """
    names = [path.name for path in files]
    if sorted(names) != sorted(shard_name(rank) for rank in range(tp.size)):
        raise WeightLoadError(
            f"{files[0].parent} has weights for {len(files)} ranks ({', '.join(sorted(names))}), "
            f"but --tensor-parallel-size is {tp.size}. Save them again for {tp.size} ranks with "
            f"tools/save_sharded_state.py"
        )
    return files[names.index(shard_name(tp.rank))]


@torch.no_grad()
def save_shard(
    model: LoadableModel,
    tp: TPGroup,
    source: Path,
    target: Path,
    prepare: Callable[[nn.Module], None],
) -> Path:
    """Read one rank's weights from a checkpoint, and write them to its file.

    Args:
        model: of this rank, on the meta device.
        tp: the rank; needs no process group.
        source: folder of the checkpoint.
        target: folder for the file.
        prepare: gives the parameters of a module memory.

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
    file = target / shard_name(tp.rank)
    save_file(state, file)
    return file
