"""Test a step of decodes in one call: it gives the tokens of its parts, with drafts and with
several decodes, and refuses what it does not support.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.test_cpu_program import (
    BLOCK_SIZE,
    HEAD_SIZE,
    HIDDEN,
    MAX_POSITIONS,
    NUM_BLOCKS,
    VOCAB_SIZE,
    Model,
    make_model,
    packed,
    program_of,
)
from vllm.ops.cpu.operators import load_cpu_kernels
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep, RowArrays
from vllm.ops.cpu.operators.program import Program
from vllm.ops.cpu.operators.recorder import Recorder
from vllm.ops.cpu.sampling import RowNumbers, load_sampling_kernels
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.sample.restrictions.masks import TokenMasks, bit_values
from vllm.sample.restrictions.output_rules import NO_TIMES, LogitRules

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

NUM_ROWS, MAX_BLOCKS = 7, 4
RANDOM, MASKED, KNOWN, UNKNOWN = 1, 128, 1 | 8 | 128, 64
NUM_WORDS = 4
GREEDY_PARAMS, RANDOM_PARAMS = (1, 0, 0, 1, 0, 0, 1, 1), (0.7, 0, 20, 0.9, 0, 0, 1, 0)


@pytest.fixture(autouse=True)
def threads(restore_threads) -> None:
    """Restore the number of threads, which some tests set."""


def head_of(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> Program:
    recorder = Recorder(dtype)
    hidden = recorder.given(weight.in_features)
    return Program(recorder, recorder.linear(hidden, weight, None), hidden)


@dataclass
class Setting:
    model: Model
    head: PackedWeight
    arrays: RowArrays

    def step(self, **options: Any) -> FusedDecodeStep:
        return FusedDecodeStep(
            program_of(self.model),
            head_of(self.head),
            self.arrays,
            known_features=KNOWN,
            random_feature=RANDOM,
            mask_features=MASKED,
            **options,
        )

    def launch(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        chosen = np.array(rows, np.int32)
        ones = np.ones(len(rows), np.int32)
        return chosen, self.arrays.num_tokens[chosen] - 1, ones

    def snapshot(self) -> list[np.ndarray]:
        return [array.copy() for array in vars(self.arrays).values()]

    def tokens_of_parts(self, rows: list[int]) -> torch.Tensor:
        """Return the tokens that decoder, head and sampler give one after another."""
        arrays = self.arrays
        chosen, indices, _ = self.launch(rows)
        tables = torch.from_numpy(arrays.block_tables[0][chosen])
        at = torch.from_numpy(indices).long()
        slots = tables.gather(1, at[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + at % BLOCK_SIZE
        hidden = program_of(self.model).forward(
            torch.from_numpy(arrays.token_ids[chosen, indices]).long(),
            (at + torch.from_numpy(arrays.position_offsets[chosen]))[None],
            slots,
            tables,
            torch.from_numpy(indices + 1),
            torch.arange(len(rows) + 1, dtype=torch.int32),
            len(rows),
        )
        out = torch.empty(len(rows), dtype=torch.int32), torch.empty(len(rows), dtype=torch.int32)
        draws = (arrays.num_tokens - arrays.num_prompt_tokens)[chosen].astype(np.int64)
        logits = self.head.linear(hidden)
        if len(masked := np.flatnonzero(arrays.features[chosen] & MASKED)):
            words = torch.from_numpy(arrays.masks[chosen[masked]])
            masks = TokenMasks(masked, words, bit_values(words.device))
            first_times = torch.from_numpy(arrays.first_times[chosen[masked]])
            logits = LogitRules(masks, first_times).apply(logits)
        load_sampling_kernels().sample(
            logits,
            out,
            params=torch.from_numpy(np.ascontiguousarray(arrays.params[:, chosen])),
            numbers=RowNumbers(arrays.keys[chosen], draws),
        )
        return out[1]


def make_setting(num_random: int = 3) -> Setting:
    """Return the same arrays and requests at each call."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.arange(1, NUM_BLOCKS))[: NUM_ROWS * MAX_BLOCKS]
    params = np.array([GREEDY_PARAMS] * (NUM_ROWS + 1), np.float32)
    params[:num_random] = RANDOM_PARAMS
    features = np.zeros(NUM_ROWS + 1, np.int32)
    features[:num_random] = RANDOM | 8
    num_prompt = rng.integers(1, 20, NUM_ROWS, np.int32)
    model = make_model()
    for layer in model.layers:  # keys and values that earlier steps have computed
        layer.key_cache.normal_()
        layer.value_cache.normal_()
    return Setting(
        model,
        packed(VOCAB_SIZE, HIDDEN),
        RowArrays(
            token_ids=rng.integers(0, VOCAB_SIZE, (NUM_ROWS, 32), np.int32),
            num_tokens=num_prompt + rng.integers(1, 12, NUM_ROWS, np.int32),
            num_prompt_tokens=num_prompt,
            position_offsets=np.zeros(NUM_ROWS, np.int32),
            end_tokens=np.full((NUM_ROWS, 4), -1, np.int32),
            block_tables=blocks.reshape(1, NUM_ROWS, MAX_BLOCKS).astype(np.int32),
            item_slots=np.zeros(NUM_ROWS, np.int64),
            num_item_slots=np.zeros(NUM_ROWS, np.int32),
            features=features,
            params=np.ascontiguousarray(params.T),
            keys=rng.integers(0, 2**63, NUM_ROWS + 1, np.uint64),
            masks=np.full((NUM_ROWS + 1, NUM_WORDS), -1, np.int32),
            first_times=np.full(NUM_ROWS + 1, NO_TIMES, np.int32),
        ),
    )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_random", [0, 3, NUM_ROWS])
