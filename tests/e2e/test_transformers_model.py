"""Test decoders that run with the modules of transformers: they give the same tokens, or are
refused at the start.
"""

import json
import random
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.e2e.reference import (
    LIMIT,
    SHORT_TEXTS,
    TransformersReference,
    assert_all_greedy,
    random_prompts,
)
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.tiny_models import ALL_FAMILIES, DECODER, make_tiny_model, randomize
from vllm import LLM, SamplingParams
from vllm.errors import ConfigError
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.transformers_version import attention_can_mask, is_version_4

MAX_TOKENS = 5
SETTINGS: dict[str, Any] = {**SHORT_TEXTS, "skip_tokenizer_init": True}
TYPES = (
    *("afmoe", "aria_text", "biogpt", "bitnet", "cohere2_moe", "ctrl", "exaone_moe"),
    *("hyperclovax", "laguna", "mellum", "moshi", "nanochat", "persimmon"),
)
"""Types without modules here, some of them with experts."""


FEW_EXPERTS = {
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 8),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
VALUES: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in ("biogpt", "ctrl", "persimmon")},
    **dict.fromkeys(("afmoe", "laguna", "exaone_moe"), FEW_EXPERTS),
    "hyperclovax": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.25,
        "residual_multiplier": 0.5,
    },
}
"""Of types whose config has no number of key/value heads, or many experts by default; and of one
that multiplies logits by what others divide them by."""
MANY_PARAMETERS = 10_000_000

needs_backend = pytest.mark.skipif(
    not attention_can_mask(), reason="the modules of this transformers keep their own attention"
)


def make(model_type: str, folder: Path, **values: Any) -> Path:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = CONFIG_MAPPING[model_type](**DECODER | values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, 0)
    model.save_pretrained(folder)
    return folder


def skip_if_attention_is_fixed(model_type: str) -> None:
    """Skip a test if transformers 4 does not allow another attention, or makes its own masks."""
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    names = ("ALL_ATTENTION_FUNCTIONS", "create_causal_mask")
    if is_version_4() and not all(hasattr(module, name) for name in names):
        pytest.skip(f"the modules of {model_type} of this transformers keep their own attention")


def check(folder: Path, limit: float = LIMIT, **settings: Any) -> None:
    prompts = random_prompts(8, 64 - MAX_TOKENS, vocab_size=4096)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    llm = LLM(model=str(folder), **SETTINGS | settings)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_all_greedy(outputs, prompts, params, TransformersReference(folder), limit)


PRECISIONS: dict[str, tuple[float, dict[str, Any]]] = {
    "float32": (LIMIT, {}),
    "bf16": (0.2, {"dtype": "bfloat16"}),
    "int8": (0.4, {"dtype": "bfloat16", "quantization": "int8"}),
}
"""Name -> difference of log-probabilities that it may make, and arguments."""
OF_EACH_KIND: dict[str, dict[str, Any]] = {
    "smollm3": {},
    "exaone4": {
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "flex_olmo": {"num_experts": 2, "num_experts_per_tok": 2},
    "nanochat": {},
}
"""Plain layers, windows in some of them, experts that all have a share, and norms without
parameters."""


@needs_backend
@pytest.mark.parametrize(
    ("model_type", "is_tied"), list(zip(OF_EACH_KIND, cycle([False, True]), strict=False))
)
def test_they_run_in_every_precision_with_a_head_that_is_tied_or_not(model_type, is_tied, tmp_path):
    values = OF_EACH_KIND[model_type] | {"tie_word_embeddings": is_tied}
    folder = make(model_type, tmp_path, **values)
    for limit, settings in PRECISIONS.values():
        check(folder, limit, model_impl="transformers", **settings)


@needs_backend
@pytest.mark.parametrize("model_type", random.Random(0).sample(TYPES, 10))
def test_types_without_modules_here_give_the_tokens_of_transformers(model_type, tmp_path):
    folder = make(model_type, tmp_path, **VALUES.get(model_type, {}))
    skip_if_attention_is_fixed(model_type)
    check(folder)


@needs_backend
def test_other_types_are_refused_in_one_line_or_run(tmp_path):
    """Try ten more model types of this transformers: each runs, or is refused without a
    traceback.
    """
    decoders = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    others = [
        name
        for name in sorted(decoders)
        if name in CONFIG_MAPPING
        and name not in TYPES
        and decoders[name] not in ModelRegistry.supported()
    ]
    checked = 0
    for name in random.Random(0).sample(others, len(others)):
        try:
            config = CONFIG_MAPPING[name](**DECODER | {"num_key_value_heads": 4})
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        # Transformers cannot make a model of this family so small; the error may be of any class.
        except Exception:
            continue
        if sum(parameter.numel() for parameter in model.parameters()) > MANY_PARAMETERS:
            continue
        config.architectures = [decoders[name]]
        config.save_pretrained(tmp_path / name)
        try:
            LLM(str(tmp_path / name), load_format="dummy", model_impl="transformers", **SETTINGS)
        except ConfigError as error:
            assert "\n" not in str(error), name
        checked += 1
        if checked == 10:
            break
    assert checked == 10


@needs_backend
@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_a_type_that_has_modules_here_can_run_with_those_of_transformers(family, models):
    check(models(family), model_impl="transformers")


@needs_backend
@pytest.mark.parametrize(
    "model_type", ["mixtral", "granitemoeshared", "phimoe", "ernie4_5_moe", "gpt_neox"]
)
def test_checkpoints_have_other_names_than_the_modules(model_type, tmp_path):
    """Experts are stored one by one or jointly, and other modules and the output head have other
    names.
    """
    folder = make(model_type, tmp_path, num_key_value_heads=4)
    skip_if_attention_is_fixed(model_type)
    check(folder, model_impl="transformers")


@needs_backend
def test_a_checkpoint_by_another_published_name_runs(tmp_path):
    skip_if_attention_is_fixed("phimoe")
    folder = make("phimoe", tmp_path, num_key_value_heads=4)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["PhiMoEForCausalLM"]}
    path.write_text(json.dumps(config))
    check(folder, model_impl="transformers")


