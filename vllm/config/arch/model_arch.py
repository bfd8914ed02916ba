"""Read the architecture of a model from its Hugging Face config.

This is the only module that knows the names of config attributes: `rope_parameters` and `dtype` of
transformers 5, `rope_theta`, `rope_scaling` and `torch_dtype` of transformers 4.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config.arch.layer_kinds import (
    has_no_positions,
    read_heads,
    read_kv_sources,
    read_layer_kinds,
    read_state_layers,
    read_windows,
)
from vllm.config.arch.sizes import (
    HEAD_SIZE,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    MAX_POSITIONS,
    MAX_ROTATIONS,
    NORM_EPS_KEYS,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_POSITIONS,
    ROTARY_DIM,
    check_sizes,
    size_of,
)
from vllm.config.families import family_of, family_of_architecture
from vllm.errors import ConfigError

WHOLE_CONFIG = "config_of_whole_model"
"""Key of the values of config.json outside of `text_config`, which describe how images are
encoded."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Settings of the rotary position embedding."""

    theta: float
    """Base of the rotary frequencies (rope_theta)."""
    rotary_dim: int
    """Leading dimensions of a head that are rotated; even."""
    rope_type: str = "default"
    """default, linear, dynamic, llama3, yarn or longrope."""
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the type, by their Hugging Face names (`factor`, ...)."""
    sections: tuple[int, ...] = ()
    """Pairs of elements that rotate by each of the positions of a token (M-RoPE: time, height and
    width). Empty: a token has one position."""
    interleaves_sections: bool = False
    """Neighbouring pairs rotate by different positions."""

    def for_length(self, max_model_len: int) -> "RopeConfig":
        """Return the config with the factors for this maximum length (longrope)."""
        if self.rope_type != "longrope":
            return self
        is_long = max_model_len > self.scaling["original_max_position_embeddings"]
        return replace(self, scaling={**self.scaling, "uses_long_factor": is_long})


@dataclass(frozen=True, kw_only=True)
class ModelArch:
    """The architecture of a model, without its weights."""

    architecture: str
    """Class name in the checkpoint, such as LlamaForCausalLM."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    """Positions that tokens can have."""
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    layer_ropes: tuple[RopeConfig | None, ...]
    """Rotary embedding of each layer; None for a layer without."""
    layer_windows: tuple[int | None, ...]
    """Sliding window of each layer: how many of the most recent keys a query sees, itself included.
    None: all."""
    layer_heads: tuple[tuple[int, int], ...]
    """Head size and number of key/value heads of each layer."""
    kv_sources: tuple[int | None, ...]
    """For each layer the earlier layer whose keys and values it reads. None: it has its own."""
    state_layers: tuple[bool, ...]
    """For each layer, whether it keeps a recurrent state of fixed size, instead of keys and values
    or in addition to them."""
    dtype: str
    """Data type of the checkpoint."""
    hf_config: Mapping[str, Any]
    """The whole config, for keys that only some model families have."""
    media_config: Mapping[str, Any] | None = None
    """config.json of the whole model, without the part of its language model. None: the model reads
    text only."""
    text_only: str = ""
    """Reason for not loading its part for images or sounds; empty: it is loaded, or does not
    exist."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelArch":
        """Read a Hugging Face config given as a plain dict.

        Raises:
            ConfigError: there is no architecture, or a required value is missing, not divisible or
                unreasonable.
        """
        check_sizes(config)
        architectures = config.get("architectures") or ()
        if not architectures:
            raise ConfigError(
                "config.json has no 'architectures', the list with the class of the model. Add "
                "it, or give it with hf_overrides"
            )
        hidden_size = _number(config, *HIDDEN_SIZE)
        num_heads = _read_num_heads(config, hidden_size)
        head_size = _first(config, HEAD_SIZE) or _divide(hidden_size, num_heads)
        num_kv_heads = _read_num_kv_heads(config, num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
                f"num_key_value_heads ({num_kv_heads}). Correct the file"
            )
        num_layers = _read_num_layers(config)
        windows = read_windows(config, num_layers)
        heads = read_heads(config, (head_size, num_kv_heads), num_heads, windows)
        arch = cls(
            architecture=architectures[0],
            model_type=config.get("model_type", ""),
            vocab_size=_number(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_read_intermediate_size(config) or 4 * hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            max_position_embeddings=_read_max_positions(config) - _num_unused_positions(config),
            norm_eps=_read_norm_eps(config),
            hidden_act=_read_activation(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            layer_ropes=_read_ropes(config, [size for size, _ in heads], windows),
            layer_windows=windows,
            layer_heads=heads,
            kv_sources=read_kv_sources(config, num_layers),
            state_layers=read_state_layers(config, num_layers),
            dtype=_read_dtype(config),
            hf_config=dict(config),
            media_config=_read_media(config),
        )
        if not 1 <= arch.derived_max_model_len <= MAX_POSITIONS:
            raise ConfigError(
                f"config.json: RoPE scaling extends {arch.max_position_embeddings} positions to "
                f"{arch.derived_max_model_len}; accepted: 1 to {MAX_POSITIONS}. Correct the "
                "scaling factor"
            )
        widest = max((rope.rotary_dim for rope in arch.layer_ropes if rope), default=0)
        if arch.derived_max_model_len * widest > MAX_ROTATIONS:
            raise ConfigError(
                f"config.json: the RoPE table ({arch.derived_max_model_len} positions x {widest} "
                f"dimensions) must have at most {MAX_ROTATIONS} entries. Lower "
                "max_position_embeddings or head_dim"
            )
        return arch

    @property
    def media_module(self) -> str | None:
        """Module of `multimodal.families` and of `model_executor.media.families` for the images of
        the model; None: it reads only text.
        """
        if self.media_config is None:
            return None
        family = family_of_architecture(self.architecture)
        vision = self.media_config.get("vision_config")
        tower = vision.get("model_type") if isinstance(vision, Mapping) else None
        return family.media_by_tower.get(str(tower), family.media)

    @property
    def num_embeddings(self) -> int:
        """Size of the embedding table: the vocabulary, plus tokens that are never sampled."""
        return self.vocab_size + family_of_architecture(self.architecture).num_unsampled_tokens

    @property
    def media_sees_ahead(self) -> bool:
        """Whether a token of an image also sees the later tokens of this image."""
        reads_images = self.media_config is not None
        return reads_images and family_of_architecture(self.architecture).media_sees_ahead

    @property
    def rope(self) -> RopeConfig | None:
        """Rotary parameters of the layers without a sliding window.

        If all layers have a window, of the first layer with parameters; None if no layer has any.
        Layers with a window may have different parameters.
        """
        ropes = [
            rope
            for rope, window in zip(self.layer_ropes, self.layer_windows, strict=True)
            if rope is not None and window is None
        ]
        return next(iter(ropes), next((rope for rope in self.layer_ropes if rope), None))

    @property
    def num_positions(self) -> int:
        """Number of positions of each prompt token in multimodal rotary embeddings (M-RoPE), which
        a request gives. 0: the position of a token is its index.
        """
        return max((len(rope.sections) for rope in self.layer_ropes if rope), default=0)

    def of_layer(self, index: int) -> "ModelArch":
        """Return the architecture with the heads of one layer."""
        head_size, num_kv_heads = self.layer_heads[index]
        if (head_size, num_kv_heads) == (self.head_size, self.num_kv_heads):
            return self
        return replace(self, head_size=head_size, num_kv_heads=num_kv_heads)

    @property
    def is_one_stage(self) -> bool:
        """Whether all layers have to be on the same ranks, because some read other layers, a table
        by token ids or an encoder, or share weights.
        """
        family = family_of_architecture(self.architecture)
        has_table = self.hf_config.get("hidden_size_per_layer_input")
        has_sources = any(source is not None for source in self.kv_sources)
        return bool(has_table or family.decoder_keys or family.has_shared_layers) or has_sources

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer, by the names that configs use; empty if the config has none."""
        return read_layer_kinds(self.hf_config)

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state."""
        return any(self.state_layers)

    @property
    def embedding_size(self) -> int:
        """Size of a token's embedding; OPT may project embeddings to `hidden_size`."""
        return int(self.hf_config.get("word_embed_proj_dim") or self.hidden_size)

    def config_size(self, name: str) -> int:
        """Return a positive integer that config.json must have.

        Raises:
            ConfigError: it is missing, or not a positive integer within the limits of the key.
        """
        return size_of(self.hf_config, name)

    def config_count(self, name: str) -> int:
        """Return an integer of config.json, at least 0; 0 if it is absent, null or false.

        Raises:
            ConfigError: it is not such an integer.
        """
        return _read_count(self.hf_config, name)

    def config_flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean of config.json; the default if it is absent, and False if it is null.

        Integers count as Python counts them: `attn_temperature_tuning` of Llama 4 is 4 in files of
        transformers 4.51.

        Raises:
            ConfigError: it is another value.
        """
        value = self.hf_config.get(name, default)
        if not isinstance(value, int | None):
            raise ConfigError(
                f"config.json: '{name}' must be true or false, got {value!r}. Correct the file, or "
                "give another value with hf_overrides"
            )
        return bool(value)

    def with_values_of_layer(self, index: int, *names: str) -> "ModelArch":
        """Return the model with the values of one layer instead of lists with a value per layer.

        Args:
            index: index of the layer.
            names: keys of config.json that may be such lists.

        Raises:
            ConfigError: a list has too few values.
        """
        values = {}
        for name in names:
            given = self.hf_config.get(name)
            if isinstance(given, list):
                _check_length(name, given, self.num_layers)
                values[name] = given[index]
        return replace(self, hf_config={**self.hf_config, **values})

    def config_number(self, name: str, default: float = 1.0) -> float:
        """Return a number of config.json; the default if it is absent or null.

        Raises:
            ConfigError: it is not a finite number.
        """
        value = self.hf_config.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise ConfigError(
                f"{name} in config.json must be a number, got {value!r}. Correct the file"
            )
        return float(value)

    def for_length(self, max_model_len: int) -> "ModelArch":
        """Return the model for a maximum request length.

        Rotary parameters that have factors for short and for long contexts (longrope) are fixed to
        the ones that are used.
        """
        ropes = tuple(rope and rope.for_length(max_model_len) for rope in self.layer_ropes)
        return replace(self, layer_ropes=ropes)

    @property
    def derived_max_model_len(self) -> int:
        """Longest sequence for which the position embedding was made."""
        if self.rope is None:
            return self.max_position_embeddings
        kind, factor = self.rope.rope_type, self.rope.scaling.get("factor")
        if kind in ("linear", "dynamic", "yarn") and factor:
            original = self.max_position_embeddings
            # For yarn, max_position_embeddings may already be the extended length.
            if kind == "yarn":
                original = self.rope.scaling["original_max_position_embeddings"]
            return int(original * factor)
        return self.max_position_embeddings


_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function")
"""Keys of the activation function in different families."""


def missing_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the sizes that every decoder needs and this config does not have, by their usual
    names.
    """
    family = family_of(config.get("model_type"))
    num_layers = NUM_LAYERS if family.num_layers_key is None else (family.num_layers_key,)
    required: list[tuple[str, ...]] = [HIDDEN_SIZE, num_layers, ("vocab_size",)]
    if not family.heads_are_channels:
        required.append(NUM_HEADS)
    if family.default_max_positions is None:
        required.append(NUM_POSITIONS)
    return [names[0] for names in required if _first(config, names) is None]


def _read_count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return 0 if value is None or value is False else size_of(config, name, least=0)


def _check_length(name: str, values: Sequence[Any], num_layers: int) -> None:
    """Refuse a list with a value for each layer that is too short. It may be longer, if the number
    of layers was overridden.
    """
    if len(values) < num_layers:
        raise ConfigError(
            f"config.json: {name} must have a value for each of the {num_layers} layers, got "
            f"{len(values)}. Correct the file, or give another value with hf_overrides"
        )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _read_activation(config: Mapping[str, Any]) -> str:
    key = family_of(config.get("model_type")).activation_key
    return str(_first(config, _ACTIVATION if key is None else (key, *_ACTIVATION)) or "silu")


def _number(config: Mapping[str, Any], *names: str) -> int:
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        raise ConfigError(
            f"config.json has no {' or '.join(names)}. Add it, or give it with hf_overrides"
        )
    return size_of(config, name)


def _read_num_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers. A config of Nemotron-H may only list their kinds."""
    if key := family_of(config.get("model_type")).num_layers_key:
        return _number(config, key)
    if _first(config, NUM_LAYERS) is None and (kinds := read_layer_kinds(config)):
        return len(kinds)
    return _number(config, *NUM_LAYERS)


def _read_num_heads(config: Mapping[str, Any], hidden_size: int) -> int:
    if family_of(config.get("model_type")).heads_are_channels:
        return hidden_size
    return _number(config, *NUM_HEADS)


def _read_num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    given = _first(config, NUM_KV_HEADS)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    if config.get("multi_query") is False and not config.get("new_decoder_architecture"):
        return num_heads  # each query head has its own KV head, whatever num_key_value_heads is
    return int(given or num_heads)


def _read_max_positions(config: Mapping[str, Any]) -> int:
    default = family_of(config.get("model_type")).default_max_positions
    if default is not None and _first(config, NUM_POSITIONS) is None:
        return default
    return _number(config, *NUM_POSITIONS)


def _num_unused_positions(config: Mapping[str, Any]) -> int:
    """Return the number of entries at the start of a learned position table that no token uses."""
    if family_of(config.get("model_type")).positions_follow_padding:
        return _read_count(config, "pad_token_id") + 1
    return 0


def _read_intermediate_size(config: Mapping[str, Any]) -> Any:
    """Return the size of the MLPs; if it differs between layers, the largest."""
    value = _first(config, INTERMEDIATE_SIZE)
    return max(value) if isinstance(value, list) else value


def _divide(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) must be a multiple of num_attention_heads "
            f"({num_heads}), or the file must have head_dim. Correct the file"
        )
    return hidden_size // num_heads


def named_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the data type that a config names; None if it names none."""
    return config.get("dtype") or config.get("torch_dtype")


def _read_media(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the values that describe how images are encoded; None: the model reads only text."""
    if family_of_architecture(config["architectures"][0]).media is None:
        return None
    whole = config.get(WHOLE_CONFIG)
    return whole if isinstance(whole, Mapping) else None


def _read_dtype(config: Mapping[str, Any]) -> str:
    name = str(named_dtype(config) or "float32")
    return name.removeprefix("torch.")


def _read_ropes(
    config: Mapping[str, Any], head_sizes: Sequence[int], windows: Sequence[int | None]
) -> tuple[RopeConfig | None, ...]:
    parameters = dict(config.get("rope_parameters") or {})
    parameters.update(config.get("rope_scaling") or {})
    theta = config.get("rope_theta") or config.get("rotary_emb_base")
    if theta is None and _rotates_by_default(config):
        theta = 10000.0
    local_theta = config.get("rope_local_base_freq")
    by_window = dict(zip((window is None for window in windows), head_sizes, strict=True))
    head_size, local_size = (by_window.get(is_full, head_sizes[0]) for is_full in (True, False))
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full = _read_rope(config, head_size, dict(parameters.get("full_attention") or {}), theta)
        local = _read_rope(
            config, local_size, dict(parameters.get("sliding_attention") or {}), local_theta
        )
    else:
        full = local = _read_rope(config, head_size, parameters, theta)
        if local_theta is not None:
            local = _read_rope(config, head_size, {}, local_theta)
    rotates_full = family_of(config.get("model_type")).has_rope_without_window
    if not rotates_full or (rotates_full == "alone" and any(windows)):
        full = None
    if has_no_positions(config):
        full = local = None
    has_rope = _layers_with_rope(config, len(windows))
    return tuple(
        (full if window is None else local) if is_rotated else None
        for window, is_rotated in zip(windows, has_rope, strict=True)
    )


def _rotates_by_default(config: Mapping[str, Any]) -> bool:
    """Return whether a config without a rotary base uses the default base.

    GPT-J only sets how much of a head is rotated; for Baichuan the presence of a maximum position
    implies it.
    """
    key = family_of(config.get("model_type")).rope_implied_by
    return bool(config.get("rotary_dim") or (key is not None and config.get(key)))


def _layers_with_rope(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    # Despite its name: 1 for each layer that has rotary embedding.
    if given := config.get("no_rope_layers"):
        if not isinstance(given, list) or not all(type(x) in (int, bool) for x in given):
            raise ConfigError(
                f"config.json: no_rope_layers must be a list of 0 or 1 for each layer, got "
                f"{given!r}. Correct the file, or give another value with hf_overrides"
            )
        _check_length("no_rope_layers", given, num_layers)
        return [bool(x) for x in given[:num_layers]]
    interval = _read_count(config, "no_rope_layer_interval")
    if not interval:
        interval = family_of(config.get("model_type")).no_rope_interval or 0
    return [not interval or (index + 1) % interval != 0 for index in range(num_layers)]


def _read_rope(
    config: Mapping[str, Any], head_size: int, parameters: dict[str, Any], theta: float | None
) -> RopeConfig | None:
    theta = parameters.pop("rope_theta", None) or theta
    if theta is None:
        return None
    legacy_type = parameters.pop("type", None)
    rope_type = parameters.pop("rope_type", None) or legacy_type or "default"
    stretch = parameters.get("alpha")
    # Hunyuan: the base changes by a fixed factor, whatever the length.
    if rope_type == "dynamic" and stretch and head_size > 2:
        theta *= float(stretch) ** (head_size / (head_size - 2))
        rope_type = "default"
    partial = parameters.pop("partial_rotary_factor", None)
    partial = partial or config.get("partial_rotary_factor") or config.get("rotary_pct") or 1.0
    if rope_type == "proportional":  # its table also has the pairs that are not rotated
        parameters["rotated_part"], partial = partial, 1.0
    if rope_type == "su":  # an earlier name of longrope
        rope_type = "longrope"
    if rope_type == "mrope":  # the default type; its sections are read separately
        rope_type = "default"
    if rope_type in ("dynamic", "llama3", "yarn", "longrope"):
        # The original length. A config without it has not been extended.
        max_positions = _number(config, *NUM_POSITIONS)
        original = config.get("original_max_position_embeddings")
        if original:  # as in transformers, it goes before a value in the parameters
            parameters["original_max_position_embeddings"] = int(original)
        if rope_type == "dynamic" or not parameters.get("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = max_positions
    rotary_dim = int(_first(config, ROTARY_DIM) or head_size * partial)
    return RopeConfig(
        theta=float(theta),
        rotary_dim=rotary_dim,
        rope_type=rope_type,
        sections=_read_sections(parameters.pop("mrope_section", None), rotary_dim),
        interleaves_sections=bool(parameters.pop("mrope_interleaved", False)),
        scaling=parameters,
    )


def _read_sections(given: Any, rotary_dim: int) -> tuple[int, ...]:
    if given is None:
        return ()
    is_list = isinstance(given, list | tuple) and all(type(n) is int and n > 0 for n in given)
    if not is_list or sum(given) != rotary_dim // 2:
        raise ConfigError(
            "mrope_section in config.json must be a list of positive numbers whose sum is "
            f"{rotary_dim // 2}, half of the rotated elements of a head; got {given!r}. Correct "
            f"the file"
        )
    return tuple(given)


_DEFAULT_NORM_EPS = 1e-5
"""Also the default of torch: OPT has no such key."""


def _read_norm_eps(config: Mapping[str, Any]) -> float:
    given = (config[name] for name in NORM_EPS_KEYS if config.get(name) is not None)
    return float(next(given, _DEFAULT_NORM_EPS))
