"""Split a checkpoint over ranks once, so that each rank later reads only its own file.

    python tools/save_sharded_state.py --model FOLDER --tensor-parallel-size 2 --output FOLDER_2
    vllm serve FOLDER_2 --load-format sharded_state --tensor-parallel-size 2

With --pipeline-parallel-size each file has the layers of one stage; VLLM_PP_LAYER_PARTITION has to
be the same when the model is saved and when it is loaded.

The files of config and tokenizer are copied. Nothing is computed, and ranks are handled one after
the other, so the memory for one rank's weights is enough.
"""

import argparse
import shutil
import sys
from itertools import product
from pathlib import Path

import torch

from vllm.distributed import Stage, TPGroup
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.loader.model_loader import ParameterMemory, build_model
from vllm.model_executor.loader.sharded_state import save_shard
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.quantization import quantization_of
from vllm.utils.files.weight_files import find_files

_COPIED = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")


def save(
    model: str, output: Path, size: int, dtype: str = "auto", num_stages: int = 1
) -> list[Path]:
    """Write the files of `size` ranks for each stage, and copy what else the model needs.

    Raises:
        ConfigError, WeightLoadError: the model cannot be loaded, or cannot be split.
    """
    config = EngineArgs(
        model=model, dtype=dtype, pipeline_parallel_size=num_stages
    ).create_engine_config()
    folder = Path(config.model.resolved_path)
    if output.resolve() == folder.resolve():
        raise ConfigError(f"--output {output} is the folder of the model; name another one")
    output.mkdir(parents=True, exist_ok=True)
    quantization = quantization_of(config.model)
    formats = [] if quantization is None else [quantization]
    torch_dtype = getattr(torch, config.model.dtype_name)
    files, stored = [], find_files(folder, config.load.load_format)
    arch, partition = config.model.resolved_arch, config.parallel.pipeline_layer_partition
    for index, rank in product(range(num_stages), range(size)):
        tp = TPGroup(rank, size)
        stage = Stage.of(index, num_stages, arch.num_layers, partition)
        part = build_model(arch, tp, torch_dtype, formats=formats, files=stored, stage=stage)
        assert isinstance(part, CausalLM), "no pooling model was asked for"
        memory = ParameterMemory(part, torch.device("cpu"))
        files.append(save_shard(part, tp, stage, folder, output, memory.allocate))
    for pattern in _COPIED:
        for path in folder.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, output)
    return files


def main() -> int:
    """Parse the command line and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder, or name on the hub")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="number of ranks")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="number of stages")
    parser.add_argument("--dtype", default="auto", help="of the weights")
    args = parser.parse_args()
    if args.tensor_parallel_size < 1:
        parser.error(f"--tensor-parallel-size must be at least 1, got {args.tensor_parallel_size}")
    if args.pipeline_parallel_size < 1:
        parser.error(
            f"--pipeline-parallel-size must be at least 1, got {args.pipeline_parallel_size}"
        )
    try:
        files = save(
            args.model,
            args.output,
            args.tensor_parallel_size,
            args.dtype,
            args.pipeline_parallel_size,
        )
    except (ConfigError, WeightLoadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file in files:
        print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