def test_tokens_are_those_of_the_parts_and_are_noted(num_random, num_threads):
    torch.set_num_threads(num_threads)
    setting = make_setting(num_random)
    arrays, step = setting.arrays, setting.step()
    for rows in ([4], [0, 2, 3, 6, 1], list(range(NUM_ROWS))):
        want = setting.tokens_of_parts(rows)
        before = arrays.num_tokens.copy()
        got, counts = step.run(*setting.launch(rows))
        assert got.tolist() == want.tolist()
        assert counts.tolist() == [1] * len(rows)
        assert step.num_invalid == 0
        assert arrays.num_tokens[rows].tolist() == (before[rows] + 1).tolist()
        assert arrays.token_ids[rows, before[rows]].tolist() == got.tolist()
        others = [row for row in range(NUM_ROWS) if row not in rows]
        assert arrays.num_tokens[others].tolist() == before[others].tolist()


def single_steps(rows: list[int], count: int) -> list[list[int]]:
    """Return the next tokens of each row, one step after the other."""
    setting = make_setting()
    step = setting.step()
    steps = [step.run(*setting.launch(rows))[0].tolist() for _ in range(count)]
    return [list(tokens) for tokens in zip(*steps, strict=True)]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_drafts_are_verified_up_to_the_first_wrong_one(num_threads):
    """Requests are greedy and random, one has no drafts, and drafts are wrong at each position."""
    torch.set_num_threads(num_threads)
    rows, num_right, num_drafts = [3, 0, 1, 2, 4, 5], [0, 0, 1, 2, 3, 3], [0, 2, 3, 3, 3, 3]
    want = single_steps(rows, 4)
    setting = make_setting()
    arrays = setting.arrays
    before = arrays.num_tokens.copy()
    for tokens, row, right, count in zip(want, rows, num_right, num_drafts, strict=True):
        drafts = [t if i < right else (t + 1) % VOCAB_SIZE for i, t in enumerate(tokens[:count])]
        arrays.token_ids[row, before[row] : before[row] + count] = drafts
    chosen, computed, ones = setting.launch(rows)
    scheduled = ones + np.array(num_drafts, np.int32)
    step = setting.step()
    got, counts = step.run(chosen, computed, scheduled, num_drafts=sum(num_drafts))
    assert counts.tolist() == [right + 1 for right in num_right]
    assert got.tolist() == [t for row, n in zip(want, counts, strict=True) for t in row[:n]]
    assert arrays.num_tokens[rows].tolist() == (before[rows] + counts).tolist()
    for tokens, row, count in zip(want, rows, counts, strict=True):
        assert arrays.token_ids[row, before[row] :][:count].tolist() == tokens[:count]
    # A further step finds the same keys and values as after single steps.
    following, _ = step.run(*setting.launch(rows))
    assert following.tolist()[4:] == [tokens[4] for tokens in single_steps(rows, 5)[4:]]


