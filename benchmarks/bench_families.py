"""Time decode steps of models with about 1 B active parameters, relative to the memory rate.

    python benchmarks/bench_families.py [--families gemma2 qwen3_moe deepseek_v2] [--rows 1 16]

Weights are random, and the shapes are written below: nothing is downloaded. A step is the one call
that serves plain decodes: inputs, decoder, output head, greedy sampling. It is repeated at one
position of the requests, so that the chosen experts are known; the modules count them.

`bytes` are the bytes of weights and cache that a step reads. `share` is their rate divided by the
rate at which the same threads read one large tensor. `of_llama` is `share` divided by the `share`
of Llama. Steps of a family, steps of Llama and reading of memory alternate, and the fastest of each
counts, because a shared machine changes its speed from one second to the next. Two models are in
memory at a time: up to 9 GB.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report
from kernels import best_in_turns_us
from torch import Tensor, nn

from vllm.attention import LaunchContext, RaggedMetadata, share_context
from vllm.attention.cached_layer import layers_with_cache
from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelArch,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import TPGroup
from vllm.model_executor.fusion import fuse, fuse_head
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.latent import LatentUpProjection
from vllm.model_executor.layers.weight_method import MethodLayer
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep, RowArrays
from vllm.ops.cpu.operators.program import Program

BLOCK_SIZE = 64
_COMMON = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "vocab_size": 64000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 24,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
}
"""Settings of config.json, with fewer experts than in the models of these names."""


def load(name: str, num_tokens: int) -> CausalLM:
    """Return a model with random weights, and an empty cache for this many tokens."""
    values = _COMMON | FAMILIES[name]
    arch = ModelArch.from_hf(values)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        config = VllmConfig(
            model=ModelConfig(model=folder, arch=arch, path=folder, dtype="bfloat16"),
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(
                max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=4096
            ),
            load=LoadConfig(load_format="dummy", use_tqdm_on_load=False),
        )
        model = load_model(config, TPGroup(), torch.device("cpu"), CPUPacked())
    assert isinstance(model, CausalLM)
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
    for layer in layers_with_cache(model):
        shapes = [
            (num_blocks, BLOCK_SIZE, *t.shape) for t in layer.cache_spec(torch.bfloat16).tensors
        ]
        layer.bind_kv_cache(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))
    return model


class Steps:
    """Runs plain decodes of n requests with `context` tokens each, always at the same position."""

    def __init__(self, model: CausalLM, programs: tuple[Program, Program], n: int, context: int):
        num_blocks = context // BLOCK_SIZE + 1
        tables = 1 + np.arange(n * num_blocks, dtype=np.int32).reshape(1, n, num_blocks)
        rng = np.random.default_rng(0)
        vocab_size = model.arch.vocab_size
        self.model, self.n, self.context = model, n, context
        self.arrays = RowArrays(
            token_ids=rng.integers(0, vocab_size, (n, num_blocks * BLOCK_SIZE), np.int32),
            num_tokens=np.full(n, context, np.int32),
            num_prompt_tokens=np.ones(n, np.int32),
            position_offsets=np.zeros(n, np.int32),
            end_tokens=np.full((n, 1), -1, np.int32),
            block_tables=np.repeat(tables, max(programs[0].num_groups, 1), 0),
            item_slots=np.zeros(n, np.int64),
            num_item_slots=np.zeros(n, np.int32),
            features=np.zeros(n, np.int32),
            params=np.zeros((8, n), np.float32),
            keys=np.zeros(n, np.uint64),
            masks=np.zeros((n, 0), np.int32),
            first_times=np.zeros(n, np.int32),
        )
        self._step = FusedDecodeStep(*programs, self.arrays, known_features=0, random_feature=1)
        self._rows, self._ones = np.arange(n, dtype=np.int32), np.ones(n, np.int32)
        self._computed = np.full(n, context - 1, np.int32)

    def run(self) -> None:
        self.arrays.num_tokens[:] = self.context
        if self._step.run(self._rows, self._computed, self._ones) is None:
            raise RuntimeError("the step is no plain decode")

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of (weights, cache) that a step reads."""
        hit, packed = self._experts_hit(), {}
        for module in self.model.modules():
            if isinstance(module, LatentUpProjection):
                for heads in (module.key_up, module.value_up):
                    packed[id(heads)] = heads.weight.num_bytes
            elif isinstance(module, MethodLayer):
                weight = getattr(module.method, "packed", None)
                if isinstance(module, Experts):
                    packed[id(weight)] = weight.num_bytes * hit[module] // weight.num_experts
                elif weight is not None:  # a head and the embeddings may share one
                    packed[id(weight)] = weight.num_bytes
        cache = 0
        for layer in layers_with_cache(self.model):
            spec = layer.cache_spec(torch.bfloat16)
            seen = min(self.context, spec.window or self.context)
            cache += self.n * seen * sum(2 * int(np.prod(t.shape)) for t in spec.tensors)
        return sum(packed.values()), cache

    def _experts_hit(self) -> dict[nn.Module, int]:
        """Return the number of chosen experts of each layer, counted by running the modules."""
        hit: dict[nn.Module, int] = {}

        def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            hit[module] = len(args[1].unique())

        experts = [m for m in self.model.modules() if isinstance(m, Experts)]
        hooks = [module.register_forward_pre_hook(count) for module in experts]
        last, tables = self.context - 1, torch.from_numpy(self.arrays.block_tables)
        slots = tables[:, :, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
        lengths = torch.full((self.n,), self.context, dtype=torch.int32)
        metadata = RaggedMetadata(
            num_decodes=self.n,
            slot_mapping=slots[0],
            block_tables=tables[0],
            seq_lens=lengths,
            query_start_loc=np.arange(self.n + 1, dtype=np.int32),
            host_seq_lens=lengths.numpy(),
            more_groups=tuple(zip(slots[1:], tables[1:], strict=True)),
        )
        positions = torch.full((1, self.n), last)
        input_ids = torch.from_numpy(self.arrays.token_ids[:, last]).long()
        with share_context(self.model).running(LaunchContext(metadata, positions)):
            self.model(input_ids, positions)
        for hook in hooks:
            hook.remove()
        return hit


def make_programs(name: str, model: CausalLM) -> tuple[Program, Program]:
    decoder = fuse(model)
    head = None if decoder is None else fuse_head(model, decoder)
    if decoder is None or head is None:
        sys.exit(f"{name} does not run in one call")
    return decoder, head


def measure(
    name: str, steps: Steps, of_llama: Steps, read: Callable[[], object], size: int, seconds: float
) -> dict[str, Any]:
    step_us, llama_us, read_us = best_in_turns_us([steps.run, of_llama.run, read], seconds)
    weights, cache = steps.bytes()
    llama_bytes = sum(of_llama.bytes())
    limit = size / read_us
    share = (weights + cache) / step_us / limit
    return {
        "family": name,
        "rows": steps.n,
        "step_ms": round(step_us / 1000, 2),
        "bytes": weights + cache,
        "cache_bytes": cache,
        "memory_gb_s": round(limit / 1000, 2),
        "share": round(share, 3),
        "of_llama": round(share / (llama_bytes / llama_us / limit), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=512, help="tokens of each request")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="per family and number of tokens"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if type(get_ops()) is not CPUOps:
        set_ops(CPUOps())
    num_tokens = max(args.rows) * (args.context // BLOCK_SIZE + 1) * BLOCK_SIZE
    large = torch.ones(128 << 20)
    results, start = [], time.perf_counter()
    with torch.inference_mode():
        llama = load("llama", num_tokens)
        llama_programs = make_programs("llama", llama)
        for name in args.families:
            model = llama if name == "llama" else load(name, num_tokens)
            programs = llama_programs if name == "llama" else make_programs(name, model)
            for n in args.rows:
                steps = Steps(model, programs, n, args.context)
                of_llama = Steps(llama, llama_programs, n, args.context)
                results.append(
                    measure(name, steps, of_llama, large.sum, large.numel() * 4, args.seconds)
                )
                print(results[-1], file=sys.stderr)
            del model, programs, steps
            gc.collect()
    settings = {"context": args.context, "seconds": round(time.perf_counter() - start)}
    report("families", settings, results)


if __name__ == "__main__":
    main()
