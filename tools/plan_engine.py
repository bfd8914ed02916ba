"""Compute the memory of a Gaudi card and the buckets of an engine, without the card and without
weights.

    VLLM_HPU_SIM=gaudi2 python tools/plan_engine.py --model FOLDER --max-model-len 8192

FOLDER needs a config.json. Flags and environment variables are those of an engine. Prints one JSON
object, for the first card. Scales of FP8 weights are left out; what launches need is measured by an
engine at its start, and here it is the assumption `--launch-gib`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

from vllm.attention.cached_layer import layers_with_cache  # noqa: E402
from vllm.bucketing import plan_buckets  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.cost_model.cards import CARDS, GIB  # noqa: E402
from vllm.distributed import RankLayout, Stage, TPGroup  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.errors import ConfigError  # noqa: E402
from vllm.model_executor.layers.embedding import VocabParallelEmbedding  # noqa: E402
from vllm.model_executor.layers.experts import Experts  # noqa: E402
from vllm.model_executor.layers.linear import ParallelLinear  # noqa: E402
from vllm.model_executor.layers.weight_method import MethodLayer  # noqa: E402
from vllm.model_executor.loader.model_loader import build_model  # noqa: E402
from vllm.model_executor.model_memory import model_tensors  # noqa: E402
from vllm.model_executor.quantization.inc.measure import (  # noqa: E402
    can_be_fp8,
    experts_can_be_fp8,
    head_can_be_fp8,
)
from vllm.platforms.hpu import simulated_card  # noqa: E402
from vllm.utils import FlexibleArgumentParser  # noqa: E402
from vllm.worker.hpu.launches.planner import launch_shapes  # noqa: E402
from vllm.worker.hpu.memory.memory import divide_memory, subtract_states  # noqa: E402
from vllm.worker.kv_cache import cache_dtype, cache_layout  # noqa: E402


def plan(config: VllmConfig, card: str, launch_bytes: int) -> dict[str, Any]:
    """Return what rank 0 of an engine has on its card.

    Args:
        config: of the engine, resolved for a card.
        card: a key of `cost_model.cards.CARDS`.
        launch_bytes: assumed memory of launches.

    Raises:
        ConfigError: the engine does not fit the card, has a draft model, or weights in a format
            whose bytes are known only once they are loaded.
    """
    if config.of_draft_model is not None:
        raise ConfigError(
            "the memory of a draft model is not planned: leave --speculative-config out, and the "
            "plan is that of the model alone"
        )
    model = _build(config)
    weight_bytes = _weight_bytes(model, config)
    total_bytes = CARDS[card].pool_bytes
    if weight_bytes + launch_bytes >= total_bytes:
        raise ConfigError(
            f"{weight_bytes / GIB:.2f} GiB of weights and {launch_bytes / GIB:.2f} GiB for forward "
            f"passes do not fit into a {card} with {total_bytes / GIB:.2f} GiB. Use more cards "
            "(--tensor-parallel-size) or FP8"
        )
    layout = cache_layout(config, layers_with_cache(model), cache_dtype(config), keeps_all=True)
    state_bytes = layout.state_bytes * (config.scheduler.max_num_seqs + 1)
    config, free_bytes = subtract_states(config, total_bytes - weight_bytes, state_bytes)
    report = divide_memory(
        config,
        free_bytes=free_bytes,
        launch_bytes=launch_bytes,
        block_bytes=layout.block_bytes,
    )
    found = plan_buckets(config, report.num_blocks)
    buckets = (*found.catalog.prefill, *found.catalog.decode)
    return {
        "card": card,
        "cards": config.parallel.world_size,
        "weights_gib": round(weight_bytes / GIB, 4),
        "assumed_launch_gib": round(launch_bytes / GIB, 2),
        "graphs_gib": round(report.warm_up_bytes / GIB, 4),
        "kv_block_mib": layout.block_bytes / 2**20,
        "kv_blocks": report.num_blocks,
        "kv_tokens": (report.num_blocks - 1) * config.cache.block_size,
        "max_model_len": config.scheduler.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "prompt_buckets": len(found.catalog.prefill),
        "decode_buckets": len(found.catalog.decode),
        "launch_shapes": sum(len(launch_shapes(bucket, found.limits)) for bucket in buckets),
    }


def _build(config: VllmConfig) -> nn.Module:
    """The part of the model that rank 0 has, with shapes but without memory."""
    parallel, arch = config.parallel, config.model.resolved_arch
    layout = RankLayout.of(parallel)
    partition = parallel.pipeline_layer_partition
    return build_model(
        arch,
        TPGroup(0, layout.tensor_size, has_whole_experts=parallel.enable_expert_parallel),
        getattr(torch, config.model.dtype_name),
        stage=Stage.of(0, layout.pipeline_size, arch.num_layers, partition),
    )


def _weight_bytes(model: nn.Module, config: VllmConfig) -> int:
    """All that a loaded model reads; what `QUANT_CONFIG` rounds to FP8 has one byte each."""
    inc = config.model.inc
    if config.model.quantization is not None and inc is None:
        raise ConfigError(
            f"the bytes of {config.model.quantization} weights are known only once they are "
            f"loaded; without quantization, and with QUANT_CONFIG, they are computed"
        )
    saved = 0
    for name, layer in model.named_modules():
        if inc is None or not isinstance(layer, MethodLayer):
            continue
        is_rounded = (
            (isinstance(layer, ParallelLinear) and can_be_fp8(name, layer, inc))
            or (isinstance(layer, Experts) and experts_can_be_fp8(name, layer, inc))
            or (isinstance(layer, VocabParallelEmbedding) and head_can_be_fp8(name, layer, inc))
        )
        if is_rounded:
            own = layer.own_parameters
            saved += sum(
                p.numel() * (p.element_size() - 1)
                for param, p in layer.named_parameters(recurse=False)
                if param not in own
            )
    return sum(tensor.nbytes for tensor in model_tensors(model)) - saved


def main() -> int:
    """Plan the engine of the command line."""
    parser = FlexibleArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--launch-gib",
        type=float,
        default=1.0,
        metavar="GIB",
        help="memory that launches are assumed to need (default: 1)",
    )
    EngineArgs.add_cli_args(parser)
    args: argparse.Namespace = parser.parse_args()
    try:
        card = simulated_card()
        if card is None:
            raise ConfigError(
                "VLLM_HPU_SIM is not set: name the card that the engine is to be planned for, "
                f"{' or '.join(CARDS)}"
            )
        engine = EngineArgs.from_cli_args(args)
        engine.skip_tokenizer_init = True
        found = plan(engine.create_engine_config(), card, int(args.launch_gib * GIB))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