ROTATIONS = {
    "longrope": ("phi3_long", {}),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}


@needs_backend
@pytest.mark.parametrize("rope_type", ROTATIONS)
def test_rotations_do_not_depend_on_the_other_prompts_of_a_launch(rope_type, tmp_path):
    """Transformers chooses frequencies by the longest position of a batch. Here the longest request
    determines them, as in our own modules.
    """
    family, values = ROTATIONS[rope_type]
    folder = make_tiny_model(family, tmp_path, **values)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    short, long = random_prompts(6, 30, 4096)[3], random_prompts(6, 100, 4096)[5]
    settings = SETTINGS | {"max_model_len": 128, "max_num_batched_tokens": 256}
    found = {}
    for impl in ("vllm", "transformers"):
        llm = LLM(model=str(folder), model_impl=impl, enable_prefix_caching=False, **settings)
        for name, prompts in (("alone", [short]), ("beside a long one", [short, long])):
            output = llm.generate(prompts, params, use_tqdm=False)
            found[impl, name] = [o.outputs[0].token_ids for o in output]
    assert found["transformers", "beside a long one"] == found["vllm", "beside a long one"]
    assert found["transformers", "alone"] == found["vllm", "beside a long one"][:1]


@needs_backend
def test_prompts_with_a_common_beginning_share_its_blocks(tmp_path):
    folder = make("smollm3", tmp_path)
    prompt = random_prompts(6, 50, 4096)[5]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    llm = LLM(model=str(folder), model_impl="transformers", **SETTINGS)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    reference = TransformersReference(folder)
    assert_all_greedy([first, second], [prompt, prompt], params, reference)


@needs_backend
@pytest.mark.parametrize(
    ("mode", "model_type"),
    [
        ("HPU graphs", "smollm3"),
        ("HPU graphs", "exaone4"),
        pytest.param("torch.compile", "smollm3", marks=pytest.mark.exhaustive),
    ],
)
def test_they_run_on_the_simulated_card(mode, model_type, tmp_path):
    lazy, eager = MODES[mode]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **FEW_BUCKETS) as bridge:
        before = bridge.counters()
        check(make(model_type, tmp_path), enforce_eager=eager, model_impl="transformers")
        assert bridge.counters().cpu_fallbacks == before.cpu_fallbacks


