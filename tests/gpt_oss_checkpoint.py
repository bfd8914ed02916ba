"""Write a tiny GPT-OSS as it is published, with experts in MXFP4, and a dense checkpoint with the
same weights.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import make_tiny_model


def write_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """Return the folders of the dense checkpoint and of the MXFP4 checkpoint."""
    dense, packed = folder / "dense", folder / "mxfp4"
    for each in (dense, packed):
        each.mkdir()
    make_tiny_model("gpt_oss", dense, intermediate_size=192, num_hidden_layers=2)
    config = json.loads((dense / "config.json").read_text())
    tensors = load_file(dense / "model.safetensors")
    stored = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            # Transformers stores experts as [experts, in, out].
            experts, num_in, num_out = tensor.shape
            shape = (experts, num_out, -(-num_in // 32), 16)
            blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape[:3], generator=generator, dtype=torch.uint8)
            numbers = mxfp4_by_definition(blocks.flatten(0, 1), scales.flatten(0, 1))
            tensors[name] = numbers.view(experts, num_out, -1).transpose(1, 2).contiguous()
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, dense / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config |= {"quantization_config": settings}
    (packed / "config.json").write_text(json.dumps(config))
    return dense, packed


def mxfp4_by_definition(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode element by element: [rows, B, 16] blocks and [rows, B] scales -> [rows, B * 32]."""
    rows = []
    for row_blocks, row_scales in zip(blocks.tolist(), scales.tolist(), strict=True):
        row = []
        for block, scale in zip(row_blocks, row_scales, strict=True):
            for byte in block:
                for bits in (byte & 0xF, byte >> 4):
                    exponent, mantissa = bits >> 1 & 3, bits & 1
                    # Numbers below the smallest exponent have no leading one.
                    size = (
                        mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
                    )
                    row.append((-size if bits & 8 else size) * 2.0 ** (scale - 127))
        rows.append(row)
    return torch.tensor(rows)