def test_several_decodes_are_single_steps_until_a_row_ends():
    rows = [1, 4, 6]
    want = single_steps(rows, 5)
    setting = make_setting()
    step = setting.step()
    got, counts = step.run(*setting.launch(rows), num_decodes=2)
    assert (got.tolist(), counts.tolist()) == ([t for row in want for t in row[:2]], [2, 2, 2])
    setting.arrays.end_tokens[4, 1] = want[1][3]
    end = want[1][2:].index(want[1][3]) + 1
    got, counts = step.run(*setting.launch(rows), num_decodes=3)
    assert step.num_done == end
    assert got.tolist() == [t for row in want for t in row[2 : 2 + end]]
    assert counts.tolist() == [end] * 3


def test_a_row_that_fails_behind_its_first_token_ends_before():
    want = single_steps([6, 4], 2)
    setting = make_setting()
    setting.model.embedding[want[0][0]] = torch.nan
    start, step = int(setting.arrays.num_tokens[6]), setting.step()
    got, counts = step.run(*setting.launch([6, 4]), num_decodes=3)
    assert (got.tolist(), counts.tolist()) == ([want[0][0], *want[1]], [1, 2])
    assert (step.num_done, step.num_invalid) == (2, 0)
    assert setting.arrays.num_tokens[6] == start + 1
    got, _ = step.run(*setting.launch([6]))
    assert (got.tolist(), step.num_invalid) == ([-1], 1)


def test_the_cache_is_written_as_by_the_decoder():
    one, other = make_setting(), make_setting()
    for layer, twin in zip(one.model.layers, other.model.layers, strict=True):
        layer.key_cache.copy_(twin.key_cache)
        layer.value_cache.copy_(twin.value_cache)
    other = dataclasses.replace(
        one,
        model=dataclasses.replace(
            one.model,
            layers=[
                dataclasses.replace(
                    layer, key_cache=layer.key_cache.clone(), value_cache=layer.value_cache.clone()
                )
                for layer in one.model.layers
            ],
        ),
    )
    other.tokens_of_parts([1, 5])
    assert one.step().run(*one.launch([1, 5])) is not None
    for layer, twin in zip(one.model.layers, other.model.layers, strict=True):
        assert torch.equal(layer.key_cache, twin.key_cache)
        assert torch.equal(layer.value_cache, twin.value_cache)


def forbid(arrays: RowArrays, row: int, *ranges: tuple[int, int]) -> None:
    """Give a row a mask that forbids these ranges of tokens."""
    arrays.features[row] |= MASKED
    bits = np.unpackbits(arrays.masks[row].view(np.uint8), bitorder="little")
    for begin, end in ranges:
        bits[begin:end] = 0
    arrays.masks[row] = np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_with_masks_sample_no_forbidden_token(num_threads):
    """The batch has greedy and random rows, masks that hold for all tokens, and rules for time
    stamps.
    """
    torch.set_num_threads(num_threads)
    rows, plain = list(range(NUM_ROWS)), single_steps(list(range(NUM_ROWS)), 1)
    setting = make_setting()
    arrays, seen = setting.arrays, set()
    for row in (0, 4):  # what they would sample is forbidden
        forbid(arrays, row, (plain[row][0], plain[row][0] + 1))
    forbid(arrays, 1, (0, 31), (33, VOCAB_SIZE))
    for row in (2, 3, 5):
        forbid(arrays, row, (5, 9))
    for first_time in range(8, VOCAB_SIZE, 3):
        arrays.first_times[[2, 3, 5]] = first_time
        want = setting.tokens_of_parts(rows)
        start = arrays.num_tokens.copy()
        got, _ = setting.step().run(*setting.launch(rows))
        assert got.tolist() == want.tolist()
        assert got[0] != plain[0][0] and got[4] != plain[4][0] and got[1] in (31, 32)
        assert got[6] == plain[6][0]
        seen |= set((got[[2, 3, 5]] < first_time).tolist())
        arrays.num_tokens[:] = start
    assert seen == {False, True}


