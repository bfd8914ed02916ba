"""Counts what a decode step of a Gaudi card runs and moves, per layer. Nothing is timed.

    python benchmarks/bench_hpu_graph.py [--layers 4] [--batch 16] [--blocks 64]

A Llama of few layers is captured as the card's compiler gets it, once with the blocks of the cache
gathered and once as a slice of it, and its operators and bytes are counted as if nothing were
fused. Launches are those of the simulated card, in each mode. Prints JSON on standard output and a
table on standard error. Nothing of this has run on a card.
"""

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from gaudi_sim.bridge import SimBridge, SimulatedKernels
from gaudi_sim.graphs.capture import capture
from gaudi_sim.graphs.cost import cost_of
from gaudi_sim.kernels.kernels import register
from vllm.attention.backends.sdpa import bridge_sdpa
from vllm.attention.cached_layer import layers_with_cache
from vllm.bucketing.bucket import decode
from vllm.config import (
    CacheConfig,
    HPUConfig,
    LoadConfig,
    ModelArch,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import TPGroup
from vllm.model_executor.loader import load_model
from vllm.ops import set_ops
from vllm.ops.hpu.operators import HPUOps
from vllm.platforms.hpu import HPUPlatform
from vllm.worker.hpu.launches.execution import GraphExecution, make_execution
from vllm.worker.hpu.launches.input import fields_of, padded_sizes
from vllm.worker.hpu.launches.model import HPUModel
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.kv_cache import bind_kv_caches, cache_dtype, cache_layout

_BLOCK_SIZE = 128
_MODES = {
    "torch.compile, regional": (False, False, True),
    "torch.compile, whole": (False, False, False),
    "eager": (False, True, False),
    # Last, as they switch Dynamo off in this process.
    "HPU graphs": (True, False, False),
    "lazy": (True, True, False),
}
"""Lazy, enforce_eager, regional compilation."""


def config_of(args: argparse.Namespace, *, is_eager: bool, is_regional: bool) -> VllmConfig:
    """A Llama with heads of 128 and grouped queries."""
    arch = ModelArch.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": args.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
        }
    )
    return VllmConfig(
        model=ModelConfig(
            model="tiny", path="tiny", arch=arch, dtype="bfloat16", enforce_eager=is_eager
        ),
        cache=CacheConfig(block_size=_BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_model_len=8192, max_num_seqs=args.batch, max_num_batched_tokens=8192
        ),
        load=LoadConfig(load_format="dummy", use_tqdm_on_load=False),
        hpu=HPUConfig(regional_compilation=is_regional),
    )


def make_model(config: VllmConfig, bridge: Any, device: torch.device, num_blocks: int) -> HPUModel:
    """The model of a card, with a cache of zeros."""
    model = load_model(config, TPGroup(), device)
    layers, dtype = layers_with_cache(model), cache_dtype(config)
    layout = cache_layout(config, layers, dtype, keeps_all=True)
    bind_kv_caches(layers, HPUPlatform(lambda: bridge), num_blocks, layout, dtype)
    newest = torch.zeros(config.scheduler.max_num_seqs + 1, dtype=torch.int32, device=device)
    return HPUModel(model, _BLOCK_SIZE, bridge_sdpa(bridge.kernels), None, newest)


def packed_zeros(shape: PaddedShape) -> torch.Tensor:
    """Input of a launch without rows, on the host."""
    num_elements = sum(fields_of(shape).part_sizes(padded_sizes(shape)))
    return torch.zeros(num_elements, dtype=torch.int32)


def count_graph(args: argparse.Namespace, shape: PaddedShape) -> dict[str, float]:
    """Of one decode, captured on the host."""
    config = config_of(args, is_eager=False, is_regional=False)
    host = SimpleNamespace(
        kernels=SimulatedKernels(), zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    set_ops(HPUOps(host))  # type: ignore[arg-type]
    model = make_model(config, host, torch.device("cpu"), args.blocks + 1)
    cost = cost_of(capture(model, packed_zeros(shape), shape))
    arch = config.model.resolved_arch
    token_bytes = 2 * arch.num_kv_heads * arch.head_size * 2  # key and value, of 2 bytes each
    ideal = token_bytes * (args.blocks * _BLOCK_SIZE + args.batch)
    per_layer = cost.cache_bytes / args.layers
    return {
        "operators_per_layer": round(cost.num_operators / args.layers, 1),
        "moved_mib_per_layer": round(cost.moved_bytes / args.layers / 2**20, 2),
        "cache_mib_per_layer": round(per_layer / 2**20, 2),
        "ideal_cache_mib_per_layer": round(ideal / 2**20, 2),
        "cache_over_ideal": round(per_layer / ideal, 3),
    }


def count_launches(args: argparse.Namespace, mode: str, shape: PaddedShape) -> dict[str, float]:
    """Of one decode on the simulated card, after the same one has been compiled."""
    is_lazy, is_eager, is_regional = _MODES[mode]
    bridge = SimBridge("gaudi2", is_lazy=is_lazy)
    config = config_of(args, is_eager=is_eager, is_regional=is_regional)
    set_ops(HPUOps(bridge))
    with torch.inference_mode():
        model = make_model(config, bridge, bridge.device, args.blocks + 1)
        execution = make_execution(bridge, model, config)
        packed = packed_zeros(shape).to(bridge.device)
        if isinstance(execution, GraphExecution):
            execution.capture(packed, shape)
        execution.run(packed, shape)
        bridge.synchronize()
        before, copies = bridge.card.num_launches, bridge.counters().cache_copies or 0
        execution.run(packed, shape)
        bridge.synchronize()
    torch._dynamo.reset()
    return {
        "launches": bridge.card.num_launches - before,
        "cache_copies": (bridge.counters().cache_copies or 0) - copies,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="rows of the decode")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of 128 tokens that it reads")
    args = parser.parse_args()
    register()
    shapes = {
        "gathered": PaddedShape(decode(args.batch, args.blocks)),
        "contiguous": PaddedShape(decode(args.batch, args.blocks), is_contiguous=True),
    }
    graphs = {name: count_graph(args, shape) for name, shape in shapes.items()}
    launches = {mode: count_launches(args, mode, shapes["gathered"]) for mode in _MODES}
    for name, row in (graphs | launches).items():
        print(f"{name:24}", "  ".join(f"{k} {v}" for k, v in row.items()), file=sys.stderr)
    print(json.dumps({**vars(args), "graphs": graphs, "modes": launches}))


if __name__ == "__main__":
    main()
