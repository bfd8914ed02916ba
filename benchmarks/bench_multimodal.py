"""Measure images on the CPU: time to the first token, the tower, caches, and slower texts.

    python -m benchmarks.bench_multimodal [--layers 16 --hidden-size 2048] [--no-peer]

The model is a LLaVA with random weights: CLIP ViT-L/14 of 336 pixels in front of a Llama of about
1.2 billion parameters, bfloat16. Nothing is downloaded. Images are drawn, and are sent as JPEG
files of 640 x 480. transformers computes the same alternately with the engine, in this process, on
as many threads: with its image processor, its model, and weights of the same shape. It caches
nothing of an image between requests, so it has no figures for repeated images.

Seconds, the least of the repetitions (a shared machine changes its speed), for one request:

    new_image         an image that was never sent: decoded, encoded, and a prompt of 600 tokens
    other_question    the same image with a different text after it: its keys and values are cached
    other_beginning   the same image with another text in front: its embeddings are kept
    text_of_as_many   a prompt of as many tokens without an image
    tower             only the encoder, for one image

`tower_share` is the rate of the tower, in floating-point operations per second, as a part of the
rate at which the decoder runs a prompt of 1,024 tokens. `longest_gap` is the longest time between
two tokens of a running text request while `images` are encoded, and while texts of as many tokens
are. `vision_model` and `text_model` compare text requests of both.
"""

import argparse
import gc
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from benchmarks.common import fixed_length, report
from vllm import LLM
from vllm.ops.cpu.library import load_cpu_kernels

IMAGE = 3
"""Token of an image."""
QUESTION_TOKENS = 24
NUM_TOGETHER = 8


def write_model(folder: Path, args: argparse.Namespace) -> LlavaConfig:
    """Write config, tokenizer and image processor of the model; its weights are drawn."""
    side = args.image_side
    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": args.vocab_size,
            "hidden_size": args.hidden_size,
            "intermediate_size": 4 * args.hidden_size,
            "num_hidden_layers": args.layers,
            "num_attention_heads": args.hidden_size // 64,
            "num_key_value_heads": max(1, args.hidden_size // 256),
            "max_position_embeddings": 4096,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": args.tower_layers,
            "num_attention_heads": 16,
            "image_size": side,
            "patch_size": 14,
            "projection_dim": 768,
        },
        image_token_index=IMAGE,
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", "<image>", *(f"w{n}" for n in range(4, 1000))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    CLIPImageProcessor(**size).save_pretrained(folder)
    return config


