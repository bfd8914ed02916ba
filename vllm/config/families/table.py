"""List one entry for each `model_type`, with the facts about a family other than its modules.

A family of models/ needs only its names and its module here; all other fields are for families that
differ from the defaults.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from vllm.config.families.family import ConfigDefaults, Family, FP8Scales, GGUFFormat, MTPFormat

GENERIC = "PreTrainedTokenizerFast"
"""The tokenizer class that takes everything from tokenizer.json."""

_LLAMA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}
_QWEN2_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN2_VL_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
}
_QWEN3_DEFAULTS: dict[str, Any] = {**_QWEN2_DEFAULTS, "head_dim": 128, "attention_bias": False}
_OPT_DEFAULTS: dict[str, Any] = {
    "activation_function": "relu",
    "word_embed_proj_dim": None,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}
_BERT_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}
_ROBERTA_DEFAULTS: dict[str, Any] = {**_BERT_DEFAULTS, "pad_token_id": 1, "eos_token_id": 2}

_MTP = MTPFormat()
_MTP_QWEN = MTPFormat(
    prefix="mtp.",
    layer_prefix="layers.0.",
    names={
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "fc": "eh_proj",
        "norm": "shared_head.norm",
    },
    count_key="mtp_num_hidden_layers",
    default_count=1,
)

_ATTENTION = ("input_layernorm", "self_attn.[qkv]_proj")
_VALUES = ("self_attn.v_proj", "self_attn.o_proj")
_NORM_OF_MLP = "post_attention_layernorm"
_DENSE = ("mlp.gate_proj", "mlp.up_proj")
_MLP = ("mlp.up_proj", "mlp.down_proj")
_EXPERTS = ("mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")
_SHARED = ("mlp.shared_expert_gate", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
_GRANITE_EXPERTS = (
    *("block_sparse_moe.router*", "block_sparse_moe.experts.*.gate_proj"),
    "block_sparse_moe.experts.*.up_proj",
)
_AWQ_LLAMA = (_ATTENTION, (_NORM_OF_MLP, *_DENSE), _VALUES, _MLP)
_AWQ_MIXTURE = (_ATTENTION, (_NORM_OF_MLP, *_EXPERTS, *_SHARED, *_DENSE), _VALUES, _MLP)
_AWQ_GEMMA2 = (_ATTENTION, ("pre_feedforward_layernorm", *_DENSE), _VALUES, _MLP)

_QUERY, _GATE = "self_attn.q_proj.bias", "mlp.gate_proj.bias"
_LLAMA_FLAGS = {"attention_bias": _QUERY, "mlp_bias": _GATE}
_UNGATED_FLAGS = {"attention_bias": _QUERY, "mlp_bias": "mlp.up_proj.bias"}
_GRANITE_SCALES = {
    "embedding_multiplier": ".embedding_scale",
    "residual_multiplier": ".residual_scale",
    "attention_multiplier": ".attention.scale",
    "logits_scaling": ".logit_scale",
}
_GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")

_FP8_DEEPSEEK = FP8Scales(blocked=("lm_head", r"mlp\.gate\b"), scale_format="scalar")

_DEEPSEEK2 = GGUFFormat(
    architecture="deepseek2",
    has_experts=True,
    is_routed=True,
    has_latent_attention=True,
    omits_head_size=True,
)

_BLOOM_POSITIONS = 2048
"""Length of the texts with which BLOOM and Mamba were trained. Only memory limits the length of
their texts."""

_LLAMAS = (
    Family(
        model_type="llama",
        also_typed=("aquila", "internlm", "xverse", "Yi"),
        old_keys={"bias": "attention_bias"},  # name in InternLM
        module="llama",
        architectures=("LlamaForCausalLM",),
        also_published_as=(
            *("AquilaForCausalLM", "AquilaModel", "InternLMForCausalLM", "LLaMAForCausalLM"),
            *("XverseForCausalLM", "YiForCausalLM"),
        ),
        pooling_architectures=("LlamaModel", "LlamaForSequenceClassification"),
        windows="ignored",
        config_defaults=ConfigDefaults(class_prefix="Llama", values=_LLAMA_DEFAULTS),
        gguf=GGUFFormat(
            architecture="llama",  # Mistral too
            flags=_LLAMA_FLAGS,
            has_neighbour_rotations=True,
        ),
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="mistral",
        module="llama",
        architectures=("MistralForCausalLM",),
        pooling_architectures=("MistralModel", "MistralForSequenceClassification"),
        config_defaults=ConfigDefaults(class_prefix="Mistral", values=_MISTRAL_DEFAULTS),
        tokenizer=GENERIC,
        has_mistral_tokenizer=True,
        in_params_json="dense",
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="mixtral",
        module="mixture",
        architectures=("MixtralForCausalLM",),
        tokenizer=GENERIC,
        has_mistral_tokenizer=True,
        gguf=GGUFFormat(
            architecture="llama",
            has_experts=True,
            flags=_LLAMA_FLAGS,
            has_neighbour_rotations=True,
            expert_count_key="num_local_experts",
        ),
        in_params_json="experts",
        awq_pairs=_AWQ_MIXTURE,
        fp8_scales=FP8Scales(blocked=("self_attn", "lm_head")),
    ),
    Family(
        model_type="llama4_text",
        module="llama4",
        architectures=("Llama4ForCausalLM",),
        no_rope_interval=4,
    ),
    Family(
        model_type="mllama_text_model",
        module="mllama",
        architectures=("MllamaForCausalLM",),
        num_unsampled_tokens=8,
        config_class="llama",  # transformers 4 has no class for only the language model
        own_defaults={
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
        },
    ),
    Family(
        model_type="baichuan",
        module="llama",
        architectures=("BaichuanForCausalLM",),
        also_published_as=("BaiChuanForCausalLM",),  # name of the first 7B model
        # The 7B model; 13B uses ALiBi and has no such key.
        rope_implied_by="max_position_embeddings",
        config_class="llama",
        gguf=GGUFFormat(architecture="baichuan", has_neighbour_rotations=True, alibi_layers=40),
    ),
    Family(
        model_type="internlm2",
        module="llama",
        architectures=("InternLM2ForCausalLM",),
        config_class="llama",
        tokenizer=GENERIC,
        gguf=GGUFFormat(
            architecture="internlm2", has_neighbour_rotations=True, flags={"bias": _QUERY}
        ),
    ),
    Family(
        model_type="internlm3",
        module="llama",
        architectures=("InternLM3ForCausalLM",),
        config_class="llama",
        tokenizer=GENERIC,
    ),
    Family(
        model_type="smollm3",
        module="llama",
        architectures=("SmolLM3ForCausalLM",),
        windows="if_switched_on",
        no_rope_interval=4,
        awq_pairs=_AWQ_LLAMA,
        gguf=GGUFFormat(architecture="smollm3", has_neighbour_rotations=True, flags=_LLAMA_FLAGS),
    ),
    Family(
        model_type="ministral3",
        module="llama",
        architectures=("Ministral3ForCausalLM",),
        config_class="llama",
        tokenizer=GENERIC,
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="exaone",
        module="llama",
        architectures=("ExaoneForCausalLM",),
        config_class="llama",
    ),
    Family(
        model_type="exaone4",
        module="olmo",
        architectures=("Exaone4ForCausalLM",),
        has_rope_without_window="alone",
        awq_pairs=(_VALUES, _MLP),
        gguf=GGUFFormat(
            architecture="exaone4", has_post_norms=True, window_period=4, windows_are_optional=True
        ),
    ),
    Family(
        model_type="exaone_moe",
        architectures=("ExaoneMoeForCausalLM",),
        also_published_as=("ExaoneMoEForCausalLM",),
    ),
    Family(
        model_type="ernie4_5",
        module="llama",
        architectures=("Ernie4_5ForCausalLM",),
        tokenizer=GENERIC,
        awq_pairs=_AWQ_LLAMA,
        gguf=GGUFFormat(architecture="ernie4_5", flags={"use_bias": _QUERY}),
    ),
    Family(
        model_type="seed_oss",
        module="llama",
        architectures=("SeedOssForCausalLM",),
        awq_pairs=_AWQ_LLAMA,
        gguf=GGUFFormat(
            architecture="seed_oss",
            has_post_norms=True,
            flags={**_LLAMA_FLAGS, "attention_out_bias": "self_attn.o_proj.bias"},
        ),
    ),
    Family(
        model_type="hunyuan_v1_dense",
        old_keys={"attention_head_dim": "head_dim"},
        module="llama",
        architectures=("HunYuanDenseV1ForCausalLM",),
        awq_pairs=_AWQ_LLAMA,
        gguf=GGUFFormat(architecture="hunyuan-dense", flags={"attention_bias": _QUERY}),
    ),
    Family(model_type="apertus", module="llama", architectures=("ApertusForCausalLM",)),
    Family(
        model_type="arcee",
        module="llama",
        architectures=("ArceeForCausalLM",),
        gguf=GGUFFormat(
            architecture="arcee",
            has_neighbour_rotations=True,
            activation=("hidden_act", "relu2"),
            flags=_UNGATED_FLAGS,
        ),
    ),
    Family(
        model_type="jais2",
        module="llama",
        architectures=("Jais2ForCausalLM",),
        config_class="llama",
        own_defaults={"hidden_act": "relu2"},
        tokenizer="GPT2Tokenizer",
        gguf=GGUFFormat(
            architecture="jais2",
            activation=("hidden_act", "relu2"),
            norm_key="layer_norm_eps",
            flags=_UNGATED_FLAGS,
        ),
    ),
    Family(
        model_type="helium",
        module="llama",
        architectures=("HeliumForCausalLM",),
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="cwm",
        module="llama",
        architectures=("CwmForCausalLM",),
        config_class="llama",
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="minicpm",
        module="minicpm",
        architectures=("MiniCPMForCausalLM",),
        config_class="llama",
        own_defaults={"tie_word_embeddings": True, "rope_theta": 10000.0},
    ),
    Family(
        model_type="minicpm3",
        module="minicpm",
        architectures=("MiniCPM3ForCausalLM",),
        config_class="llama",
        tokenizer=GENERIC,
    ),
)
_QWENS = (
    Family(
        model_type="qwen2",
        also_typed=("qwen2_vl_text", "qwen2_5_vl_text"),
        values_of_type=dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), _QWEN2_VL_DEFAULTS),
        module="llama",
        architectures=("Qwen2ForCausalLM",),
        pooling_architectures=(
            *("Qwen2Model", "Qwen2ForSequenceClassification"),
            *("Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"),
        ),
        step_token_id=151651,  # <extra_0> of Qwen2.5-Math-PRM
        windows="if_switched_on",
        config_defaults=ConfigDefaults(class_prefix="Qwen2", values=_QWEN2_DEFAULTS),
        tokenizer="Qwen2Tokenizer",
        replaces_tokenizer=True,
        gguf=GGUFFormat(architecture="qwen2"),
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="qwen2_moe",
        module="mixture",
        architectures=("Qwen2MoeForCausalLM",),
        tokenizer="Qwen2Tokenizer",
        gguf=GGUFFormat(
            architecture="qwen2moe",
            has_experts=True,
            flags={"qkv_bias": _QUERY},
            has_shared_expert=True,
        ),
        awq_pairs=_AWQ_MIXTURE,
    ),
    Family(
        model_type="qwen3",
        also_typed=("qwen3_vl_text",),
        module="llama",
        architectures=("Qwen3ForCausalLM",),
        pooling_architectures=("Qwen3Model", "Qwen3ForSequenceClassification"),
        windows="if_switched_on",
        config_defaults=ConfigDefaults(class_prefix="Qwen3", values=_QWEN3_DEFAULTS),
        tokenizer="Qwen2Tokenizer",
        gguf=GGUFFormat(architecture="qwen3", flags={"attention_bias": _QUERY}),
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="qwen3_moe",
        also_typed=("qwen3_vl_moe_text",),
        values_of_type={"qwen3_vl_moe_text": {"norm_topk_prob": True}},
        module="mixture",
        architectures=("Qwen3MoeForCausalLM",),
        tokenizer="Qwen2Tokenizer",
        gguf=GGUFFormat(
            architecture="qwen3moe",
            has_experts=True,
            flags={"attention_bias": _QUERY},
            normalizes_experts=True,
        ),
        awq_pairs=_AWQ_MIXTURE,
    ),
    Family(
        model_type="qwen3_next",
        module="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        mtp=_MTP_QWEN,
        tokenizer="Qwen2Tokenizer",
    ),
    Family(
        model_type="qwen3_5_text",
        module="qwen3_next",
        architectures=("Qwen3_5ForCausalLM",),
        config_class="llama",
        mtp=_MTP_QWEN,
        tokenizer="Qwen3_5Tokenizer",
    ),
    Family(
        model_type="qwen3_5_moe_text",
        module="qwen3_next",
        architectures=("Qwen3_5MoeForCausalLM",),
        config_class="llama",
        mtp=_MTP_QWEN,
        tokenizer="Qwen3_5Tokenizer",
        replaces_tokenizer=True,
    ),
    Family(
        model_type="mimo",
        module="llama",
        architectures=("MiMoForCausalLM",),
        mtp=MTPFormat(
            prefix="model.mtp_layers.0.",
            names={
                "token_layernorm": "enorm",
                "hidden_layernorm": "hnorm",
                "input_proj": "eh_proj",
                "final_layernorm": "shared_head.norm",
            },
            is_state_first=True,
        ),
        windows="if_switched_on",
        config_class="qwen2",
    ),
)
_GEMMAS = (
    Family(
        model_type="gemma",
        module="gemma",
        architectures=("GemmaForCausalLM",),
        activation_key="hidden_activation",
        tokenizer="GemmaTokenizer",
        gguf=GGUFFormat(architecture="gemma", activation=_GEMMA_ACTIVATION),
        norms_add_one=True,
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="gemma2",
        module="gemma",
        architectures=("Gemma2ForCausalLM",),
        activation_key="hidden_activation",
        full_attention_every=2,
        tokenizer="GemmaTokenizer",
        gguf=GGUFFormat(
            architecture="gemma2",
            activation=_GEMMA_ACTIVATION,
            has_post_norms=True,
            unscaled_layers=46,  # number of layers of the 27B model
        ),
        norms_add_one=True,
        awq_pairs=_AWQ_GEMMA2,
    ),
    Family(
        model_type="gemma3_text",
        module="gemma",
        architectures=("Gemma3ForCausalLM",),
        activation_key="hidden_activation",
        full_attention_every=6,
        tokenizer="GemmaTokenizer",
        gguf=GGUFFormat(
            architecture="gemma3",
            activation=_GEMMA_ACTIVATION,
            has_post_norms=True,
            has_window_theta=True,
            unscaled_layers=62,  # number of layers of the 27B model
        ),
        norms_add_one=True,
        awq_pairs=_AWQ_GEMMA2,
    ),
    Family(
        model_type="vaultgemma",
        module="gemma",
        architectures=("VaultGemmaForCausalLM",),
        activation_key="hidden_activation",
        full_attention_every=2,
        norms_add_one=True,
        awq_pairs=_AWQ_GEMMA2,
    ),
    Family(
        model_type="gemma3n_text",
        module="gemma3n",
        architectures=("Gemma3nForCausalLM",),
        activation_key="hidden_activation",
        full_attention_every=5,
        tokenizer="GemmaTokenizer",
    ),
    Family(
        model_type="gemma4_text",
        module="gemma4",
        architectures=("Gemma4ForCausalLM",),
        activation_key="hidden_activation",
        config_class="llama",
        own_defaults={"hidden_activation": "gelu_pytorch_tanh"},
        full_attention_every=6,
    ),
)
_GRANITES = (
    Family(
        model_type="granite",
        module="granite",
        architectures=("GraniteForCausalLM",),
        tokenizer=GENERIC,
        awq_pairs=_AWQ_LLAMA,
        gguf=GGUFFormat(
            architecture="granite",
            has_neighbour_rotations=True,
            flags=_LLAMA_FLAGS,
            values=_GRANITE_SCALES,
        ),
    ),
    Family(
        model_type="granitemoe",
        module="mixture",
        architectures=("GraniteMoeForCausalLM",),
        tokenizer=GENERIC,
        awq_pairs=(_ATTENTION, (_NORM_OF_MLP, *_GRANITE_EXPERTS), _VALUES),
        gguf=GGUFFormat(
            architecture="granitemoe",
            has_experts=True,
            has_neighbour_rotations=True,
            flags=_LLAMA_FLAGS,
            values=_GRANITE_SCALES,
            expert_count_key="num_local_experts",
        ),
    ),
    Family(
        model_type="granitemoehybrid",
        has_new_layer_types=True,
        module="hybrid",
        architectures=("GraniteMoeHybridForCausalLM",),
        rope_switch=("position_embedding_type", "rope"),
        tokenizer=GENERIC,
    ),
)
_OTHERS = (
    Family(
        model_type="bailing_moe",
        also_typed=("bailing_moe_v2",),
        module="routed",
        architectures=("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
        mtp=MTPFormat(names={"final_layernorm": "shared_head.norm"}),
        config_class="llama",
    ),
    Family(
        model_type="bamba",
        module="hybrid",
        architectures=("BambaForCausalLM",),
        attention_layers_key="attn_layer_indices",
    ),
    Family(
        model_type="bloom",
        module="gpt",
        architectures=("BloomForCausalLM",),
        default_max_positions=_BLOOM_POSITIONS,
        gguf=GGUFFormat(architecture="bloom", norm_key="layer_norm_epsilon", has_rotations=False),
    ),
    Family(
        model_type="chatglm",
        module="glm",
        architectures=("ChatGLMModel",),
        also_published_as=("ChatGLMForConditionalGeneration",),  # name in fine-tuned models
        config_format="chatglm",
    ),
    Family(
        model_type="cohere",
        module="cohere",
        architectures=("CohereForCausalLM",),
        tokenizer="CohereTokenizer",
        gguf=GGUFFormat(
            architecture="command-r",
            norm_key="layer_norm_eps",
            flags={"attention_bias": _QUERY, "use_qk_norm": "self_attn.q_norm.weight"},
            values={"logit_scale": ".logit_scale"},
            head_norms="per_head",
        ),
    ),
    Family(
        model_type="cohere2",
        module="cohere",
        architectures=("Cohere2ForCausalLM",),
        full_attention_every=4,
        has_rope_without_window=False,
        tokenizer="CohereTokenizer",
        gguf=GGUFFormat(
            architecture="cohere2",
            norm_key="layer_norm_eps",
            flags={"attention_bias": _QUERY},
            values={"logit_scale": ".logit_scale"},
        ),
    ),
    Family(
        model_type="dbrx",
        plain_sections=("attn_config", "ffn_config"),
        old_keys={
            "attn_config.kv_n_heads": "num_key_value_heads",
            "attn_config.rope_theta": "rope_theta",
            "ffn_config.ffn_hidden_size": "intermediate_size",
            "ffn_config.moe_num_experts": "num_local_experts",
            "ffn_config.moe_top_k": "num_experts_per_tok",
        },
        module="dbrx",
        architectures=("DbrxForCausalLM",),
        tokenizer="GPT2Tokenizer",
    ),
    Family(
        model_type="nemotron-nas",
        also_typed=("deci",),
        module="decilm",
        architectures=("DeciLMForCausalLM",),
        config_format="decilm",
    ),
    Family(
        model_type="deepseek",
        module="routed",
        architectures=("DeepseekForCausalLM",),
        config_class="llama",
    ),
    Family(
        model_type="deepseek_v2",
        module="deepseek",
        architectures=("DeepseekV2ForCausalLM",),
        gguf=_DEEPSEEK2,
        fp8_scales=_FP8_DEEPSEEK,
    ),
    Family(
        model_type="deepseek_v3",
        also_typed=("kimi_k2",),
        module="deepseek",
        architectures=("DeepseekV3ForCausalLM",),
        mtp=_MTP,
        gguf=replace(_DEEPSEEK2, has_router_bias=True),
        fp8_scales=_FP8_DEEPSEEK,
    ),
    Family(
        model_type="deepseek_v32",
        module="deepseek",
        architectures=("DeepseekV32ForCausalLM",),
        config_class="llama",
        mtp=_MTP,
        dense_up_to_key="index_topk",
        fp8_scales=_FP8_DEEPSEEK,
    ),
    Family(
        model_type="dots1",
        module="routed",
        architectures=("Dots1ForCausalLM",),
        gguf=GGUFFormat(
            architecture="dots1",
            has_experts=True,
            is_routed=True,
            has_router_bias=True,
            flags={"attention_bias": _QUERY},
        ),
    ),
    Family(
        model_type="ernie4_5_moe",
        module="routed",
        architectures=("Ernie4_5_MoeForCausalLM",),
        tokenizer=GENERIC,
    ),
    Family(
        model_type="youtu",
        module="deepseek",
        architectures=("YoutuForCausalLM",),
        config_class="llama",
    ),
    Family(
        model_type="falcon",
        # Types of the 40B model, and of the 7B and RW models.
        also_typed=("RefinedWeb", "RefinedWebModel"),
        values_of_type={"RefinedWeb": {"new_decoder_architecture": True}},
        old_keys={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_kv_heads",
        },
        module="gpt",
        architectures=("FalconForCausalLM",),
        also_published_as=("RWForCausalLM",),
        gguf=GGUFFormat(
            architecture="falcon",
            activation=("activation", "gelu"),
            norm_key="layer_norm_epsilon",
            constants={"new_decoder_architecture": True},
            omits_head_size=True,
            flags={"bias": _QUERY},
            fewer_norms=("num_ln_in_parallel_attn", "post_attention_layernorm.weight"),
        ),
    ),
    Family(
        model_type="falcon_h1",
        module="falcon_h1",
        architectures=("FalconH1ForCausalLM",),
        has_states_and_attention=True,
    ),
    Family(
        model_type="flex_olmo",
        module="olmo",
        architectures=("FlexOlmoForCausalLM",),
        tokenizer=GENERIC,
    ),
    Family(
        model_type="glm",
        module="glm",
        architectures=("GlmForCausalLM",),
        tokenizer=GENERIC,
        gguf=GGUFFormat(
            architecture="chatglm", flags={"attention_bias": _QUERY}, has_fused_gate=True
        ),
    ),
    Family(
        model_type="glm4",
        also_typed=("glm4v_text",),
        values_of_type={"glm4v_text": {"attention_bias": True, "rms_norm_eps": 1e-5}},
        module="glm",
        architectures=("Glm4ForCausalLM",),
        tokenizer=GENERIC,
        gguf=GGUFFormat(
            architecture="glm4",
            flags={"attention_bias": _QUERY},
            has_fused_gate=True,
            has_post_norms=True,
        ),
    ),
    Family(
        model_type="glm4_moe",
        also_typed=("glm4v_moe_text",),
        values_of_type={"glm4v_moe_text": {"attention_bias": True}},
        module="routed",
        architectures=("Glm4MoeForCausalLM",),
        mtp=_MTP,
        tokenizer=GENERIC,
        gguf=GGUFFormat(
            architecture="glm4moe",
            has_experts=True,
            is_routed=True,
            has_router_bias=True,
            has_post_norms=True,
            flags={"attention_bias": _QUERY, "use_qk_norm": "self_attn.q_norm.weight"},
        ),
    ),
    Family(
        model_type="glm4_moe_lite",
        module="deepseek",
        architectures=("Glm4MoeLiteForCausalLM",),
        config_class="llama",
        mtp=_MTP,
        tokenizer=GENERIC,
    ),
    Family(
        model_type="glm_moe_dsa",
        module="deepseek",
        architectures=("GlmMoeDsaForCausalLM",),
        config_class="llama",
        mtp=_MTP,
        dense_up_to_key="index_topk",
    ),
    Family(
        model_type="gpt2",
        module="gpt",
        architectures=("GPT2LMHeadModel",),
        tokenizer="GPT2Tokenizer",
        gguf=GGUFFormat(
            architecture="gpt2",
            activation=("activation_function", "gelu_new"),
            norm_key="layer_norm_epsilon",
            has_rotations=False,
        ),
    ),
    Family(
        model_type="gpt_bigcode",
        module="gpt",
        architectures=("GPTBigCodeForCausalLM",),
        tokenizer=GENERIC,
        gguf=GGUFFormat(
            architecture="starcoder",
            activation=("activation_function", "gelu_pytorch_tanh"),
            norm_key="layer_norm_epsilon",
            has_rotations=False,
        ),
    ),
    Family(
        model_type="gpt_neox",
        module="gpt",
        architectures=("GPTNeoXForCausalLM",),
        tokenizer="GPTNeoXTokenizer",
        gguf=GGUFFormat(
            architecture="gptneox",
            activation=("hidden_act", "gelu"),
            norm_key="layer_norm_eps",
            values={"use_parallel_residual": ".use_parallel_residual"},
        ),
    ),
    Family(
        model_type="gptj",
        module="gpt",
        architectures=("GPTJForCausalLM",),
        tokenizer="GPT2Tokenizer",
    ),
    Family(
        model_type="gpt_oss",
        module="gpt_oss",
        architectures=("GptOssForCausalLM",),
        reasoning_parser="openai_gptoss",
        gguf=GGUFFormat(
            architecture="gpt-oss",
            has_experts=True,
            flags={"attention_bias": _QUERY},
            has_post_norms=True,
            expert_count_key="num_local_experts",
            window_period=2,
            yarn={"truncate": False},
        ),
    ),
    Family(
        model_type="hunyuan_v1_moe",
        first_typed=("hunyuan",),
        old_keys={"attention_head_dim": "head_dim"},
        module="routed",
        architectures=("HunYuanMoEV1ForCausalLM",),
    ),
    Family(
        model_type="jamba",
        module="jamba",
        architectures=("JambaForCausalLM",),
        attention_period_keys=("attn_layer_period", "attn_layer_offset"),
        has_positions=False,
        tokenizer=GENERIC,
    ),
    Family(model_type="lfm2", module="lfm", architectures=("Lfm2ForCausalLM",)),
    Family(
        model_type="lfm2_moe",
        module="lfm",
        architectures=("Lfm2MoeForCausalLM",),
        config_class="llama",
    ),
    Family(
        model_type="kimi_linear",
        tokenizer=None,
        module="kimi",
        architectures=("KimiLinearForCausalLM",),
        config_class="llama",
        rope_switch=("mla_use_nope", False),
    ),
    Family(
        model_type="longcat_flash",
        module="longcat",
        architectures=("LongcatFlashForCausalLM",),
        num_layers_key="num_layers",
    ),
    Family(
        model_type="mamba",
        module="mamba",
        architectures=("MambaForCausalLM",),
        has_attention=False,
        heads_are_channels=True,
        default_max_positions=_BLOOM_POSITIONS,
        tokenizer="GPTNeoXTokenizer",
    ),
    Family(
        model_type="falcon_mamba",
        module="mamba",
        architectures=("FalconMambaForCausalLM",),
        has_attention=False,
        heads_are_channels=True,
        default_max_positions=_BLOOM_POSITIONS,
        tokenizer="GPTNeoXTokenizer",
    ),
    Family(
        model_type="mamba2",
        module="mamba",
        architectures=("Mamba2ForCausalLM",),
        has_attention=False,
        default_max_positions=_BLOOM_POSITIONS,
        tokenizer="GPTNeoXTokenizer",
    ),
    Family(
        model_type="mimo_v2_flash",
        module="mimo_v2",
        architectures=("MiMoV2FlashForCausalLM",),
        config_class="llama",
        window_kv_heads=2,
        tokenizer=GENERIC,
    ),
    Family(
        model_type="minimax_m2",
        first_typed=("minimax",),
        module="routed",
        architectures=("MiniMaxM2ForCausalLM",),
        config_class="llama",
        tokenizer=GENERIC,
        gguf=GGUFFormat(
            architecture="minimax-m2",
            has_experts=True,
            has_router_bias=True,
            head_norms="all_heads",
            expert_count_key="num_local_experts",
        ),
    ),
    Family(
        model_type="mpt",
        module="gpt",
        architectures=("MptForCausalLM",),
        also_published_as=("MPTForCausalLM",),
        tokenizer="GPTNeoXTokenizer",
        gguf=GGUFFormat(
            architecture="mpt",
            norm_key="layer_norm_epsilon",
            values={"attn_config.clip_qkv": ".attention.clamp_kqv"},
            has_rotations=False,
        ),
    ),
    Family(
        model_type="nemotron",
        module="gpt",
        architectures=("NemotronForCausalLM",),
        tokenizer=GENERIC,
        norms_add_one=True,
        gguf=GGUFFormat(
            architecture="nemotron",
            activation=("hidden_act", "relu2"),
            norm_key="norm_eps",
            flags=_UNGATED_FLAGS,
        ),
    ),
    Family(
        model_type="nemotron_h",
        old_keys={"attention_head_dim": "head_dim"},
        module="nemotron_h",
        architectures=("NemotronHForCausalLM",),
        config_class="llama",
        own_defaults={"num_hidden_layers": None},
        has_positions=False,
    ),
    Family(
        model_type="olmo",
        module="olmo",
        architectures=("OlmoForCausalLM",),
        tokenizer="GPTNeoXTokenizer",
        gguf=GGUFFormat(
            architecture="olmo",
            has_neighbour_rotations=True,
            values={"clip_qkv": ".attention.clamp_kqv"},
        ),
    ),
    Family(
        model_type="olmo2",
        module="olmo",
        architectures=("Olmo2ForCausalLM",),
        tokenizer=GENERIC,
        awq_pairs=(_VALUES, _MLP),
        gguf=GGUFFormat(architecture="olmo2", has_post_norms=True, head_norms="all_heads"),
    ),
    Family(
        model_type="olmo3", module="olmo", architectures=("Olmo3ForCausalLM",), tokenizer=GENERIC
    ),
    Family(
        model_type="olmoe",
        module="olmo",
        architectures=("OlmoeForCausalLM",),
        tokenizer="GPTNeoXTokenizer",
        gguf=GGUFFormat(
            architecture="olmoe",
            has_experts=True,
            constants={"norm_topk_prob": False},
            values={"clip_qkv": ".attention.clamp_kqv"},
            head_norms="all_heads",
            expert_count_key="num_experts",
        ),
    ),
    Family(
        model_type="opt",
        module="opt",
        architectures=("OPTForCausalLM",),
        windows="ignored",
        config_defaults=ConfigDefaults(
            class_prefix="OPT", values=_OPT_DEFAULTS, has_rotations=False, inner_size="ffn_dim"
        ),
        tokenizer="GPT2Tokenizer",
    ),
    Family(
        model_type="phi",
        module="phi",
        architectures=("PhiForCausalLM",),
        tokenizer="GPT2Tokenizer",
        gguf=GGUFFormat(
            architecture="phi2", activation=("hidden_act", "gelu_new"), norm_key="layer_norm_eps"
        ),
    ),
    Family(
        model_type="phi3",
        module="phi",
        architectures=("Phi3ForCausalLM",),
        tokenizer=GENERIC,
        awq_pairs=(("input_layernorm", "self_attn.qkv_proj"), (_NORM_OF_MLP, "mlp.gate_up_proj")),
        gguf=GGUFFormat(
            architecture="phi3",
            values={"sliding_window": ".attention.sliding_window"},
            has_fused_gate=True,
        ),
    ),
    Family(
        model_type="phimoe",
        module="mixture",
        architectures=("PhimoeForCausalLM",),
        also_published_as=("PhiMoEForCausalLM",),
        tokenizer=GENERIC,
    ),
    Family(
        model_type="solar_open",
        module="routed",
        architectures=("SolarOpenForCausalLM",),
        config_class="llama",
    ),
    Family(
        model_type="stablelm",
        also_typed=("stablelm_epoch",),
        old_keys={"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"},
        module="stablelm",
        architectures=("StableLmForCausalLM",),
        also_published_as=("StableLMEpochForCausalLM",),
        tokenizer=GENERIC,
        gguf=GGUFFormat(
            architecture="stablelm",
            norm_key="layer_norm_eps",
            values={"use_parallel_residual": ".use_parallel_residual"},
            flags={"use_qkv_bias": _QUERY, "qk_layernorm": "self_attn.q_norm.weight"},
            head_norms="per_head",
        ),
    ),
    Family(
        model_type="starcoder2",
        module="gpt",
        architectures=("Starcoder2ForCausalLM",),
        tokenizer="GPT2Tokenizer",
        gguf=GGUFFormat(
            architecture="starcoder2",
            activation=("hidden_act", "gelu_pytorch_tanh"),
            norm_key="norm_epsilon",
            flags={"use_bias": _QUERY},
            values={"sliding_window": ".attention.sliding_window"},
        ),
    ),
    Family(
        model_type="zamba2",
        module="zamba",
        architectures=("Zamba2ForCausalLM",),
        has_states_and_attention=True,
        has_shared_layers=True,
        rope_switch=("use_mem_rope", True),
    ),
)
_with_encoder = partial(Family, module="text_of_images")
"""Makes the entry of models that also have a part for images or sound."""
_WITH_MEDIA = (
    _with_encoder(
        model_type="llava",
        architectures=("LlavaForConditionalGeneration",),
        text_type="llama",
        also_text_types=("mistral", "qwen2"),
        media="llava",
        media_by_tower={"pixtral": "pixtral"},
        tokenizer=GENERIC,
    ),
    _with_encoder(
        model_type="llava_next",
        architectures=("LlavaNextForConditionalGeneration",),
        text_type="llama",
        also_text_types=("mistral", "granite", "qwen2"),
        media="llava_next",
        tokenizer=GENERIC,
    ),
    _with_encoder(
        model_type="internvl",
        architectures=("InternVLForConditionalGeneration",),
        text_type="qwen2",
        also_text_types=("qwen3", "qwen3_moe", "llama"),
        media="internvl",
        tokenizer="Qwen2Tokenizer",
    ),
    _with_encoder(
        model_type="idefics3",
        architectures=("Idefics3ForConditionalGeneration",),
        text_type="llama",
        media="idefics3",
    ),
    _with_encoder(
        model_type="smolvlm",
        architectures=("SmolVLMForConditionalGeneration",),
        text_type="llama",
        media="idefics3",
        tokenizer=GENERIC,
    ),
    _with_encoder(
        model_type="mllama",
        architectures=("MllamaForConditionalGeneration",),
        text_type="mllama_text_model",
        media="mllama",
        num_unsampled_tokens=8,
    ),
    _with_encoder(
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        text_type="gemma3_text",
        media="gemma3",
        media_sees_ahead=True,
        tokenizer="GemmaTokenizer",
    ),
    _with_encoder(
        model_type="gemma3n",
        architectures=("Gemma3nForConditionalGeneration",),
        text_only=(
            "its image encoder is a MobileNet of the timm package, which this engine does not use"
        ),
        text_type="gemma3n_text",
        tokenizer="GemmaTokenizer",
    ),
    _with_encoder(
        model_type="gemma4",
        architectures=("Gemma4ForConditionalGeneration",),
        text_type="gemma4_text",
    ),
    _with_encoder(
        model_type="llama4",
        architectures=("Llama4ForConditionalGeneration",),
        text_only=(
            "its image processor in transformers needs torchvision, which this engine does not use"
        ),
        text_type="llama4_text",
    ),
    _with_encoder(
        model_type="phi4_multimodal",
        also_typed=("phi4mm",),
        architectures=("Phi4MultimodalForCausalLM",),
        also_published_as=("Phi4MMForCausalLM",),
        text_only="its image processor in transformers needs torchvision, which is not used, and "
        "its images and sounds need adapters of their own",
        text_type="phi3",
    ),
    _with_encoder(
        model_type="mistral3",
        tokenizer=None,
        architectures=("Mistral3ForConditionalGeneration",),
        text_type="mistral",
        also_text_types=("ministral3",),  # type in Ministral 3 and Devstral Small 2
        media="mistral3",
    ),
    _with_encoder(
        model_type="qwen2_vl",
        architectures=("Qwen2VLForConditionalGeneration",),
        text_type="qwen2_vl_text",
        media="qwen2_vl",
        tokenizer="Qwen2Tokenizer",
    ),
    _with_encoder(
        model_type="qwen2_5_vl",
        architectures=("Qwen2_5_VLForConditionalGeneration",),
        text_type="qwen2_5_vl_text",
        media="qwen2_5_vl",
        tokenizer="Qwen2Tokenizer",
    ),
    _with_encoder(
        model_type="qwen3_vl",
        architectures=("Qwen3VLForConditionalGeneration",),
        text_type="qwen3_vl_text",
        media="qwen3_vl",
        tokenizer="Qwen2Tokenizer",
    ),
    _with_encoder(
        model_type="qwen3_vl_moe",
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        text_type="qwen3_vl_moe_text",
        media="qwen3_vl",
        tokenizer="Qwen2Tokenizer",
    ),
    _with_encoder(
        model_type="glm4v",
        architectures=("Glm4vForConditionalGeneration",),
        text_type="glm4v_text",
        media="glm4v",
        tokenizer=GENERIC,
    ),
    _with_encoder(
        model_type="glm4v_moe",
        architectures=("Glm4vMoeForConditionalGeneration",),
        text_type="glm4v_moe_text",
        media="glm4v",
        tokenizer=GENERIC,
    ),
    _with_encoder(
        model_type="qwen3_5",
        architectures=("Qwen3_5ForConditionalGeneration",),
        mtp=_MTP_QWEN,
        text_type="qwen3_5_text",
        media="qwen3_5",
        tokenizer="Qwen3_5Tokenizer",
        replaces_tokenizer=True,
    ),
    _with_encoder(
        model_type="qwen3_5_moe",
        architectures=("Qwen3_5MoeForConditionalGeneration",),
        mtp=_MTP_QWEN,
        text_type="qwen3_5_moe_text",
        media="qwen3_5",
        tokenizer="Qwen3_5Tokenizer",
        replaces_tokenizer=True,
    ),
    _with_encoder(
        model_type="kimi_k25",
        architectures=("KimiK25ForConditionalGeneration",),
        also_published_as=("Kimi_K25ForConditionalGeneration",),
        text_type="deepseek_v3",
        also_text_types=("kimi_k2",),
        tokenizer=GENERIC,
    ),
    _with_encoder(
        model_type="kimi_vl",
        architectures=("KimiVLForConditionalGeneration",),
        text_type="deepseek_v3",
    ),
    _with_encoder(
        model_type="qwen2_audio",
        architectures=("Qwen2AudioForConditionalGeneration",),
        text_type="qwen2",
        media="qwen2_audio",
        tokenizer="Qwen2Tokenizer",
    ),
    _with_encoder(
        model_type="voxtral",
        architectures=("VoxtralForConditionalGeneration",),
        text_type="llama",
        also_text_types=("mistral",),
        media="voxtral",
        tokenizer=GENERIC,
        has_mistral_tokenizer=True,
    ),
    _with_encoder(
        model_type="whisper",
        architectures=("WhisperForConditionalGeneration",),
        decoder_keys={
            "d_model": "hidden_size",
            "decoder_layers": "num_hidden_layers",
            "decoder_attention_heads": "num_attention_heads",
            "decoder_ffn_dim": "intermediate_size",
            "max_target_positions": "max_position_embeddings",
        },
        media="whisper",
        has_positions=False,
        tokenizer="WhisperTokenizer",
        has_complete_prompts=True,
    ),
)
_ENCODERS = (
    Family(
        model_type="bert",
        module="bert",
        architectures=("BertModel", "BertForSequenceClassification"),
        is_encoder=True,
        windows="ignored",
        config_defaults=ConfigDefaults(
            class_prefix="Bert", values=_BERT_DEFAULTS, has_rotations=False
        ),
        tokenizer="BertTokenizer",
        gguf=GGUFFormat(
            architecture="bert",
            activation=("hidden_act", "gelu"),
            norm_key="layer_norm_eps",
            has_rotations=False,
        ),
    ),
    Family(
        model_type="roberta",
        module="roberta",
        architectures=("RobertaModel", "RobertaForSequenceClassification"),
        is_encoder=True,
        windows="ignored",
        positions_follow_padding=True,
        config_defaults=ConfigDefaults(
            class_prefix="Roberta", values=_ROBERTA_DEFAULTS, has_rotations=False
        ),
        tokenizer="RobertaTokenizer",
    ),
    Family(
        model_type="xlm-roberta",
        module="roberta",
        architectures=("XLMRobertaModel", "XLMRobertaForSequenceClassification"),
        is_encoder=True,
        windows="ignored",
        positions_follow_padding=True,
        config_defaults=ConfigDefaults(
            class_prefix="XLMRoberta", values=_ROBERTA_DEFAULTS, has_rotations=False
        ),
        tokenizer="XLMRobertaTokenizer",
    ),
    Family(
        model_type="camembert",  # some checkpoints of Camembert have the class names of RoBERTa
        tokenizer=None,
        is_encoder=True,
        windows="ignored",
        positions_follow_padding=True,
    ),
)

FAMILIES = {
    family.model_type: family
    for family in (
        *(*_LLAMAS, *_QWENS, *_GRANITES, *_GEMMAS),
        *(*_OTHERS, *_WITH_MEDIA, *_ENCODERS),
    )
}
"""`model_type` -> family. Messages list families in this order."""
