"""Compute how the work of a layer is divided on machines with more cores than this one.

Measures no times. For each number of cores and NUMA nodes: the largest work of a thread divided by
the mean, for the linear layers of decoders and encoders, weighted by the bytes of their weights;
the bytes of weights that a step reads from each node, and the part of them that cores of another
node read; and the barriers of a layer, in the program that the engine records for `--model`.

On two nodes there are two ways: one process, whose memory is spread over both nodes, and a rank for
each node (`--tensor-parallel-size 2`), which reads its own memory only.

    python benchmarks/bench_work_shares.py --model FOLDER

Needs a C++ compiler. One JSON object on stdout, a table on stderr.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL

ROOT = Path(__file__).parents[1]
LAYERS = {
    "1b": ("qkv", "o", "gate_up", "down"),
    "8b": ("qkv", "o", "gate_up", "down"),
    "minilm": ("qkv", "o", "up", "down"),
    "bert-base": ("qkv", "o", "up", "down"),
    "bert-large": ("qkv", "o", "up", "down"),
}
PRODUCTS = ("linear", "head_linear", "low_rank", "experts")
ALONE = ("attend", "attend_items", "all_reduce", "all_gather")


def build(folder: Path) -> Path:
    """Compile the program that divides work as the kernels do."""
    kernels, program = ROOT / "csrc" / "cpu", folder / "shares"
    sources = [str(ROOT / "tests" / "ops" / "work_shares.cpp"), str(kernels / "runtime.cpp")]
    flags = ["-std=c++17", "-pthread", "-Wno-psabi", "-DVLLM_ISA=vllm_base", f"-I{kernels}"]
    subprocess.run(["c++", *flags, *sources, "-o", str(program)], check=True)
    return program


def counts(program: Path, num_cores: int, num_nodes: int, num_ranks: int) -> list[dict[str, Any]]:
    """Return a line for each model and number of rows."""
    command = [str(program), str(num_cores // num_ranks), str(num_ranks)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for line in map(json.loads, done.stdout.splitlines()):
        model, _, part = line["name"].partition(" ")
        found[model][line["rows"]][part] = line
    rows = []
    for model, parts in LAYERS.items():
        for num_rows, lines in sorted(found[model].items()):
            if parts[0] not in lines:  # measured only with other tiles
                continue
            layer = [lines[part] for part in parts]
            of_rank = sum(line["bytes"] for line in layer)
            largest = sum(line["bytes"] * line["largest_over_mean"] for line in layer)
            rows.append(
                {
                    "cores": num_cores,
                    "nodes": num_nodes,
                    "ranks": num_ranks,
                    "model": model,
                    "rows": num_rows,
                    "largest_over_mean": round(largest / of_rank, 3),
                    "bytes_per_node_and_layer": of_rank * num_ranks // num_nodes,
                    "read_from_other_nodes": round(1 - num_ranks / num_nodes, 2),
                    "by_layer": {
                        part: round(line["largest_over_mean"], 3)
                        for part, line in zip(parts, layer, strict=True)
                    },
                }
            )
    return rows


def barriers(model: str | Path) -> dict[str, Any]:
    """Return the loops of all threads per layer: each ends when the last thread is done."""
    llm = LLM(model=str(model), max_model_len=64, num_gpu_blocks_override=16)
    llm.generate({"prompt_token_ids": [16]}, SamplingParams(max_tokens=2), use_tqdm=False)
    core: Any = llm.llm_engine.engine_core
    program = core.executor._worker.runner.launches.programs.of(None)
    assert program is not None, f"{model} has no program"
    kinds = program._kernels.OperationKind
    names = [kinds(op.kind).name for op in program._operations]
    num_products = sum(name in PRODUCTS for name in names)
    num_alone = sum(name in ALONE for name in names)
    num_runs = sum(
        name not in PRODUCTS + ALONE and (not index or names[index - 1] in PRODUCTS + ALONE)
        for index, name in enumerate(names)
    )
    num_layers = sum(name == "attend" for name in names)
    return {
        "layers": num_layers,
        "products": round(num_products / num_layers, 2),
        "attention": round(num_alone / num_layers, 2),
        "operations_of_rows": round(num_runs / num_layers, 2),
        "of_few_rows": round((num_products + num_alone) / num_layers, 2),
        "of_many_rows": round((num_products + num_alone + num_runs) / num_layers, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=BUNDLED_MODEL, help="whose program is counted")
    parser.add_argument("--cores", type=int, nargs="+", default=[8, 32, 96])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        rows = []
        for num_cores in args.cores:
            for num_nodes, num_ranks in ((1, 1), (2, 1), (2, 2)):
                rows += counts(program, num_cores, num_nodes, num_ranks)
    result = {"benchmark": "work shares", "shares": rows}
    result["barriers_per_layer"] = barriers(args.model)
    print(json.dumps(result))
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
