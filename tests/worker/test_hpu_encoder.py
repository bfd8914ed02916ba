"""Test the encoder of images on a simulated card: its sizes, its memory, and its compilations."""

import itertools
import logging
import random
import re
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from tests.engine.test_resolve_config import resolve
from tests.hpu import FEW_BUCKETS, captured_log, simulated_hpu
from tests.reach import runner_of, worker_of
from tests.tiny_images import FAMILIES, draw_image, make_tiny_images
from vllm import LLM, SamplingParams
from vllm.bucketing import MemoryClass
from vllm.cost_model import constants
from vllm.distributed import TPGroup
from vllm.errors import CapacityError, RequestError
from vllm.model_executor.loader.model_loader import load_model
from vllm.multimodal.job import family_of_model
from vllm.utils.process import startup_progress
from vllm.worker.hpu.encoder import CardEncoder, as_tensors
from vllm.worker.hpu.warmup import warmup_estimate

pytest.importorskip("PIL", reason="images need Pillow")

MIB = 2**20
ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 33,
    "block_size": 16,
}
LAZY = FEW_BUCKETS | {"PT_HPU_LAZY_MODE": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return str(make_tiny_images("qwen2_vl", tmp_path_factory.mktemp("qwen")))


def items_of(config, shapes):
    family = family_of_model(config)
    return [
        as_tensors(family.process(draw_image(seed, *shape)).tensors)
        for seed, shape in enumerate(shapes)
    ]


def prompt_of(*shapes):
    images = [draw_image(seed, *shape) for seed, shape in enumerate(shapes)]
    text = FAMILIES["qwen2_vl"].in_text * len(images)
    return {"prompt": text + "Look.", "multi_modal_data": {"image": images}}


@pytest.mark.parametrize(
    ("family", "dtype", "share"),
    [
        ("qwen2_vl", "float32", 2e-5),
        ("llava_next", "float32", 2e-5),
        *(
            pytest.param(family, "bfloat16", 0.05, marks=pytest.mark.exhaustive)
            for family in ("qwen2_5_vl", "glm4v", "llava")
        ),
    ],
)
def test_after_the_warm_up_no_image_compiles_and_none_depends_on_others(
    family, dtype, share, tmp_path, monkeypatch
):
    folder, rng, reports = make_tiny_images(family, tmp_path), random.Random(1), []
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr(
        warmup_estimate.WarmUpEstimate.__init__, "__defaults__", (lambda: next(clock),)
    )
    monkeypatch.setattr(
        startup_progress, "current_listener", lambda *report: reports.append(report)
    )
    card = simulated_hpu(has_profiling_run=False, **LAZY)
    with card as bridge, captured_log(logging.INFO) as log:
        llm = LLM(str(folder), **ENGINE | {"dtype": dtype}, enforce_eager=True)
        encoder, compilations = runner_of(llm).encoder, bridge.counters().compilations
        sides = [[rng.randint(8, 300) for _ in range(2)] for _ in range(60)]
        items = items_of(llm.llm_engine.vllm_config, sides)
        batches, rest = [], list(range(len(items)))
        while rest:
            count = rng.randint(1, 9)
            batches.append(rest[:count])
            del rest[:count]
        together = [x for batch in batches for x in encoder.encode([items[i] for i in batch])]
        alone = [encoder.encode([item])[0] for item in items[:15]]
        assert bridge.counters().compilations == compilations
    assert len(together) == len(items)
    # Rounding to bfloat16 changes embeddings of GLM-4V by up to 0.06 of the largest one, in
    # transformers too. So errors are compared with the largest embedding, and not with their own.
    atol = share * max(float(each.abs().max()) for each in together)
    for own, other in zip(alone, together, strict=False):
        torch.testing.assert_close(own, other, rtol=0, atol=atol)
    # The progress counts the whole warm-up, and the encoder is its first part.
    warm_up = [report for report in reports if report[0].startswith("warm-up")]
    passes = [report for report in warm_up if report[0] == "warm-up: encoder of images"]
    assert warm_up[: len(encoder.sizes)] == passes
    etas = [eta for *_, eta in warm_up if eta is not None]
    assert len(etas) == len(warm_up) - 2
    assert all(after <= before * 4 / 3 + 1e-9 for before, after in itertools.pairwise(etas))
    lines = [line.split() for line in log if line.startswith("[Warmup][Encoder]")]
    assert [int(line[1]) for line in lines] == sorted(encoder.sizes, reverse=True)


def test_no_size_is_larger_than_what_a_prompt_has_room_for(qwen):
    limits = {"mm_processor_kwargs": {"max_pixels": 12_845_056}}
    card = simulated_hpu(has_profiling_run=False, **LAZY)
    with card as bridge, captured_log(logging.INFO) as log:
        llm = LLM(qwen, **ENGINE, **limits, enforce_eager=True)
        encoder = runner_of(llm).encoder
        assert encoder.sizes[-1] == 4 * ENGINE["max_model_len"]
        compilations = bridge.counters().compilations
        (output,) = llm.generate([prompt_of((280, 280))], GREEDY)  # the image has 100 tokens
        assert len(output.outputs[0].token_ids) == 4
        assert bridge.counters().compilations == compilations
        with pytest.raises(ValueError, match="128"):
            llm.generate([prompt_of((2000, 2000))], GREEDY)
    (line,) = [line for line in log if "max_model_len (128)" in line]
    assert line.startswith("The encoder of images is warmed up for at most 512 patches")
    assert "images of 65536" in line


def test_the_expected_size_of_images_limits_what_a_card_prepares_for(qwen):
    limit = {"image": {"count": 2, "width": 84, "height": 56}}
    with simulated_hpu(has_profiling_run=False, VLLM_SKIP_WARMUP=1, **LAZY):
        llm = LLM(qwen, **ENGINE, limit_mm_per_prompt=limit, enforce_eager=True)
        assert runner_of(llm).encoder.sizes[-1] == 32  # 6 x 4 patches, padded to a multiple of 16
        assert llm.generate(prompt_of((56, 84)), GREEDY)
        with pytest.raises(RequestError, match=r"16 embeddings.*at most 6 .*84 x 56 pixels"):
            llm.generate(prompt_of((112, 112)), GREEDY)


def test_the_expected_size_of_images_is_a_limit_on_the_cpu(qwen):
    limit = {"image": {"width": 84, "height": 56}}
    llm = LLM(qwen, **ENGINE, limit_mm_per_prompt=limit, device="cpu")
    assert llm.generate(prompt_of((56, 84)), GREEDY)
    with pytest.raises(RequestError, match=r"16 embeddings.*at most 6 .*84 x 56 pixels"):
        llm.generate(prompt_of((112, 112)), GREEDY)


def test_sizes_that_the_card_does_not_hold_are_given_up(qwen):
    engine = ENGINE | {"max_model_len": 512, "num_gpu_blocks_override": 40}
    engine |= {"mm_processor_kwargs": {"max_pixels": 400 * 28 * 28}}
    with simulated_hpu(**LAZY, pool_bytes=64 * MIB):
        llm = LLM(qwen, **engine, enforce_eager=True)
        assert runner_of(llm).encoder.max_embeddings == 400
    # Without the fused kernel, the scores of all patches need memory.
    plain = LAZY | {"VLLM_HPU_SIM_ABSENT": "FusedSDPA"}
    with simulated_hpu(**plain, pool_bytes=64 * MIB), captured_log(logging.WARNING) as log:
        llm = LLM(qwen, **engine, enforce_eager=True)
        encoder = runner_of(llm).encoder
        most = encoder.max_embeddings
        assert 4 <= most < 400
        small, large = prompt_of((56, 56)), prompt_of((560, 560))
        assert len(llm.generate([small], GREEDY)[0].outputs[0].token_ids) == 4
        with pytest.raises(CapacityError, match=f"400 embeddings.* at most {most}"):
            llm.generate([large], GREEDY)
        assert len(llm.generate([small], GREEDY)[0].outputs[0].token_ids) == 4
    (line,) = [line for line in log if line.startswith("Images may have at most")]
    assert f"{encoder.sizes[-1]} patches ({most} embeddings)" in line and "max_pixels" in line


def test_without_a_warm_up_a_size_compiles_once_and_is_preferred_to_one_that_is_not(qwen):
    variables = LAZY | {"VLLM_SKIP_WARMUP": 1, "VLLM_MULTIMODAL_BUCKETS": "16,32,64,96"}
    with simulated_hpu(**variables) as bridge, captured_log(logging.WARNING) as log:
        llm = LLM(qwen, **ENGINE, enforce_eager=True, skip_mm_profiling=True)
        encoder = runner_of(llm).encoder
        # 288 is the size for the longest image that is accepted.
        assert encoder.sizes == (16, 32, 64, 96, 288)

        def compiles(height, width):
            before = bridge.counters().compilations
            (item,) = items_of(llm.llm_engine.vllm_config, [(height, width)])
            encoder.encode([item])
            return bridge.counters().compilations > before

        assert compiles(112, 112)  # 64 patches
        assert not compiles(112, 112)
        assert not compiles(84, 84)  # 36 patches, padded to 64
        assert not compiles(56, 112)  # 32 patches, padded to 64
        assert compiles(56, 56)  # 16 patches: padding them to 64 would be too much
        assert not compiles(56, 56)
    lines = "\n".join(line for line in log if "encoder of images compiles" in line)
    assert re.findall(r"size of (\d+)", lines) == ["64", "16"]


def test_an_encoder_that_has_slept_encodes_as_before_and_compiles_nothing(qwen):
    with simulated_hpu(has_profiling_run=False, **LAZY) as bridge:
        llm = LLM(qwen, **ENGINE, enable_sleep_mode=True)
        config, encoder = llm.llm_engine.vllm_config, runner_of(llm).encoder
        items = items_of(config, [(64, 80), (200, 30)])
        assert encoder.graph_sizes == list(encoder.sizes)
        before = encoder.encode(items)
        compilations = bridge.counters().compilations
        for level in (1, 2):
            llm.sleep(level)
            assert encoder.graph_sizes == []
            llm.wake_up()
            replays = bridge.counters().graph_replays
            for own, other in zip(before, encoder.encode(items), strict=True):
                assert torch.equal(own, other)
            assert bridge.counters().graph_replays > replays
            assert bridge.counters().compilations == compilations
        for size in encoder.sizes:
            encoder.release(size)
        for own, other in zip(before, encoder.encode(items), strict=True):
            assert torch.equal(own, other)
        assert bridge.counters().compilations == compilations


def test_graphs_of_the_encoder_take_what_the_language_model_has_left(qwen, monkeypatch):
    monkeypatch.setattr(constants, "GRAPH_BYTES_PER_OP", 10_000)
    # The card has memory for some graphs. The language model uses 5 MiB of this memory; graphs of
    # all sizes of the encoder would need 25 MiB.
    with simulated_hpu(**LAZY, pool_bytes=24 * MIB) as bridge, captured_log(logging.INFO) as log:
        llm = LLM(qwen, **ENGINE)
        encoder, ledger = runner_of(llm).encoder, worker_of(llm).ledger
        some = encoder.graph_sizes
        assert len(some) > 2 and ledger.left(MemoryClass.PREFILL_GRAPHS) >= 0
        items = items_of(llm.llm_engine.vllm_config, [(56, 56), (280, 224)])
        compilations, replays = bridge.counters().compilations, bridge.counters().graph_replays
        encoder.encode(items[:1])
        assert bridge.counters().graph_replays == replays + 1
        encoder.encode(items[1:])  # this size runs without a graph
        assert bridge.counters().graph_replays == replays + 1
        assert bridge.counters().compilations == compilations
    assert some == list(encoder.sizes[: len(some)]) and len(some) < len(encoder.sizes)
    (line,) = [line for line in log if line.startswith("Graph/Encoder captured:")]
    assert f"captured:{len(some)} (" in line and f"patches:{some}" in line


@pytest.mark.parametrize("is_lazy", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_an_encoder_with_masks_compiles_nothing_after_the_warm_up(is_lazy, tmp_path):
    folder, rng = make_tiny_images("mllama", tmp_path), random.Random(1)
    config = resolve(model=str(folder), device="cpu", dtype="float32")
    on_cpu = load_model(config, TPGroup(), torch.device("cpu")).media_encoder
    family = family_of_model(config)
    items = items_of(config, [[rng.randint(8, 300) for _ in range(2)] for _ in range(20)])
    with torch.inference_mode():
        want = on_cpu(items)
    with simulated_hpu(PT_HPU_LAZY_MODE=is_lazy, **FEW_BUCKETS) as bridge:
        on_card = deepcopy(on_cpu).to(bridge.device)
        two = TPGroup(0, 2, SimpleNamespace(all_reduce=lambda x: x + x))
        encoder = CardEncoder(config, on_card, family, bridge, two, is_here=True)
        assert encoder.sizes == (1, 2, 4, 8)
        for size in encoder.sizes:
            encoder.warm_up(size)
        encoder.warm_up_agreement()
        compilations, found = bridge.counters().compilations, []
        for count in (1, 32, 80):  # ranks agree on as many images as one step has
            are_there = [index % 3 > 0 for index in range(count)]
            assert encoder.agree(are_there) == are_there
        while len(found) < len(items):
            found += encoder.encode(items[len(found) : len(found) + rng.randint(1, 9)])
        assert bridge.counters().compilations == compilations
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
