"""Measure perplexity, memory and speed of the bundled model in each format, on the CPU.

Texts are modules of Python's standard library: some are measured for the scales of INC, AWQ and
GPTQ, others are for the perplexity. Checkpoints are written by `vllm quantize`; those that it does
not write are rounded to nearest as the tests do. Groups have 16 inputs, as 688 features are no
multiple of 32; in GGUF files those layers are BF16. Engines run one after another, in several
rounds. One JSON object on stdout, with the table of docs/quantization_tables.md in it.

Run in the root of the repository: python -m benchmarks.bench_quantization --folder FOLDER What is
in the folder is not made again: checkpoints, and perplexities of an earlier run.
"""

import argparse
import json
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.common import fixed_length, random_prompts
from tests.quantized_checkpoints import write
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.calibration.dataset import split_samples
from vllm.entrypoints.calibration.folder import CalibrationFolder
from vllm.entrypoints.calibration.perplexity import perplexity
from vllm.entrypoints.calibration.run import Calibration, CalibrationSettings
from vllm.model_executor.model_memory import model_storages

MODEL = Path(__file__).resolve().parents[1] / "vllm/assets/models/stdlib-llama-5m"
LIBRARY = Path(sysconfig.get_path("stdlib"))
MEASURED = ("textwrap", "shutil", "tempfile", "heapq", "csv", "dataclasses", "socket", "tarfile")
EVALUATED = ("configparser", "queue", "random", "uuid", "wave", "netrc")
INC = (
    ("maxabs_hw", "GAUDI2"),
    ("maxabs_hw", "GAUDI3"),
    ("maxabs_hw_opt_weight", "GAUDI2"),
    ("act_maxabs_pow2_weights_pcs_opt_pow2", "GAUDI2"),
    ("maxabs_arbitrary", "GAUDI3"),
)
BATCHES = (1, 16)
SAMPLE_TOKENS = 512
FP8_CACHE = {"kv_cache_dtype": "fp8"}

Maker = Callable[[Path], Path]
"""Writes a checkpoint into a new folder -> what an engine loads."""


def by_command(*flags: str) -> Maker:
    """Return a function that writes a checkpoint with `vllm quantize`."""

    def make(folder: Path) -> Path:
        from vllm.entrypoints.cli.main import main as vllm

        texts = folder.with_suffix(".json")
        texts.write_text(json.dumps([read(name) for name in MEASURED]))
        command = ["quantize", "--model", str(MODEL), "--out", str(folder), "--dataset", str(texts)]
        with redirect_stdout(sys.stderr):
            if vllm([*command, *flags, "--num-samples", "24", "--sample-tokens", "256"]):
                raise RuntimeError(f"vllm quantize {' '.join(flags)} has failed")
        return folder

    return make


def by_tests(name: str) -> Maker:
    """Return a function that writes a checkpoint with the code of the tests, rounded to nearest."""

    def make(folder: Path) -> Path:
        folder.mkdir()
        return write(name, folder, MODEL)[0]

    return make


def as_gguf(kind: str) -> Maker:
    """Return a function that writes a GGUF file; layers whose inputs do not fit its blocks are
    BF16.
    """

    def make(folder: Path) -> Path:
        from tests.gguf_files import Type, write_gguf

        folder.mkdir()
        stored = Type[kind]
        write_gguf(MODEL, folder, lambda name: Type.BF16 if "ffn_down" in name else stored)
        return folder / "model.gguf"

    return make


