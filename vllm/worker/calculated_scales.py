"""Computes scales of an FP8 KV cache by a forward pass at the start (`--calculate-kv-scales`).

The tokens of the pass depend only on the vocabulary. So every start and every replica computes the
same scales, and similar engines can exchange KV blocks.
"""

import torch
from torch import Tensor, nn

from vllm.attention import Attention, share_context
from vllm.attention.cached_layer import layers_with_cache
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.loader.kv_scales import cache_scale_factor
from vllm.model_executor.models.interface import LayeredModel
from vllm.ops.attention_options import FP8_DTYPES
from vllm.worker.kv_cache import cache_dtype

logger = init_logger(__name__)

_NUM_TOKENS = 256
_SEED = 0

_KEY_RANGE, _VALUE_RANGE = 200, 100
"""The largest key and value of the pass are scaled to these numbers, of the 448 of e4m3, so that
other texts may have larger ones."""


@torch.no_grad()
def calculate_scales(config: VllmConfig, model: LayeredModel, device: torch.device) -> None:
    """Set the KV-cache scales of layers that have none, one for each key/value head.

    All ranks call this at the same time, before caches are bound. It does nothing unless the config
    asks for it and the cache is FP8.

    Args:
        config: config of the engine.
        model: the model of this rank, complete; its layers may communicate with other ranks.
        device: the device of the model.
    """
    if not config.cache.calculate_kv_scales:
        return
    if cache_dtype(config) not in FP8_DTYPES:
        logger.warning("calculate_kv_scales has no effect: the KV cache is not FP8")
        return
    largest: dict[Attention, list[Tensor]] = {}

    def note(layer: nn.Module, args: tuple[Tensor | None, ...]) -> None:
        assert isinstance(layer, Attention)
        # [T, G, D] -> [G]
        largest[layer] = [x.abs().amax((0, 2)).float() for x in args[1:] if x is not None]

    layers = [layer for layer in layers_with_cache(model) if isinstance(layer, Attention)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        _run(config, model, device)
    finally:
        for hook in hooks:
            hook.remove()
    num_set = 0
    for layer in layers:
        if not ((layer.key_scales == 1) & (layer.value_scales == 1)).all():
            continue  # its scale comes from the checkpoint or from QUANT_CONFIG
        ranges = (_KEY_RANGE, _VALUE_RANGE)
        found = [_scales(x.cpu(), y) for x, y in zip(largest[layer], ranges, strict=False)]
        layer.set_cache_scales(*found)
        layer.has_calculated_scales = True
        num_set += 1
    logger.info("calculated scales of the KV cache in %d of %d layers", num_set, len(layers))


def _run(config: VllmConfig, model: LayeredModel, device: torch.device) -> None:
    """Run one prompt without a KV cache, through all pipeline stages."""
    arch, scheduler = config.model.resolved_arch, config.scheduler
    size = min(_NUM_TOKENS, scheduler.max_model_len, scheduler.max_num_batched_tokens)
    generator = torch.Generator().manual_seed(_SEED)
    inputs = torch.randint(arch.vocab_size, (size,), generator=generator).to(device)
    stage = model.stage
    if not stage.is_first:
        inputs = stage.receive(
            size, arch.hidden_size, getattr(torch, config.model.dtype_name), device
        )
    positions = torch.arange(size).to(device)
    # Eager mode: the model runs only once here, so compiling it would take longer than running it.
    with torch.compiler.set_stance("force_eager"), share_context(model).running(None):
        out = model(inputs, positions)
    if not stage.is_last:
        stage.connected.send(out)


def _scales(largest: Tensor, wanted: int) -> Tensor:
    """Compute the scales [G] from the largest values [G].

    A head without values gets the scale 1.
    """
    scales = largest / wanted * cache_scale_factor()
    return torch.where(scales.isfinite() & (scales > 0), scales, 1.0)
