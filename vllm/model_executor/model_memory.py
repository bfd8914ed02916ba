"""Finds all memory that a loaded model reads, and moves its tensors to other memory.

Independent of files, batches and sleep mode.
"""

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention import Attention, CachedLayer
from vllm.distributed import Stage, TPGroup
from vllm.model_executor.layers.cross_attention import CrossAttention
from vllm.model_executor.speculators.interface import Speculator

_FINGERPRINT_COLUMNS = 1024
_WITHOUT_TENSORS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
_DICTS = frozenset({dict, OrderedDict})


def model_storages(model: nn.Module) -> list[Tensor]:
    """Return all memory that a model reads, each storage once, as bytes.

    KV caches with their scales and the pools of items are left out, and for a speculator also what
    it shares with its target. In addition to parameters and buffers there are tensors in objects
    that modules hold, such as packed weights. The order depends only on how the model was built, so
    two models of one config have the same list.

    Returns:
        [num_bytes] uint8 each, sharing the memory.
    """
    found: dict[int, Tensor] = {}
    for tensor in model_tensors(model):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = tensor.new_empty(0, dtype=torch.uint8).set_(storage)
    return list(found.values())


def model_tensors(model: nn.Module) -> list[Tensor]:
    """Return every tensor that a model reads, each once, in the order of `model_storages`.

    KV caches and pools of items are left out, and for a speculator also what it shares with its
    target. Several tensors may be views of one storage.
    """
    found = {id(tensor): tensor for tensor in _tensors(model)}
    if isinstance(model, Speculator):
        for tensor in _tensors(model.target):
            found.pop(id(tensor), None)
    return list(found.values())


def _tensors(value: Any) -> list[Tensor]:
    """Return all tensors in a value: in modules, containers, and objects of this package.

    Connections to other ranks are skipped, since they hold hidden states that are being sent.
    """
    found: list[Tensor] = []
    _add_tensors(value, set(), found)
    return found


def _add_tensors(value: Any, seen: set[int], found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    if isinstance(value, (Stage, TPGroup)):
        return
    if isinstance(value, dict):
        below = list(value.values())
    elif isinstance(value, (list, tuple)):
        below = list(value)
    elif isinstance(value, nn.Module) or type(value).__module__.startswith("vllm."):
        names: dict[str, Any] = getattr(value, "__dict__", {})
        others: tuple[str, ...] = ()
        if isinstance(value, CachedLayer):
            others = (*value.cache_names, *value.scale_names, *value.input_names)
        elif isinstance(value, CrossAttention):
            others = value.pool_names
        below = [v for name, v in names.items() if name not in others]
    else:
        return
    if not below or id(value) in seen:
        return
    seen.add(id(value))
    for each in below:
        # Most attributes of a module are such values or empty dicts of hooks.
        if type(each) not in _WITHOUT_TENSORS and (type(each) not in _DICTS or each):
            _add_tensors(each, seen, found)


def fingerprint(data: Tensor) -> bytes:
    """Return a short checksum of a tensor's bytes; equal values mean almost certainly equal bytes.

    It sums over rows and columns, at the speed of memory. It is not cryptographic: data can be
    constructed to have the same value.

    Args:
        data: [num_bytes] uint8 on the CPU, at an address that is a multiple of 8.
    """
    num_words = len(data) // 8
    num_rows = num_words // _FINGERPRINT_COLUMNS
    words = data[: 8 * num_words].view(torch.int64)
    table = words[: num_rows * _FINGERPRINT_COLUMNS].view(num_rows, _FINGERPRINT_COLUMNS)
    digest = blake2b(digest_size=16)
    for part in (
        table.sum(0),
        table.sum(1),
        words[num_rows * _FINGERPRINT_COLUMNS :],
        data[8 * num_words :],
    ):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.digest()


def replace_tensors(model: nn.Module, replacement: Callable[[str, Tensor], Tensor]) -> None:
    """Replace all parameters and buffers of a model by other tensors.

    Args:
        model: any module. A tensor that two modules share is replaced once and stays shared.
        replacement: called with the first name of a tensor and the tensor; returns the new one.
    """
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        owned = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in owned:
            full_name = f"{path}.{name}" if path else name
            owners.setdefault(id(tensor), []).append((full_name, module, name))
    del owned, tensor  # each tensor is freed when its last reference is replaced
    for shared in owners.values():
        full_name, module, name = shared[0]
        is_parameter = name in module._parameters
        new = replacement(full_name, getattr(module, name).detach())
        if is_parameter:
            new = nn.Parameter(new, requires_grad=False)
        for _, module, name in shared:
            setattr(module, name, new)


def copy_cache_scales(source: nn.Module, target: nn.Module) -> None:
    """Copy the scales of FP8 KV caches from the attention layers of `source` to `target`."""
    layers = [
        [m for m in model.modules() if isinstance(m, Attention)] for model in (source, target)
    ]
    for theirs, ours in zip(*layers, strict=True):
        if not ours.has_calculated_scales:
            ours.set_cache_scales(theirs.key_scales, theirs.value_scales)
