"""Describe speculators: small networks that draft next tokens from hidden states of the model.

The table has one entry per method: how to read the config of published checkpoints, and the class
that runs it. Independent of tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.config.arch.model_arch import ModelArch
from vllm.config.families import FAMILIES, family_of_architecture
from vllm.errors import ConfigError

MAX_DRAFTS = 64
"""Most drafts of a request in one step."""


@dataclass(frozen=True)
class SpeculatorFile:
    """The config of a speculator, and the model for which it is used."""

    path: str
    """config.json, for messages."""
    config: Mapping[str, Any]
    target: ModelArch
    target_name: str

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer of the config.

        Raises:
            ConfigError: it is missing and has no default, or is not a positive integer.
        """
        value = next((self.config[n] for n in names if self.config.get(n) is not None), default)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.path}: {' or '.join(names)} must be 1 or more, got {value!r}")
        return value

    def check(self, name: str, value: int, wanted: int) -> None:
        """Refuse a size that differs from the model's.

        Raises:
            ConfigError: the sizes differ.
        """
        if value != wanted:
            raise ConfigError(
                f"{self.path}: {name} is {value}, but the model '{self.target_name}' has "
                f"{wanted}. Name a speculator that was made for this model"
            )


@dataclass(frozen=True)
class SpeculatorArch:
    """The architecture of a speculator, without its weights."""

    arch: ModelArch
    """Config of the speculator's layers. Values that it does not have are the model's."""
    max_drafts: int = MAX_DRAFTS
    """Maximum number of draft tokens of a request in one step; a speculator may have one head for
    each."""


def _read_eagle(file: SpeculatorFile) -> SpeculatorArch:
    """Read the config of an EAGLE head, which is a Llama with one layer (Li et al. 2024, arXiv
    2401.15077).
    """
    arch, target = ModelArch.from_hf(file.config), file.target
    for size in (target.hidden_size, target.embedding_size):
        file.check("hidden_size", arch.hidden_size, size)
    file.check("vocab_size", arch.vocab_size, target.vocab_size)
    if arch.num_layers != 1:
        raise ConfigError(
            f"{file.path}: num_hidden_layers must be 1 for EAGLE, got {arch.num_layers}. Is it a "
            "speculator for this model?"
        )
    rope = arch.rope
    if rope is None or rope.rope_type in ("default", "llama3"):
        # Draft heads were trained on short texts and their config limits the length accordingly,
        # but their rotary embedding has no such limit.
        positions = max(arch.max_position_embeddings, target.derived_max_model_len)
        arch = replace(arch, max_position_embeddings=positions)
    return SpeculatorArch(replace(arch, dtype=target.dtype))


def _read_eagle3(file: SpeculatorFile) -> SpeculatorArch:
    """Read the config of an EAGLE-3 head, which has its own vocabulary (Li et al. 2025, arXiv
    2503.01840).
    """
    found, num_layers = _read_eagle(file), file.target.num_layers
    size = file.size("draft_vocab_size", default=file.target.vocab_size)
    if size > file.target.vocab_size:
        raise ConfigError(
            f"{file.path}: draft_vocab_size must be at most {file.target.vocab_size}, the "
            f"vocabulary of the model '{file.target_name}', got {size}. Name a speculator that "
            f"was made for this model"
        )
    layers = eagle3_layers(found.arch.hf_config, num_layers)
    if len(layers) != 3 or not all(type(x) is int and 0 < x < num_layers for x in layers):
        given = [x - 1 if type(x) is int else x for x in layers]
        raise ConfigError(
            f"{file.path}: it must read the outputs of 3 layers with indices from 0 to "
            f"{num_layers - 2}, because the model '{file.target_name}' has {num_layers} layers; "
            f"got {given}"
        )
    return found


