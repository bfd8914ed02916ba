"""Time Whisper on the CPU: seconds for each second of sound, against faster-whisper.

    python -m benchmarks.bench_speech [--peer-python PYTHON] [--shape tiny] [--seconds 30 600]

The models have the shapes of Whisper tiny and base and random weights; nothing is downloaded. The
sounds are made here, a new one for each round. All outputs have the same number of tokens, greedy,
in pieces of 30 s, so that every engine computes the same. PYTHON is the interpreter of an
environment with faster-whisper, ctranslate2, transformers and torch, where `peer_faster_whisper.py`
converts the same weights; without it only the engines of this package are measured.

Every engine is a process with `--threads` threads; the others are stopped (SIGSTOP) while one runs.
In a round they run one after another, and every second round goes through them backwards. All
pieces of a sound are sent at once, and `--batch` of them are computed together. Figures of each
engine, with their median, quartiles, least and largest value:

    s_per_s         seconds for a second of sound
    encoder_share   the part of them that the encoder takes
    rest_s_per_s    the others: features, decoder, and what is around them
    ratio           the seconds of the peer with the same weights, in the same round, divided by
                    ours: above 1 we are faster; `encoder_ratio` and `rest_ratio` are the
                    ratios of these parts

An engine reads lines with {"path": samples in a .npy file, "num_tokens": of each piece}, and
answers with {"whole_s", "encoder_s", "tokens"}.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

from benchmarks.bench_checkpoints import READY, Engine, spread
from benchmarks.common import fixed_length, report
from vllm import LLM
from vllm.multimodal.interface.languages import LANGUAGE_NAMES

RATE = 16_000
PIECE_S = 30
SHAPES = {"tiny": (384, 4, 6, 1536), "base": (512, 6, 8, 2048)}
"""Width, layers of the encoder and of the decoder, heads, and width of an MLP."""
TYPES = ("float32", "int8")
LANGUAGES = [code for code in LANGUAGE_NAMES if code != "yue"]
HEADER = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
END = 50257
NUM_TOKENS = 51865


def special_tokens() -> list[str]:
    """Return the tokens from END on, in the order of the published models."""
    return [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{code}|>" for code in LANGUAGES),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *("<|nospeech|>", "<|notimestamps|>"),
        *(f"<|{step * 0.02:.2f}|>" for step in range(1501)),
    ]


def write_model(folder: Path, shape: str) -> None:
    """Write a Whisper with random weights, its tokenizer and its settings."""
    width, num_layers, num_heads, inner = SHAPES[shape]
    special = special_tokens()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{index}" for index in range(len(alphabet), END)), special[0]]
    tokenizer = transformers.WhisperTokenizer(
        vocab={word: index for index, word in enumerate(words)}, merges=[]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:-1501]})
    tokenizer.add_tokens(special[-1501:])
    assert len(tokenizer) == NUM_TOKENS, len(tokenizer)
    tokenizer.save_pretrained(folder)
    ids = {token: END + index for index, token in enumerate(special)}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END)
    config = transformers.WhisperConfig(
        vocab_size=NUM_TOKENS,
        d_model=width,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=num_heads,
        decoder_attention_heads=num_heads,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        decoder_start_token_id=END + 1,
        begin_suppress_tokens=None,
        **ends,
    )
    torch.manual_seed(0)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    generation = {
        **ends,
        "decoder_start_token_id": END + 1,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    transformers.WhisperFeatureExtractor().save_pretrained(folder)


def make_sound(seconds: int, seed: int) -> np.ndarray:
    """Return a melody in noise, in which no two pieces are equal."""
    generator = np.random.default_rng(seed)
    sound_at = np.arange(seconds * RATE) / RATE
    pitch = 220 * 2 ** (generator.integers(0, 24, seconds * 4) / 12)
    tone = np.sin(2 * np.pi * np.cumsum(np.repeat(pitch, RATE // 4)) / RATE)
    loudness = 0.5 + 0.5 * np.sin(2 * np.pi * 0.3 * sound_at)
    noise = generator.normal(0, 0.01, len(sound_at))
    return (0.3 * loudness * tone + noise).astype(np.float32)


class Timed:
    """Adds up the seconds of calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **settings: Any) -> Any:
        began = time.perf_counter()
        found = self._function(*args, **settings)
        self.seconds += time.perf_counter() - began
        return found


class Ours:
    """Transcribes with the engine of this package, in this process.

    Args:
        folder: folder of the model.
        kind: float32 or int8.
        batch: number of pieces that are computed together.
    """

    def __init__(self, folder: str, kind: str, batch: int) -> None:
        self._llm = LLM(
            folder,
            dtype="float32",
            quantization=None if kind == "float32" else kind,
            max_num_seqs=batch,
        )
        runner = self._llm.llm_engine.engine_core.executor._worker.runner
        encoder = runner.model.media_encoder
        self._encoder = encoder.forward = Timed(encoder.forward)

    def run(self, path: str, num_tokens: int) -> dict[str, float]:
        """Transcribe the samples of a file; the answer has seconds and the tokens of all pieces."""
        sound = np.load(path)
        size = PIECE_S * RATE
        special = special_tokens()
        header = [END + special.index(token) for token in HEADER]
        self._encoder.seconds = 0.0
        began = time.perf_counter()
        outputs = self._llm.generate(
            [
                {
                    "prompt_token_ids": header,
                    "multi_modal_data": {"audio": (sound[first : first + size], RATE)},
                }
                for first in range(0, len(sound), size)
            ],
            fixed_length(num_tokens),
            use_tqdm=False,
        )
        whole_s = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {"whole_s": whole_s, "encoder_s": self._encoder.seconds, "tokens": tokens}


