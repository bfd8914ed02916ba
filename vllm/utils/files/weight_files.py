"""Find the weight files of a model folder. Does not open them, and does not import torch."""

from pathlib import Path

from vllm.errors import ConfigError, WeightLoadError
from vllm.utils.files.json_file import read_json_object
from vllm.utils.files.lfs import pointer_problem

_INDEX_NAMES = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json", "model*.safetensors"),
    "pt": ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin"),
}
"""Format -> single file, index of a sharded checkpoint, shards without an index."""

CONSOLIDATED = "consolidated*.safetensors"
"""Files in the format of Mistral AI."""
_OTHER_PATTERNS = {"gguf": "*.gguf", "mistral": CONSOLIDATED}
"""Format -> all of its files, for formats without an index."""
_SHARDS = "model-rank-*-part-0.safetensors"
_ANY_NAME = {"safetensors": ("*.safetensors",), "pt": ("*.bin", "*.pt", "*.pth")}
"""Format -> its files under any name, if there is none with a usual name."""
_NOT_OF_MODEL = (
    *("consolidated*", _SHARDS, "adapter_model*", "optimizer*", "scheduler*", "scaler*"),
    *("training_args*", "rng_state*", "random_states*", "openvino*"),
)
"""Files that are not the weights of a model, or have them in another format."""
_WHOLE = "use the safetensors checkpoint of the model"
_NO_WEIGHTS = {
    "adapter_model.*": "an adapter. Name the model that it was trained on, and give the adapter "
    "with lora_modules or a LoRARequest",
    "consolidated*.pth": "weights in the format of Meta: use the repository of the same model "
    "whose files are named model*.safetensors",
    "global_step*": "a checkpoint of DeepSpeed: run `python zero_to_fp32.py . . "
    "--safe_serialization` in the folder",
    "pytorch_model_fsdp*": "a checkpoint of FSDP: merge it with `accelerate merge-weights`",
    **dict.fromkeys(
        ("*.incomplete", "*.part", "*.crdownload"),
        "a file whose download was interrupted: download it again",
    ),
    "*.distcp": "a distributed checkpoint of PyTorch: save the model with save_pretrained",
    **dict.fromkeys(
        ("tf_model.h5", "flax_model.msgpack", "*.onnx", "openvino_model.xml", "*.nemo", "*.ckpt*"),
        f"weights of another framework: {_WHOLE}",
    ),
}
"""Pattern of files and folders that are not weights of a model for this engine -> what they are,
and what to do."""


def shard_name(rank: int) -> str:
    """Return the name of the file with the weights of one rank (`sharded_state`)."""
    return _SHARDS.replace("*", str(rank))


def find_index(folder: Path, load_format: str) -> Path | None:
    """Return the file that lists the shards of a checkpoint; None if there is no list, or a single
    file has all weights.
    """
    for name in ("safetensors", "pt") if load_format == "auto" else (load_format,):
        single, index, _ = _INDEX_NAMES.get(name, (None, None, None))
        if single is None or index is None or (folder / single).is_file():
            return None
        if (folder / index).is_file():
            return folder / index
    return None


def find_files(folder: Path, load_format: str) -> list[Path]:
    """Return the weight files of a model.

    Args:
        folder: folder of the model.
        load_format: "safetensors", "pt", "gguf", "mistral", "auto" for the first of these that
            exists, or "sharded_state" for the files of all ranks.

    Raises:
        WeightLoadError: the folder has no weights, the index names a file that is missing, or a
            file was not downloaded.
    """
    files = _find_files(folder, load_format)
    if problem := next(filter(None, map(pointer_problem, files)), None):
        raise WeightLoadError(problem)
    return files


def _find_files(folder: Path, load_format: str) -> list[Path]:
    shards_of_ranks = sorted(folder.glob(_SHARDS))
    if load_format == "sharded_state":
        if not shards_of_ranks:
            raise WeightLoadError(
                f"no weights in {folder}: --load-format sharded_state expects {_SHARDS}, as "
                f"tools/save_sharded_state.py writes"
            )
        return shards_of_ranks
    formats = ("safetensors", "pt") if load_format == "auto" else (load_format,)
    others = {name: sorted(folder.glob(pattern)) for name, pattern in _OTHER_PATTERNS.items()}
    if load_format in others:
        if not others[load_format]:
            raise WeightLoadError(
                f"no weights in {folder}: no file there is named {_OTHER_PATTERNS[load_format]}, "
                f"which --load-format {load_format} reads; for files of another kind give "
                f"--load-format auto"
            )
        return others[load_format]
    for name in formats:
        single, index, pattern = _INDEX_NAMES[name]
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _read_index(folder / index)
        shards = sorted({*folder.glob(pattern)} - {*shards_of_ranks})
        if broken := next((path for path in shards if not path.exists()), None):
            raise WeightLoadError(
                f"{broken} is a link to a file that does not exist. Download the model again"
            )
        if shards:
            return shards
    found = next(((name, files) for name, files in others.items() if files), None)
    if found and load_format == "auto":
        return found[1]
    left_out = {path for pattern in _NOT_OF_MODEL for path in folder.glob(pattern)}
    for pattern in (pattern for name in formats for pattern in _ANY_NAME[name]):
        if named_otherwise := sorted({*folder.glob(pattern)} - left_out):
            return named_otherwise
    wanted = " or ".join(name for each in formats for name in _INDEX_NAMES[each][:2])
    if found:
        wanted += f". It has {found[1][0].name}: use --load-format {found[0]}"
    if shards_of_ranks:
        wanted += f". It has {shards_of_ranks[0].name}: use --load-format sharded_state"
    for pattern, what in _NO_WEIGHTS.items():
        if not found and (other := next(iter(sorted(folder.glob(pattern))), None)):
            wanted += f". It has {other.name}, {what}"
            break
    raise WeightLoadError(f"no weights in {folder}: expected {wanted}")


def _read_index(path: Path) -> list[Path]:
    try:
        names = set(read_json_object(path)["weight_map"].values())
    except ConfigError as error:
        raise WeightLoadError(f"{error}. Download the file again") from error
    except (KeyError, AttributeError, TypeError):
        names = set()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise WeightLoadError(
            f"{path} has no 'weight_map' of names of tensors and of files. Download the file again"
        )
    # A file in another folder cannot belong to the checkpoint.
    outside = sorted(
        name
        for name in names
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name
    )
    if outside:
        raise WeightLoadError(
            f"{path} names {outside[0]!r}, which is not a file of its folder. Download the file "
            "again"
        )
    files = [path.parent / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightLoadError(
            f"{len(missing)} of {len(files)} files named by {path} are missing: "
            f"{name_some(missing)}"
        )
    return files


def name_some(names: list[str], most: int = 10) -> str:
    """List names in one line: at most `most` names, then the number of the others.

    >>> name_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