def eagle3_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the model layers whose inputs an EAGLE-3 head reads.

    `eagle_aux_hidden_state_layer_ids` names the layers before them, whose outputs these inputs are.
    Without it, an early, a middle and a late layer are used.

    >>> eagle3_layers({}, 32)
    (2, 16, 29)
    """
    given = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        return 2, num_layers // 2, num_layers - 3
    return tuple(x + 1 if type(x) is int else x for x in given)


def _read_mtp(file: SpeculatorFile) -> SpeculatorArch:
    """Read the config of a multi-token prediction layer after the last layer, as in DeepSeek V3
    (arXiv 2412.19437, section 2.2). It is run again for each further draft.
    """
    target = file.target
    mtp = family_of_architecture(target.architecture).mtp
    if mtp is None:
        names = [name for each in FAMILIES.values() if each.mtp for name in each.architectures]
        raise ConfigError(
            f"{file.path}: the method mtp needs a model with multi-token prediction layers "
            f"({', '.join(names)}), got {target.architecture}. Use another method"
        )
    count = target.hf_config.get(mtp.count_key)
    count = mtp.default_count or None if count is None else count
    if type(count) is not int or count < 1:
        raise ConfigError(
            f"{file.path}: {mtp.count_key} is {count!r}, but the method mtp needs at least 1 "
            "multi-token prediction layer. Use another method"
        )
    return SpeculatorArch(target)


def _read_mlp(file: SpeculatorFile) -> SpeculatorArch:
    """Read the config of an ibm-fms accelerator (Wertheimer et al. 2024, arXiv 2404.19124)."""
    file.check("emb_dim", file.size("emb_dim"), file.target.hidden_size)
    file.check("vocab_size", file.size("vocab_size"), file.target.vocab_size)
    count = file.size("n_predict")
    config = {
        "n_predict": count,
        "inner_dim": file.config.get("inner_dim") or file.target.hidden_size,
        "tie_weights": bool(file.config.get("tie_weights", False)),
        "scale_input": bool(file.config.get("scale_input", False)),
    }
    return SpeculatorArch(replace(file.target, hf_config=config), count)


def _read_medusa(file: SpeculatorFile) -> SpeculatorArch:
    """Read the config of Medusa heads (Cai et al. 2024, arXiv 2401.10774), with the keys of the
    first checkpoints or of transformers.
    """
    for name, wanted in (
        ("hidden_size", file.target.hidden_size),
        ("vocab_size", file.target.vocab_size),
    ):
        if file.config.get(name) is not None:
            file.check(name, file.size(name), wanted)
    count = file.size("medusa_num_heads", "num_heads")
    layers = file.size("medusa_num_layers", "num_hidden_layers", default=1)
    config = {"num_heads": count, "num_layers": layers}
    return SpeculatorArch(replace(file.target, hf_config=config), count)


@dataclass(frozen=True)
class SpeculatorMethod:
    """An entry of the table of methods."""

    class_path: str
    """module:Class of the network."""
    num_drafts: int
    """Number of draft tokens of a request in one step, unless the user sets it; fewer if the
    speculator has fewer heads."""
    read: Callable[[SpeculatorFile], SpeculatorArch]
    is_decoder: bool = False
    """Whether config.json describes a decoder; missing keys then have the defaults of its model
    type."""
    inner_layers: Callable[[Mapping[str, Any], int], tuple[int, ...]] | None = None
    """Function of the config and the number of layers of the model. It returns the layers of the
    model whose inputs the speculator reads in addition to the result. None: it reads only the
    result."""
    has_files: bool = True
    """Whether the speculator has a folder of its own. False: it is in the files of the model."""


SPECULATORS: Mapping[str, SpeculatorMethod] = {
    "eagle": SpeculatorMethod(
        "vllm.model_executor.speculators.eagle:Eagle", 4, _read_eagle, is_decoder=True
    ),
    "eagle3": SpeculatorMethod(
        "vllm.model_executor.speculators.eagle:Eagle3",
        4,
        _read_eagle3,
        is_decoder=True,
        inner_layers=eagle3_layers,
    ),
    "mtp": SpeculatorMethod(
        "vllm.model_executor.speculators.mtp:MTP", 2, _read_mtp, has_files=False
    ),
    "mlp_speculator": SpeculatorMethod(
        "vllm.model_executor.speculators.heads:MLPSpeculator", MAX_DRAFTS, _read_mlp
    ),
    "medusa": SpeculatorMethod(
        "vllm.model_executor.speculators.heads:Medusa", MAX_DRAFTS, _read_medusa
    ),
}


def method_of_config(config: Mapping[str, Any], name: str) -> str:
    """Return the speculative method of a draft model.

    Args:
        config: config.json of the draft model.
        name: folder or hub name of the draft model. It is needed because the config of an EAGLE
            head equals the config of a Llama with one layer.

    >>> method_of_config({"model_type": "mlp_speculator"}, "a/b")
    'mlp_speculator'
    >>> method_of_config({"model_type": "llama", "num_hidden_layers": 1}, "yuhuili/EAGLE-Vicuna")
    'eagle'
    """
    kind = config.get("model_type")
    if kind in ("mlp_speculator", "medusa"):
        return str(kind)
    if "medusa_num_heads" in config:
        return "medusa"
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    if "draft_vocab_size" in config or architecture.endswith("Eagle3"):
        return "eagle3"
    is_named_eagle = "eagle" in name.rstrip("/").rpartition("/")[2].lower()
    has_one_layer = config.get("num_hidden_layers") == 1
    return "eagle" if is_named_eagle and has_one_layer else "draft_model"
