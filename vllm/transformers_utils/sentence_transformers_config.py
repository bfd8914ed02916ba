"""Read the files of a sentence-transformers model other than config.json. Loads no model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config.pooler import PoolingType
from vllm.errors import ConfigError
from vllm.utils.files.json_file import read_json_array, read_json_object

_MODES: Mapping[str, PoolingType] = {
    "cls": "CLS",
    "cls_token": "CLS",
    "mean": "MEAN",
    "mean_tokens": "MEAN",
    "lasttoken": "LAST",
}
"""Names in 1_Pooling/config.json, without `pooling_mode_`, of the supported modes."""


@dataclass(frozen=True, kw_only=True)
class SentenceTransformersConfig:
    """The modules after the transformer, as modules.json describes them."""

    pooling_type: PoolingType
    normalize: bool
    max_seq_length: int | None
    """Number of tokens to which sentence-transformers truncates a text."""


def read_sentence_transformers_config(folder: Path) -> SentenceTransformersConfig | None:
    """Return the modules in modules.json; None if the file is missing or names no pooling.

    Raises:
        ConfigError: a file is damaged, or has a module or a mode that is not supported.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    pooling_type: PoolingType | None = None
    normalize = False
    for module in read_json_array(path):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind == "Pooling":
            pooling_type = _read_pooling(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{path}: a module of type {kind or module} is not supported; supported: "
                "Transformer, Pooling and Normalize"
            )
    if pooling_type is None:
        return None
    return SentenceTransformersConfig(
        pooling_type=pooling_type, normalize=normalize, max_seq_length=_read_max_seq_length(folder)
    )


def _read_pooling(path: Path) -> PoolingType:
    config = read_json_object(path)
    modes = config.get("pooling_mode")
    if modes is None:  # before version 5 there was one flag per mode
        flags = {k: v for k, v in config.items() if k.startswith("pooling_mode_")}
        modes = [name.removeprefix("pooling_mode_") for name, is_on in flags.items() if is_on]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _MODES:
        raise ConfigError(
            f"{path}: pooling by {modes!r} is not supported; supported: one of cls, mean and "
            "lasttoken"
        )
    return _MODES[modes[0]]


def _read_max_seq_length(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    value: Any = read_json_object(path).get("max_seq_length") if path.is_file() else None
    return value if type(value) is int and value > 0 else None
