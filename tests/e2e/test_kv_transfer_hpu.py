"""Test KV blocks that are stored outside of a simulated card: they come back with the same tokens,
and nothing compiles for them.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, simulated_hpu
from vllm import LLM, SamplingParams
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.memory.block_copies import CardBlockCopies

PREFIX = "import os\nimport sys\ndef foo(a, b):\n    return a + b\n" * 3
PROMPTS = [f"# file {number}\n{PREFIX}" for number in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = SMALL_ENGINE | {"num_gpu_blocks_override": 10, "max_num_seqs": 2}
"""A cache that holds the blocks of one of the prompts."""


def generate(llm: LLM, size: int = len(PROMPTS)) -> tuple[list[list[int]], list[int]]:
    """Run the prompts in groups of `size`. Return the tokens, and the number of cached tokens of
    each prompt.
    """
    outputs = [
        output
        for first in range(0, len(PROMPTS), size)
        for output in llm.generate(PROMPTS[first : first + size], PARAMS, use_tqdm=False)
    ]
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens for o in outputs]


CASES = [
    ("HPU graphs", "float32", "auto"),
    pytest.param("torch.compile", "bfloat16", "auto", marks=pytest.mark.exhaustive),
    pytest.param("lazy", "bfloat16", "fp8", marks=pytest.mark.exhaustive),
    pytest.param("eager", "float32", "auto", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("mode", "dtype", "cache_dtype"), CASES)
def test_blocks_come_back_from_host_memory_and_from_another_engine(
    mode, dtype, cache_dtype, tmp_path
):
    settings = {
        **SMALL,
        "enforce_eager": MODES[mode][1],
        "dtype": dtype,
        "kv_cache_dtype": cache_dtype,
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"folder": str(tmp_path)},
    }
    variables = FEW_BUCKETS | {"PT_HPU_LAZY_MODE": MODES[mode][0]}
    with simulated_hpu(has_profiling_run=False, **variables) as bridge:
        llm = LLM(**settings)
        expected, _ = generate(llm)
        assert generate(llm) == (expected, [0] * len(PROMPTS)), "everything was evicted"
        llm = LLM(**settings, kv_transfer_config=transfer)
        before = bridge.counters().compilations
        assert generate(llm) == (expected, [0] * len(PROMPTS))
        tokens, cached = generate(llm)
        assert tokens == expected and all(cached)
        assert bridge.counters().compilations == before
        llm.llm_engine.shutdown()
        other = LLM(**settings, kv_transfer_config=transfer)
        # Send one request at a time: the cache holds few blocks, and files are read while steps
        # run.
        tokens, cached = generate(other, size=1)
        assert tokens == expected and all(cached), "from the files of the first engine"


def make_copies(bridge: HabanaBridge) -> tuple[CardBlockCopies, list[torch.Tensor]]:
    caches = [bridge.zeros((24, 3), torch.bfloat16), bridge.zeros((24, 2), torch.float32)]
    return CardBlockCopies(bridge, [SimpleNamespace(kv_caches=caches)], block_size=2), caches


def test_numbers_that_are_not_finite_stay_out_of_the_cache():
    with simulated_hpu() as bridge:
        copies, caches = make_copies(bridge)
        bad = [torch.full((2, 3), torch.nan, dtype=torch.bfloat16), torch.ones(2, 2)]
        bad[1][0, 0] = -torch.inf
        block = b"".join(each.view(torch.uint8).numpy().tobytes() for each in bad)
        assert copies.write([5], [block])
        assert not caches[0].cpu().any()
        assert caches[1].cpu()[10:12].tolist() == [[0, 1], [1, 1]]


def test_blocks_are_read_as_they_were_written_and_other_sizes_are_refused():
    with simulated_hpu() as bridge:
        copies, caches = make_copies(bridge)
        data = torch.randint(0, 60, (11, copies.block_bytes), dtype=torch.uint8)
        blocks = [bytes(row.tolist()) for row in data]
        ids = [11, 3, 4, 1, 10, 9, 2, 8, 7, 6, 5]
        assert copies.write(ids, blocks) and copies.read(ids) == blocks
        assert copies.read([4]) == [blocks[2]]
        assert not copies.write([1], [blocks[0][:-1]])
        assert copies.read(ids) == blocks
        assert caches[0].cpu()[:2].any() == 0, "padding of the parts is the null block"
