"""Test the config object of transformers that programs read from an engine."""

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_models import ALL_FAMILIES, tiny_config
from vllm.config import ModelArch, ModelConfig, ParallelConfig
from vllm.transformers_utils.hf_config import complete_hf_config, read_hf_config


def model_config(folder) -> ModelConfig:
    raw = read_hf_config(folder, {})
    completed = complete_hf_config(raw, folder, trust_remote_code=False)
    return ModelConfig(model=str(folder), arch=ModelArch.from_hf(completed))


def reads_what_it_writes(config):
    """Return whether transformers accepts the values of a config; older releases refuse DBRX's."""
    try:
        type(config).from_dict(config.to_dict())
    except ValueError:
        return False
    return True


def test_the_object_of_each_family_is_the_one_of_transformers(tmp_path):
    for family in ALL_FAMILIES:
        written = tiny_config(family)
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(written.model_type)
        if name is None:
            continue
        written.architectures = [name]
        written.save_pretrained(tmp_path)
        wanted = transformers.AutoConfig.from_pretrained(tmp_path)
        if not reads_what_it_writes(wanted):
            continue
        config = model_config(tmp_path)
        found = config.hf_config
        assert type(found) is type(wanted), family
        assert found.vocab_size == wanted.vocab_size == config.get_vocab_size(), family
        assert found.hidden_size == wanted.hidden_size == config.get_hidden_size(), family
        assert found.architectures == config.architectures == [name], family


@pytest.mark.parametrize("kind", ["Qwen2VLConfig", "LlavaConfig", "Gemma3Config"])
def test_the_object_of_a_model_with_images_has_both_parts(tmp_path, kind):
    text = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100}
    names = {"Qwen2VLConfig": "Qwen2VLForConditionalGeneration"}
    kind_class = getattr(transformers, kind)
    has_text_part = "text_config" in kind_class.sub_configs  # not in older releases
    written = kind_class(**({"text_config": text} if has_text_part else text))
    written.architectures = [
        names.get(kind, kind.replace("Config", "ForConditionalGeneration")),
    ]
    written.save_pretrained(tmp_path)
    config = model_config(tmp_path)
    assert type(config.hf_config).__name__ == kind
    assert config.hf_config.vision_config.hidden_size == written.vision_config.hidden_size
    assert config.hf_text_config.num_hidden_layers == 2 and config.is_multimodal_model


def test_sizes_of_a_worker_follow_the_parallel_config(tmp_path):
    written = tiny_config("llama")
    written.architectures = ["LlamaForCausalLM"]
    written.save_pretrained(tmp_path)
    config, two = model_config(tmp_path), ParallelConfig(tensor_parallel_size=2)
    assert config.get_num_attention_heads(two) == written.num_attention_heads // 2
    assert config.get_num_kv_heads(two) == max(1, written.num_key_value_heads // 2)
    stages = ParallelConfig(pipeline_parallel_size=2)
    assert config.get_num_layers(stages) == -(-written.num_hidden_layers // 2)
    assert config.get_head_size() == written.head_dim
    assert config.get_total_num_kv_heads() == written.num_key_value_heads
    assert config.get_inputs_embeds_size() == written.hidden_size
    assert config.get_sliding_window() is None and not config.is_multimodal_model
