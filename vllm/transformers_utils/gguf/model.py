"""The files of a GGUF model, and what its tensors are called in checkpoints of transformers.

A model may be split: NAME-00001-of-00003.gguf and the files beside it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vllm.config.families import FAMILIES, Family, GGUFFacts
from vllm.errors import ConfigError, WeightLoadError
from vllm.transformers_utils.gguf.header import SUFFIX, Header, StoredTensor, read_header
from vllm.transformers_utils.weight_files import name_some

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_Value = TypeVar("_Value")

_FAMILIES = [family for family in FAMILIES.values() if family.gguf is not None]

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_EXPERT_PARTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""Tensors that have a matrix of every expert, one behind the other."""
_SANDWICH_PARTS = _PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ROPE_FACTORS = "rope_freqs.weight"
"""One divisor for each frequency of the rotations: no weight."""


def architectures(*, with_experts: bool = False) -> list[str]:
    """Return each `general.architecture` that is supported: all, or those that can have experts."""
    facts = [family.gguf for family in _FAMILIES if family.gguf is not None]
    names = [each.architecture for each in facts if each.has_experts or not with_experts]
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class GGUFModel:
    """The headers of all files of a model."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Of the first file."""
    tensors: Mapping[str, StoredTensor]
    """Of all files, by the names in them."""

    @property
    def architecture(self) -> str:
        """As the file spells it; one of `architectures()`."""
        return self.get("general.architecture", str)

    @property
    def family(self) -> Family:
        """Of the models in such files. Two families may be stored alike, of which one has experts:
        Mixtral is llama, too."""
        has_experts = bool(self.metadata.get(f"{self.architecture}.expert_count"))
        found = [f for f in _FAMILIES if f.gguf and f.gguf.architecture == self.architecture]
        return next((f for f in found if f.gguf and f.gguf.has_experts == has_experts), found[0])

    @property
    def facts(self) -> GGUFFacts:
        """How the files store models of the family."""
        facts = self.family.gguf
        assert facts is not None
        return facts

    @property
    def rope_factors(self) -> StoredTensor | None:
        """One divisor for each frequency of the rotations."""
        return self.tensors.get(_ROPE_FACTORS)

    def get(self, name: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """A metadata value.

        Args:
            name: of the value; one that begins with a dot belongs to the architecture.
            kind: its type; an int will do for a float.
            default: where there is none; None: it is required.

        Raises:
            WeightLoadError: it is missing or of another type.
        """
        if name.startswith("."):
            name = self.architecture + name
        value = self.metadata.get(name, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            what = "has no metadata" if value is None else f"has {_shown(value)} as metadata"
            raise WeightLoadError(
                f"{self.paths[0]} {what} {name!r}; a {kind.__name__} is expected. Convert the "
                f"model again"
            )
        return value

    def checkpoint_names(self) -> dict[str, StoredTensor]:
        """The tensors by their names in checkpoints of transformers.

        Raises:
            WeightLoadError: a tensor is unknown.
        """
        parts = _SANDWICH_PARTS if self.facts.has_post_norms else _PARTS
        found: dict[str, StoredTensor] = {}
        for name, tensor in self.tensors.items():
            if name == _ROPE_FACTORS:
                continue
            stem, _, kind = name.rpartition(".")
            full = _OUTER.get(stem)
            if stem.startswith("blk."):
                _, index, part = (*stem.split(".", 2), "")[:3]
                if part in _EXPERT_PARTS and kind == "weight" and len(tensor.shape) == 3:
                    stem = f"model.layers.{index}.mlp.experts."
                    found |= _by_expert(tensor, stem, f".{_EXPERT_PARTS[part]}.weight")
                    continue
                full = f"model.layers.{index}.{parts[part]}" if part in parts else None
                if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
                    tensor = replace(tensor, shape=(1, *tensor.shape))
            if full is None or kind not in ("weight", "bias"):
                raise WeightLoadError(
                    f"tensor {name} of {tensor.path} is unknown in models of the architecture "
                    f"{self.architecture!r}. Use the safetensors checkpoint of the model"
                )
            found[f"{full}.{kind}"] = tensor
        return found


def _by_expert(tensor: StoredTensor, before: str, behind: str) -> dict[str, StoredTensor]:
    """The matrices of a tensor [experts, rows, columns], with the number of the expert in their
    names."""
    count, *shape = tensor.shape
    num_bytes = shape[0] * tensor.row_bytes
    return {
        f"{before}{i}{behind}": replace(
            tensor, shape=tuple(shape), start=tensor.start + i * num_bytes
        )
        for i in range(count)
    }


def open_model(paths: Iterable[Path]) -> GGUFModel:
    """Read the headers of a model.

    Args:
        paths: all of its files, the first of a split model first.

    Raises:
        WeightLoadError: a file is damaged or missing.
        ConfigError: the architecture is not supported.
    """
    paths = tuple(paths)
    headers = [read_header(path) for path in paths]
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise WeightLoadError(
                    f"tensor {name} is in {tensors[name].path} and in {tensor.path}; a model has "
                    f"each tensor once. Download its files again"
                )
            tensors[name] = tensor
    _check_split(paths, headers[0], len(tensors))
    model = GGUFModel(paths, headers[0].metadata, tensors)
    if model.architecture not in architectures():
        raise ConfigError(
            f"{paths[0]} has a model of the architecture {model.architecture!r}, which is not "
            f"supported in GGUF files; supported: {', '.join(architectures())} (Mistral is llama). "
            f"Use the safetensors checkpoint of the model"
        )
    return model


def _check_split(paths: tuple[Path, ...], first: Header, num_tensors: int) -> None:
    count = first.metadata.get("split.count", 1) or 1
    if count != len(paths):
        raise WeightLoadError(
            f"{paths[0]} is a part of a model in {count} files, {len(paths)} of them are here. "
            f"Put all of them into one folder, under the names that they were published with"
        )
    claimed = first.metadata.get("split.tensors.count", num_tensors)
    if count > 1 and claimed != num_tensors:
        raise WeightLoadError(
            f"{paths[0]} and the files beside it have {num_tensors} tensors, the model has "
            f"{claimed}. Download them again"
        )


def files_of_model(path: Path) -> list[Path]:
    """All files of the model that this file belongs to, the first one first.

    Raises:
        WeightLoadError: a part of a split model is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = match["count"]
    wanted = (f"{match['stem']}-{i + 1:05}-of-{count}{SUFFIX}" for i in range(int(count)))
    parts = [path.parent / name for name in wanted]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise WeightLoadError(
            f"{len(missing)} of {len(parts)} files of the model are missing in {path.parent}: "
            f"{name_some(missing)}"
        )
    return parts


def find_model(folder: Path) -> Path | None:
    """The first GGUF file of a folder; None: it has none.

    Raises:
        ConfigError: it has several models.
    """
    firsts = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        match = _PART.fullmatch(path.name)
        if match is None or int(match["number"]) == 1:
            firsts.append(path)
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts[:5])
        raise ConfigError(
            f"model folder '{folder}' has {len(firsts)} GGUF models ({names}); name one of these "
            f"files as the model"
        )
    return firsts[0] if firsts else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
