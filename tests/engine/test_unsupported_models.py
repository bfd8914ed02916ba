"""Test that unsupported models are refused as such, before an error about a missing key of their
configs.
"""

import json
from typing import Any

import pytest
import transformers

from tests.engine.test_resolve_config import resolve
from vllm.errors import ConfigError

_LLAMA = {"model_type": "llama", "hidden_size": 64}
_VISION = {"model_type": "clip_vision_model", "hidden_size": 32}
_PARTS = "has parts for other input than text"
_BOTH = "it is an encoder-decoder"
_UNKNOWN = "the installed transformers has no decoder of that name either"
_OTHERWISE = "its config in transformers lacks values that are needed to run it"
_CODE = r"The code of a model that comes with it \(auto_map\) is never run"


def _with_parts(name: str, model_type: str, text: dict[str, Any], **parts: Any) -> dict[str, Any]:
    parts = parts or {"vision_config": _VISION}
    return {"architectures": [name], "model_type": model_type, "text_config": text, **parts}


def _named(name: str, model_type: str, **values: Any) -> dict[str, Any]:
    return {"architectures": [name], "model_type": model_type, **values}


_AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig"}

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    # Models with parts for images, sounds and videos, which transformers may know or not.
    (
        _with_parts("LlavaOnevisionForConditionalGeneration", "llava_onevision", _LLAMA),
        r"nearest: LlamaForCausalLM\): it has parts .*\. Its language model \(LlamaForCausal",
    ),
    (
        _with_parts("VipLlavaForConditionalGeneration", "vipllava", {"model_type": "mistral"}),
        r"Its language model \(MistralForCausalLM\) can run if it is saved as a checkpoint "
        r"without the other parts",
    ),
    (
        _with_parts("Idefics2ForConditionalGeneration", "idefics2", _LLAMA),
        _PARTS,
    ),
    (
        _with_parts("PaliGemmaForConditionalGeneration", "paligemma", {"model_type": "gemma2"}),
        r"nearest: Gemma2ForCausalLM\).* that do not run \(all tokens of its prompts",
    ),
    (
        _named(
            "PaddleOCRVLForConditionalGeneration", "paddleocr_vl", vision_config={}, hidden_size=64
        ),
        r"it has parts for other input than text \(vision_config\). See docs/multimodal.md",
    ),
    (
        _named("InternVLChatModel", "internvl_chat", auto_map=_AUTO_MAP, vision_config=_VISION)
        | {"llm_config": {"model_type": "qwen2"}},
        rf"Qwen2ForCausalLM\): it has parts .*llm_config, vision_config.*{_CODE}",
    ),
    (
        _named("DeepseekVLV2ForCausalLM", "deepseek_vl_v2", vision_config=_VISION)
        | {"language_config": {"model_type": "deepseek_v2"}},
        r"nearest: DeepseekV2ForCausalLM",
    ),
    (
        _named("KimiV9ForConditionalGeneration", "kimi_v9", auto_map=_AUTO_MAP)
        | {"text_config": {"model_type": "deepseek_v3"}, "vision_config": _VISION},
        r"Its language model \(DeepseekV3ForCausalLM\)",
    ),
    (
        _with_parts("Step3VLForConditionalGeneration", "step3_vl", {"model_type": "step3_text"}),
        _PARTS,
    ),
    (
        _named("Qwen2_5OmniModel", "qwen2_5_omni", thinker_config={}, talker_config={}),
        r"thinker_config, talker_config",
    ),
    (
        _named("AudioFlamingo3ForConditionalGeneration", "audioflamingo3", audio_config={})
        | {"text_config": {"model_type": "qwen2"}},
        r"nearest: Qwen2ForCausalLM",
    ),
    (
        _named("GraniteSpeechForConditionalGeneration", "granite_speech", encoder_config={})
        | {"text_config": {"model_type": "granite"}},
        r"nearest: GraniteForCausalLM\).* that do not run \(its .* needs torchaudio",
    ),
    (_with_parts("CLIPModel", "clip", {"model_type": "clip_text_model"}), _PARTS),
    (_with_parts("SiglipModel", "siglip", {"model_type": "siglip_text_model"}), _PARTS),
    # Encoder-decoder models.
    (
        _named("T5ForConditionalGeneration", "t5", is_encoder_decoder=True, d_model=64),
        f"'T5ForConditionalGeneration' is not supported.*: {_BOTH} model of a kind that this "
        "engine cannot run",
    ),
    (_named("BartForConditionalGeneration", "bart", is_encoder_decoder=True), _BOTH),
    (_named("MBartForConditionalGeneration", "mbart", is_encoder_decoder=True), _BOTH),
    (_named("M2M100ForConditionalGeneration", "m2m_100", is_encoder_decoder=True), _BOTH),
    (_named("PegasusForConditionalGeneration", "pegasus", is_encoder_decoder=True), _BOTH),
    (
        _named("T5GemmaForConditionalGeneration", "t5gemma", is_encoder_decoder=True)
        | {"encoder": {}, "decoder": {}},
        _BOTH,
    ),
    (
        _named("VisionEncoderDecoderModel", "vision-encoder-decoder", is_encoder_decoder=True)
        | {"encoder": {}, "decoder": {}},
        _BOTH,
    ),
    # Decoders with layers of another kind, or with code of their own.
    (_named("RwkvForCausalLM", "rwkv", hidden_size=64, num_hidden_layers=2), _OTHERWISE),
    (_named("RecurrentGemmaForCausalLM", "recurrent_gemma", num_key_value_heads=1), _OTHERWISE),
    (_named("xLSTMForCausalLM", "xlstm", hidden_size=64), _OTHERWISE),
    (
        _named("OpenELMForCausalLM", "openelm", num_kv_heads=[3, 4], num_query_heads=[12, 16]),
        _UNKNOWN,
    ),
    (_named("QWenLMHeadModel", "qwen", auto_map=_AUTO_MAP, n_head="?"), f"{_UNKNOWN}. {_CODE}"),
    (_named("RWKV7ForCausalLM", "rwkv7", auto_map=_AUTO_MAP), _UNKNOWN),
    (_named("MiniMaxM3ForCausalLM", "minimax_m3", num_hidden_layers=2), _UNKNOWN),
    (_named("Step3p7ForCausalLM", "step3p7", auto_map=_AUTO_MAP), _UNKNOWN),
    (
        _named("DeepseekV9ForCausalLM", "deepseek_v9", vocab_size=-1, layer_types=5),
        r"nearest: Deepseek.*ForCausalLM",
    ),
    (_named("GrokForCausalLM", "grok-1", auto_map=_AUTO_MAP), _UNKNOWN),
    (_named("BertForMaskedLM", "bert"), r"nearest: BertForSequenceClassification, BertModel, "),
    (_named("SDARForCausalLM", "sdar", auto_map=_AUTO_MAP), _UNKNOWN),
    # These are not language models.
    (_named("ViTForImageClassification", "vit"), _UNKNOWN),
    (
        {"_class_name": "UNet2DConditionModel"},
        "describes UNet2DConditionModel, a part of a diffusers model",
    ),
    ({"model_type": "timm_wrapper"}, "has no 'architectures'.* from its model_type 'timm_wrapper'"),
    ({"model_type": "t5"}, "has no 'architectures'.* from its model_type 't5'"),
    ({"model_type": "bailing_moe"}, "'bailing_moe'.* as .*BailingMoeV2ForCausalLM"),
]
"""Values of config.json, and what the message says."""


