"""Test which values `speculative_config` accepts."""

import pytest

from vllm.config.arch.speculators import method_of_config
from vllm.config.speculative import DraftOptions, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError


def drafts_of(**given) -> DraftOptions | None:
    return SpeculativeConfig(speculative_config=given).drafts


def test_defaults_and_the_names_of_the_fork():
    assert SpeculativeConfig().drafts is None
    ngram = drafts_of(method="ngram")
    assert (ngram.num_speculative_tokens, ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (
        32,
        2,
        8,
    )
    assert drafts_of(method="suffix").num_speculative_tokens == 32
    assert drafts_of(method="ngram", prompt_lookup_max=1).prompt_lookup_min == 1
    args = EngineArgs(
        speculative_model="[ngram]",
        num_speculative_tokens=3,
        ngram_prompt_lookup_max=4,
        ngram_prompt_lookup_min=2,
        speculative_disable_by_batch_size=8,
    )
    found = SpeculativeConfig(speculative_config=args.speculative_config).drafts
    assert found == DraftOptions(
        method="ngram",
        num_speculative_tokens=3,
        prompt_lookup_max=4,
        prompt_lookup_min=2,
        disable_by_batch_size=8,
    )


def test_a_speculator_is_a_model_or_part_of_it():
    found = drafts_of(method="eagle3", model="some/head")
    assert (found.model, found.num_speculative_tokens) == ("some/head", 4)
    assert drafts_of(method="mtp").model is None


@pytest.mark.parametrize(
    ("config", "name", "method"),
    [
        ({"model_type": "mlp_speculator"}, "a/b", "mlp_speculator"),
        ({"model_type": "medusa"}, "a/b", "medusa"),
        ({"medusa_num_heads": 2, "model_type": "llama"}, "a/b", "medusa"),
        ({"draft_vocab_size": 32000, "architectures": ["LlamaForCausalLM"]}, "a/b", "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "a/b", "eagle3"),
        ({"num_hidden_layers": 1}, "yuhuili/EAGLE-llama2-chat-7B", "eagle"),
        ({"num_hidden_layers": 1}, "eagle/tiny-llama", "draft_model"),
        ({"num_hidden_layers": 12}, "a/eagle-llama", "draft_model"),
    ],
)
def test_the_method_is_found_from_the_config(config, name, method):
    assert method_of_config(config, name) == method


def test_a_method_may_have_the_name_that_a_model_gives_it():
    assert drafts_of(method="deepseek_mtp").method == "mtp"


def test_a_model_without_a_method_makes_drafts():
    args = EngineArgs(
        speculative_model="draft/model",
        num_speculative_tokens=5,
        speculative_model_quantization="int8",
        speculative_max_model_len=512,
    )
    found = drafts_of(**args.speculative_config)
    assert (found.quantization, found.max_model_len) == ("int8", 512)
    assert (found.method, found.model, found.num_speculative_tokens) == (
        "draft_model",
        "draft/model",
        5,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 5}, "needs the key 'method'"),
        ({"method": "magic"}, "method must be one of"),
        ({"method": "ngram", "tokens": 5}, "has the unknown key 'tokens'"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 1000}, "at most 64, got 1000"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "must not exceed"),
        ({"method": "draft_model"}, "needs the key 'model'"),
        ({"method": "medusa"}, "medusa needs the key 'model'"),
        ({"model": "draft", "quantization": 4}, "quantization must be a string, got 4"),
        ({"method": "ngram", "adaptive": "yes"}, "adaptive must be true or false"),
    ],
)
def test_wrong_values_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        drafts_of(**given)
