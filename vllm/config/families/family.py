"""Define the properties of a family of models other than its modules, as a class. Independent of
single families.

Defaults apply to most families, and to an unknown `model_type`. Entries are compared by identity,
which makes the classes cheaper to import.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfigDefaults:
    """Default values of keys that config.json may leave out, as in transformers.

    A family with these defaults starts without the config classes of transformers.
    """

    class_prefix: str
    """Beginning of the names of all its architectures."""
    values: Mapping[str, Any]
    """Optional keys of config.json that the engine reads."""
    has_rotations: bool = True
    """False: a config with rope parameters is left to transformers."""
    inner_size: str = "intermediate_size"
    """Required key with the size of the MLP."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GGUFFormat:
    """Properties of the GGUF files of a family."""

    architecture: str
    """`general.architecture`. Families may share it if one of them has experts."""
    has_experts: bool = False
    """A file with `expert_count` is of this family."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Key and value for config.json."""
    norm_key: str = "rms_norm_eps"
    """Key for config.json with what norms add to a variance."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values for config.json that are the same for all models."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Key for config.json, with a dot for one inside of another -> metadata of the architecture. A
    key is left out where the metadata has none, or 0."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Key for config.json -> tensor of the first layer. The key is true if the tensor exists."""
    omits_head_size: bool = False
    """Whether config.json must not have `head_dim`, because it follows from other sizes."""
    fewer_norms: tuple[str, str] | None = None
    """Key for config.json with the number of norms before attention and MLP, and the name of a
    tensor: the number is 2 if the first layer has this tensor, else 1."""
    has_rotations: bool = True
    """Whether the model has rotary positions. False: it has a table of positions, or ALiBi."""
    yarn: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of YaRN that the metadata does not have."""
    alibi_layers: int | None = None
    """Number of layers of the model that has ALiBi. The metadata does not contain it."""
    has_fused_gate: bool = False
    """Whether `ffn_up` has the gate projection, followed by the up projection."""
    head_norms: Literal["one", "per_head", "all_heads"] = "one"
    """Kind of the norms of queries and keys: the same for each head, one for each head, or one over
    all heads."""
    window_period: int | None = None
    """Every n-th layer has full attention, the others a sliding window. None: the same value as in
    `Family`."""
    windows_are_optional: bool = False
    """Whether a file without the size of a window has full attention in all layers."""
    has_neighbour_rotations: bool = False
    """Whether queries and keys are stored for rotations of neighbouring elements of a head."""
    has_post_norms: bool = False
    """Whether layers also have norms after attention and MLP."""
    has_window_theta: bool = False
    """Whether layers with a window have rotary parameters of their own."""
    unscaled_layers: int | None = None
    """Number of layers of the model whose attention is scaled by `hidden_size / num_heads` and not
    by the head size. The metadata does not contain it."""
    expert_count_key: str | None = None
    """Another key for config.json with the number of experts; the sizes of the experts are then the
    sizes of the MLP."""
    normalizes_experts: bool = False
    """Value of `norm_topk_prob` if the metadata does not have it."""
    has_shared_expert: bool = False
    is_routed: bool = False
    """Whether layers choose experts as DeepSeek does: in groups, with scaled weights and shared
    experts."""
    has_router_bias: bool = False
    """Whether experts have biases for the choice; a file with such biases belongs to this
    family."""
    has_latent_attention: bool = False
    """Whether keys and values of all heads are projections of one latent vector."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MTPFormat:
    """Checkpoint names of the first multi-token prediction layer. The defaults are the names of
    DeepSeek V3.
    """

    prefix: str = "model.layers.{}."
    """Beginning of the names of its tensors; {} is the number of layers of the model."""
    layer_prefix: str = ""
    """Rest of the names of tensors that other layers of the model also have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Modules that other layers of the model lack -> their names in DeepSeek V3."""
    count_key: str = "num_nextn_predict_layers"
    """Key of config.json with the number of such layers."""
    default_count: int = 0
    """Number of such layers if config.json does not have the key."""
    is_state_first: bool = False
    """Whether the projection takes the hidden state first, then the embedding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FP8Scales:
    """Settings of a family for FP8 calibration."""

    blocked: tuple[str, ...] = ()
    """Regular expressions for the names of modules that are not quantized."""
    scale_format: str | None = None
    """Device for the files of QUANT_CONFIG. None: they do not name one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """The models of one `model_type`."""

    model_type: str
    also_typed: tuple[str, ...] = ()
    """Other values of `model_type` in published checkpoints."""
    first_typed: tuple[str, ...] = ()
    """Values that config.json had when models were published, with the architectures of this
    family. With other values they mean other models."""

    values_of_type: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """If config.json has one of these keys -> values that it does not have, and that the key
    implies."""
    old_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of older config.json files, with a dot for one inside of another -> their names in
    transformers."""

    # ---- names and classes
    architectures: tuple[str, ...] = ()
    """Classes of generating models, and of encoders; the first one is the usual one."""
    also_published_as: tuple[str, ...] = ()
    """Other names of the first architecture in published checkpoints."""
    module: str | None = None
    """Module of `vllm.model_executor.models` with the architectures. None: they run with the model
    code of transformers, if at all."""
    pooling_architectures: tuple[str, ...] = ()
    """Classes of decoders that embed, classify or score, in the module `pooling_decoders`."""
    is_encoder: bool = False
    """Whether all tokens of a prompt see each other, and no tokens are generated."""
    text_type: str | None = None
    """`model_type` of the language model in `text_config`, of a family with a part for images or
    sound."""
    also_text_types: tuple[str, ...] = ()
    """Other values of it, which the same class runs."""
    media: str | None = None
    """Module of `multimodal.families` and of `model_executor.media.families` that encodes images
    or sound; None: the models read text only."""
    text_only: str = "image input is not supported for this kind of model"
    """Why the models read text only if `media` is None, for the log."""
    media_by_tower: Mapping[str, str] = field(default_factory=dict)
    """`model_type` of `vision_config` -> the module for such encoders, if it is not `media`."""
    decoder_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that describe the decoder of an encoder-decoder -> their usual names."""
    num_unsampled_tokens: int = 0
    """Entries of the embedding table after the vocabulary, for tokens of prompts that the output
    head does not have."""
    media_sees_ahead: bool = False
    """Whether a token of an image also sees the later tokens of its image."""
    step_token_id: int | None = None
    """Token at the end of a step, of models that reward steps (`ForProcessRewardModel`)."""

    mtp: MTPFormat | None = None
    """Multi-token prediction layers that checkpoints may have, for speculative decoding. None: they
    have none, or none that can be used."""

    # ---- attention and windows
    windows: Literal["configured", "if_switched_on", "ignored"] = "configured"
    """Whether layers have the `sliding_window` of the config; `if_switched_on`: only with
    `use_sliding_window`; `ignored`: never, though some checkpoints give one."""
    full_attention_every: int | None = None
    """Every n-th layer has full attention, the others a sliding window; for configs that do not
    name the kinds of their layers."""
    window_kv_heads: int = 1
    """Number of key/value heads of layers with a window, for each key/value head of the other
    layers."""
    has_attention: bool = True
    """Whether layers have attention. False: every layer has a recurrent state instead of keys and
    values."""
    attention_layers_key: str | None = None
    """Key of the config that lists the layers with attention; the others have a recurrent state."""
    attention_period_keys: tuple[str, str] | None = None
    """Keys of the config with n and i: layer i, and every n-th one from there, has attention; the
    others keep a recurrent state."""
    has_states_and_attention: bool = False
    """Whether every layer has both a recurrent state, and keys and values."""
    has_shared_layers: bool = False
    """Whether layers share weights and read embeddings, so that a pipeline cannot divide them."""
    dense_up_to_key: str | None = None
    """Key of the config with the number of tokens up to which each attends to all tokens before it.
    In longer prompts the original model attends to some of them only; this engine attends to
    all."""
    heads_are_channels: bool = False
    """Whether the channels of a layer are independent of each other, as heads are; the config has
    no number of heads."""

    num_layers_key: str | None = None
    """Key of the config with the number of layers, where `num_hidden_layers` counts the attentions
    in them."""

    activation_key: str | None = None
    """Key of the config with the activation function, if it goes before `hidden_act`."""

    # ---- positions
    has_positions: bool = True
    """Whether attention has rotary positions. False: it has none, even if the config has parameters
    for them."""
    rope_switch: tuple[str, str | bool] | None = None
    """Key of the config, and the value that turns rotary positions on. None: there is no switch."""
    rope_implied_by: str | None = None
    """Key of the config that turns rotary positions on even if their base is missing."""
    has_rope_without_window: bool | Literal["alone"] = True
    """Whether layers of full attention have rotary positions. False: they have none; `alone`: they
    have none only if no layer has a window."""
    no_rope_interval: int | None = None
    """Every n-th layer has no rotary positions, if the config does not name such layers."""
    default_max_positions: int | None = None
    """Value for configs that do not have it. None: they must."""
    positions_follow_padding: bool = False
    """Whether the table of positions begins with entries that no token uses, up to the entry of
    `pad_token_id`."""

    # ---- config.json
    config_defaults: ConfigDefaults | None = None
    """Defaults of config.json. None: transformers' config class is asked."""
    config_class: str | None = None
    """`model_type` whose config class completes the config if transformers has none for this
    family. Rotary parameters and the number of positions have no defaults then."""
    own_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of keys for which `config_class` has different ones."""
    config_format: Literal["transformers", "chatglm", "decilm"] = "transformers"
    """Config class whose keys config.json has."""

    has_new_layer_types: bool = False
    """Whether transformers 5 has different names for the kinds of layers, which version 4
    refuses."""
    plain_sections: tuple[str, ...] = ()
    """Objects in config.json in which transformers 5 also writes keys that version 4 refuses."""

    # ---- tokenizer
    tokenizer: str | None = ""
    """Tokenizer class that transformers 5 registers. "": none, so the class of the checkpoint is
    used. None: it is unknown, and `AutoTokenizer` is asked."""
    has_complete_prompts: bool = False
    """Whether prompts as text contain all of their special tokens, because the tokenizer would add
    wrong ones."""
    reasoning_parser: str | None = None
    """The reasoning parser that is used without `--reasoning-parser`, because answers cannot be
    read without it. None: there is none."""
    replaces_tokenizer: bool = False
    """Whether the registered class replaces the class that the checkpoint names."""
    has_mistral_tokenizer: bool = False
    """Whether mistral_common provides the tokenizer if that package is installed."""

    # ---- other formats of checkpoints
    gguf: GGUFFormat | None = None
    """None: its GGUF files are not supported."""
    in_params_json: Literal["dense", "experts"] | None = None
    """Test for models in the format of Mistral AI that belong to this family."""
    norms_add_one: bool = False
    """Whether norms multiply by 1 + weight."""

    # ---- quantization
    awq_pairs: tuple[tuple[str, ...], ...] = ()
    """For AWQ, the inputs of each part of a transformers decoder layer: a module whose outputs can
    be divided, and patterns of all layers that read them. Empty: AWQ does not support this
    family."""
    fp8_scales: FP8Scales = FP8Scales()