def serve(args: argparse.Namespace) -> None:
    """Answer questions until standard input ends."""
    ours = Ours(args.serve, args.type[0], args.batch)
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(ours.run(**json.loads(line))), flush=True)


def commands(args: argparse.Namespace, folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return the command of each engine, by its name and the kind of its weights."""
    found = {}
    for kind in args.type:
        own = [sys.executable, "-m", "benchmarks.bench_speech", "--serve", str(folder)]
        found["ours", kind] = [*own, "--type", kind, "--batch", str(args.batch)]
        if args.peer_python:
            program = str(Path(__file__).with_name("peer_faster_whisper.py"))
            found["faster-whisper", kind] = [
                *(args.peer_python, "-I", program, "--model", str(folder)),
                *("--converted", f"{folder}-converted", "--compute-type", kind),
                *("--threads", str(args.threads), "--batch", str(args.batch)),
            ]
    return found


def measure(args: argparse.Namespace, shape: str, folder: Path) -> list[dict[str, Any]]:
    """Return the results of a shape, one for each engine and length of sound."""
    folder = folder / shape
    write_model(folder, shape)
    engines: dict[tuple[str, str], Engine] = {}
    answers: dict[tuple[int, tuple[str, str]], list[dict[str, float]]] = {}
    try:
        for key, command in commands(args, folder).items():
            engines[key] = Engine(" ".join(key), command)
        sound = folder.with_suffix(".npy")
        for number in range(args.rounds + 1):  # the first one is a warm-up
            for seconds in args.seconds if number else args.seconds[:1]:
                np.save(sound, make_sound(seconds, number))
                for key in list(engines)[:: -1 if number % 2 else 1]:
                    question = {"path": str(sound), "num_tokens": args.tokens}
                    answer = engines[key].run(question)
                    num_tokens = args.tokens * -(-seconds // PIECE_S)
                    if answer["tokens"] != num_tokens:
                        sys.exit(f"{key} made {answer['tokens']} tokens, not {num_tokens}")
                    if number:
                        answers.setdefault((seconds, key), []).append(answer)
            print(f"{shape}: round {number} of {args.rounds}", file=sys.stderr, flush=True)
            # A run may be stopped before its last round, which prints the results.
            for line in lines_of(shape, answers):
                so_far = {key: line[key] for key in ("seconds", "engine", "type", "s_per_s")}
                print(so_far, "ratio", line.get("ratio"), file=sys.stderr, flush=True)
    finally:
        for engine in engines.values():
            engine.stop()
    return lines_of(shape, answers)


def lines_of(
    shape: str, answers: dict[tuple[int, tuple[str, str]], list[dict[str, float]]]
) -> list[dict[str, Any]]:
    """Return the results so far, one for each engine and length of sound that every engine has."""
    num_rounds = min(map(len, answers.values()), default=0)
    whole = {key: found[:num_rounds] for key, found in answers.items()}
    return [
        {"shape": shape, "seconds": seconds, "engine": name, "type": kind}
        | summary(found, whole.get((seconds, ("faster-whisper", kind))), seconds)
        for (seconds, (name, kind)), found in whole.items()
    ]


def summary(
    found: list[dict[str, float]], peer: list[dict[str, float]] | None, seconds: int
) -> dict[str, Any]:
    """Return the figures of an engine.

    Args:
        found: answers of the engine.
        peer: the answers of the other engine with the same kind of weights, if there is one.
        seconds: seconds of sound.
    """
    shares = [answer["encoder_s"] / answer["whole_s"] for answer in found]
    result: dict[str, Any] = {
        "s_per_s": spread([answer["whole_s"] / seconds for answer in found], 5),
        "encoder_share": round(statistics.median(shares), 3),
        "rest_s_per_s": round(
            statistics.median([(a["whole_s"] - a["encoder_s"]) / seconds for a in found]), 5
        ),
    }
    if peer is not None and peer is not found:
        for name, part in (
            ("ratio", lambda a: a["whole_s"]),
            ("encoder_ratio", lambda a: a["encoder_s"]),
            ("rest_ratio", lambda a: a["whole_s"] - a["encoder_s"]),
        ):
            ratios = [part(b) / part(a) for a, b in zip(found, peer, strict=True)]
            result[name] = spread(ratios, 3)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    add("--peer-python", metavar="PYTHON", help="of the environment with faster-whisper")
    add("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--type", nargs="+", choices=TYPES, default=list(TYPES))
    add("--seconds", nargs="+", type=int, default=[30, 600], help="of sound")
    add("--tokens", type=int, default=100, help="of the output of each piece")
    add("--batch", type=int, default=8, help="pieces that are computed together")
    add("--threads", type=int, default=1, help="of each engine")
    add("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the engine processes
    with tempfile.TemporaryDirectory() as folder:
        results = [row for shape in args.shape for row in measure(args, shape, Path(folder))]
    report("speech", {**vars(args), "whisper": SHAPES}, results)


if __name__ == "__main__":
    main()
