"""Map the tensors in the files of a GGUF model to the parameters of this package.

A model may be split: NAME-00001-of-00003.gguf and the files next to it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vllm.config.families import FAMILIES, Family, GGUFFormat
from vllm.errors import ConfigError, WeightLoadError
from vllm.transformers_utils.gguf.header import SUFFIX, Header, StoredTensor, read_header
from vllm.utils.files.weight_files import name_some

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_Value = TypeVar("_Value")
_MAX_SIZE = 1 << 31

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
_ROUTED_PARTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT_PARTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj.keys",
    "attn_v_b": "self_attn.kv_b_proj.values",
}
"""The last two are the halves of the one before in newer files: a matrix for each head, transposed
for keys."""
_ROUTER_BIAS = "exp_probs_b"
_DRAFT_LAYERS = ".nextn_predict_layers"
"""Metadata with the number of layers, the last ones, that guess further tokens."""
_FUSED_ATTENTION = ("attn_q", "attn_k", "attn_v")
_FUSED_GATE = ("ffn_gate", "ffn_up")
"""Parts of layers that may be stored as one tensor, one after the other."""
_EXPERT_PARTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""Tensors that have a matrix of every expert, one after the other."""
_MERGED_EXPERTS, _HALVES = "ffn_gate_up_exps", ("gate_proj", "up_proj")
"""A tensor that newer files have instead of two: for each expert the gate, and then the up
projection."""
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
"""Matches a matrix of one expert in the files of 2023, such as ffn_up.3."""
_MAY_BE_ONE_ROW = ("ffn_gate_inp_shexp", "token_types", "cls.output")
"""Matrices that may have one row, and are then stored as a vector."""
_TWO_NORMS = {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}
"""Norms of Falcon 40B, whose attention and MLP have one each."""
_OUTER = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embed_norm",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}


@dataclass(frozen=True)
class _Names:
    """Names of the modules in this package's models."""

    layers: str
    """Level with the layers."""
    parts: Mapping[str, str]
    """Tensor of a layer in the file -> module in the layer."""
    outer: Mapping[str, str]
    """Other tensor in the file -> module."""


