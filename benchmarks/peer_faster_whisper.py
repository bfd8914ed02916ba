"""Run faster-whisper as a process that `bench_speech` asks for transcriptions.

    PYTHON -I benchmarks/peer_faster_whisper.py --model FOLDER --converted FOLDER [--threads 1]

PYTHON has faster-whisper, ctranslate2, transformers and torch; this package is not needed. `-I`
keeps the modules of this folder away from transformers, which looks for one named `kernels`. The
model is converted once, and its weights are rounded to the compute type while they are loaded.
`bench_speech` describes the protocol.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.converters import TransformersConverter
from faster_whisper import BatchedInferencePipeline, WhisperModel

RATE = 16_000
PIECE_S = 30
HEADER_TOKENS = 4
"""Of a prompt. ctranslate2 generates half of the most tokens of prompt and output together."""


class TimedModel:
    """A model of ctranslate2 that records how long its encoder takes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.encoder_s = 0.0

    def encode(self, *args: Any, **settings: Any) -> Any:
        began = time.perf_counter()
        found = self._model.encode(*args, **settings)
        self.encoder_s += time.perf_counter() - began
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def convert(model: str, folder: Path) -> None:
    """Write the weights in the format of ctranslate2, and the files that faster-whisper reads."""
    files = ["tokenizer.json", "preprocessor_config.json"]
    TransformersConverter(model, copy_files=files).convert(str(folder))


class Peer:
    """Transcribes with faster-whisper: greedy, pieces of 30 s, all outputs of one length.

    Args:
        folder: folder of the converted model.
        compute_type: float32 or int8.
        threads: threads of one model.
        batch: number of pieces that are computed together.
    """

    def __init__(self, folder: Path, compute_type: str, threads: int, batch: int) -> None:
        self._whisper = WhisperModel(
            str(folder), device="cpu", compute_type=compute_type, cpu_threads=threads
        )
        self._timed = self._whisper.model = TimedModel(self._whisper.model)
        self._batched = BatchedInferencePipeline(self._whisper)
        self._batch = batch
        self._end = self._whisper.hf_tokenizer.token_to_id("<|endoftext|>")

    def run(self, path: str, num_tokens: int) -> dict[str, float]:
        """Transcribe the samples of a file; the answer has seconds and the tokens of all pieces."""
        sound = np.load(path)
        seconds = len(sound) / RATE
        starts = np.arange(0, seconds, PIECE_S)
        self._timed.encoder_s = 0.0
        began = time.perf_counter()
        segments, _ = self._batched.transcribe(
            sound,
            language="en",
            beam_size=1,
            temperature=0.0,
            compression_ratio_threshold=None,
            log_prob_threshold=None,
            no_speech_threshold=None,
            suppress_tokens=[self._end],
            without_timestamps=True,
            max_new_tokens=2 * (num_tokens + 1) - HEADER_TOKENS,
            vad_filter=False,
            clip_timestamps=[
                {"start": float(start), "end": float(min(start + PIECE_S, seconds))}
                for start in starts
            ],
            batch_size=min(self._batch, len(starts)),
        )
        tokens = sum(len(segment.tokens) for segment in segments)
        whole_s = time.perf_counter() - began
        return {"whole_s": whole_s, "encoder_s": self._timed.encoder_s, "tokens": tokens}


def main() -> None:
    """Answer questions until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder in the format of transformers")
    parser.add_argument("--converted", type=Path, required=True, help="made if it is not there")
    parser.add_argument("--compute-type", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    if not args.converted.exists():
        convert(args.model, args.converted)
    peer = Peer(args.converted, args.compute_type, args.threads, args.batch)
    print(f"ctranslate2 {ctranslate2.__version__}", file=sys.stderr, flush=True)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
