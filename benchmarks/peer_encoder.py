"""Run optimum-intel or sentence-transformers as a process that `bench_encoder` asks for results.

    PYTHON -I benchmarks/peer_encoder.py --peer openvino --model FOLDER --task embed --type bfloat16

PYTHON has torch and sentence-transformers, and optimum-intel with openvino; this package is not
needed. Texts run in batches of 32 of similar length, as both libraries do it. With int8, openvino
has weights of 8 bits and rounds inputs while it runs, and torch quantizes dynamically.
`bench_encoder` describes the protocol.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 32


def load_openvino(args: argparse.Namespace) -> Any:
    """Return a function that maps lists of texts, or of pairs, to results [N, size]."""
    from optimum.intel import (
        OVModelForFeatureExtraction,
        OVModelForSequenceClassification,
        OVWeightQuantizationConfig,
    )
    from transformers import AutoTokenizer

    is_embed = args.task == "embed"
    kind = OVModelForFeatureExtraction if is_embed else OVModelForSequenceClassification
    settings: dict[str, Any] = {}
    if args.type == "int8":
        settings["quantization_config"] = OVWeightQuantizationConfig(bits=8)
    model = kind.from_pretrained(
        args.model,
        export=True,
        compile=True,
        ov_config={
            "INFERENCE_PRECISION_HINT": "f32" if args.type == "float32" else "bf16",
            "INFERENCE_NUM_THREADS": str(args.threads),
            "PERFORMANCE_HINT": "LATENCY",  # all threads work on one batch
        },
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def run(texts: list[Any]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len("".join(texts[i])))
        found: list[Any] = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            given = tokenizer(
                [texts[i] for i in some],
                padding=True,
                truncation=True,
                max_length=args.max_len,
                return_tensors="np",
            )
            out = model(**given)
            if is_embed:
                mask = given["attention_mask"][..., None].astype(np.float32)
                pooled = (np.asarray(out.last_hidden_state) * mask).sum(1) / mask.sum(1)
                rows = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
            else:
                rows = 1 / (1 + np.exp(-np.asarray(out.logits)))
            for i, row in zip(some, rows, strict=True):
                found[i] = row
        return np.stack(found)

    return run


def load_sentence_transformers(args: argparse.Namespace) -> Any:
    """Return a function that maps lists of texts, or of pairs, to results [N, size], by
    sentence-transformers on torch.
    """
    from sentence_transformers import CrossEncoder, SentenceTransformer, models

    dtype = {"float32": torch.float32}.get(args.type, torch.bfloat16)
    if args.task == "embed":
        word = models.Transformer(args.model, max_seq_length=args.max_len)
        pool = models.Pooling(word.get_embedding_dimension(), "mean")
        model: Any = SentenceTransformer(modules=[word, pool, models.Normalize()], device="cpu")
    else:
        model = CrossEncoder(args.model, max_length=args.max_len, device="cpu")
    if args.type == "int8":
        model = torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear})
    else:
        model = model.to(dtype)

    def run(texts: list[Any]) -> np.ndarray:
        call = model.encode if args.task == "embed" else model.predict
        found = call(texts, batch_size=BATCH, show_progress_bar=False)
        return np.asarray(found, np.float32).reshape(len(texts), -1)

    return run


def main() -> None:
    """Load a model and answer questions until there are none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=("openvino", "sentence-transformers"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", choices=("embed", "rerank"), required=True)
    parser.add_argument("--type", choices=("float32", "bfloat16", "int8"), required=True)
    parser.add_argument("--max-len", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = (load_openvino if args.peer == "openvino" else load_sentence_transformers)(args)
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        texts = json.loads(Path(question["path"]).read_text())
        began, cpu = time.perf_counter(), time.process_time()
        found = run(texts)
        answer = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        np.save(question["out"], found)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