class Requests:
    """Makes images and texts that differ from all earlier ones."""

    def __init__(self, num_embeddings: int) -> None:
        self.num_embeddings = num_embeddings
        self._random = random.Random(0)
        self._generator = np.random.default_rng(0)

    def image(self) -> bytes:
        """Return the JPEG file of a drawn picture of 640 x 480."""
        blocks = self._generator.integers(0, 256, (30, 40, 3))
        pixels = np.kron(blocks, np.ones((16, 16, 1))) + self._generator.normal(0, 8, (480, 640, 3))
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        return file.getvalue()

    def text(self, num_tokens: int = QUESTION_TOKENS) -> list[int]:
        """Return tokens of a text."""
        return [self._random.randrange(4, 1000) for _ in range(num_tokens)]

    def with_image(
        self, image: bytes, before: Sequence[int] = (1,), after: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return a prompt with an image between two texts."""
        tokens = [*before, IMAGE, *(self.text() if after is None else after)]
        return {"prompt_token_ids": tokens, "multi_modal_data": {"image": image}}

    def as_long(self) -> dict[str, Any]:
        """Return a prompt without an image, as long as a prompt with an image."""
        return {"prompt_token_ids": self.text(1 + self.num_embeddings + QUESTION_TOKENS)}


class Peer:
    """transformers with a model of the same shape.

    Args:
        config: of the model.
        folder: with the image processor.
    """

    def __init__(self, config: LlavaConfig, folder: Path, num_embeddings: int) -> None:
        self._num_embeddings = num_embeddings
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.model = LlavaForConditionalGeneration(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        self._processor = CLIPImageProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def first_token(self, prompt: dict[str, Any]) -> int:
        """Return the first token of a prompt of the engine."""
        tokens = prompt["prompt_token_ids"]
        if (data := prompt.get("multi_modal_data")) is None:
            logits = self.model(input_ids=torch.tensor([tokens]), logits_to_keep=1).logits
            return int(logits.argmax())
        with Image.open(io.BytesIO(data["image"])) as image:
            pixels = self._processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]
        at = tokens.index(IMAGE)
        full = [*tokens[:at], *[IMAGE] * self._num_embeddings, *tokens[at + 1 :]]
        out = self.model(
            input_ids=torch.tensor([full]), pixel_values=pixels.bfloat16(), logits_to_keep=1
        )
        return int(out.logits.argmax())

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor) -> Any:
        """Run the tower and the projector on normalised pixels."""
        return self.model.model.get_image_features(pixel_values=pixels.bfloat16())


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def core_of(llm: LLM) -> Any:
    """Return the core of an engine whose worker is in this process."""
    return llm.llm_engine.engine_core


def runner_of(llm: LLM) -> Any:
    """Return the runner of the engine."""
    return core_of(llm).executor._worker.runner


def tower_operations(config: LlavaConfig) -> float:
    """Return the floating-point operations for one image: matmuls and attention in the layers that
    LLaVA uses, and the projector.
    """
    vision, hidden = config.vision_config, config.text_config.hidden_size
    size, num_layers = vision.hidden_size, vision.num_hidden_layers - 1
    patches = (vision.image_size // vision.patch_size) ** 2
    tokens = patches + 1
    layer = 2 * tokens * (4 * size * size + 2 * size * vision.intermediate_size)
    attention = 4 * tokens * tokens * size
    embedding = 2 * patches * 3 * vision.patch_size**2 * size
    projector = 2 * patches * (size * hidden + hidden * hidden)
    return float(num_layers * (layer + attention) + embedding + projector)


def decoder_operations(config: LlavaConfig, num_tokens: int) -> float:
    """Return the operations of the decoder for a prompt; its head runs for the last token only."""
    text = config.text_config
    size, head = text.hidden_size, text.hidden_size // text.num_attention_heads
    weights = size * size * 2 + 2 * size * head * text.num_key_value_heads
    weights += 3 * size * text.intermediate_size
    attention = 2 * num_tokens * num_tokens * size
    layers = text.num_hidden_layers * (2 * num_tokens * weights + attention)
    return float(layers + 2 * size * text.vocab_size)


def longest_gap(llm: LLM, prompts: Sequence[dict[str, Any]], num_texts: int = 4) -> float:
    """Return the longest time in seconds between tokens of running text requests while prompts
    start.

    Args:
        llm: the engine.
        prompts: prompts that arrive all at once while the texts run.
        num_texts: number of running text requests.
    """
    engine = llm.llm_engine
    requests = Requests(1)
    for n in range(num_texts):
        engine.add_request(f"text-{n}", {"prompt_token_ids": requests.text()}, fixed_length(400))
    for _ in range(8):
        engine.step()
    for n, prompt in enumerate(prompts):
        engine.add_request(f"image-{n}", prompt, fixed_length(1))
    waiting = len(prompts)
    longest = 0.0
    while waiting:
        began = time.perf_counter()
        outputs = engine.step()
        longest = max(longest, time.perf_counter() - began)
        waiting -= sum(each.finished and each.request_id.startswith("image") for each in outputs)
    engine.abort_request([f"text-{n}" for n in range(num_texts)])
    while engine.has_unfinished_requests():
        engine.step()
    return longest


class Least:
    """Records the smallest time of calls, by name."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}

    def add(self, name: str, call: Callable[[], object]) -> None:
        """Time a call, and keep the smallest time in seconds."""
        self._found[name] = min(self._found.get(name, float("inf")), seconds(call))

    def rounded(self) -> dict[str, float]:
        """Return all times in seconds, rounded to milliseconds."""
        return {name: round(value, 4) for name, value in self._found.items()}

    def __getitem__(self, name: str) -> float:
        return self._found[name]


def measure(args: argparse.Namespace, folder: Path, config: LlavaConfig) -> dict[str, Any]:
    """Return all results."""
    num_embeddings = (args.image_side // 14) ** 2
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_step_ms": args.max_step_ms,
        "num_gpu_blocks_override": 400,
    }
    llm = LLM(str(folder), **settings)
    requests, peer = Requests(num_embeddings), None
    encoder, media = runner_of(llm).model.media_encoder, core_of(llm).scheduler.media
    least, one = Least(), fixed_length(1)
    if not args.no_peer:
        peer = Peer(config, folder, num_embeddings)

    def first_token(name: str, prompt: dict[str, Any], *, has_peer: bool = False) -> None:
        least.add(name, lambda: llm.generate(prompt, one, use_tqdm=False))
        if has_peer and peer is not None:
            least.add(f"{name}_transformers", lambda: peer.first_token(prompt))

    side = args.image_side
    pixels = torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8)
    statistics = torch.tensor([[[127.0] * 3, [70.0] * 3]])
    item = {"pixels": pixels, "statistics": statistics}
    with torch.inference_mode():
        encoder([item])
    for _ in range(args.repetitions):
        image = requests.image()
        first_token("new_image", requests.with_image(image), has_peer=True)
        first_token("other_question", requests.with_image(image))
        first_token("other_beginning", requests.with_image(image, before=(1, *requests.text(8))))
        first_token("text_of_as_many", requests.as_long(), has_peer=True)
        first_token("text_of_1024", {"prompt_token_ids": requests.text(1024)})
        with torch.inference_mode():
            least.add("tower", lambda: encoder([item]))
        if peer is not None:
            least.add("tower_transformers", lambda: peer.encode(pixels))
    peer = None
    gc.collect()
    tower, decoder = tower_operations(config), decoder_operations(config, 1024)
    rate, decoder_rate = tower / least["tower"], decoder / least["text_of_1024"]
    before = (media.num_queries, media.num_hits)
    image = requests.image()
    together = [requests.with_image(image) for _ in range(NUM_TOGETHER)]
    least.add("together", lambda: llm.generate(together, one, use_tqdm=False))
    num_runs = media.num_queries - before[0] - (media.num_hits - before[1])
    gaps = {
        "images": longest_gap(llm, [requests.with_image(requests.image()) for _ in range(2)]),
        "texts": longest_gap(llm, [requests.as_long() for _ in range(2)]),
        "none": longest_gap(llm, [{"prompt_token_ids": requests.text()}]),
    }
    found = {
        "seconds": least.rounded(),
        "tower_gflop": round(tower / 1e9, 1),
        "tower_gflops": round(rate / 1e9, 1),
        "decoder_gflops": round(decoder_rate / 1e9, 1),
        "tower_share": round(rate / decoder_rate, 3),
        f"{NUM_TOGETHER}_together_encoder_runs": num_runs,
        "longest_gap_s": {name: round(value, 4) for name, value in gaps.items()},
    }
    if not args.no_peer:
        found["times_transformers"] = {
            name: round(least[f"{name}_transformers"] / least[name], 2)
            for name in ("new_image", "tower", "text_of_as_many")
        }
    found["text_only"] = compare_texts(llm, folder, settings, args.repetitions)
    return found


