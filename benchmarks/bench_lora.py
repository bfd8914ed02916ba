"""Time decodes and prompts with LoRA adapters, relative to the same engine without adapters.

With --stall: how loading an adapter delays other requests. A batch runs, and requests with a loaded
adapter and with a new adapter arrive alternately. For each, the longest time between two of the
next --stall-steps steps is printed, sorted, and by how much the median is longer for new adapters.

Adapters of random weights change all linear layers of a Llama-shaped model. The cases run one after
another, in several rounds: no adapter, one adapter on all rows, and a different one on each row.
One JSON object on stdout: medians in milliseconds, and what each case costs over no adapter, as the
median of the ratios within a round.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import torch
from safetensors.torch import save_file

from benchmarks.common import fixed_length, random_prompts
from vllm import LLM
from vllm.lora.request import LoRARequest


def write_adapter(folder: Path, config: dict, rank: int, seed: int) -> None:
    """Write an adapter for every linear layer, as peft does."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, middle),
        "mlp.up_proj": (hidden, middle),
        "mlp.down_proj": (middle, hidden),
    }
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                values = torch.randn(shape, generator=rng) * 0.02
                tensors[f"{path}.{part}.weight"] = values.bfloat16()
    folder.mkdir()
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")


def longest_gaps(llm: LLM, num_steps: int, adapters: Sequence[LoRARequest]) -> list[float]:
    """Return, for each adapter, the longest time in seconds between the ends of two steps of the
    running batch.

    Of `num_steps` steps. When they start, a request names the adapter, whose files are checked in a
    thread, as a server does.
    """
    engine, longest = llm.llm_engine, []
    params = fixed_length(1)
    for adapter in adapters:
        name = f"{adapter.lora_name} {len(longest)}"
        look = Thread(target=engine.input_processor.adapter, args=(adapter, lambda: True))
        look.start()
        is_added = is_done = False
        gaps, end = [], time.perf_counter()
        for _ in range(num_steps):
            if not is_added and not look.is_alive():
                is_added = True
                engine.add_request(name, {"prompt_token_ids": [5]}, params, None, adapter)
            is_done |= any(o.request_id == name and o.finished for o in engine.step())
            end, before = time.perf_counter(), end
            gaps.append(end - before)
        longest.append(max(gaps))
        if not is_done:
            raise SystemExit(f"{adapter.lora_name} was not loaded in {num_steps} steps")
    return longest


def measure_stalls(args: argparse.Namespace) -> None:
    """Measure and print the steps of both cases."""
    config = json.loads((Path(args.model) / "config.json").read_text())
    num_steps = 2 * args.rounds * args.stall_steps
    llm = LLM(
        args.model,
        load_format=args.load_format,
        quantization=args.quantization,
        skip_tokenizer_init=True,
        max_model_len=args.input_len + num_steps + 16,
        max_num_seqs=args.batch + 1,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=args.rank,
        max_cpu_loras=args.rounds + 1,
    )
    prompts = random_prompts(args.batch, args.input_len, config["vocab_size"])
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"batch {number}", prompt, fixed_length(num_steps + 12))
    cases: dict[str, list[float]] = {"loaded": [], "new": []}
    with tempfile.TemporaryDirectory() as root:
        made = []
        for number in range(args.rounds + 1):
            folder = Path(root) / f"adapter {number}"
            write_adapter(folder, config, args.rank, number)
            made.append(LoRARequest(folder.name, number + 1, str(folder)))
        size = (folder / "adapter_model.safetensors").stat().st_size
        llm.llm_engine.add_lora(made[0])
        for _ in range(4):  # run the prompts
            llm.llm_engine.step()
        for adapter in made[1:]:
            cases["loaded"] += longest_gaps(llm, args.stall_steps, made[:1])
            cases["new"] += longest_gaps(llm, args.stall_steps, [adapter])
    report: dict[str, object] = {"batch": args.batch, "rank": args.rank, "adapter_bytes": size}
    report["threads"] = torch.get_num_threads()
    for name, seconds in cases.items():
        report[f"{name}_ms"] = [round(each * 1e3, 2) for each in sorted(seconds)]
    loaded, new = (statistics.median(seconds) for seconds in cases.values())
    report["excess_ms"] = round((new - loaded) * 1e3, 2)
    print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a Llama-shaped model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time of the processor, not of the clock: where other programs run. Needs "
        "OMP_NUM_THREADS=1, as threads that wait count too",
    )
    parser.add_argument(
        "--stall", action="store_true", help="measure steps while adapters are loaded"
    )
    parser.add_argument("--stall-steps", type=int, default=64)
    args = parser.parse_args()
    if args.stall:
        measure_stalls(args)
        return
    config = json.loads((Path(args.model) / "config.json").read_text())
    llm = LLM(
        args.model,
        load_format=args.load_format,
        quantization=args.quantization,
        skip_tokenizer_init=True,
        max_model_len=args.input_len + args.output_len,
        max_num_seqs=args.batch,
        max_num_batched_tokens=args.batch * args.input_len,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=args.batch,
        max_lora_rank=args.rank,
        max_cpu_loras=2 * args.batch,
    )
    prompts = random_prompts(args.batch, args.input_len, config["vocab_size"])
    with tempfile.TemporaryDirectory() as root:
        adapters = []
        for number in range(args.batch):
            folder = Path(root) / str(number)
            write_adapter(folder, config, args.rank, number)
            adapters.append(LoRARequest(folder.name, number + 1, str(folder)))
        cases = {"none": [None] * args.batch, "one": adapters[:1] * args.batch, "all": adapters}

        now = time.process_time if args.cpu_time else time.perf_counter

        def seconds(name: str, num_tokens: int) -> float:
            start = now()
            llm.generate(
                prompts, fixed_length(num_tokens), use_tqdm=False, lora_request=cases[name]
            )
            return now() - start

        prompt_s: dict[str, list[float]] = {name: [] for name in cases}
        decode_s: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(args.rounds + 1):  # the first one loads and warms up
            for name in cases:
                prompt = seconds(name, 1)
                decode = (seconds(name, args.output_len) - prompt) / (args.output_len - 1)
                if number:
                    prompt_s[name].append(prompt)
                    decode_s[name].append(decode)
    report = {"batch": args.batch, "rank": args.rank, "threads": torch.get_num_threads()}
    for what, found in (("prompts", prompt_s), ("decode_step", decode_s)):
        report[f"{what}_ms"] = {n: round(statistics.median(v) * 1e3, 2) for n, v in found.items()}
        ratios = {
            name: [t / base - 1 for t, base in zip(times, found["none"], strict=True)]
            for name, times in found.items()
        }
        report[f"{what}_cost_percent"] = {
            name: round(100 * statistics.median(ratios[name]), 1) for name in ("one", "all")
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
