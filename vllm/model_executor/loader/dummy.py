"""Random weights, for measuring a model whose checkpoint is not at hand."""

import torch
from torch import nn

from vllm.model_executor.layers.weight_method import MethodLayer

_BLOCK_SIZE = 1_000_003
"""Random numbers drawn; a prime, so that the rows of a weight that repeats them differ."""


@torch.no_grad()
def fill_with_dummy_weights(model: nn.Module, seed: int) -> None:
    """Give every parameter seeded values under which activations stay finite.

    Matrices are uniform with the spread of a trained model (1 / sqrt of the inputs), norm
    weights are one, biases zero. One block of random numbers is repeated: drawing each weight
    of a large model on its own would take longer than reading a checkpoint.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.rand(_BLOCK_SIZE, generator=generator) * 2 - 1
    for name, param in model.named_parameters():
        if param.dim() < 2:
            param.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        values = (block * param.shape[-1] ** -0.5).to(device=param.device, dtype=param.dtype)
        flat = param.view(-1)
        for start in range(0, flat.numel(), _BLOCK_SIZE):
            part = flat[start : start + _BLOCK_SIZE]
            part.copy_(values[: part.numel()])
    for module in model.modules():
        if isinstance(module, MethodLayer):
            module.method.fill_indices(module)
