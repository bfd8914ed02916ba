"""Small random Whisper models with tokenizer, feature extractor and generation_config.json, and
their outputs by transformers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers.generation import logits_process

from tests.kept_folders import kept
from tests.multimodal.sound_models import SETTINGS
from tests.tiny_models import randomize
from vllm.transformers_utils.transformers_version import is_version_4

SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"),
    *("<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
NUM_TIMES = 101
"""Steps of 20 ms in 2 s, with both ends."""
RATE = 16000
TRANSCRIBE = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
WITH_TIMES = "<|startoftranscript|><|en|><|transcribe|>"


def _make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the special tokens of Whisper."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), SPECIAL[0]]
    vocabulary = {token: index for index, token in enumerate(names)}
    if is_version_4():
        with TemporaryDirectory() as folder:
            files = Path(folder, "vocab.json"), Path(folder, "merges.txt")
            files[0].write_text(json.dumps(vocabulary))
            files[1].write_text("#version: 0.2\n")
            tokenizer = transformers.WhisperTokenizerFast(*map(str, files))
    else:
        tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(NUM_TIMES)])
    tokenizer.set_prefix_tokens(language="english", task="transcribe")
    return tokenizer


@kept
def make_tiny_whisper(
    folder: Path, *, seed: int = 0, is_english: bool = False, **values: Any
) -> Path:
    """Write a small random Whisper that reads 2 s of sound.

    Args:
        folder: folder of the model, created if it does not exist.
        seed: seed of the weights.
        is_english: the model only supports English.
        values: values of config.json that replace the usual ones.
    """
    tokenizer = _make_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    end = ids["<|endoftext|>"]
    config = transformers.WhisperConfig(
        **{
            "vocab_size": len(tokenizer),
            "num_mel_bins": SETTINGS["feature_size"],
            "max_source_positions": 100,
            "max_target_positions": 96,
            "d_model": 48,
            "encoder_layers": 3,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 80,
            "decoder_start_token_id": ids["<|startoftranscript|>"],
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "begin_suppress_tokens": None,
            **values,
        }
    )
    model = transformers.WhisperForConditionalGeneration(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation = {
        "begin_suppress_tokens": [tokenizer.convert_tokens_to_ids("a"), end],
        "bos_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": end,
        "is_multilingual": True,
        "lang_to_id": {token: ids[token] for token in ("<|en|>", "<|de|>")},
        "max_initial_timestamp_index": 10,
        "max_length": config.max_target_positions,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "pad_token_id": end,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": [5, 6, 7, *(ids[t] for t in SPECIAL[1:2] + SPECIAL[4:9])],
        "task_to_id": {t: ids[f"<|{t}|>"] for t in ("transcribe", "translate")},
    }
    if is_english:
        generation["is_multilingual"] = False
        del generation["lang_to_id"], generation["task_to_id"]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    settings = {**SETTINGS, "feature_size": config.num_mel_bins}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


class Reference:
    """A Whisper of transformers in float32.

    Args:
        folder: folder of the model.
        dtype: dtype of its weights.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = transformers.WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.extract = transformers.WhisperFeatureExtractor.from_pretrained(folder)
        self.config = json.loads((folder / "generation_config.json").read_text())

    def features(self, sound: np.ndarray) -> torch.Tensor:
        """Return the features [1, mel bins, frames]."""
        found = self.extract(sound, sampling_rate=RATE, return_tensors="pt")
        return found["input_features"].to(self.model.dtype)

    @torch.inference_mode()
    def states(self, sound: np.ndarray) -> Any:
        """Return the outputs of the encoder."""
        return self.model.model.encoder(self.features(sound))

    @torch.inference_mode()
    def logits(self, sound: np.ndarray, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [n, V] of the tokens that follow each of n tokens."""
        ids = torch.tensor([list(token_ids)])
        found = self.model(encoder_outputs=self.states(sound), decoder_input_ids=ids)
        return found.logits[0].float()

    @torch.inference_mode()
    def greedy(
        self, sound: np.ndarray, prompt: Sequence[int], max_tokens: int, *, begin: int | None = None
    ) -> tuple[list[int], list[float]]:
        """Return tokens chosen by the rules of `generate`, and the log-probability of each. An end
        token does not stop the output.

        Args:
            sound: sound of the prompt.
            prompt: tokens of the prompt.
            max_tokens: length of the output.
            begin: index of the first token that counts as output; None: the length of the prompt.
        """
        states, found, logprobs = self.states(sound), [], []
        processors = self._processors(len(prompt) if begin is None else begin, prompt)
        while len(found) < max_tokens:
            scores = self._scores(states, [*prompt, *found], processors)
            token = int(scores.argmax())
            logprobs.append(float(scores[token]))
            found.append(token)
        return found, logprobs

    @torch.inference_mode()
    def followed(self, sound: np.ndarray, ids: Sequence[int], begin: int) -> list[float]:
        """Return the log-probabilities of tokens from the index `begin` on, with the rules of
        `generate`."""
        states, processors = self.states(sound), self._processors(begin, ids[:begin])
        return [
            float(self._scores(states, ids[:index], processors)[ids[index]])
            for index in range(begin, len(ids))
        ]

    @torch.inference_mode()
    def beams(
        self, sound: np.ndarray, prompt: Sequence[int], width: int, max_tokens: int
    ) -> list[tuple[list[int], float]]:
        """Return the best outputs of this length, and their total log-probabilities."""
        states, processors = self.states(sound), self._processors(len(prompt), prompt)
        live: list[tuple[list[int], float]] = [([], 0.0)]
        for _ in range(max_tokens):
            grown = []
            for tokens, total in live:
                scores = self._scores(states, [*prompt, *tokens], processors)
                best = scores.topk(width)
                grown += [
                    ([*tokens, int(token)], total + float(score))
                    for score, token in zip(*best, strict=True)
                ]
            live = sorted(grown, key=lambda beam: -beam[1])[:width]
        return live

    def _scores(self, states: Any, ids: Sequence[int], processors: Sequence[Any]) -> torch.Tensor:
        """Return the log-probabilities [V] of the next token."""
        given = torch.tensor([list(ids)])
        logits = self.model(encoder_outputs=states, decoder_input_ids=given).logits[:, -1].float()
        for processor in processors:
            logits = processor(given, logits)
        return logits[0].log_softmax(-1)

    def _processors(self, begin: int, prompt: Sequence[int]) -> list[Any]:
        """Return the processors that `generate` has for a prompt."""
        config = transformers.GenerationConfig(**self.config)
        found = [
            logits_process.SuppressTokensAtBeginLogitsProcessor(
                config.begin_suppress_tokens, begin
            ),
            logits_process.SuppressTokensLogitsProcessor(config.suppress_tokens),
        ]
        if config.no_timestamps_token_id not in prompt:
            found.append(logits_process.WhisperTimeStampLogitsProcessor(config, begin))
        return found
