"""One entry for each `model_type`: what is known of a family besides its modules.

A family that models/ has needs its names and its module here; everything else is for families that
are not as most are.
"""

from typing import Any

from vllm.config.families.family import ConfigDefaults, Family, FP8Scales, GGUFFacts

_GENERIC = "PreTrainedTokenizerFast"
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

_QUERY, _GATE = "self_attn.q_proj", "mlp.gate_proj"
_LLAMA_BIASES = {"attention_bias": _QUERY, "mlp_bias": _GATE}
_GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")

_FP8_DEEPSEEK = FP8Scales(blocked=("lm_head", r"mlp\.gate\b"), scale_format="scalar")

_BLOOM_POSITIONS = 2048
"""What BLOOM and Mamba were trained with. Nothing but memory limits the length of their texts."""

_LLAMAS = (
    Family(
        model_type="llama",
        module="llama",
        architectures=("LlamaForCausalLM",),
        pooling_architectures=("LlamaModel", "LlamaForSequenceClassification"),
        windows="ignored",
        config_defaults=ConfigDefaults(class_prefix="Llama", values=_LLAMA_DEFAULTS),
        tokenizer="",
        gguf=GGUFFacts(
            architecture="llama",  # and so is Mistral
            biases=_LLAMA_BIASES,
            has_neighbour_rotations=True,
        ),
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="mistral",
        module="mistral",
        architectures=("MistralForCausalLM",),
        pooling_architectures=("MistralModel", "MistralForSequenceClassification"),
        config_defaults=ConfigDefaults(class_prefix="Mistral", values=_MISTRAL_DEFAULTS),
        tokenizer=_GENERIC,
        has_mistral_tokenizer=True,
        in_params_json="dense",
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="mixtral",
        module="mixture",
        architectures=("MixtralForCausalLM",),
        tokenizer=_GENERIC,
        has_mistral_tokenizer=True,
        gguf=GGUFFacts(
            architecture="llama",
            has_experts=True,
            biases=_LLAMA_BIASES,
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
        tokenizer="",
    ),
    Family(
        model_type="baichuan",
        module="baichuan",
        architectures=("BaichuanForCausalLM",),
        also_published_as=("BaiChuanForCausalLM",),  # the first model of 7B
        rope_implied_by="max_position_embeddings",  # without it: ALiBi
        config_class="llama",
        tokenizer="",
    ),
    Family(
        model_type="internlm2",
        module="internlm",
        architectures=("InternLM2ForCausalLM",),
        config_class="llama",
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="internlm3",
        module="internlm",
        architectures=("InternLM3ForCausalLM",),
        config_class="llama",
        tokenizer=_GENERIC,
    ),
)
_QWENS = (
    Family(
        model_type="qwen2",
        module="qwen2",
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
        gguf=GGUFFacts(architecture="qwen2"),
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="qwen2_moe",
        module="mixture",
        architectures=("Qwen2MoeForCausalLM",),
        tokenizer="Qwen2Tokenizer",
        gguf=GGUFFacts(
            architecture="qwen2moe",
            has_experts=True,
            biases={"qkv_bias": _QUERY},
            has_shared_expert=True,
        ),
        awq_pairs=_AWQ_MIXTURE,
    ),
    Family(
        model_type="qwen3",
        module="qwen3",
        architectures=("Qwen3ForCausalLM",),
        pooling_architectures=("Qwen3Model", "Qwen3ForSequenceClassification"),
        windows="if_switched_on",
        config_defaults=ConfigDefaults(class_prefix="Qwen3", values=_QWEN3_DEFAULTS),
        tokenizer="Qwen2Tokenizer",
        gguf=GGUFFacts(architecture="qwen3", biases={"attention_bias": _QUERY}),
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="qwen3_moe",
        module="mixture",
        architectures=("Qwen3MoeForCausalLM",),
        tokenizer="Qwen2Tokenizer",
        gguf=GGUFFacts(
            architecture="qwen3moe",
            has_experts=True,
            biases={"attention_bias": _QUERY},
            normalizes_experts=True,
        ),
        awq_pairs=_AWQ_MIXTURE,
    ),
)
_GEMMAS = (
    Family(
        model_type="gemma",
        module="gemma",
        architectures=("GemmaForCausalLM",),
        tokenizer="GemmaTokenizer",
        gguf=GGUFFacts(architecture="gemma", activation=_GEMMA_ACTIVATION),
        norms_add_one=True,
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="gemma2",
        module="gemma",
        architectures=("Gemma2ForCausalLM",),
        full_attention_every=2,
        tokenizer="GemmaTokenizer",
        gguf=GGUFFacts(
            architecture="gemma2",
            activation=_GEMMA_ACTIVATION,
            has_post_norms=True,
            unscaled_layers=46,  # the model of 27B
        ),
        norms_add_one=True,
        awq_pairs=_AWQ_GEMMA2,
    ),
    Family(
        model_type="gemma3_text",
        module="gemma",
        architectures=("Gemma3ForCausalLM",),
        full_attention_every=6,
        tokenizer="GemmaTokenizer",
        gguf=GGUFFacts(
            architecture="gemma3",
            activation=_GEMMA_ACTIVATION,
            has_post_norms=True,
            has_window_theta=True,
            unscaled_layers=62,  # the model of 27B
        ),
        norms_add_one=True,
        awq_pairs=_AWQ_GEMMA2,
    ),
)
_GRANITES = (
    Family(
        model_type="granite",
        module="granite",
        architectures=("GraniteForCausalLM",),
        tokenizer=_GENERIC,
        awq_pairs=_AWQ_LLAMA,
    ),
    Family(
        model_type="granitemoe",
        module="mixture",
        architectures=("GraniteMoeForCausalLM",),
        tokenizer=_GENERIC,
        awq_pairs=(_ATTENTION, (_NORM_OF_MLP, *_GRANITE_EXPERTS), _VALUES),
    ),
    Family(
        model_type="granitemoehybrid",
        module="hybrid",
        architectures=("GraniteMoeHybridForCausalLM",),
        rope_switch=("position_embedding_type", "rope"),
        tokenizer=_GENERIC,
    ),
)
_OTHERS = (
    Family(
        model_type="bailing_moe",
        also_typed=("bailing_moe_v2",),
        module="routed",
        architectures=("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
        config_class="llama",
        tokenizer="",
    ),
    Family(
        model_type="bamba",
        module="hybrid",
        architectures=("BambaForCausalLM",),
        attention_layers_key="attn_layer_indices",
        tokenizer="",
    ),
    Family(
        model_type="bloom",
        module="bloom",
        architectures=("BloomForCausalLM",),
        default_max_positions=_BLOOM_POSITIONS,
        tokenizer="",
    ),
    Family(
        model_type="chatglm",
        module="glm",
        architectures=("ChatGLMModel",),
        also_published_as=("ChatGLMForConditionalGeneration",),  # fine-tuned models
        config_format="chatglm",
        tokenizer="",
    ),
    Family(
        model_type="cohere",
        module="cohere",
        architectures=("CohereForCausalLM",),
        tokenizer="CohereTokenizer",
    ),
    Family(
        model_type="cohere2",
        module="cohere",
        architectures=("Cohere2ForCausalLM",),
        full_attention_every=4,
        has_rope_without_window=False,
        tokenizer="CohereTokenizer",
    ),
    Family(
        model_type="deepseek",
        module="routed",
        architectures=("DeepseekForCausalLM",),
        config_class="llama",
        tokenizer="",
    ),
    Family(
        model_type="deepseek_v2",
        module="deepseek",
        architectures=("DeepseekV2ForCausalLM",),
        tokenizer="",
        fp8_scales=_FP8_DEEPSEEK,
    ),
    Family(
        model_type="deepseek_v3",
        also_typed=("kimi_k2",),
        module="deepseek",
        architectures=("DeepseekV3ForCausalLM",),
        has_mtp_layers=True,
        tokenizer="",
        fp8_scales=_FP8_DEEPSEEK,
    ),
    Family(
        model_type="deepseek_v32",
        module="deepseek",
        architectures=("DeepseekV32ForCausalLM",),
        dense_up_to_key="index_topk",
        tokenizer="",
        fp8_scales=_FP8_DEEPSEEK,
    ),
    Family(
        model_type="dots1",
        module="routed",
        architectures=("Dots1ForCausalLM",),
        tokenizer="",
    ),
    Family(
        model_type="ernie4_5_moe",
        module="routed",
        architectures=("Ernie4_5_MoeForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="falcon",
        module="falcon",
        architectures=("FalconForCausalLM",),
        tokenizer="",
    ),
    Family(
        model_type="flex_olmo",
        module="olmo",
        architectures=("FlexOlmoForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="glm",
        module="glm",
        architectures=("GlmForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="glm4",
        module="glm",
        architectures=("Glm4ForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="glm4_moe",
        module="routed",
        architectures=("Glm4MoeForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="glm4_moe_lite",
        module="deepseek",
        architectures=("Glm4MoeLiteForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="glm_moe_dsa",
        module="deepseek",
        architectures=("GlmMoeDsaForCausalLM",),
        dense_up_to_key="index_topk",
        tokenizer="",
    ),
    Family(
        model_type="gpt2",
        module="gpt2",
        architectures=("GPT2LMHeadModel",),
        tokenizer="GPT2Tokenizer",
    ),
    Family(
        model_type="gpt_bigcode",
        module="gpt2",
        architectures=("GPTBigCodeForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="gpt_neox",
        module="gpt_neox",
        architectures=("GPTNeoXForCausalLM",),
        tokenizer="GPTNeoXTokenizer",
    ),
    Family(
        model_type="gptj",
        module="gpt_neox",
        architectures=("GPTJForCausalLM",),
        tokenizer="GPT2Tokenizer",
    ),
    Family(
        model_type="gpt_oss",
        module="gpt_oss",
        architectures=("GptOssForCausalLM",),
        tokenizer="",
        reasoning_parser="openai_gptoss",
    ),
    Family(
        model_type="hunyuan_v1_moe",
        module="routed",
        architectures=("HunYuanMoEV1ForCausalLM",),
        tokenizer="",
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
        model_type="mamba2",
        module="mamba",
        architectures=("Mamba2ForCausalLM",),
        has_attention=False,
        default_max_positions=_BLOOM_POSITIONS,
        tokenizer="GPTNeoXTokenizer",
    ),
    Family(
        model_type="minimax_m2",
        module="routed",
        architectures=("MiniMaxM2ForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="mpt",
        module="bloom",
        architectures=("MptForCausalLM",),
        also_published_as=("MPTForCausalLM",),
        tokenizer="GPTNeoXTokenizer",
    ),
    Family(
        model_type="olmo",
        module="olmo",
        architectures=("OlmoForCausalLM",),
        tokenizer="GPTNeoXTokenizer",
    ),
    Family(
        model_type="olmo2",
        module="olmo",
        architectures=("Olmo2ForCausalLM",),
        tokenizer=_GENERIC,
        awq_pairs=(_VALUES, _MLP),
    ),
    Family(
        model_type="olmo3",
        module="olmo",
        architectures=("Olmo3ForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="olmoe",
        module="olmo",
        architectures=("OlmoeForCausalLM",),
        tokenizer="GPTNeoXTokenizer",
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
    ),
    Family(
        model_type="phi3",
        module="phi",
        architectures=("Phi3ForCausalLM",),
        tokenizer=_GENERIC,
        awq_pairs=(
            ("input_layernorm", "self_attn.qkv_proj"),
            (_NORM_OF_MLP, "mlp.gate_up_proj"),
        ),
    ),
    Family(
        model_type="phimoe",
        module="mixture",
        architectures=("PhimoeForCausalLM",),
        also_published_as=("PhiMoEForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="solar_open",
        module="routed",
        architectures=("SolarOpenForCausalLM",),
        tokenizer="",
    ),
    Family(
        model_type="stablelm",
        module="stablelm",
        architectures=("StableLmForCausalLM",),
        tokenizer=_GENERIC,
    ),
    Family(
        model_type="starcoder2",
        module="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        tokenizer="GPT2Tokenizer",
    ),
)
_WITH_IMAGES = (
    Family(
        model_type="gemma3",
        module="text_of_images",
        architectures=("Gemma3ForConditionalGeneration",),
        text_type="gemma3_text",
        tokenizer="GemmaTokenizer",
    ),
    Family(
        model_type="llama4",
        module="text_of_images",
        architectures=("Llama4ForConditionalGeneration",),
        text_type="llama4_text",
        tokenizer="",
    ),
    Family(
        model_type="mistral3",
        module="text_of_images",
        architectures=("Mistral3ForConditionalGeneration",),
        text_type="mistral",
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
        model_type="camembert",  # for checkpoints that name the classes of RoBERTa
        is_encoder=True,
        windows="ignored",
        positions_follow_padding=True,
    ),
)

FAMILIES = {
    family.model_type: family
    for family in (
        *(*_LLAMAS, *_QWENS, *_GRANITES, *_GEMMAS),
        *(*_OTHERS, *_WITH_IMAGES, *_ENCODERS),
    )
}
"""`model_type` -> family. Messages list families in this order."""
