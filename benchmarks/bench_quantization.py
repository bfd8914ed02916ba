"""Perplexity, memory and speed of the bundled model in each weight and cache format, on the CPU.

Texts are modules of Python's standard library: some are measured for the scales of INC, others are
for the perplexity. Checkpoints of fp8, AWQ and GPTQ are written as the tests write them, rounded to
nearest, without the search of the libraries. Engines run in turn, in several rounds. One JSON
object on stdout, with the table of docs/quantization.md in it.

Run in the root of the repository: python -m benchmarks.bench_quantization
"""

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
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
CHECKPOINTS = {
    "fp8-block": "fp8 checkpoint, blocks of 128 x 128",
    "gptq-4-rows": "GPTQ checkpoint, 4 bits, one group",
}
BATCHES = (1, 16)
SAMPLE_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = evaluation_samples()
        settings = formats(folder)
        engines = {}
        rows: dict[str, dict[str, Any]] = {}
        for format_, changes in settings.items():
            llm = engines[format_] = LLM(
                **{
                    "model": str(MODEL),
                    "dtype": "bfloat16",
                    "max_model_len": SAMPLE_TOKENS + 1,
                    "num_gpu_blocks_override": 2048,
                    "enable_prefix_caching": False,
                    "use_tqdm_on_load": False,
                    **changes,
                }
            )
            weights, cache = llm.collective_rpc(memory_of)[0]
            rows[format_] = {
                "perplexity": perplexity(llm, samples),
                "weights_bytes": weights,
                "cache_bytes_per_token": cache,
            }
        speeds = measure_speed(engines, args.output_len, args.rounds)
        for format_, row in rows.items():
            row["change_percent"] = 100 * (row["perplexity"] / rows["bf16"]["perplexity"] - 1)
            row["tokens_per_s"] = speeds[format_]
    report = {
        "tokens": sum(len(sample) - 1 for sample in samples),
        "rounds": args.rounds,
        "formats": rows,
        "table": table(rows),
    }
    print(json.dumps(report, indent=2))


def evaluation_samples() -> list[list[int]]:
    """Samples of tokens of the modules that are evaluated."""
    from vllm.transformers_utils.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(str(MODEL))
    texts = [read(name) for name in EVALUATED]
    return split_samples(texts, tokenizer.encode, SAMPLE_TOKENS, 10**6)[0]


def read(name: str) -> str:
    return (LIBRARY / f"{name}.py").read_text(encoding="utf-8")


def formats(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> arguments of the engine."""
    configs = calibrate(folder)
    fp8_cache = {"kv_cache_dtype": "fp8_inc"}
    found: dict[str, dict[str, Any]] = {
        "bf16": {},
        "bf16, fp8 cache": {"kv_cache_dtype": "fp8"},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
        "fp8 while loading": {"quantization": "fp8"},
        "fp8 while loading, fp8 cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    }
    for name, title in CHECKPOINTS.items():
        found[title] = {"model": str(write(name, folder, MODEL)[0]), "tokenizer": str(MODEL)}
    for title, path in configs.items():
        found[f"INC {title}"] = {"quant_config": path}
        if title.startswith("maxabs_hw,"):
            found[f"INC {title}, fp8 cache"] = {"quant_config": path, **fp8_cache}
    return found


def calibrate(folder: Path) -> dict[str, str]:
    """Method and card -> QUANT_CONFIG, all of them with the same measurements."""
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
    """Bytes of weights, and of the cache per token."""
    layout = worker.runner.cache_layout
    weights = sum(len(storage) for storage in model_storages(worker.model))
    return weights, layout.block_bytes / layout.block_size


def measure_speed(
    engines: dict[str, LLM], output_len: int, rounds: int
) -> dict[str, dict[int, float]]:
    """Output tokens per second by format and batch: medians of rounds, in which engines take
    turns."""
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
    """The lines of the table in docs/quantization.md."""
    lines = [
        "| format | perplexity | change | weights, MiB | cache, bytes per token | "
        "tokens/s, batch 1 | batch 16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        one, many = (row["tokens_per_s"][batch] for batch in BATCHES)
        lines.append(
            f"| {name} | {row['perplexity']:.3f} | {row['change_percent']:+.2f} % | "
            f"{row['weights_bytes'] / 2**20:.2f} | {row['cache_bytes_per_token']:.0f} | "
            f"{one:.0f} | {many:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