def compare_texts(
    vision: LLM, folder: Path, settings: dict[str, Any], repetitions: int
) -> dict[str, float]:
    """Return the seconds of text requests of a model with images and of only its language model,
    alternately."""
    plain_folder = folder / "plain"
    plain_folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain_folder / name).write_bytes((folder / name).read_bytes())
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text = {**text, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (plain_folder / "config.json").write_text(json.dumps(text))
    plain = LLM(str(plain_folder), **settings)
    least, requests = Least(), Requests(1)
    for _ in range(max(2, repetitions)):
        for name, llm in (("vision_model", vision), ("text_model", plain)):
            prompts = [{"prompt_token_ids": requests.text(64)} for _ in range(4)]
            least.add(
                name,
                lambda llm=llm, prompts=prompts: llm.generate(
                    prompts, fixed_length(32), use_tqdm=False
                ),
            )
    return {**least.rounded(), "ratio": round(least["vision_model"] / least["text_model"], 3)}


def cpu_name() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def processor() -> dict[str, str]:
    """Return the name of the processor, and the instruction set of the kernels on it."""
    library = load_cpu_kernels()
    isa = "torch" if library is None else library.isa
    return {"cpu": cpu_name(), "instruction_set": isa}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=16, help="of the decoder")
    add("--hidden-size", type=int, default=2048, help="of the decoder, a multiple of 256")
    add("--vocab-size", type=int, default=32064)
    add("--tower-layers", type=int, default=24)
    add("--image-side", type=int, default=336, help="pixels, a multiple of 14")
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--max-step-ms", type=int, default=300, help="limit of a step, as in a server")
    add("--repetitions", type=int, default=3)
    add("--no-peer", action="store_true", help="leave transformers out")
    args = parser.parse_args()
    settings = vars(args) | processor()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_model(folder, args)
        report("multimodal", settings, measure(args, folder, config))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