def test_a_mask_holds_for_drafts_and_several_decodes_but_not_with_rules_for_times():
    rows = [4, 5]

    def masked() -> Setting:
        setting = make_setting()
        for row in rows:
            forbid(setting.arrays, row, (0, 20))
        return setting

    setting = masked()
    step = setting.step()
    want = [step.run(*setting.launch(rows))[0].tolist() for _ in range(3)]
    setting = masked()
    got, _ = setting.step().run(*setting.launch(rows), num_decodes=3)
    assert got.tolist() == [token for row in zip(*want, strict=True) for token in row]
    for options, scheduled in (({"num_drafts": 2}, 3), ({"num_decodes": 3}, 1)):
        setting = masked()
        arrays, (chosen, computed, _) = setting.arrays, setting.launch(rows)
        at = arrays.num_tokens[5]
        arrays.token_ids[5, at : at + 2] = [want[0][1], want[1][1]]
        launch = chosen, computed, np.array([1, scheduled], np.int32)
        arrays.first_times[5] = 40
        assert setting.step().run(*launch, **options) is None
        arrays.first_times[5] = NO_TIMES
        got, counts = setting.step().run(*launch, **options)
        assert got[counts[0] :].tolist() == [tokens[1] for tokens in want]


def test_logits_are_given_with_what_masks_forbid():
    setting = make_setting()
    forbid(setting.arrays, 3, (0, 30))
    step = setting.step()
    got, _ = step.run(*setting.launch([1, 3]), gives_logits=True)
    logits = step.logits.clone()
    assert logits.shape == (2, VOCAB_SIZE) and logits[0].isfinite().all()
    assert logits[1].isinf().nonzero().flatten().tolist() == list(range(30))
    assert logits[1].argmax() == got[1]  # a greedy row
    before = setting.snapshot()
    assert step.run(*setting.launch([1, 3]), num_decodes=2, gives_logits=True) is None
    assert all(map(np.array_equal, before, setting.snapshot()))
    assert step.run(*setting.launch([3])) is not None
    assert torch.equal(step.logits, logits), "not asked for"


def change(name: str, value: int) -> Any:
    def apply(setting: Setting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        launch = setting.launch([3, 5])
        index = {"rows": 0, "num_computed": 1, "num_scheduled": 2}.get(name)
        if index is None:
            getattr(setting.arrays, name)[5] = value
        else:
            launch[index][1] = value
        return launch

    return apply


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(change("num_scheduled", 2), id="more tokens than was said"),
        pytest.param(change("num_scheduled", 0), id="no token"),
        pytest.param(change("num_computed", 0), id="not the newest token"),
        pytest.param(change("num_computed", -1), id="negative"),
        pytest.param(change("rows", NUM_ROWS), id="no such row"),
        pytest.param(change("rows", -1), id="negative row"),
        pytest.param(change("num_prompt_tokens", 32), id="the end of a prompt"),
        pytest.param(change("features", UNKNOWN), id="wants a feature that is not known"),
    ],
)
def test_a_step_that_is_no_plain_decode_is_left_alone(make):
    setting = make_setting()
    launch, before = make(setting), setting.snapshot()
    caches = [layer.key_cache.clone() for layer in setting.model.layers]
    assert setting.step().run(*launch) is None
    assert all(map(np.array_equal, before, setting.snapshot()))
    for layer, cache in zip(setting.model.layers, caches, strict=True):
        assert torch.equal(layer.key_cache, cache)


def test_rows_that_are_full_are_left_alone():
    setting = make_setting()
    setting.arrays.num_tokens[5] = 32
    assert setting.step().run(*setting.launch([3, 5])) is None