IN_GROUPS = ("--group-size", "16")
CHECKPOINTS: dict[str, Maker] = {
    "fp8 checkpoint, per tensor": by_tests("modelopt"),
    "fp8 checkpoint, per output feature": by_command("--method", "fp8"),
    "fp8 checkpoint, blocks of 128 x 128": by_tests("fp8-block"),
    "compressed-tensors W8A8": by_command("--method", "int8"),
    "compressed-tensors W4A16": by_tests("ct-w4a16-16"),
    "GPTQ": by_command("--method", "gptq", *IN_GROUPS),
    "GPTQ, act-order": by_command("--method", "gptq", "--desc-act", *IN_GROUPS),
    "AWQ": by_command("--method", "awq", *IN_GROUPS),
    "GGUF Q8_0": as_gguf("Q8_0"),
    "GGUF Q4_0": as_gguf("Q4_0"),
}
INT8_HEAD = {"lm_head_quantization": "int8"}
WITH_INT8_HEAD = ("fp8 checkpoint, per output feature", "GPTQ", "AWQ")
WITH_FP8_CACHE = ("GPTQ, act-order", "AWQ", "compressed-tensors W8A8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="0: no speed")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="for checkpoints and perplexities; kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(folder, args.output_len, args.rounds), indent=2))


def measure(folder: Path, output_len: int, rounds: int) -> dict[str, Any]:
    """Measure all formats; return the report."""
    samples = evaluation_samples()
    kept = folder / "perplexities.json"
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    engines: dict[str, LLM] = {}
    rows: dict[str, dict[str, Any]] = {}
    for format_, changes in formats(folder).items():
        settings = {
            "model": str(MODEL),
            "dtype": "bfloat16",
            "max_model_len": SAMPLE_TOKENS + 1,
            "max_num_seqs": max(BATCHES),
            "num_gpu_blocks_override": 640,
            "enable_prefix_caching": False,
            "use_tqdm_on_load": False,
            **changes,
        }
        if format_ in known and not rounds:
            rows[format_] = known[format_]
            continue
        llm = engines[format_] = LLM(**settings)
        weights, cache = llm.collective_rpc(memory_of)[0]
        rows[format_] = {
            "perplexity": known.get(format_, {}).get("perplexity") or perplexity(llm, samples),
            "disk_bytes": bytes_on_disk(Path(settings["model"])),
            "weights_bytes": weights,
            "cache_bytes_per_token": cache,
        }
        known[format_] = rows[format_]
        kept.write_text(json.dumps(known))
    speeds = measure_speed(engines, output_len, rounds) if rounds else {}
    rows = {name: dict(row) for name, row in rows.items()}
    for format_, row in rows.items():
        row["change_percent"] = 100 * (row["perplexity"] / rows["bf16"]["perplexity"] - 1)
        row["tokens_per_s"] = speeds.get(format_, {})
    return {
        "tokens": sum(len(sample) - 1 for sample in samples),
        "rounds": rounds,
        "formats": rows,
        "table": table(rows),
    }


def bytes_on_disk(model: Path) -> int:
    """Return the bytes of the weights in a folder, or of a file."""
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def evaluation_samples() -> list[list[int]]:
    """Return samples of token ids of the Python modules on which the perplexity is measured."""
    from vllm.transformers_utils.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(str(MODEL))
    texts = [read(name) for name in EVALUATED]
    return split_samples(texts, tokenizer.encode, SAMPLE_TOKENS, 10**6)[0]


def read(name: str) -> str:
    return (LIBRARY / f"{name}.py").read_text(encoding="utf-8")


