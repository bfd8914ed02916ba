"""Compare questions about images with openvino-genai, alternately and with the same weights.

    python -m benchmarks.bench_image_peer --peer-python PYTHON [--kind bf16 int8] [--rounds 5]

The model is the LLaVA of `bench_multimodal`, with random weights: CLIP ViT-L/14 of 336 pixels in
front of a Llama of about 1.2 billion parameters. Nothing is downloaded. PYTHON is of an environment
with openvino-genai and optimum-intel, and `peer_openvino_images.py` converts the same weights. Each
round sends a new picture of 640 x 480 to both. Images are sent as JPEG files, which both decode.

    first_token_s   until the first token: image, tower and prompt
    decode          tokens per second after the first
    ratio           of the engine to the peer in the same round: more than 1 means that it is faster

Each is the median of the rounds, with the least and the largest. The peer reads a line for each
question, `{"path": ..., "text": ..., "num_tokens": ...}`, and answers in a line with `first_s`,
`whole_s`, `tokens` and `prompt_tokens`.
"""

import argparse
import gc
import inspect
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from benchmarks.bench_multimodal import Requests, processor, write_model
from benchmarks.common import fixed_length, report
from vllm import LLM

QUESTION = "What is in this picture, where is it, and who may have put it there?"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_weights(folder: Path, args: argparse.Namespace) -> None:
    """Write the model, its random weights, and a tokenizer that the peer can convert."""
    config = write_model(folder, args)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<pad>", "<s>", "</s>", "<image>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([inspect.getsource(textwrap)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    images = CLIPImageProcessor.from_pretrained(folder)
    strategy = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    processor = LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, **strategy)
    processor.save_pretrained(folder)
    images.save_pretrained(folder)  # also the name that older releases read
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


class Peer:
    """The process of openvino-genai."""

    def __init__(self, python: str, folder: Path, kind: str, threads: int) -> None:
        program = str(Path(__file__).with_name("peer_openvino_images.py"))
        command = [python, "-I", program, "--model", str(folder), "--threads", str(threads)]
        command += ["--converted", str(folder.with_name(f"converted-{kind}"))]
        command += ["--weights", "int8" if kind == "int8" else "fp16"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while (line := self._line()) != "ready":
            print(line, file=sys.stderr)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer has ended")
        return line.strip()

    def run(self, path: Path, num_tokens: int) -> dict[str, float]:
        """Ask a question about an image; return its times."""
        assert self._process.stdin is not None
        question = {"path": str(path), "text": QUESTION, "num_tokens": num_tokens}
        print(json.dumps(question), file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._line())
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Engine:
    """The engine of this package."""

    def __init__(self, folder: Path, kind: str, args: argparse.Namespace) -> None:
        self._llm = LLM(
            str(folder),
            dtype="bfloat16",
            quantization="int8" if kind == "int8" else None,
            max_model_len=1024,
            max_num_seqs=8,
            device="cpu",
        )
        self._tokenizer = self._llm.get_tokenizer()

    def run(self, path: Path, num_tokens: int) -> dict[str, float]:
        """Ask a question about an image: first one token, then the whole answer."""
        prompt = {
            "prompt": f"<image>\n{QUESTION}",
            "multi_modal_data": {"image": path.read_bytes()},
        }
        began = time.perf_counter()
        (first,) = self._llm.generate([prompt], fixed_length(1), use_tqdm=False)
        first_s = time.perf_counter() - began
        assert first.prompt_token_ids is not None
        times = []
        for length in (2, num_tokens + 1):  # the prompt is cached now
            began = time.perf_counter()
            self._llm.generate([prompt], fixed_length(length), use_tqdm=False)
            times.append(time.perf_counter() - began)
        whole_s = first_s + times[1] - times[0]
        tokens, prompt_tokens = float(num_tokens), float(len(first.prompt_token_ids))
        return {
            "first_s": first_s,
            "whole_s": whole_s,
            "tokens": tokens,
            "prompt_tokens": prompt_tokens,
        }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the largest."""
    found = {"median": statistics.median(values), "least": min(values), "largest": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def decode_rate(found: dict[str, float]) -> float:
    """Return the tokens per second after the first."""
    return (found["tokens"] - 1) / (found["whole_s"] - found["first_s"])


def measure(kind: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Ask both engines alternately."""
    requests, picture = Requests(0), folder.with_name("picture.jpg")
    engine, peer = Engine(folder, kind, args), Peer(args.peer_python, folder, kind, args.threads)
    ours, theirs = [], []
    try:
        for number in range(args.rounds + 1):
            picture.write_bytes(requests.image())
            found = engine.run(picture, args.tokens), peer.run(picture, args.tokens)
            if number:  # the first round warms up
                ours.append(found[0])
                theirs.append(found[1])
    finally:
        peer.close()
    pairs = list(zip(ours, theirs, strict=True))
    del engine
    gc.collect()
    return {
        "kind": kind,
        "prompt_tokens": [ours[0]["prompt_tokens"], theirs[0]["prompt_tokens"]],
        "first_token_s": summary([own["first_s"] for own in ours]),
        "peer_first_token_s": summary([other["first_s"] for other in theirs]),
        "first_token_ratio": summary([other["first_s"] / own["first_s"] for own, other in pairs]),
        "decode": summary([decode_rate(own) for own in ours]),
        "peer_decode": summary([decode_rate(other) for other in theirs]),
        "decode_ratio": summary([decode_rate(own) / decode_rate(other) for own, other in pairs]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peer-python", required=True, metavar="PYTHON", help="of the peer's environment")
    add("--kind", nargs="+", default=["bf16", "int8"], choices=["bf16", "int8"])
    add("--rounds", type=int, default=5)
    add("--tokens", type=int, default=32, help="of each answer")
    add("--threads", type=int, default=torch.get_num_threads(), help="of the peer")
    add("--layers", type=int, default=16, help="of the decoder")
    add("--hidden-size", type=int, default=2048, help="of the decoder, a multiple of 256")
    add("--vocab-size", type=int, default=32064)
    add("--tower-layers", type=int, default=24)
    add("--image-side", type=int, default=336, help="pixels, a multiple of 14")
    args = parser.parse_args()
    settings = vars(args) | processor()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        write_weights(folder, args)
        report("image_peer", settings, [measure(kind, folder, args) for kind in args.kind])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
