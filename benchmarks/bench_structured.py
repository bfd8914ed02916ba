"""Time structured output: compiling, the mask of a token, and tokens per second.

    python benchmarks/bench_structured.py
    python benchmarks/bench_structured.py --vocab-sizes 4096 128256 --rows 16 --no-engine

Prints JSON on stdout. Vocabularies are the bundled model's, filled up with random words. The engine
runs the bundled model, the same requests with and without a constraint.
"""

import argparse
import json
import random
import string
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.sample.restrictions.masks import TokenMasks, bit_values
from vllm.sampling_params import GuidedDecodingParams
from vllm.structured_output.backends import BACKENDS, make_backend
from vllm.structured_output.backends.interface import Backend
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.transformers_utils.tokenizer import get_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = {"type": "array", "minItems": 200}
NUM_STEPS = 60
NUM_WALKS = 20


def make_vocabulary(size: int) -> Vocabulary:
    tokenizer = get_tokenizer(str(BUNDLED_MODEL))
    tokens, rng = Vocabulary.of(tokenizer, min(size, len(tokenizer))).tokens, random.Random(0)
    letters = string.ascii_letters + "    _-.,:\"{}[]()'"
    while len(tokens) < size:
        tokens.append("".join(rng.choices(letters, k=rng.randint(1, 8))).encode())
    return Vocabulary(tokens)


def milliseconds(function: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        function()
        times.append((time.perf_counter() - started) * 1e3)
    return round(float(np.median(times)), 3)


def fill_times(backend: Backend, content: bytes, vocabulary: Vocabulary) -> np.ndarray:
    """Return the microseconds of each mask of some random outputs."""
    loaded, rng, times = backend.load(content), random.Random(0), []
    mask = np.empty(vocabulary.num_words, np.int32)
    for _ in range(NUM_WALKS):
        matcher = loaded.matcher()
        for _ in range(NUM_STEPS):
            started = time.perf_counter()
            matcher.fill(mask)
            times.append((time.perf_counter() - started) * 1e6)
            bits = np.unpackbits((mask & vocabulary.text_mask).view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                break
            matcher.accept(int(rng.choice(allowed)))
    return np.array(times)


def measure_backend(name: str, vocabulary: Vocabulary) -> dict[str, Any]:
    backend = make_backend(name, vocabulary)
    content = backend.compile("json", SCHEMA)
    times = fill_times(backend, content, vocabulary)
    return {
        "backend": name,
        "vocab_size": len(vocabulary.tokens),
        "compile_ms": milliseconds(lambda: backend.compile("json", SCHEMA), 5),
        "load_ms": milliseconds(lambda: backend.load(content), 5),
        "content_bytes": len(content),
        "mask_us": {f"p{p}": round(float(np.percentile(times, p)), 1) for p in (50, 95, 100)},
    }


def measure_apply(vocab_size: int, num_rows: int) -> dict[str, Any]:
    """Time masks that allow one token in a hundred, on the CPU."""
    words = np.packbits(
        np.random.default_rng(0).random((num_rows, -(-vocab_size // 32) * 32)) < 0.01,
        axis=1,
        bitorder="little",
    ).view(np.int32)
    device = torch.device("cpu")
    masks = TokenMasks(np.arange(num_rows), torch.from_numpy(words), bit_values(device))
    logits = torch.zeros(num_rows, (vocab_size // 128 + 1) * 128)
    return {
        "vocab_size": vocab_size,
        "rows": num_rows,
        "apply_ms": milliseconds(lambda: masks.apply(logits), 20),
    }


def measure_engine(num_requests: int) -> list[dict[str, Any]]:
    llm = LLM(max_model_len=512, max_num_seqs=num_requests)
    forms = {
        "free": None,
        "regex": GuidedDecodingParams(regex="[a-z ]{999}"),
        "json": GuidedDecodingParams(json={**LIST, "items": {"type": "string"}}),
    }
    results = []
    for name, form in forms.items():
        params = SamplingParams(max_tokens=64, ignore_eos=True, guided_decoding=form)
        for _ in range(2):  # the first run compiles and loads
            started = time.perf_counter()
            outputs = llm.generate(["data = "] * num_requests, params, use_tqdm=False)
            seconds = time.perf_counter() - started
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        results.append({"form": name, "tokens_per_s": round(num_tokens / seconds, 1)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[4096, 128256])
    parser.add_argument("--rows", type=int, default=64, help="requests of one forward pass")
    parser.add_argument("--no-engine", action="store_true", help="only the parts")
    args = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "structured", "threads": torch.get_num_threads()}
    report["masks"], report["apply"] = [], []
    for vocab_size in args.vocab_sizes:
        vocabulary = make_vocabulary(vocab_size)
        report["masks"] += [measure_backend(name, vocabulary) for name in BACKENDS]
        report["apply"].append(measure_apply(vocab_size, args.rows))
    if not args.no_engine:
        report["engine"] = measure_engine(args.rows)
    for rows in (report["masks"], report["apply"], report.get("engine", [])):
        for row in rows:
            print("  ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
