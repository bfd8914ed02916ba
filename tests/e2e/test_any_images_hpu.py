"""Test random loads with images on a simulated card.

Images have random sizes and numbers, some are equal, and some requests are aborted or preempted.
Nothing compiles after the warm-up, and the caches are empty at the end.
"""

import random

import pytest

from tests.e2e.test_images import ENGINE
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.reach import check_media_are_gone, runner_of, scheduler_of
from tests.tiny_images import FAMILIES, draw_image, make_tiny_images
from vllm import LLM, SamplingParams
from vllm.worker.hpu.items import DeviceItems
from vllm.worker.parts.embedding_rows import EmbeddingRows

pytest.importorskip("PIL", reason="images need Pillow")

NUM_IMAGES = 200
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LIMITS = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 18}
"""Requests are preempted, and prompts are cut inside of images."""


def random_requests(family, rng):
    """Return prompts with images of any size, some of which are equal."""
    image, drawn, found = FAMILIES[family].in_text, [], []
    while len(drawn) < NUM_IMAGES:
        images = []
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            if drawn and rng.random() < 0.3:
                images.append(rng.choice(drawn))
                continue
            shape = [int(2 ** rng.uniform(3, 8)) for _ in range(2)]
            images.append(draw_image(len(drawn), *shape))
            drawn.append(images[-1])
        text = "".join(f"{image} {rng.choice('abc') * rng.randrange(9)}" for _ in images)
        found.append({"prompt": f"Look: {text}", "multi_modal_data": {"image": images}})
    return found


def run(llm, requests, rng, abort_share):
    """Return the tokens of each request that was not aborted, by its index, and the number of
    aborted requests.
    """
    engine, waiting, found, aborted = llm.llm_engine, list(enumerate(requests)), {}, set()
    running: set[str] = set()
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.randrange(4)):
            if waiting:
                index, request = waiting.pop(0)
                engine.add_request(str(index), request, GREEDY)
                running.add(str(index))
        for output in engine.step():
            if output.finished:
                running.discard(output.request_id)
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
        for request_id in sorted(running):
            if rng.random() < abort_share:
                engine.abort_request([request_id])
                running.discard(request_id)
                aborted.add(int(request_id))
    return {index: each for index, each in found.items() if index not in aborted}, len(aborted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "qwen3_vl", "mllama"])
def test_any_images_compile_nothing_and_leave_nothing(family, tmp_path, monkeypatch):
    folder, rng = str(make_tiny_images(family, tmp_path)), random.Random(20261127)
    monkeypatch.setattr("vllm.config.scheduler.ENCODER_CACHE_SIZE", 64)
    llm = LLM(folder, **ENGINE)
    requests = random_requests(family, rng)
    expected, _ = run(llm, requests, rng, 0)
    assert len(expected) == len(requests)
    with simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS) as bridge:
        llm = LLM(folder, **{**ENGINE, **LIMITS}, enforce_eager=True)
        before = bridge.counters().compilations
        found, num_aborted = run(llm, requests, rng, 0.02)
        assert bridge.counters().compilations == before
        assert all(tokens == expected[index] for index, tokens in found.items())
        assert num_aborted > 5 and len(found) + num_aborted == len(requests)
        scheduler, parts = scheduler_of(llm), runner_of(llm).parts
        part = parts.find(DeviceItems) or parts.find(EmbeddingRows)
        assert scheduler.num_preemptions
        assert not scheduler.media.holders and scheduler.media.num_kept <= scheduler.media.capacity
        llm.reset_prefix_cache()
        # Only a further step tells the worker which images to drop.
        llm.generate("No picture", GREEDY)
        check_media_are_gone(part)
