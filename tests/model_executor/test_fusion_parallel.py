"""Test ranks that run their parts as programs: the bits of their modules, and close to the results
of one rank.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model_executor.helpers import make_config
from tests.model_executor.test_fusion import (
    Requests,
    attention_layers,
    bind_caches,
    run_fused,
)
from tests.tiny_models import (
    ALL_FAMILIES,
    RARE_FAMILIES,
    SIBLINGS,
    VOCAB_SIZE,
    WITHOUT_PROGRAM,
)
from vllm.attention import LaunchContext, share_context
from vllm.config import ParallelConfig
from vllm.distributed import Rendezvous, TPGroup
from vllm.distributed.rendezvous import ARENA_BUFFER_BYTES, ARENA_HEADER_BYTES
from vllm.errors import CollectiveError, ConfigError
from vllm.model_executor.fusion import fuse, fuse_head
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops.cpu.collectives import SharedMemoryCollectives
from vllm.ops.cpu.library import load_cpu_kernels

pytestmark = [
    pytest.mark.usefixtures("cpu_ops"),
    pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built"),
]

NOT_HERE = (
    *("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2"),
    *WITHOUT_PROGRAM,
)
"""Norms that need all heads; what has no program at all."""
WITH_EXPERTS = [
    family
    for family in (
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "granite_moe",
        "gpt_oss",
        "llama4",
        "deepseek_v3",
    )
    if family in ALL_FAMILIES
]
LAUNCHES = [[9, 1, 23], [1, 1, 40], [1, 1, 1]]
LaunchOfOne = tuple[Tensor, Tensor, Any]


@dataclass
class Ranks:
    """Threads in the role of the ranks of one model, each with its own caches."""

    folder: Path
    size: int
    dtype: str = "float32"
    is_by_expert: bool = False
    timeout_s: float = 60.0
    first_rank: int = 0
    models: list[CausalLM] = field(default_factory=list)

    def __enter__(self) -> "Ranks":
        self.rendezvous = Rendezvous.create(
            ParallelConfig(tensor_parallel_size=self.size, distributed_timeout_s=self.timeout_s)
        )
        for rank in range(self.size):
            group = TPGroup(rank, self.size, has_whole_experts=self.is_by_expert)
            if self.size > 1:
                group.collectives = SharedMemoryCollectives(
                    load_cpu_kernels(),
                    self.rendezvous.arena_fd,
                    rank,
                    self.size,
                    header_bytes=ARENA_HEADER_BYTES,
                    buffer_bytes=ARENA_BUFFER_BYTES,
                    timeout_s=self.timeout_s,
                    first_rank=self.first_rank,
                )
            config = make_config(self.folder, self.dtype)
            model = load_model(config, group, torch.device("cpu"), CPUPacked())
            for layer in attention_layers(model):
                bind_caches(layer, getattr(torch, self.dtype))
            self.models.append(model)
        self.pool = ThreadPoolExecutor(self.size)
        return self

    def __exit__(self, *args: object) -> None:
        self.pool.shutdown()
        self.rendezvous.close()

    def on_all(self, call: Callable[[CausalLM], Any]) -> list[Any]:
        return list(self.pool.map(call, self.models))

    def run_modules(self, launch: LaunchOfOne) -> list[Tensor]:
        def run(model: CausalLM) -> Tensor:
            context = LaunchContext(launch[2], launch[1])
            with torch.inference_mode(), share_context(model).running(context):
                return model(*launch[:2])

        return self.on_all(run)

    def run_programs(self, programs: dict[int, Any], launch: LaunchOfOne) -> list[Tensor]:
        return self.on_all(lambda model: run_fused(programs[id(model)], *launch))


def launches() -> list[LaunchOfOne]:
    torch.manual_seed(1)
    requests = Requests(3)
    made = [requests.launch(counts) for counts in LAUNCHES]
    return [(torch.randint(VOCAB_SIZE, ids.shape), *rest) for ids, *rest in made]


def assert_close(got: Tensor, want: Tensor) -> None:
    if want.dtype == torch.float32:
        torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)
    else:  # sums are rounded at other points, so the router may choose another expert for a token
        of_tokens = (got - want).float().norm(dim=-1) / want.float().norm(dim=-1)
        assert float(of_tokens.median()) < 0.08


def assert_ranks_are_one(ranks: Ranks, one: Ranks) -> None:
    """Check that modules and programs of all ranks have the same bits, and are close to the results
    of one rank.
    """
    (alone,) = map(fuse, one.models)
    programs = {id(model): fuse(model) for model in ranks.models}
    assert alone is not None and all(programs.values())
    found = []
    for launch in launches():
        by_modules = ranks.run_modules(launch)
        found.append((by_modules[0], one.run_modules(launch)[0]))
        for got in (*by_modules, *ranks.run_programs(programs, launch)):
            assert torch.equal(got, by_modules[0])
    assert_close(*map(torch.cat, zip(*found, strict=True)))
    heads = [fuse_head(model, programs[id(model)]) for model in ranks.models]
    assert [head and head.width for head in heads] == [VOCAB_SIZE] * ranks.size


SPARED = (*RARE_FAMILIES, *SIBLINGS)
HERE = [family for family in ALL_FAMILIES if family not in NOT_HERE]
ON_FOUR = ("llama", "qwen2", "opt", "gemma3", "falcon_7b", "gpt_bigcode", "mixtral", "gpt_oss")
CASES = [
    *((family, 2, "bfloat16") for family in HERE if family not in SPARED),
    *((family, 4, "float32") for family in HERE if family in ON_FOUR),
    *(
        pytest.param(family, 2, "bfloat16", marks=pytest.mark.exhaustive)
        for family in HERE
        if family in SPARED
    ),
    *(
        pytest.param(family, 4, "float32", marks=pytest.mark.exhaustive)
        for family in HERE
        if family not in ON_FOUR
    ),
]
"""Four ranks are more than the KV heads of most families."""


@pytest.mark.parametrize(("family", "size", "dtype"), CASES)
def test_programs_of_ranks_have_the_bits_of_their_modules(tiny_model, family, size, dtype):
    several = Ranks(tiny_model(family), size, dtype)
    with Ranks(tiny_model(family), 1, dtype) as one, several as ranks:
        assert_ranks_are_one(ranks, one)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_ranks_may_have_whole_experts(tiny_model, family):
    for size, dtype in ((2, "bfloat16"), (4, "float32")):
        several = Ranks(tiny_model(family), size, dtype, is_by_expert=True)
        with Ranks(tiny_model(family), 1, dtype) as one, several as ranks:
            assert_ranks_are_one(ranks, one)


def test_a_program_names_the_rank_that_does_not_come(tiny_model):
    launch = launches()[0]
    with Ranks(tiny_model("llama"), 2, timeout_s=0.2, first_rank=2) as ranks:
        program = fuse(ranks.models[0])
        with pytest.raises(
            CollectiveError, match=r"all_reduce on rank 2 failed: rank 3 has not arrived"
        ):
            run_fused(program, *launch)
    with Ranks(tiny_model("llama"), 2) as ranks:
        program = fuse(ranks.models[0])
        running = ranks.pool.submit(run_fused, program, *launch)
        time.sleep(0.05)
        ranks.rendezvous.abort()
        with pytest.raises(CollectiveError, match="all_reduce on rank 0 failed: another rank has"):
            running.result(timeout=10)


def test_what_does_not_divide_is_refused_or_uneven():
    message = "enable_expert_parallel: the model has 4 experts per layer, but each of the 8 ranks"
    group = TPGroup(0, 8, has_whole_experts=True)
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        Experts(4, 64, 176, group)
    message = r"\(3\) must divide the 176 intermediate features of an expert\. .* fit: 1, 2, 4; or"
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        Experts(4, 64, 176, TPGroup(0, 3))
    with torch.device("meta"):
        part = Experts(7, 64, 176, TPGroup(1, 3, has_whole_experts=True))
    assert (part.expert_ids, part.intermediate_size) == (range(2, 4), 176)