@needs_backend
def test_their_weights_can_be_stored_in_int8(models):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    folder = models("llama")
    prompt = {"prompt_token_ids": list(range(20, 40))}
    found = [
        LLM(model=str(folder), model_impl=impl, quantization="int8", **SETTINGS)
        .generate(prompt, params, use_tqdm=False)[0]
        .outputs[0]
        .token_ids
        for impl in ("vllm", "transformers")
    ]
    assert found[0] == found[1]


@needs_backend
@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (
            "diffllama",
            "DiffLlamaForCausalLM .* its 2 layers call the attention interface of transformers "
            "4 times",
        ),
        (
            "falcon_h1",
            r"FalconH1ForCausalLM .* layers.0.mamba \(FalconH1Mixer\) stores data of earlier",
        ),
        ("falcon", "FalconForCausalLM .* attention implementation can only be one of a fixed list"),
        ("doge", "DogeForCausalLM .* its attention uses its own mask"),
        ("persimmon", r"PersimmonForCausalLM .* config.json describes \(4, 2, 2\) heads of 16"),
        ("modernbert-decoder", "module 'lm_head' takes part in computing the logits"),
        ("gpt_oss", "GptOssForCausalLM .* its attention is not causal, or has attention sinks"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(model_type, message, tmp_path):
    folder = make(model_type, tmp_path)
    if is_version_4():  # transformers 4 refuses some families for other reasons
        message += "|one of a fixed list|its attention uses its own mask"
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(folder), model_impl="transformers", **SETTINGS)


@needs_backend
@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_and_values_are_refused(family, tmp_path):
    """In the modules of Gemma 3n and 4, each layer would attend to its own cache."""
    if family not in ALL_FAMILIES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    folder = make_tiny_model(family, tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"num_kv_shared_layers in config.json must be 0, got 2: .* Use model_impl='vllm'",
    ):
        LLM(model=str(folder), model_impl="transformers", **SETTINGS)


@needs_backend
def test_a_model_whose_tokens_meet_outside_of_attention_is_refused(tmp_path, monkeypatch):
    """An example is a convolution that no name or argument reveals."""
    folder = make("smollm3", tmp_path)
    mlp = transformers.models.smollm3.modeling_smollm3.SmolLM3MLP
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(
        ConfigError, match="depends on neighbouring tokens in another way than by attention"
    ):
        LLM(model=str(folder), model_impl="transformers", **SETTINGS)


@needs_backend
def test_a_type_that_is_not_of_the_architecture_is_refused(tmp_path):
    folder = make("smollm3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["DiffLlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"model_type 'smollm3' .* another class, SmolLM3ForCausalLM"
    ):
        LLM(model=str(folder), model_impl="transformers", **SETTINGS)


@needs_backend
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lm_head", "its logits differ from output_head\\(hidden_states\\)"),
        ("embed_tokens", "its token embedding does more than scale the entries of a table"),
    ],
)
def test_what_a_model_adds_to_its_embedding_or_logits_is_noticed(
    change, message, tmp_path, monkeypatch
):
    """An example is a scale by a key of config.json that this version does not know."""
    folder = make("smollm3", tmp_path)
    module = transformers.models.smollm3.modeling_smollm3
    whole, decoder = module.SmolLM3ForCausalLM, module.SmolLM3Model
    forward, build = whole.forward, decoder.__init__

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    def with_offset(self, config):
        build(self, config)
        self.embed_tokens.register_forward_hook(lambda _, args, out: out + 1)

    if change == "lm_head":
        monkeypatch.setattr(whole, "forward", scaled)
    else:
        monkeypatch.setattr(decoder, "__init__", with_offset)
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(folder), model_impl="transformers", **SETTINGS)


def test_with_the_modules_of_this_package_only_other_types_are_refused(tmp_path):
    folder = make("nanochat", tmp_path)
    with pytest.raises(ConfigError, match=r"'NanoChatForCausalLM' .* is not supported with"):
        LLM(model=str(folder), model_impl="vllm", **SETTINGS)


@needs_backend
def test_the_head_of_a_tied_model_is_its_embedding(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path)
    check(folder, model_impl="transformers")


def test_a_transformers_that_is_too_old_is_named(monkeypatch, models):
    name = "vllm.model_executor.models.transformers_model.attention_can_mask"
    monkeypatch.setattr(name, lambda: False)
    with pytest.raises(ConfigError, match=r"transformers \d.* is too old, 4.53 is the first"):
        LLM(model=str(models("llama")), model_impl="transformers", **SETTINGS)
