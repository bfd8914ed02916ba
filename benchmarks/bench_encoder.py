"""Time embeddings and reranking on the CPU against openvino and sentence-transformers.

    python -m benchmarks.bench_encoder --model FOLDER [--peer-python PYTHON] [--shape given base]

FOLDER has a BERT with its tokenizer, such as all-MiniLM-L6-v2. The shape `given` is that model; the
others, and all rerankers, have random weights and its tokenizer. Texts are docstrings of the
standard library, cut to `--max-len` tokens; a reranker reads each after a query. PYTHON is the
interpreter of an environment with torch, sentence-transformers, optimum-intel and openvino, which
runs `peer_encoder.py`; without it only this package is measured.

Every engine is a process with `--threads` threads; the others are stopped (SIGSTOP) while one runs.
In a round they run one after another, and every second round goes through them backwards. Figures
of each engine, with their median, quartiles, least and largest value:

    texts_per_s     by the clock
    texts_per_cpu_s by the processor time of the process: with one thread it does not depend on
                    what else the machine does
    ratios          texts per second of this package divided by the ones of a peer with the same
    kind
                    of weights in the same round, above 1 we are faster; by clock and processor
    cosine          smallest cosine of a vector and the peer's vector of the same text; of scores,
                    1 less the largest difference

An engine reads lines with {"path": JSON file with texts, "out": .npy file for results}, and answers
with {"wall_s", "cpu_s"}.
"""

import argparse
import ast
import json
import os
import random
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.bench_checkpoints import READY, Engine, spread
from benchmarks.common import report
from vllm import LLM

SHAPES = {"minilm": (384, 6, 12, 1536), "base": (768, 12, 12, 3072), "large": (1024, 24, 16, 4096)}
"""Width, layers, heads, and width of an MLP."""
TYPES = ("float32", "bfloat16", "int8")
PEERS = ("openvino", "sentence-transformers")
QUERY = "How is a file read line by line?"


def docstrings(count: int) -> list[str]:
    """Return docstrings of the standard library in a random order that is fixed for one Python
    version.
    """
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                found += [text] if len(text) > 20 else []
    random.Random(0).shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def write_model(folder: Path, source: Path, shape: str, task: str) -> None:
    """Write a model with random weights and the tokenizer of another model."""
    config = transformers.BertConfig.from_pretrained(source)
    if shape in SHAPES:
        width, layers, heads, inner = SHAPES[shape]
        config.hidden_size, config.num_hidden_layers = width, layers
        config.num_attention_heads, config.intermediate_size = heads, inner
    torch.manual_seed(0)
    if task == "embed":
        config.architectures = ["BertModel"]
        transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    else:
        config.num_labels = 1
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (source / name).exists():
            shutil.copy(source / name, folder / name)


