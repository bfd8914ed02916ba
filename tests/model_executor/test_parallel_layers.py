"""Test tensor parallelism: ranks that are loaded from one checkpoint compute the same as one
rank.
"""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from tests.model_executor.helpers import load, logits_of, prompt_of
from tests.tiny_models import ALL_FAMILIES, FAMILIES, STATE_FAMILIES, make_tiny_model
from vllm.distributed import TPGroup
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, Slice

INPUT_IDS = prompt_of(20)
SPLIT_OTHERWISE = tuple(
    family
    for family in (
        *("gpt_oss", "llama4", "qwen2_moe", "cohere_head_norms", "stablelm_head_norms"),
        *("granite_hybrid", "granite_hybrid_dense", "mamba", "mamba2"),
        *("olmo2", "olmo3", "olmoe"),
    )
    if family in ALL_FAMILIES
)
"""Families with experts, sinks, norms of single heads or of all together, or mixers (of one group
and of several, which may be fewer than the ranks)."""


class Rendezvous:
    """Exchanges tensors between the threads that have the role of ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.tensors[rank] = x.clone()
        self.barrier.wait()
        everyone = list(self.tensors)
        self.barrier.wait()
        return everyone


@dataclass(eq=False)
class FakeTPGroup(TPGroup):
    """A tensor-parallel group whose ranks are threads of one process."""

    rendezvous: Rendezvous | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        assert self.rendezvous is not None
        return x.copy_(torch.stack(self.rendezvous.exchange(self.rank, x)).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        assert self.rendezvous is not None
        return torch.cat(self.rendezvous.exchange(self.rank, x), dim=-1)


def logits_of_ranks(folder: Path, tp_size: int) -> list[Tensor]:
    rendezvous = Rendezvous(tp_size)
    models = [
        load(folder, FakeTPGroup(rank, tp_size, rendezvous=rendezvous)) for rank in range(tp_size)
    ]
    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(lambda model: logits_of(model, INPUT_IDS), models))


OFTEN = (*FAMILIES, *SPLIT_OTHERWISE, "deepseek_v3")


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in OFTEN else pytest.mark.exhaustive) for f in ALL_FAMILIES],
)
def test_ranks_together_compute_what_one_does(tiny_model, family, tp_size):
    """Four ranks are more than the two KV heads of the decoders, so two ranks share each head. All
    ranks have the whole latent vector of DeepSeek.
    """
    folder = tiny_model(family)
    want = logits_of(load(folder), INPUT_IDS)
    # This Gemma 3 has seven layers, so errors add up.
    tolerance = 1e-4 if family in (*STATE_FAMILIES, "gemma3") else 2e-5
    for got in logits_of_ranks(folder, tp_size):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def test_a_vocabulary_that_does_not_divide_is_padded(tmp_path):
    folder = make_tiny_model("llama", tmp_path, vocab_size=4097)
    want = logits_of(load(folder), INPUT_IDS)
    for got in logits_of_ranks(folder, 4):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def _gloo_rank(rank: int, folder: Path, rendezvous: str, results: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
    logits = logits_of(load(folder, TPGroup(rank, 2)), INPUT_IDS)
    torch.save(logits, results / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.exhaustive  # exhaustive: tests/e2e/test_tensor_parallel.py runs ranks as processes
@pytest.mark.slow
def test_ranks_as_processes_with_gloo(tiny_model, tmp_path):
    folder = tiny_model("granite_code")
    # Both ranks are forked from a process that has imported this module.
    multiprocessing.set_forkserver_preload([__name__])
    torch.multiprocessing.start_processes(
        _gloo_rank,
        (folder, str(tmp_path / "rendezvous"), tmp_path),
        nprocs=2,
        start_method="forkserver",
    )
    want = logits_of(load(folder), INPUT_IDS)
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_each_rank_holds_and_reads_its_part_only():
    read: list[tuple[slice, ...]] = []
    stored = torch.arange(24.0).view(8, 3)

    def read_part(index: tuple[slice, ...]) -> Tensor:
        read.append(index)
        return stored[index]

    param = torch.full((5, 3), -1.0)
    Slice(0, 1, 4, total=8).copy(param, CheckpointTensor(stored.shape, read_part), TPGroup(1, 2))
    assert read == [(slice(4, 8),)]
    assert torch.equal(param[1:], stored[4:])
    assert (param[0] == -1).all()


def test_rows_beyond_the_checkpoint_are_zero():
    stored = torch.ones(5, 2)
    source = CheckpointTensor(stored.shape, stored.__getitem__)
    parts = []
    for rank in range(4):  # the ranks have 2, 2, 1 and no rows
        param = torch.full((2, 2), -1.0)
        Slice(0, 0, 2, total=5).copy(param, source, TPGroup(rank, 4))
        parts.append(param[:, 0].tolist())
    assert parts == [[1, 1], [1, 1], [1, 0], [0, 0]]


def test_sizes_of_a_packed_layer_with_shared_kv_heads():
    layer = ColumnParallelLinear(
        16,
        {"q_proj": 32, "k_proj": 8, "v_proj": 8},
        TPGroup(3, 4),
        num_replicas={"k_proj": 2, "v_proj": 2},
        bias=True,
    )
    assert layer.split_sizes == [8, 4, 4]
    assert layer.weight.shape == (16, 16)
    assert layer.bias is not None and layer.bias.shape == (16,)
    assert layer.slices["weight"]["v_proj"] == Slice(0, 12, 4, total=8, num_replicas=2)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="30 cannot be split evenly over 4"):
        ColumnParallelLinear(16, {"": 30}, TPGroup(0, 4))
    with pytest.raises(ValueError, match="30 cannot be split evenly over 4"):
        RowParallelLinear(30, 16, TPGroup(0, 4))


def test_a_tied_head_shares_the_parameter():
    embedding = VocabParallelEmbedding(10, 4, TPGroup())
    head = ParallelLMHead(10, 4, TPGroup())
    head.tie(embedding)
    torch.nn.init.normal_(embedding.weight)
    rows = embedding(torch.tensor([3, 9]))
    torch.testing.assert_close(head(rows), rows @ embedding.weight.T)
