"""Yields tensors of `consolidated*.safetensors` with the names and row order of transformers."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.loader.row_order import halves_of_neighbours
from vllm.transformers_utils.configs.mistral_params import PARAMS, read_params
from vllm.transformers_utils.hf_config import read_hf_config

_NAMES = {
    r"^tok_embeddings\.": "model.embed_tokens.",
    r"^output\.": "lm_head.",
    r"^norm\.": "model.norm.",
    r"^layers\.": "model.layers.",
    r"\.attention\.w([qkvo])\.": r".self_attn.\1_proj.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.feed_forward\.(gate|experts)\.": r".block_sparse_moe.\1.",
    r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
    r"\.feed_forward\.w2\.": ".mlp.down_proj.",
    r"\.feed_forward\.w3\.": ".mlp.up_proj.",
}


def in_the_order_of_transformers(
    folder: Path, tensors: NamedTensors
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield names and tensors of the files, converted to the names and order of transformers.

    Args:
        folder: folder of the files.
        tensors: tensors of the files, by their names in the files.
    """
    has_params = (folder / PARAMS).is_file()
    config = read_params(folder) if has_params else read_hf_config(folder, {})
    heads = {
        ".q_proj.weight": config["num_attention_heads"],
        ".k_proj.weight": config.get("num_key_value_heads") or config["num_attention_heads"],
    }
    for name, source in tensors:
        for pattern, replacement in _NAMES.items():
            name = re.sub(pattern, replacement, name)
        num_heads = next((count for end, count in heads.items() if name.endswith(end)), None)
        if num_heads is not None and source.shape[0] % (2 * num_heads) == 0:
            order = halves_of_neighbours(source.shape[0], num_heads)
            source = source.mapped(partial(_pick, order))
        yield name, source


def _pick(order: Tensor, rows: Tensor) -> Tensor:
    return rows[order.to(rows.device)]