def serve(args: argparse.Namespace) -> None:
    """Answer questions with an engine of this package."""
    torch.set_num_threads(args.threads)
    kind = args.type[0]
    llm = LLM(
        args.serve,
        task="embed" if args.task[0] == "embed" else "score",
        dtype="float32" if kind == "float32" else "bfloat16",
        quantization="int8" if kind == "int8" else None,
        max_model_len=args.max_len,
        override_pooler_config={"pooling_type": "MEAN", "normalize": True}
        if args.task[0] == "embed"
        else None,
    )
    print(READY, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        texts = json.loads(Path(question["path"]).read_text())
        settings: dict[str, Any] = {"truncate_prompt_tokens": -1, "use_tqdm": False}
        began, cpu = time.perf_counter(), time.process_time()
        if args.task[0] == "embed":
            rows = [each.outputs.embedding for each in llm.embed(texts, **settings)]
        else:
            query = texts[0][0]
            scores = llm.score(query, [text for _, text in texts], **settings)
            rows = [[each.outputs.score] for each in scores]
        answer = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        np.save(question["out"], np.asarray(rows, np.float32))
        print(json.dumps(answer), flush=True)


def commands(args: argparse.Namespace, folder: Path, task: str) -> dict[tuple[str, str], list[str]]:
    """Return the command of each engine, by its name and the kind of its weights."""
    found = {}
    common = ["--max-len", str(args.max_len), "--threads", str(args.threads)]
    for kind in args.type:
        own = [sys.executable, "-m", "benchmarks.bench_encoder", "--serve", str(folder)]
        found["vllm", kind] = [*own, "--task", task, "--type", kind, *common]
        for peer in args.peer if args.peer_python else ():
            program = str(Path(__file__).with_name("peer_encoder.py"))
            found[peer, kind] = [
                *(args.peer_python, "-I", program, "--peer", peer, "--model", str(folder)),
                *("--task", task, "--type", kind, *common),
            ]
    return found


def agreement(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return how well two results agree; 1: they are equal."""
    if ours.shape[1] == 1:
        return float(1 - np.abs(ours - theirs).max())
    length = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(1) / length).min())


def measure(args: argparse.Namespace, shape: str, task: str, folder: Path) -> list[dict[str, Any]]:
    """Return the results of a shape and a task, one for each engine and number of texts."""
    model = folder / f"{shape}-{task}"
    if shape == "given" and task == "embed":
        model = Path(args.model)
    else:
        write_model(model, Path(args.model), shape, task)
    texts = docstrings(max(args.count))
    engines: dict[tuple[str, str], Engine] = {}
    answers: dict[tuple[int, tuple[str, str]], list[dict[str, float]]] = {}
    path, out = folder / "texts.json", folder / "out.npy"
    rows: dict[tuple[str, str], np.ndarray] = {}
    cosines: dict[tuple[int, tuple[str, str]], float] = {}
    try:
        for key, command in commands(args, model, task).items():
            engines[key] = Engine(" ".join(key), command)
        for number in range(args.rounds + 1):  # the first one is a warm-up
            for count in args.count:
                first = number * count % (len(texts) - count + 1)
                some: list[Any] = texts[first : first + count]
                if task == "rerank":
                    some = [[QUERY, text] for text in some]
                path.write_text(json.dumps(some))
                for key in list(engines)[:: -1 if number % 2 else 1]:
                    answer = engines[key].run({"path": str(path), "out": str(out)})
                    rows[key] = np.load(out)
                    if number:
                        answers.setdefault((count, key), []).append(answer)
                for key, found in rows.items():
                    cosines[count, key] = agreement(rows["vllm", key[1]], found)
            print(f"{shape} {task}: round {number} of {args.rounds}", file=sys.stderr, flush=True)
    finally:
        for engine in engines.values():
            engine.stop()
    results = []
    for (count, key), found in answers.items():
        name, kind = key
        result: dict[str, Any] = {"shape": shape, "task": task, "texts": count}
        result |= {"engine": name, "type": kind, "cosine": round(cosines[count, key], 5)}
        for figure, field in (("texts_per_s", "wall_s"), ("texts_per_cpu_s", "cpu_s")):
            result[figure] = spread([count / each[field] for each in found], 2)
            if name != "vllm":
                ours = answers[count, ("vllm", kind)]
                ratios = [b[field] / a[field] for a, b in zip(ours, found, strict=True)]
                result[f"ratio_{field}"] = spread(ratios, 3)
        results.append(result)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    add("--model", metavar="FOLDER", help="a BERT with its tokenizer")
    add("--peer-python", metavar="PYTHON", help="of the environment with the peers")
    add("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    add("--shape", nargs="+", choices=["given", *SHAPES], default=["given", "base", "large"])
    add("--task", nargs="+", choices=("embed", "rerank"), default=["embed", "rerank"])
    add("--type", nargs="+", choices=TYPES, default=list(TYPES))
    add("--count", nargs="+", type=int, default=[1, 32, 1500], help="texts of a call")
    add("--max-len", type=int, default=256, help="tokens of a text, at most")
    add("--threads", type=int, default=1, help="of each engine")
    add("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    if not args.model:
        parser.error("--model is missing: a folder with a BERT and its tokenizer")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the engine processes
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shape:
            for task in args.task:
                results += measure(args, shape, task, Path(folder))
    report("encoder", {**vars(args), "shapes": SHAPES}, results)


if __name__ == "__main__":
    main()