@pytest.mark.parametrize("config, message", UNSUPPORTED, ids=lambda value: _id_of(value))
def test_the_message_says_that_the_model_is_not_supported(config, message, tmp_path):
    if message is _OTHERWISE and not hasattr(transformers, config["architectures"][0]):
        pytest.skip("this transformers does not know it")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as failure:
        resolve(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True)
    text = str(failure.value)
    assert "\n" not in text
    name = next(iter(config.get("architectures", ())), None)
    if name is not None:
        assert text.startswith((f"model architecture '{name}' is not supported", f"{name} cannot"))
    assert "config.json has no" not in text


def _id_of(value: Any) -> str | None:
    if not isinstance(value, dict):
        return ""
    return str(value.get("architectures", [value.get("_class_name") or value.get("model_type")])[0])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "has no config.json, but adapter_config.json: it is an adapter of"),
        ("model_index.json", "has no config.json, but model_index.json: it is a pipeline of"),
        (
            "consolidated.safetensors",
            "but consolidated.safetensors, which has .* Mistral AI. Copy params.json of the same",
        ),
        ("checkpoint-7/config.json", "but its subfolder has one: name '.*/checkpoint-7'"),
        ("snapshots/1f/config.json", "but its subfolder has one: name '.*/snapshots/1f'"),
    ],
)
def test_a_folder_of_something_else_is_named(file, message, tmp_path):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        resolve(model=str(tmp_path))