def test_a_row_whose_logits_hold_nan_has_no_token_and_harms_no_other():
    setting = make_setting()
    want = setting.tokens_of_parts([0, 3, 5]).tolist()
    _, positions, _ = setting.launch([0, 3, 5])
    setting.arrays.token_ids[3, positions[1]] = 17
    setting.model.embedding[17] = torch.nan
    step = setting.step()
    got, _ = step.run(*setting.launch([0, 3, 5]))
    assert got.tolist() == [want[0], -1, want[2]]
    assert step.num_invalid == 1
    assert setting.arrays.token_ids[3, positions[1] + 1] == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", VOCAB_SIZE, "BadToken: request 5 has the token 50"),
        ("block_tables", NUM_BLOCKS, r"request 5 .* and the blocks \[90, 90, 90, 90\]"),
    ],
)
def test_numbers_out_of_range_are_refused_and_no_token_is_noted(name, value, message):
    setting = make_setting()
    getattr(setting.arrays, name)[..., 5, :] = value
    before = setting.snapshot()
    with pytest.raises(IndexError, match=message):
        setting.step().run(*setting.launch([3, 5]))
    assert all(map(np.array_equal, before, setting.snapshot()))


def test_what_does_not_fit_is_refused():
    setting = make_setting()
    for name, array in vars(setting.arrays).items():
        if array.ndim == 1:
            part = [array[:3], array[::2]]
        elif array.ndim == 2:
            part = [array[..., :3], np.asfortranarray(array[:, ::2])]
        else:
            part = [array[:, :3], array[..., ::2], array[0]]
        for wrong in (array.astype(np.float64), *part):
            arrays = dataclasses.replace(setting.arrays, **{name: wrong})
            with pytest.raises(ValueError, match=f"^{name} "):
                dataclasses.replace(setting, arrays=arrays).step()
    short = dataclasses.replace(setting.arrays, masks=setting.arrays.masks[:, :1].copy())
    with pytest.raises(ValueError, match="masks must have a bit for each of the 50 tokens"):
        dataclasses.replace(setting, arrays=short).step()
    with pytest.raises(ValueError, match="must have the dtype and hidden size of the decoder"):
        dataclasses.replace(setting, head=packed(VOCAB_SIZE, HIDDEN * 2)).step()
    with pytest.raises(
        ValueError, match=r"num_computed \(1\) and num_scheduled \(1\) must have .* \(3\)"
    ):
        setting.step().run(*(x[:1] if i else x for i, x in enumerate(setting.launch([3, 5, 6]))))


def test_formats_of_the_head():
    for weight_format in (WeightFormat.INT8, WeightFormat.INT4):
        setting = make_setting()
        weight = (torch.randn(VOCAB_SIZE, HIDDEN) * HIDDEN**-0.5).bfloat16()
        setting.head = PackedWeight.quantize(weight, weight_format)
        want = setting.tokens_of_parts([2, 6])
        got, _ = setting.step().run(*setting.launch([2, 6]))
        assert got.tolist() == want.tolist()


def test_positions_are_indices_and_an_offset():
    rows, hidden = [0, 2, 5], []
    for offsets in ((0, 0, 0), (0, -3, 6)):
        setting = make_setting(0)
        setting.arrays.position_offsets[rows] = offsets
        want = setting.tokens_of_parts(rows)
        step = setting.step(gives_hidden=True)
        got, _ = step.run(*setting.launch(rows))
        assert got.tolist() == want.tolist()
        hidden.append(step.hidden)
    assert (hidden[0] == hidden[1]).all(1).tolist() == [True, False, False]


def test_positions_end_with_the_table_of_rotations():
    setting = make_setting()
    model = dataclasses.replace(setting.model, cos_sin=torch.rand(5, HEAD_SIZE))
    assert MAX_POSITIONS > 5
    with pytest.raises(IndexError, match="BadPosition: request 3"):
        dataclasses.replace(setting, model=model).step().run(*setting.launch([3]))
