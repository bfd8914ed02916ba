"""Transcribe with Whisper: text, time stamps, and a long sound in pieces.

    python examples/offline_inference/transcription.py openai/whisper-tiny

Without a model, it makes one of random weights, whose text means nothing. The example also
makes the sound: read your own with PyAV or soundfile, as samples of one channel from -1 to 1.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from vllm import LLM, SamplingParams

RATE = 16_000
SECONDS = 30
HEADER = "<|startoftranscript|><|en|><|transcribe|>"


def make_sound(seconds: float) -> np.ndarray:
    """Return a melody with pauses."""
    time = np.arange(int(seconds * RATE)) / RATE
    pitch = 220 * 2 ** (np.floor(time * 3) % 12 / 12)
    is_loud = np.floor(time) % 4 < 3
    return (0.3 * np.sin(2 * np.pi * pitch * time) * is_loud).astype(np.float32)


def ask(sound: np.ndarray, text: str) -> dict:
    return {"prompt": text, "multi_modal_data": {"audio": (sound, RATE)}}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else make_random_model(Path(folder)))


def run(model: str) -> None:
    llm = LLM(model, max_num_seqs=8)
    greedy = SamplingParams(temperature=0, max_tokens=60)

    sound = make_sound(8)
    (text,) = llm.generate(ask(sound, f"{HEADER}<|notimestamps|>"), greedy)
    print(f"text: {text.outputs[0].text!r}")

    # Without <|notimestamps|> the output has time stamps, in seconds from the start of the sound.
    (timed,) = llm.generate(ask(sound, HEADER), greedy)
    print(f"with times: {timed.outputs[0].text!r}")

    # A prompt has at most 30 s. The pieces of a longer sound are one batch.
    long = make_sound(70)
    pieces = [long[at : at + SECONDS * RATE] for at in range(0, len(long), SECONDS * RATE)]
    outputs = llm.generate([ask(piece, f"{HEADER}<|notimestamps|>") for piece in pieces], greedy)
    for index, output in enumerate(outputs):
        print(f"from {index * SECONDS} s: {output.outputs[0].text!r}")


def make_random_model(folder: Path) -> str:
    """Write a Whisper with random weights and a tokenizer of bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end, *others = (
        *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"),
        *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
    )
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), end]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = Tokenizer(models.BPE(vocabulary, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token=end, eos_token=end, unk_token=end
    )
    tokenizer.add_special_tokens({"additional_special_tokens": others})
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(1501)])
    tokenizer.save_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (end, *others)}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids[end])
    special["decoder_start_token_id"] = ids["<|startoftranscript|>"]
    sizes = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in SIZES.items()}
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), d_model=64, **sizes, **special, begin_suppress_tokens=None
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    generation = {
        **special,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ids["<|en|>"]},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    features = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
    (folder / "preprocessor_config.json").write_text(json.dumps(features))
    return str(folder)


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}


if __name__ == "__main__":
    main()