def formats(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> arguments of the engine."""
    found: dict[str, dict[str, Any]] = {
        "bf16": {},
        "bf16, fp8 cache": FP8_CACHE,
        "bf16, fp8 cache with calculated scales": {**FP8_CACHE, "calculate_kv_scales": True},
        "bf16, int8 head": INT8_HEAD,
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
        "int4, fp8 cache": {"quantization": "int4", **FP8_CACHE},
        "fp8 while loading": {"quantization": "fp8"},
        "fp8 while loading, fp8 cache": {"quantization": "fp8", **FP8_CACHE},
    }
    for title, make in CHECKPOINTS.items():
        path = once(folder / title.replace(" ", "_").replace(",", ""), make)
        found[title] = {"model": str(path), "tokenizer": str(MODEL)}
        if title in WITH_INT8_HEAD:
            found[f"{title}, int8 head"] = {**found[title], **INT8_HEAD}
        if title in WITH_FP8_CACHE:
            found[f"{title}, fp8 cache"] = {**found[title], **FP8_CACHE}
    for title, config in calibrate(folder).items():
        found[f"INC {title}"] = {"quant_config": config}
        if title.startswith("maxabs_hw,"):
            inc_cache = {"quant_config": config, "kv_cache_dtype": "fp8_inc"}
            found[f"INC {title}, fp8 cache"] = inc_cache
    return found


def once(folder: Path, make: Maker) -> Path:
    """Return the path that `make` writes; call it only if an earlier run has not."""
    mark = folder.with_suffix(".done")
    if not mark.is_file():
        if folder.is_dir():  # left by a run that was stopped
            shutil.rmtree(folder)
        mark.write_text(str(make(folder)))
    return Path(mark.read_text())


def calibrate(folder: Path) -> dict[str, str]:
    """Return (method, card) -> QUANT_CONFIG; all of them use the same measurements."""
    texts = folder / "texts.json"
    texts.write_text(json.dumps([read(name) for name in MEASURED]))
    place = CalibrationFolder(str(folder), str(MODEL), "g3")
    settings = CalibrationSettings(
        dataset=str(texts),
        num_samples=32,
        sample_tokens=SAMPLE_TOKENS,
        output_tokens=1,
        batch_size=16,
        scale_method="maxabs_hw",
        blocked=(),
        unify_ranks=None,
    )
    engine = EngineArgs(model=str(MODEL), dtype="bfloat16", use_tqdm_on_load=False)
    calibration = Calibration(engine, place, settings, lambda _: None)
    if "measure" not in place.read_state().get("done", []):
        for step in ("prepare", "measure"):
            calibration.run((step,))
    configs = {}
    for method, device in INC:
        config = json.loads(place.quant_config.read_text())
        config |= {"scale_method": method, "device_for_scales": device, "recalc_scales": True}
        path = folder / f"{method}_{device}.json"
        path.write_text(json.dumps(config))
        configs[f"{method}, {device.capitalize()}"] = str(path)
    return configs


def memory_of(worker: Any) -> tuple[int, float]:
    """Return the bytes of weights, and of the cache per token."""
    layout = worker.runner.cache_layout
    weights = sum(len(storage) for storage in model_storages(worker.model))
    return weights, layout.block_bytes / layout.block_size


def measure_speed(
    engines: dict[str, LLM], output_len: int, rounds: int
) -> dict[str, dict[int, float]]:
    """Return output tokens/s by format and batch: medians of rounds, in which engines run one after
    another.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in engines}
    for batch in BATCHES:
        prompts = random_prompts(batch, 32, 4096)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds + 1):
            for name, llm in engines.items():
                start = time.perf_counter()
                llm.generate(prompts, fixed_length(output_len), use_tqdm=False)
                seconds[name].append(time.perf_counter() - start)
        for name, values in seconds.items():
            found[name][batch] = batch * output_len / statistics.median(values[1:])
    return found


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the table in docs/quantization_tables.md."""
    lines = [
        "| format | perplexity | change | on disk, MiB | in memory, MiB | cache, bytes per token | "
        "tokens/s, batch 1 | batch 16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        speeds = (row["tokens_per_s"].get(batch) for batch in BATCHES)
        one, many = ("" if speed is None else f"{speed:.0f}" for speed in speeds)
        lines.append(
            f"| {name} | {row['perplexity']:.3f} | {row['change_percent']:+.2f} % | "
            f"{row['disk_bytes'] / 2**20:.2f} | {row['weights_bytes'] / 2**20:.2f} | "
            f"{row['cache_bytes_per_token']:.0f} | {one} | {many} |"
        )
    return lines


if __name__ == "__main__":
    main()