_DECODER = _Names("model.layers", _PARTS, _OUTER)
_SANDWICH = replace(
    _DECODER,
    parts=_PARTS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
_ENCODER = _Names(
    "model.encoder.layer",
    {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    {
        "token_embd": "model.embeddings.word_embeddings",
        "token_embd_norm": "model.embeddings.LayerNorm",
        "token_types": "model.embeddings.token_type_embeddings",
        "position_embd": "model.embeddings.position_embeddings",
        "cls": "pooler",
        "cls.output": "classifier",
    },
)
_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""One divisor for each frequency of the rotations: no weights."""


_IN_NO_FORMAT: Mapping[tuple[str, ...], str] = {
    (
        *("nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3"),
        *("modern-bert", "neo-bert", "eurobert", "t5encoder"),
    ): "an embedding model that is a BERT, a RoBERTa or a decoder, such as Qwen3-Embedding",
    ("refact",): "another model for code, such as StarCoder 2 or Qwen2.5-Coder",
    ("t5",): "a decoder",
}
"""Architectures of GGUF files that this package cannot run in any format -> what to use
instead."""


_OTHER_KINDS = {
    "mmproj": "the part of a model that reads images or sounds. Name the GGUF file of the language "
    "model; to use images, name the safetensors checkpoint of the model",
    "adapter": "a LoRA adapter. Name the GGUF file of a model, and give the adapter in the format "
    "of peft",
    "imatrix": "a matrix of importances, with which a model is quantized. Name the GGUF file of a "
    "model",
}
"""`general.type` of GGUF files that are not models -> what they are, and what to do."""


def _other_kind(metadata: Mapping[str, Any]) -> str | None:
    """Return what a file is that is not a model, and what to do; None if it is a model."""
    if metadata.get("general.architecture") == "clip":  # older files with images have no type
        return _OTHER_KINDS["mmproj"]
    return _OTHER_KINDS.get(str(metadata.get("general.type")))


def architectures(*, with_experts: bool = False) -> list[str]:
    """Return each supported `general.architecture`; with `with_experts`, only those with
    experts.
    """
    gguf = [family.gguf for family in _FAMILIES if family.gguf is not None]
    names = [each.architecture for each in gguf if each.has_experts or not with_experts]
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF model: the headers of all its files."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Metadata of the first file."""
    tensors: Mapping[str, StoredTensor]
    """Tensors of all files, by the names in them."""

    @property
    def architecture(self) -> str:
        """Architecture as the file names it; one of `architectures()`."""
        return self.get("general.architecture", str)

    @property
    def family(self) -> Family:
        """Family of the model in the file.

        Several families may share a GGUF architecture, if one of them has experts or router biases:
        Mixtral is also stored as llama.
        """
        kind = self.architecture
        has_experts = bool(self.metadata.get(f"{kind}.expert_count"))
        has_bias = any(name.endswith(f"{_ROUTER_BIAS}.bias") for name in self.tensors)
        found = [(f, f.gguf) for f in _FAMILIES if f.gguf and f.gguf.architecture == kind]
        family, _ = max(
            found, key=lambda f: (f[1].has_experts == has_experts, f[1].has_router_bias == has_bias)
        )
        return family

    @property
    def gguf(self) -> GGUFFormat:
        """Properties of the GGUF files of this family."""
        gguf = self.family.gguf
        assert gguf is not None
        return gguf

    @property
    def rope_factors(self) -> StoredTensor | None:
        """Divisors of the rotary frequencies, one for each; None if there are none."""
        return self.tensors.get(_ROPE_FACTORS)

    @property
    def factors_by_length(self) -> tuple[StoredTensor, StoredTensor] | None:
        """Divisors of the rotary frequencies for short and for long contexts; None if there are
        none.
        """
        short, long = (self.tensors.get(name) for name in (_SHORT_FACTORS, _LONG_FACTORS))
        return None if short is None or long is None else (short, long)

    @property
    def num_layers(self) -> int:
        """Number of layers, without multi-token prediction layers."""
        all_layers, drafts = self.size(".block_count"), self.get(_DRAFT_LAYERS, int, 0)
        if not 0 <= drafts < all_layers:
            raise WeightLoadError(
                f"{self.paths[0]}: the metadata '{self.architecture}{_DRAFT_LAYERS}' is {drafts}, "
                f"and '{self.architecture}.block_count' {all_layers}. It is damaged; download it "
                f"again"
            )
        return all_layers - drafts

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.size(".attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        name = ".attention.head_count_kv"
        return self.size(name) if self.architecture + name in self.metadata else self.num_heads

    @property
    def head_size(self) -> int:
        """Number of elements in each head."""
        name = ".attention.key_length"
        if self.architecture + name in self.metadata:
            return self.size(name)
        return self.size(".embedding_length") // self.num_heads

    def size(self, name: str) -> int:
        """Return a size from the metadata of the architecture, above 0 and within a reasonable
        limit.

        A list with the same value for every layer is accepted.

        Raises:
            WeightLoadError: it is missing or has another value.
        """
        value = self.metadata.get(self.architecture + name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if type(value) is not int or not 0 < value < _MAX_SIZE:
            raise WeightLoadError(
                f"{self.paths[0]}: the metadata '{self.architecture}{name}' must be a number above "
                f"0 and below {_MAX_SIZE}, the same for all layers; got {str(value)[:40]}"
            )
        return value

    def get(self, name: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """Return a metadata value.

        Args:
            name: name of the value; a name that begins with a dot belongs to the architecture.
            kind: type of the value; an int is accepted for a float.
            default: result if there is no value; None: the value is required.

        Raises:
            WeightLoadError: it is missing or has another type.
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

    def module_names(self) -> dict[str, StoredTensor]:
        """Return the tensors by the names of the parameters, or parts of parameters, that they
        fill.

        Raises:
            WeightLoadError: a tensor is unknown.
        """
        found: dict[str, StoredTensor] = {}
        drafts = self._draft_prefixes()
        for name, tensor in self.tensors.items():
            if name.startswith(drafts):
                continue
            if name in (_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS):
                continue
            made = self._parameters(name, tensor)
            if made is None:
                raise WeightLoadError(
                    f"tensor {name} of {tensor.path} is unknown in models of the architecture "
                    f"{self.architecture!r}. Use the safetensors checkpoint of the model"
                )
            found |= made
        return found

    def _draft_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of the tensor names of multi-token prediction layers."""
        if not self.metadata.get(self.architecture + _DRAFT_LAYERS):
            return ()
        last = min(self.size(".block_count"), len(self.tensors))
        return tuple(f"blk.{i}." for i in range(self.num_layers, last))

    @property
    def _names(self) -> _Names:
        if self.family.is_encoder:
            return _ENCODER
        names = _SANDWICH if self.gguf.has_post_norms else _DECODER
        if self.gguf.is_routed:
            names = replace(names, parts={**names.parts, **_ROUTED_PARTS})
        if self.gguf.has_latent_attention:
            names = replace(names, parts={**names.parts, **_LATENT_PARTS})
        return names

    def _parameters(self, name: str, tensor: StoredTensor) -> dict[str, StoredTensor] | None:
        """Return the parameters that one tensor of the file fills; None if the tensor is
        unknown.
        """
        stem, _, kind = name.rpartition(".")
        names, gguf = self._names, self.gguf
        if kind not in ("weight", "bias"):
            return None
        if kind == "weight" and len(tensor.shape) == 1 and stem.endswith(_MAY_BE_ONE_ROW):
            tensor = replace(tensor, shape=(1, *tensor.shape))
        if stem in names.outer:
            return {f"{names.outer[stem]}.{kind}": tensor}
        if not stem.startswith("blk."):
            return None
        _, index, part = (*stem.split(".", 2), "")[:3]
        layer = f"{names.layers}.{index}."
        if part in _EXPERT_PARTS and len(tensor.shape) == (3 if kind == "weight" else 2):
            return _by_expert(tensor, f"{layer}mlp.experts.", f".{_EXPERT_PARTS[part]}.{kind}")
        if part == _MERGED_EXPERTS and len(tensor.shape) == (3 if kind == "weight" else 2):
            return _halves_by_expert(name, tensor, f"{layer}mlp.experts.", kind)
        if gguf.has_experts and (expert := _ONE_EXPERT.fullmatch(part)) is not None:
            return {f"{layer}mlp.experts.{expert[2]}.{expert[1]}_proj.{kind}": tensor}
        if part == "attn_qkv":
            head, kv_heads = self.head_size, self.num_kv_heads
            sizes = [count * head for count in (self.num_heads, kv_heads, kv_heads)]
            return self._split(name, tensor, _FUSED_ATTENTION, layer, sizes)
        if part == "ffn_up" and gguf.has_fused_gate and self.gate_name(index) not in self.tensors:
            sizes = [tensor.shape[0] // 2] * 2
            return self._split(name, tensor, _FUSED_GATE, layer, sizes)
        if part == _ROUTER_BIAS and gguf.has_router_bias:
            return {f"{layer}mlp.gate.e_score_correction_bias": tensor}
        if part in ("attn_k_b", "attn_v_b") and len(tensor.shape) == 3:
            heads, rows, columns = tensor.shape
            tensor = replace(tensor, shape=(heads * rows, columns))
        if part == "attn_sinks":
            return {f"{layer}self_attn.sinks": tensor}
        if f"blk.{index}.attn_norm_2.weight" in self.tensors and part in _TWO_NORMS:
            return {f"{layer}{_TWO_NORMS[part]}.{kind}": tensor}
        return {f"{layer}{names.parts[part]}.{kind}": tensor} if part in names.parts else None

    @staticmethod
    def gate_name(index: str) -> str:
        """Return the name that the gate projection of a layer has if it is a separate tensor."""
        return f"blk.{index}.ffn_gate.weight"

    def _split(
        self, name: str, tensor: StoredTensor, parts: tuple[str, ...], layer: str, sizes: list[int]
    ) -> dict[str, StoredTensor]:
        """Split a tensor into parts with the given sizes in its first dimension."""
        if tensor.shape[0] != sum(sizes):
            raise WeightLoadError(
                f"tensor {name} in {tensor.path} has the shape {list(tensor.shape)}; by the "
                f"metadata of the file the first size must be {sum(sizes)}. It is damaged; "
                f"download it again"
            )
        kind, found, first = name.rpartition(".")[2], {}, 0
        for part, size in zip(parts, sizes, strict=True):
            found[f"{layer}{self._names.parts[part]}.{kind}"] = _rows(tensor, first, size)
            first += size
        return found


def _rows(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    """Return some rows of a matrix, or some elements of a vector."""
    size = tensor.row_bytes if len(tensor.shape) > 1 else tensor.type.block_bytes
    return replace(tensor, shape=(count, *tensor.shape[1:]), start=tensor.start + first * size)


def _by_expert(tensor: StoredTensor, before: str, behind: str) -> dict[str, StoredTensor]:
    """Split a tensor of all experts into the matrix or vector of each, named by the expert's
    index.
    """
    count, *shape = tensor.shape
    num_bytes = math.prod(shape[:-1]) * tensor.row_bytes
    return {
        f"{before}{i}{behind}": replace(
            tensor, shape=tuple(shape), start=tensor.start + i * num_bytes
        )
        for i in range(count)
    }


def _halves_by_expert(
    name: str, tensor: StoredTensor, before: str, kind: str
) -> dict[str, StoredTensor]:
    """Split a tensor with the gate and up projections of all experts."""
    if tensor.shape[1] % 2:
        raise WeightLoadError(
            f"tensor {name} in {tensor.path} has the shape {list(tensor.shape)}; the second size "
            "must be even, for gate and up projections. It is damaged; download it again"
        )
    count = tensor.shape[1] // 2
    found = {}
    for number, whole in _by_expert(tensor, before, "").items():
        for index, half in enumerate(_HALVES):
            found[f"{number}.{half}.{kind}"] = _rows(whole, index * count, count)
    return found


def open_model(paths: Iterable[Path]) -> GGUFModel:
    """Read the headers of a model.

    Args:
        paths: all files of the model; for a split model in order.

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
                    f"tensor {name} is both in {tensors[name].path} and in {tensor.path}; a model "
                    "must have each tensor once. Download its files again"
                )
            tensors[name] = tensor
    if (kind := _other_kind(headers[0].metadata)) is not None:
        raise ConfigError(f"{paths[0]} is {kind}")
    _check_split(paths, headers[0], len(tensors))
    model = GGUFModel(paths, headers[0].metadata, tensors)
    if model.architecture not in architectures():
        raise ConfigError(
            f"{paths[0]} has a model of the architecture {model.architecture!r}, which is not "
            f"supported in GGUF files; supported: {', '.join(architectures())} (Mistral models "
            f"have the architecture llama). {_instead(model.architecture)}"
        )
    return model


def _instead(architecture: str) -> str:
    """Return a sentence: what to use instead of a file with an unsupported architecture."""
    for names, other in _IN_NO_FORMAT.items():
        if architecture in names:
            return f"No other format of this model is supported either: use {other}"
    return "Use the safetensors checkpoint of the model"


def _check_split(paths: tuple[Path, ...], first: Header, num_tensors: int) -> None:
    count = first.metadata.get("split.count", 1) or 1
    if count != len(paths):
        raise WeightLoadError(
            f"{paths[0]} is a part of a model in {count} files, but only {len(paths)} of them are "
            "in its folder. Put all of them into one folder, under the names that they were "
            "published with"
        )
    claimed = first.metadata.get("split.tensors.count", num_tensors)
    if count > 1 and claimed != num_tensors:
        raise WeightLoadError(
            f"{paths[0]} and the other files of the model have {num_tensors} tensors, but the "
            f"model needs {claimed}. Download them again"
        )


def files_of_model(path: Path) -> list[Path]:
    """Return all files of the model to which this file belongs, in order.

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
    """Return the first GGUF file of the model in a folder; None if there is none.

    Files of other kinds, such as parts that read images, are left out.

    Raises:
        ConfigError: the folder has several models.
    """
    firsts = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        match = _PART.fullmatch(path.name)
        if match is None or int(match["number"]) == 1:
            firsts.append(path)
    if len(firsts) > 1:
        firsts = [path for path in firsts if _is_model(path)] or firsts
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts[:5])
        raise ConfigError(
            f"model folder '{folder}' has {len(firsts)} GGUF models ({names}); name one of these "
            f"files as the model"
        )
    return firsts[0] if firsts else None


def _is_model(path: Path) -> bool:
    try:
        return _other_kind(read_header(path).metadata) is None
    except WeightLoadError:  # reported if the file is chosen
        return True


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
