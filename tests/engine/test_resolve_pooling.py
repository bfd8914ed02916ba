"""Test how the task of a model is chosen, by its architecture, its files and the arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_pooling_models import MODELS, add_sentence_transformers_files
from vllm.config import PoolerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser


def write(folder: Path, architecture: str, **changes: Any) -> Path:
    create, values = MODELS[architecture]
    config = create(**values, architectures=[architecture]).to_dict()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def resolve(folder: Path, **settings: Any) -> VllmConfig:
    return EngineArgs(str(folder), skip_tokenizer_init=True, **settings).create_engine_config()


def pooler(folder: Path, **settings: Any) -> PoolerConfig:
    found = resolve(folder, **settings).model.pooler
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("architecture", "changes", "settings", "want"),
    [
        ("BertModel", {}, {}, ("embed", "CLS", "normalize", False)),
        ("XLMRobertaModel", {}, {"task": "embedding"}, ("embed", "CLS", "normalize", False)),
        ("LlamaModel", {}, {}, ("embed", "LAST", "normalize", True)),
        ("Qwen2ForCausalLM", {}, {"task": "embed"}, ("embed", "LAST", "normalize", True)),
        ("Qwen2ForCausalLM", {}, {"runner": "pooling"}, ("embed", "LAST", "normalize", True)),
        ("BertModel", {}, {"runner": "pooling"}, ("embed", "CLS", "normalize", False)),
        ("LlamaModel", {}, {"convert": "embed"}, ("embed", "LAST", "normalize", True)),
        ("BertForSequenceClassification", {}, {}, ("classify", "CLS", "softmax", False)),
        ("RobertaForSequenceClassification", {}, {}, ("score", "CLS", "sigmoid", False)),
        (
            "RobertaForSequenceClassification",
            {},
            {"task": "classify"},
            ("classify", "CLS", "sigmoid", False),
        ),
        ("Qwen2ForSequenceClassification", {}, {}, ("classify", "LAST", "softmax", True)),
        (
            "BertForSequenceClassification",
            {"problem_type": "multi_label_classification"},
            {},
            ("classify", "CLS", "sigmoid", False),
        ),
        (
            "RobertaForSequenceClassification",
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            {},
            ("score", "CLS", "none", False),
        ),
        (
            "RobertaForSequenceClassification",
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            {},
            ("score", "CLS", "sigmoid", False),
        ),
    ],
)
def test_architecture_and_config_decide(architecture, changes, settings, want, tmp_path):
    found = pooler(write(tmp_path, architecture, **changes), **settings)
    assert (found.task, found.pooling_type, found.activation, found.is_causal) == want


def test_a_generative_model_generates_unless_told(tmp_path):
    folder = write(tmp_path, "Qwen2ForCausalLM")
    assert resolve(folder).model.pooler is resolve(folder, task="generate").model.pooler is None
    add_sentence_transformers_files(folder, "lasttoken")
    assert pooler(folder).task == "embed"
    assert resolve(folder, task="generate").model.pooler is None


def test_the_labels_have_their_names(tmp_path):
    names = {"0": "good", "1": "bad", "2": "ugly"}
    folder = write(tmp_path, "BertForSequenceClassification", id2label=names)
    assert pooler(folder).labels == ("good", "bad", "ugly")


def test_the_user_has_the_last_word(tmp_path):
    folder = write(tmp_path, "LlamaModel")
    override = {"pooling_type": "step", "softmax": True, "step_tag_id": 5}
    override["returned_token_ids"] = [1, 2]
    found = pooler(folder, override_pooler_config=override)
    assert (found.pooling_type, found.activation, found.step_tag_id) == ("STEP", "softmax", 5)
    assert found.returned_token_ids == (1, 2)
    assert pooler(folder, override_pooler_config={"normalize": False}).activation == "none"


def test_flags_of_the_command_line_say_the_same():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm test"))
    flags = ["--task", "embed", "--override-pooler-config", '{"pooling_type": "MEAN"}']
    args = EngineArgs.from_cli_args(parser.parse_args(flags))
    assert (args.task, args.override_pooler_config) == ("embed", {"pooling_type": "MEAN"})
    args = EngineArgs.from_cli_args(parser.parse_args(["--runner", "pooling"]))
    assert args.task == "pooling"


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("BertModel", {"task": "generate"}, "available: embed"),
        ("BertModel", {"runner": "generate"}, "available: embed"),
        ("BertModel", {"runner": "draft"}, "runner must be one of auto, generate, pooling, got"),
        ("BertModel", {"task": "classify", "convert": "embed"}, "leave one out"),
        ("BertModel", {"task": "classify"}, "available: embed"),
        ("BertForSequenceClassification", {"task": "score"}, "available: classify"),
        ("Qwen2ForCausalLM", {"task": "reward"}, "available: generate, embed"),
        (
            "Qwen2ForCausalLM",
            {"override_pooler_config": {"normalize": True}},
            "has no effect with task 'generate'",
        ),
        (
            "BertModel",
            {"override_pooler_config": {"kind": 1}},
            "has the unknown key 'kind'; accepted: ",
        ),
        ("BertModel", {"override_pooler_config": {"pooling_type": "MAX"}}, "CLS, LAST, MEAN"),
        ("BertModel", {"override_pooler_config": {"pooling_type": "STEP"}}, "step_tag_id"),
        ("BertModel", {"override_pooler_config": {"normalize": 1}}, "true or false"),
        ("BertModel", {"override_pooler_config": {"step_tag_id": "a"}}, "an integer"),
        ("BertModel", {"override_pooler_config": {"returned_token_ids": [-1]}}, "at least 0"),
        ("BertModel", {"max_num_batched_tokens": 100, "max_num_seqs": 4}, "a long prompt"),
    ],
)
def test_what_cannot_be_is_told_at_the_start(architecture, settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        resolve(write(tmp_path, architecture), **settings)


def test_prompts_run_whole_where_all_tokens_count(tmp_path):
    encoder = resolve(write(tmp_path, "BertModel"))
    assert not encoder.scheduler.enable_chunked_prefill
    assert not encoder.cache.enable_prefix_caching
    decoder = resolve(write(tmp_path, "LlamaModel"))
    assert decoder.scheduler.enable_chunked_prefill and decoder.cache.enable_prefix_caching


def test_positions_of_padding_are_not_counted(tmp_path):
    assert resolve(write(tmp_path, "RobertaModel")).scheduler.max_model_len == 128


def test_the_length_of_sentence_transformers_is_a_default(tmp_path):
    folder = add_sentence_transformers_files(write(tmp_path, "BertModel"), "mean_tokens")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 50}')
    assert resolve(folder).scheduler.max_model_len == 50
    assert resolve(folder, max_model_len=100).scheduler.max_model_len == 100


@pytest.mark.parametrize("activation", ["torch.nn.GELU", "os.system"])
def test_an_activation_that_is_not_there_is_named(activation, tmp_path):
    folder = write(
        tmp_path,
        "RobertaForSequenceClassification",
        sbert_ce_default_activation_function=activation,
    )
    with pytest.raises(ConfigError, match=f"function '{activation}'; available: Identity"):
        resolve(folder)
