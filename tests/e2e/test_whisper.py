"""Test Whisper: the tokens and log-probabilities of transformers, in any batch."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.multimodal.sound_models import make_sound
from tests.quantized_checkpoints import write as write_quantized
from tests.reach import media_of, scheduler_of
from tests.tiny_speech import RATE, TRANSCRIBE, WITH_TIMES, Reference, make_tiny_whisper
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.input.media_reader import MediaReader
from vllm.errors import ConfigError, RequestError
from vllm.lora.request import LoRARequest
from vllm.ops.cpu.operators import load_cpu_kernels
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep
from vllm.sampling_params import BeamSearchParams
from vllm.worker.parts.item_rows import KeptItems

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 60,
}
NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
LIMIT = 1e-4
SOUNDS = [make_sound(seed, size) for seed, size in enumerate((32_000, 9_000, 20_001, 400))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **ENGINE)


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


def ask(sound, text=TRANSCRIBE, **others):
    return {"prompt": text, "multi_modal_data": {"audio": (sound, RATE)}, **others}


def num_encoded_of(llm):
    return media_of(llm, KeptItems).num_encoded


def tokens_of(output, index=0):
    return list(output.outputs[index].token_ids)


def logprobs_of(output, index=0):
    sample = output.outputs[index]
    pairs = zip(sample.logprobs, sample.token_ids, strict=True)
    return np.array([logprobs[token].logprob for logprobs, token in pairs])


def assert_equal(outputs, sounds, reference, num_tokens=NUM_TOKENS):
    """Compare the greedy outputs for each sound with the expected ones."""
    for output, sound in zip(outputs, sounds, strict=True):
        tokens, logprobs = reference.greedy(sound, output.prompt_token_ids, num_tokens)
        assert tokens_of(output) == tokens
        assert np.abs(logprobs_of(output) - logprobs).max() < LIMIT


@pytest.mark.parametrize("text", [TRANSCRIBE, WITH_TIMES, f"<|startofprev|> so far{TRANSCRIBE}"])
def test_several_sounds_in_one_batch_are_those_of_transformers(llm, reference, text, monkeypatch):
    run, in_one_call = FusedDecodeStep.run, []

    def noted(self, *args, **options):
        found = run(self, *args, **options)
        in_one_call.append(found is not None)
        return found

    monkeypatch.setattr(FusedDecodeStep, "run", noted)
    outputs = llm.generate([ask(sound, text) for sound in SOUNDS], GREEDY)
    assert_equal(outputs, SOUNDS, reference)
    assert in_one_call == [True] * (NUM_TOKENS - 1) or load_cpu_kernels() is None
    assert len({tuple(tokens_of(output)) for output in outputs}) == len(SOUNDS)


def test_kinds_of_prompts_share_a_batch(llm, reference):
    texts = [TRANSCRIBE, WITH_TIMES, f"{TRANSCRIBE} and", f"{WITH_TIMES}<|0.00|> and"]
    outputs = llm.generate(
        [ask(sound, text) for sound, text in zip(SOUNDS, texts, strict=True)], GREEDY
    )
    assert_equal(outputs[:2], SOUNDS[:2], reference)
    # Text after the tokens of the task is the beginning of the output.
    size = len(llm.get_tokenizer()(TRANSCRIBE, add_special_tokens=False)["input_ids"])
    for output, sound in zip(outputs[2:], SOUNDS[2:], strict=True):
        ids = output.prompt_token_ids
        begin = size if output is outputs[2] else size - 1
        expected, _ = reference.greedy(sound, ids, NUM_TOKENS, begin=begin)
        assert tokens_of(output) == expected


def test_a_sound_is_encoded_once(llm, reference):
    sound = make_sound(11, 12_345)
    before = num_encoded_of(llm)
    prompts = [ask(sound), ask(sound, WITH_TIMES), ask(make_sound(12, 8_000)), ask(sound.copy())]
    outputs = llm.generate(prompts, GREEDY)
    assert num_encoded_of(llm) == before + 2
    assert_equal(outputs[:2], [sound] * 2, reference)
    assert tokens_of(outputs[3]) == tokens_of(outputs[0])


def test_another_sound_behind_the_same_prompt_shares_no_blocks(llm, reference):
    long = f"<|startofprev|>{'ab ' * 15}{TRANSCRIBE}"
    sounds = [make_sound(21, 16_000), make_sound(22, 16_000)]
    for sound, num_cached in ((sounds[0], 0), (sounds[1], 0), (sounds[0], 48)):
        (output,) = llm.generate(ask(sound, long), GREEDY)
        assert output.num_cached_tokens == num_cached
        assert_equal([output], [sound], reference)


def test_samples_and_beams_read_one_sound(llm, reference):
    before = num_encoded_of(llm)
    sound = make_sound(31, 30_000)
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, logprobs=0)
    (output,) = llm.generate(ask(sound, WITH_TIMES), params)
    assert len({tuple(tokens_of(output, index)) for index in range(3)}) > 1
    for index in range(3):
        ids = [*output.prompt_token_ids, *tokens_of(output, index)]
        logprobs = reference.followed(sound, ids, len(output.prompt_token_ids))
        assert np.abs(logprobs_of(output, index) - logprobs).max() < LIMIT
    width = 4
    beams = llm.beam_search(
        [ask(sound)], BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
    )[0].sequences
    (greedy,) = llm.generate(ask(sound), GREEDY)
    size = len(greedy.prompt_token_ids)
    found = [(beam.tokens[size:], beam.cum_logprob) for beam in beams]
    expected = reference.beams(sound, greedy.prompt_token_ids, width, 6)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert np.allclose([s for _, s in found], [s for _, s in expected], atol=LIMIT)
    assert num_encoded_of(llm) == before + 1


@pytest.mark.parametrize("text", [TRANSCRIBE, WITH_TIMES])
def test_chunks_and_preemption_change_nothing(folder, reference, text):
    settings = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 12}
    llm = LLM(str(folder), **{**ENGINE, **settings, "enable_chunked_prefill": True})
    long = f"<|startofprev|>{'ab ' * 12}{text}"
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    outputs = llm.generate([ask(sound, long) for sound in SOUNDS], params)
    assert scheduler_of(llm).num_preemptions
    assert_equal(outputs, SOUNDS, reference, 40)


def test_an_output_ends_at_the_last_position(llm, reference):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logprobs=0)
    (output,) = llm.generate(ask(SOUNDS[0]), params)
    assert output.outputs[0].finish_reason == "length"
    num_tokens = len(output.outputs[0].token_ids)
    assert len(output.prompt_token_ids) + num_tokens == 96
    assert_equal([output], SOUNDS[:1], reference, num_tokens)


def test_the_end_token_ends_an_output(llm, reference):
    end = reference.config["eos_token_id"]
    bias = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logit_bias={end: 100})
    (output,) = llm.generate(ask(SOUNDS[0]), bias)
    # The first token may not be the end token.
    assert output.outputs[0].finish_reason == "stop" and len(tokens_of(output)) == 2


def test_language_and_silence_have_the_probabilities_of_transformers(llm, reference):
    speech = llm.llm_engine.input_processor.media.speech(llm.get_tokenizer())
    languages = speech.language_tokens()
    for sound in SOUNDS:
        prompt = {
            "prompt_token_ids": speech.start_prompt(),
            "multi_modal_data": {"audio": (sound, RATE)},
        }
        logits = reference.logits(sound, speech.start_prompt())[0]
        detect = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(languages))
        token = int(reference.model.detect_language(reference.features(sound))[0])
        assert tokens_of(llm.generate(prompt, detect)[0]) == [token]
        silent = speech.no_speech_token
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[silent], logprobs=0)
        (found,) = logprobs_of(llm.generate(prompt, params)[0])
        assert abs(found - float(logits.log_softmax(-1)[silent])) < LIMIT


def test_prompts_of_encoder_and_decoder_are_those_of_the_decoder_with_the_sound(llm):
    (want,) = llm.generate(ask(SOUNDS[1]), GREEDY)
    encoder = {"prompt": "", "multi_modal_data": {"audio": (SOUNDS[1], RATE)}}
    for decoder in (
        TRANSCRIBE,
        want.prompt_token_ids,
        {"prompt": TRANSCRIBE},
        {"prompt_token_ids": want.prompt_token_ids},
    ):
        prompt = {"encoder_prompt": encoder, "decoder_prompt": decoder}
        (found,) = llm.generate(prompt, GREEDY)
        assert found.prompt_token_ids == want.prompt_token_ids
        assert tokens_of(found) == tokens_of(want)


def test_other_rates_are_resampled_and_other_types_are_accepted(llm):
    pytest.importorskip("av")
    seconds = np.arange(44_100) / 44_100
    sound = np.sin(2 * np.pi * 440 * seconds).astype(np.float32)
    outputs = llm.generate(
        [
            {"prompt": TRANSCRIBE, "multi_modal_data": {"audio": given}}
            for given in ((sound, 44_100), [(sound.astype(np.float64), 44_100)])
        ],
        GREEDY,
    )
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])


SOUND = SOUNDS[3]
NOT_FINITE = np.array([0.1, np.nan] * 400, np.float32)
ENCODER = {"prompt": "", "multi_modal_data": {"audio": (SOUND, RATE)}}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (TRANSCRIBE, "needs exactly one 'audio' item in multi_modal_data of each prompt, got none"),
        ([1, 2], "got none"),
        ({"prompt": TRANSCRIBE, "multi_modal_data": {"audio": []}}, "got none"),
        ({"prompt": TRANSCRIBE, "multi_modal_data": {"image": SOUND}}, "reads sounds and no other"),
        (ask(np.zeros(0, np.float32)), r"\['audio'\]\[0\].*at least one.*got \(ndarray \[0\] of"),
        (ask(NOT_FINITE), r"\['audio'\]\[0\].*of float32 with NaN"),
        (ask(np.zeros(32_001, np.float32)), "has 2 s, .* at most 2 s. .*/v1/audio/transcriptions"),
        (ask(np.zeros((3, 4, 5), np.float32)), r"\['audio'\]\[0\] must be"),
        ({"prompt": TRANSCRIBE, "multi_modal_data": {"audio": (SOUND, 0)}}, r"of float32, 0\)$"),
        (
            {"prompt": TRANSCRIBE, "multi_modal_data": {"audio": (SOUND, "x")}},
            "got str$",
        ),
        (ask(SOUND, ""), "prompt is empty"),
        ({"encoder_prompt": ENCODER, "decoder_prompt": None}, "decoder_prompt must be .*missing"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "encoder_prompt must be a dict"),
        (
            {"encoder_prompt": {**ENCODER, "prompt": "a"}, "decoder_prompt": "b"},
            "the encoder reads no text",
        ),
        ({"encoder_prompt": ENCODER, "decoder_prompt": ask(SOUND)}, "put media into encoder_"),
        ({"encoder_prompt": ENCODER, "decoder_prompt": "b", "prompt": "c"}, "got prompt"),
        ({"encoder_prompt": {"prompt": ""}, "decoder_prompt": TRANSCRIBE}, "got none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_prompt_is_refused_in_one_line(llm, prompt, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompt, GREEDY)
    assert len(str(caught.value).splitlines()) == 1
    assert not scheduler_of(llm).media.holders


def test_a_conversation_is_refused(llm):
    with pytest.raises(RequestError, match=r"no conversations: use POST /v1/audio/transcriptions"):
        llm.chat([{"role": "user", "content": "a"}])


def test_two_sounds_are_refused(folder):
    llm = LLM(str(folder), **ENGINE, limit_mm_per_prompt={"audio": 2})
    prompt = {"prompt": TRANSCRIBE, "multi_modal_data": {"audio": [(SOUND, RATE)] * 2}}
    with pytest.raises(RequestError, match=r"exactly one 'audio' item .*, got 2"):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_scheduler_steps": 4},
        {"enforce_eager": True, "async_scheduling": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("text", [TRANSCRIBE, WITH_TIMES], ids=["text", "times"])
def test_other_engines_give_the_same(folder, reference, text, settings):
    llm = LLM(str(folder), **ENGINE, **settings)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([ask(sound, text) for sound in SOUNDS], params)
    for output, sound in zip(outputs, SOUNDS, strict=True):
        assert tokens_of(output) == reference.greedy(sound, output.prompt_token_ids, NUM_TOKENS)[0]


def test_a_server_joins_both_prompts_before_it_reads_media(llm):
    reader = MediaReader(lambda: llm.llm_engine.input_processor)
    prompt = {"encoder_prompt": {"prompt": "", "cache_salt": "a"}, "decoder_prompt": [1, 2]}
    found = asyncio.run(reader.read(prompt))
    reader.shutdown()
    assert found == {"cache_salt": "a", "prompt_token_ids": [1, 2]}


@pytest.mark.exhaustive
def test_the_engine_of_a_server_gives_the_same(folder, reference):
    async def run():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **ENGINE))

        async def one(index, prompt):
            return [o async for o in engine.generate(prompt, GREEDY, str(index))][-1]

        encoder = {"prompt": "", "multi_modal_data": {"audio": (SOUNDS[0], RATE)}}
        prompts = [
            {"encoder_prompt": encoder, "decoder_prompt": WITH_TIMES},
            *(ask(sound, WITH_TIMES) for sound in SOUNDS[1:]),
        ]
        try:
            return await asyncio.gather(*(one(*each) for each in enumerate(prompts)))
        finally:
            engine.shutdown()

    assert_equal(asyncio.run(run()), SOUNDS, reference)


def write_adapter(folder, modules, reference):
    """Write an adapter, and return it with the matrices that it adds to the weights."""
    generator, tensors, added = torch.Generator().manual_seed(1), {}, {}
    for name in modules:
        outputs, inputs = reference.model.get_submodule(name).weight.shape
        a, b = (
            torch.randn(shape, generator=generator) * 0.2 for shape in ((4, inputs), (outputs, 4))
        )
        prefix = f"base_model.model.{name}.lora_"
        tensors |= {f"{prefix}A.weight": a, f"{prefix}B.weight": b}
        added[name] = b @ a
    names = sorted({name.rpartition(".")[2] for name in modules})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": names}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("adapter", 1, str(folder)), added


def test_adapters_change_the_decoder_and_not_what_requests_share(folder, tmp_path):
    reference, layer = Reference(folder), "model.decoder.layers.1"
    llm = LLM(str(folder), **ENGINE, enable_lora=True)
    own = ("self_attn.v_proj", "self_attn.out_proj", "encoder_attn.q_proj", "encoder_attn.out_proj")
    names = [f"{layer}.{name}" for name in (*own, "fc1", "fc2")]
    adapter, added = write_adapter(tmp_path / "own", names, reference)
    plain, adapted = llm.generate([ask(SOUNDS[0])] * 2, GREEDY, lora_request=[None, adapter])
    assert_equal([plain], SOUNDS[:1], reference)
    for name, more in added.items():
        reference.model.get_submodule(name).weight.data += more
    assert_equal([adapted], SOUNDS[:1], reference)
    assert tokens_of(plain) != tokens_of(adapted)
    for index, name in enumerate(
        (f"{layer}.encoder_attn.k_proj", "model.encoder.layers.0.self_attn.q_proj")
    ):
        shared, _ = write_adapter(tmp_path / str(index), [name], reference)
        with pytest.raises(RequestError, match=f"{name} does not belong to a layer"):
            llm.generate(ask(SOUNDS[0]), GREEDY, lora_request=shared)


@dataclass(frozen=True)
class Variant:
    """A kind of checkpoint."""

    values: dict[str, Any]
    """Values of config.json."""
    text: str = TRANSCRIBE


VARIANTS = {
    "deeper encoder": Variant({"encoder_layers": 5, "decoder_layers": 1}),
    "more mel bins": Variant({"num_mel_bins": 16}),
    "wide decoder": Variant({"decoder_ffn_dim": 160, "decoder_attention_heads": 6}),
    "own head": Variant({"tie_word_embeddings": False}),
    "relu": Variant({"activation_function": "relu"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_sizes_are_those_of_transformers(name, tmp_path):
    variant = VARIANTS[name]
    folder = make_tiny_whisper(tmp_path, seed=3, **variant.values)
    llm = LLM(str(folder), **ENGINE)
    outputs = llm.generate([ask(sound, variant.text) for sound in SOUNDS[:2]], GREEDY)
    assert_equal(outputs, SOUNDS[:2], Reference(folder))


def test_a_model_of_english_has_no_language(tmp_path):
    folder = make_tiny_whisper(tmp_path, is_english=True)
    llm = LLM(str(folder), **ENGINE)
    speech = llm.llm_engine.input_processor.media.speech(llm.get_tokenizer())
    assert not speech.is_multilingual
    for has_times in (False, True):
        prompt = {
            "prompt_token_ids": speech.prompt(language=None, with_times=has_times),
            "multi_modal_data": {"audio": (SOUNDS[0], RATE)},
        }
        assert_equal(llm.generate(prompt, GREEDY), SOUNDS[:1], Reference(folder))


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantized_weights_stay_near(folder, reference, quantization):
    llm = LLM(str(folder), **{**ENGINE, "quantization": quantization})
    (output,) = llm.generate(ask(SOUNDS[0]), GREEDY)
    ids = [*output.prompt_token_ids, *tokens_of(output)]
    logprobs = reference.followed(SOUNDS[0], ids, len(output.prompt_token_ids))
    assert 0 < np.abs(logprobs_of(output) - logprobs).max() < 0.5


@pytest.mark.parametrize("kind", ["gptq-4", "fp8-static"])
def test_a_quantized_decoder_has_the_values_of_its_checkpoint(kind, tmp_path):
    sizes = {"d_model": 64, "decoder_ffn_dim": 128}
    folder = make_tiny_whisper(tmp_path / "dense", **sizes)
    found = []
    for copy in write_quantized(kind, tmp_path, folder, skipped=("model.encoder",)):
        for file in folder.iterdir():
            if not (copy / file.name).exists():
                shutil.copy(file, copy)
        (output,) = LLM(str(copy), **ENGINE).generate(ask(SOUNDS[0]), GREEDY)
        found.append((tokens_of(output), logprobs_of(output)))
    (tokens, logprobs), (dense_tokens, dense_logprobs) = found
    assert tokens == dense_tokens
    # On the CPU, int4 matmuls round their inputs.
    assert np.abs(logprobs - dense_logprobs).max() < (0.1 if kind == "gptq-4" else LIMIT)


def test_bfloat16_is_as_near_as_transformers(folder, reference):
    llm = LLM(str(folder), **{**ENGINE, "dtype": "bfloat16"})
    (output,) = llm.generate(ask(SOUNDS[0]), GREEDY)
    size = len(output.prompt_token_ids)
    ids = [*output.prompt_token_ids, *tokens_of(output)]
    exact = reference.followed(SOUNDS[0], ids, size)
    theirs = Reference(folder, torch.bfloat16).followed(SOUNDS[0], ids, size)
    error, their_error = (np.abs(np.array(x) - exact).max() for x in (logprobs_of(output), theirs))
    assert error < max(2 * their_error, 0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 97}, "max_model_len"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1 .* an encoder"),
        (
            {"limit_mm_per_prompt": {"audio": 0}},
            "input of sounds is not available: limit_mm_per_prompt",
        ),
        ({"hf_overrides": {"d_model": 50}}, "hidden_size|d_model"),
    ],
)
def test_an_engine_that_cannot_run_says_why(folder, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(folder), **ENGINE, **settings)
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_without_settings_of_features_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no settings of a feature extractor"):
        LLM(str(copy), **ENGINE)


@pytest.mark.parametrize(
    "mode",
    [
        "HPU graphs",
        *(
            pytest.param(mode, marks=pytest.mark.exhaustive)
            for mode in ("lazy", "torch.compile", "eager")
        ),
    ],
)
def test_on_a_simulated_card_nothing_compiles_after_the_warm_up(folder, reference, mode):
    lazy, eager = MODES[mode]
    texts = [TRANSCRIBE, WITH_TIMES, f"<|startofprev|> so far{TRANSCRIBE}", TRANSCRIBE]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **FEW_BUCKETS) as bridge:
        llm = LLM(str(folder), **ENGINE, enforce_eager=eager)
        before = bridge.counters()
        prompts = [ask(sound, text) for sound, text in zip(SOUNDS, texts, strict=True)]
        outputs = llm.generate(prompts, params)
        outputs += llm.generate([ask(SOUNDS[0], text) for text in texts[:2]], params)
        assert num_encoded_of(llm) == len(SOUNDS)
        assert bridge.counters().compilations == before.compilations
    for output, sound in zip(outputs, [*SOUNDS, *SOUNDS[:1] * 2], strict=True):
        assert tokens_of(output) == reference.greedy(sound, output.prompt_token_ids, NUM_TOKENS)[0]
