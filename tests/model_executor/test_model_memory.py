"""Test finding the memory of a model, and replacing its tensors by others."""

import pytest
import torch
from torch import nn

from vllm.attention import Attention
from vllm.distributed import TPGroup
from vllm.model_executor.layers.cpu_methods import PackedTable
from vllm.model_executor.layers.embedding import ParallelLMHead
from vllm.model_executor.model_memory import fingerprint, model_storages, replace_tensors
from vllm.ops.cpu.library import load_cpu_kernels


class TinyModel(nn.Module):
    """A model with tied parameters, a buffer, a list, and an attention layer with bound caches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.parts = [torch.zeros(3), self.table[2:4]]
        self.attn = Attention(1, 4, 1)
        self.attn.bind_kv_cache(torch.zeros(2, 4, 1, 4), torch.zeros(2, 4, 1, 4))


def test_every_storage_is_found_once_and_caches_are_not():
    sizes = [len(storage) for storage in model_storages(TinyModel())]
    assert sorted(sizes) == [12, 16, 24, 64]
    assert sizes == [len(storage) for storage in model_storages(TinyModel())]


def test_a_storage_is_the_memory_itself():
    model = TinyModel()
    for storage in model_storages(model):
        storage.zero_()
    assert not model.first.weight.any() and not model.table.any()


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_packed_weights_are_found():
    head = ParallelLMHead(64, 32, TPGroup())
    head.use_method(PackedTable())
    head.method.finish(head)
    assert [len(storage) for storage in model_storages(head)] == [64 * 32 * 4]


def test_any_changed_byte_changes_the_fingerprint():
    for size in (0, 5, 8, 8192, 3 * 8192 + 77):
        data = torch.randint(0, 255, (size + 8,), dtype=torch.uint8)[:size].clone()
        before = fingerprint(data)
        assert fingerprint(data.clone()) == before
        for index in {0, size // 2, size - 1} & set(range(size)):
            data[index] += 1
            assert fingerprint(data) != before
            data[index] -= 1
    swapped = torch.arange(16384, dtype=torch.int32).view(torch.uint8)
    words = swapped.view(torch.int64).clone()
    words[[5, 2000]] = words[[2000, 5]]
    assert fingerprint(words.view(torch.uint8)) != fingerprint(swapped)


def test_replaced_tensors_stay_shared_and_keep_their_kind():
    model = TinyModel()
    names = []

    def double(name: str, tensor: torch.Tensor) -> torch.Tensor:
        names.append(name)
        return tensor * 2

    expected = model.first.weight.detach() * 2
    replace_tensors(model, double)
    assert names == ["table", "first.weight", "first.bias"]
    assert model.second.weight is model.first.weight
    assert isinstance(model.first.weight, nn.Parameter) and not model.first.weight.requires_grad
    assert torch.equal(model.first.weight, expected)
    assert model.table.tolist() == [0, 2, 4, 6, 8, 10]
    assert "table" in dict(model.named_buffers())
