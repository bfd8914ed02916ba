"""Test tokens on the card: the newest token of each request, and which drafts are accepted."""

import numpy as np
import pytest
import torch

from tests.exhaustive import seeds
from tests.worker.test_input_batch import int_array
from vllm.bucketing.bucket import decode
from vllm.sample.sampler import SamplerOutput
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.verification import count_accepted
from vllm.worker.hpu.launches.device_tokens import DeviceTokens
from vllm.worker.hpu.launches.input import RESIDENT, HPUInputBuilder, unpack_decode
from vllm.worker.hpu.launches.planner import PaddedLaunch

SIZE, MAX_DRAFTS, MAX_LEN, NUM_ROWS = 4, 3, 64, 6
CPU = torch.device("cpu")


def make_batch(rng: np.random.Generator) -> InputBatch:
    batch = InputBatch(NUM_ROWS, MAX_LEN, MAX_LEN // SIZE)
    batch.token_ids[:] = rng.integers(10, 99, batch.token_ids.shape)
    blocks = rng.permutation(np.arange(1, 1 + batch.block_table.size)).astype(np.int32)
    batch.block_table[:] = blocks.reshape(batch.block_table.shape)
    return batch


def make_launch(rows, start, num_drafts) -> PaddedLaunch:
    has_drafts = num_drafts.any()
    return PaddedLaunch(
        rows,
        start,
        num_drafts + 1,
        decode(len(rows) + 1, 80, 1 + MAX_DRAFTS if has_drafts else 1),
        num_drafts=num_drafts if has_drafts else None,
    )


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_tokens_on_the_card_are_those_that_a_host_would_pack(seed):
    rng = np.random.default_rng(seed)
    batch, device_tokens = make_batch(rng), DeviceTokens(NUM_ROWS, CPU, MAX_DRAFTS)
    rows = rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS)].astype(np.int32)
    begin = rng.integers(0, 40, len(rows)).astype(np.int32)
    num_drafts = rng.integers(0, 1 + MAX_DRAFTS * (seed % 2), len(rows)).astype(np.int32)
    newest = rng.integers(100, 200, len(rows)).astype(np.int32)
    drafts = rng.integers(200, 300, (len(rows), MAX_DRAFTS)).astype(np.int32)

    batch.num_tokens[rows] = begin + 1
    batch.token_ids[rows, begin] = newest
    batch.token_ids[rows[:, None], begin[:, None] + 1 + np.arange(MAX_DRAFTS)] = drafts
    host = HPUInputBuilder(batch, SIZE)
    want_launch = make_launch(rows, begin, num_drafts)
    want = unpack_decode(torch.from_numpy(host.pack(want_launch)[0]), want_launch.shape)

    builder = HPUInputBuilder(batch, SIZE, has_device_drafts=True)
    builder.mark_sampled(rows)
    launch = make_launch(rows, begin, num_drafts)
    packed = torch.from_numpy(builder.pack(launch)[0])
    device_tokens.newest[rows] = torch.from_numpy(newest)
    device_tokens.drafts.view(-1, MAX_DRAFTS)[rows] = torch.from_numpy(drafts)
    given = unpack_decode(packed, launch.shape)
    assert (given.token_ids.view(len(rows) + 1, -1)[:-1, 0] == RESIDENT).all()
    found = device_tokens.fill_in(given, launch.shape)

    query_len = launch.bucket.query_len
    is_token = np.arange(query_len) <= np.append(num_drafts, -1)[:, None]
    for name in ("token_ids", "indices"):
        shape = (-1, query_len)
        found_of, want_of = (getattr(x, name).view(shape)[is_token] for x in (found, want))
        assert found_of.tolist() == want_of.tolist(), name


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_the_card_accepts_what_the_host_would(seed):
    rng = np.random.default_rng(seed)
    batch, device_tokens = make_batch(rng), DeviceTokens(NUM_ROWS, CPU, MAX_DRAFTS)
    rows = int_array(4, 0, 2)
    num_drafts = rng.integers(0, MAX_DRAFTS + 1, 3).astype(np.int32)
    num_drafts[seed % 3] = MAX_DRAFTS
    start = rng.integers(0, 40, 3).astype(np.int32)
    batch.num_tokens[rows] = start + 1
    builder = HPUInputBuilder(batch, SIZE, has_device_drafts=bool(seed % 2))
    launch = make_launch(rows, start, num_drafts)
    drafts = rng.integers(0, 3, (3, MAX_DRAFTS)).astype(np.int32)
    batch.token_ids[rows[:, None], start[:, None] + 1 + np.arange(MAX_DRAFTS)] = drafts
    device_tokens.drafts.view(-1, MAX_DRAFTS)[rows] = torch.from_numpy(drafts)
    sampled = rng.integers(0, 3, (4, 1 + MAX_DRAFTS)).astype(np.int32)
    host_ids = np.where(rng.random(sampled.shape) < 0.15, -1, sampled).astype(np.int32)
    output = SamplerOutput(*(torch.from_numpy(x.ravel()) for x in (sampled, host_ids)))
    found = device_tokens.accept(torch.from_numpy(builder.pack(launch)[0]), launch.shape, output)

    has_token = np.arange(1 + MAX_DRAFTS) <= num_drafts[:, None]
    counts = count_accepted(host_ids[:3][has_token], drafts[has_token[:, 1:]], num_drafts)
    assert found[:3, 0].tolist() == counts.tolist()
    assert found[:, 1:].tolist() == host_ids.tolist()
    assert device_tokens.ends[rows].tolist() == (start + counts).tolist()
    assert device_tokens.newest[rows].tolist() == sampled[np.arange(3), counts - 1].tolist()
