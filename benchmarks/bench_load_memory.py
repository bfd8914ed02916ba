"""Measure peak memory and time of loading a large random checkpoint, up to the first tokens.

The checkpoint has random bf16 weights in shards of a few GB, like checkpoints on a hub. `--shape
8b`, the shape of Llama 3.1 8B, takes 16 GB of disk and as much memory; make sure that both are
free. The folder is kept for the next run; delete it when you are done.

    python benchmarks/bench_load_memory.py --shape 2b --folder /tmp/model-2b
    python benchmarks/bench_load_memory.py --shape 8b --folder /tmp/model-8b --max-model-len 4096
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from common import fixed_length, make_llm, make_parser, random_prompts, report
from safetensors.torch import save_file
from torch import nn

from vllm.attention import CachedLayer
from vllm.model_executor.model_memory import model_storages

# hidden size, intermediate size, layers, heads, key/value heads, vocabulary
SHAPES = {
    "125m": (768, 2048, 12, 12, 4, 32_768),
    "1b": (2048, 8192, 16, 32, 8, 32_768),
    "2b": (2560, 8704, 26, 20, 4, 32_768),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
}
_SHARD_LAYERS = 8


def write_checkpoint(shape: str, folder: Path) -> None:
    """Write a Llama with random weights, with one shard in memory at a time."""
    hidden, inner, layers, heads, kv_heads, vocab = SHAPES[shape]
    head = hidden // heads
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    block = torch.rand(10_000_019).mul_(0.04).sub_(0.02).bfloat16()

    def values(*size: int) -> torch.Tensor:
        count = torch.Size(size).numel()
        return block.repeat(-(-count // len(block)))[:count].view(size)

    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    norm = torch.ones(hidden, dtype=torch.bfloat16)
    outer = {"model.embed_tokens.weight": values(vocab, hidden), "model.norm.weight": norm}
    write(0, outer | {"lm_head.weight": values(vocab, hidden)})
    for first in range(0, layers, _SHARD_LAYERS):
        tensors = {}
        for layer in range(first, min(layers, first + _SHARD_LAYERS)):
            path = f"model.layers.{layer}"
            tensors |= {f"{path}.{name}.weight": values(*size) for name, size in sizes.items()}
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{path}.{name}.weight"] = norm.clone()
        write(1 + first // _SHARD_LAYERS, tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))


def peak_bytes() -> int:
    """Return the largest memory of this process since it runs this program.

    `getrusage` also counts the memory of the process that started this one and has written a
    checkpoint.
    """
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the weights and of the KV cache."""
    weights = sum(len(storage) for storage in model_storages(model))
    layers = [module for module in model.modules() if isinstance(module, CachedLayer)]
    tensors = [getattr(layer, name) for layer in layers for name in layer.cache_names]
    caches = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return weights, sum(caches.values())


def measure(args: Any) -> dict[str, Any]:
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    llm = make_llm(args)
    loaded_s = time.perf_counter() - started
    loaded_peak = peak_bytes()
    engine = llm.llm_engine
    vocab = engine.vllm_config.model.resolved_arch.vocab_size
    llm.generate(random_prompts(1, args.input_len, vocab), fixed_length(1), use_tqdm=False)
    first_s = time.perf_counter() - started
    llm.generate(random_prompts(1, args.input_len, vocab), fixed_length(args.output_len))
    ((weights, caches),) = llm.apply_model(sizes_of)
    peak = peak_bytes()
    gib = 2**30
    return {
        "weights_gib": round(weights / gib, 3),
        "kv_cache_gib": round(caches / gib, 3),
        "before_loading_gib": round(before / gib, 3),
        "peak_while_loading_gib": round(loaded_peak / gib, 3),
        "peak_gib": round(peak / gib, 3),
        "peak_less_cache_per_weights": round((peak - caches) / weights, 3),
        "peak_less_cache_and_program_per_weights": round((peak - caches - before) / weights, 3),
        "load_s": round(loaded_s, 2),
        "first_token_s": round(first_s, 2),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="2b")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--measure", action="store_true", help="in this process; internal")
    args = parser.parse_args()
    if not args.measure:
        if not (args.folder / "config.json").is_file():
            write_checkpoint(args.shape, args.folder)
        # Measure in a new process: its peak memory is the peak of loading.
        sys.exit(subprocess.run([sys.executable, *sys.argv, "--measure"], check=False).returncode)
    args.model = str(args.folder)
    args.skip_tokenizer_init = True
    settings = {"shape": args.shape, "quantization": args.quantization}
    report("load_memory", settings, measure(args))


if __name__ == "__main__":
    main()
