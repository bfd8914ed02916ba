"""Test images and sounds that cross-attention layers read on a strict simulated card: no setting of
the engine changes a token.
"""

import pytest

from tests.e2e.test_images import ENGINE, GREEDY, BrokenEncoder, images_of, requests_of, tokens_of
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.reach import (
    held_media_of,
    media_of,
    replace_encoder,
    report_of,
    runner_of,
    scheduler_of,
    worker_of,
)
from tests.tiny_images import make_tiny_images
from vllm import LLM
from vllm.errors import ConfigError
from vllm.model_executor.layers.cross_attention import cross_attention_layers
from vllm.worker.hpu.items import DeviceItems

pytest.importorskip("PIL", reason="images need Pillow")

FAMILY = "mllama"
SETTINGS = [
    {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
    {"max_num_batched_tokens": 8, "enable_prefix_caching": False},
    {"enable_prefix_caching": False, "max_model_len": 128, "num_gpu_blocks_override": 9},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    {"speculative_config": {"num_speculative_tokens": 2}},
    {"enable_lora": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_images(FAMILY, tmp_path_factory.mktemp(FAMILY))


@pytest.fixture(scope="module")
def expected(folder):
    return tokens_of(LLM(str(folder), **ENGINE).generate(requests_of(FAMILY), GREEDY))


def many_images():
    """Return a prompt with more images than fit into the smaller number of slots."""
    images = images_of([2, 3, 2, 4])
    return {"prompt": "<|image|>" * len(images), "multi_modal_data": {"image": images}}


@pytest.fixture(scope="module")
def many(folder):
    (tokens,) = tokens_of(LLM(str(folder), **ENGINE).generate(many_images(), GREEDY))
    return tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_change_no_token(folder, expected, settings):
    settings = dict(settings)
    if "method" not in (speculation := settings.get("speculative_config", {"method": ""})):
        settings["speculative_config"] = {**speculation, "model": str(folder)}
    buckets = {**FEW_BUCKETS, "VLLM_PROMPT_BS_BUCKET_MAX": 4, "VLLM_CONTIGUOUS_PA": 1}
    with simulated_hpu(PT_HPU_LAZY_MODE=1, **buckets) as bridge:
        llm = LLM(str(folder), **{**ENGINE, **settings})
        before = bridge.counters()
        for _ in range(2):  # the second time the images are in the encoder cache
            assert tokens_of(llm.generate(requests_of(FAMILY), GREEDY)) == expected
        assert bridge.counters().compilations == before.compilations
        assert not held_media_of(scheduler_of(llm))


def read_slots(llm, monkeypatch):
    """Return a set to which each batch of an engine adds the number of image slots that it
    reads."""
    launches, found = runner_of(llm).launches, set()
    run = launches.run

    def note(given):
        found.add(given.launch.item_slots)
        return run(given)

    monkeypatch.setattr(launches, "run", note)
    return found


def test_a_card_that_slept_and_an_image_that_failed_leave_nothing_to_others(
    folder, expected, many, monkeypatch
):
    requests = requests_of(FAMILY)
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS) as bridge:
        llm = LLM(str(folder), **ENGINE, enable_sleep_mode=True)
        before = bridge.counters().compilations
        slots = read_slots(llm, monkeypatch)
        media = media_of(llm, DeviceItems)
        with monkeypatch.context() as patched:
            replace_encoder(patched, media, BrokenEncoder())
            outputs = llm.generate([requests[3], requests[2], requests[3]], GREEDY)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["error", "length", "error"]
        assert tokens_of(outputs) == [[], expected[2], []]
        # 128 slots are enough for one image of up to 68 hidden states, or two smaller images.
        assert slots == {128}
        assert tokens_of(llm.generate([*requests, many_images()], GREEDY)) == [*expected, many]
        # 16 images need more than 128 slots, so their batch uses the shape without a limit (0).
        assert slots == {128, 0}
        in_use = bridge.card.memory.in_use_bytes
        llm.sleep()
        layers = cross_attention_layers(worker_of(llm).model)
        assert layers and not any(layer.pool_tensors for layer in layers)
        llm.wake_up()
        assert bridge.card.memory.in_use_bytes == in_use
        assert tokens_of(llm.generate(requests, GREEDY)) == expected
        assert bridge.counters().compilations == before


def test_pools_are_counted_before_blocks(folder):
    with simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        llm = LLM(str(folder), **ENGINE, limit_mm_per_prompt={"image": 2}, enforce_eager=True)
        worker = worker_of(llm)
        largest = worker.model.media_encoder.max_states
        (layer, *_) = cross_attention_layers(worker.model)
        # There is one image for each of 8 requests; a table has room for two images of a request.
        assert len(layer.item_keys) == report_of(worker).num_item_states == 8 * largest
        assert runner_of(llm).items.table.shape == (9, 3, -(-2 * largest // 128) * 128)
        names = {use.what: use.num_bytes for use in worker.memory_uses}
        pools = sum(
            tensor.nbytes for x in cross_attention_layers(worker.model) for tensor in x.pool_tensors
        )
        assert pools in names.values()


def test_merged_prompts_are_refused_in_one_line(folder):
    with simulated_hpu(PT_HPU_LAZY_MODE=1, VLLM_MERGED_PREFILL=1, **FEW_BUCKETS):
        with pytest.raises(ConfigError, match=r"VLLM_MERGED_PREFILL=1 .*Set VLLM_MERGED_PREFILL=0"):
            LLM(str(folder), **ENGINE)
        llm = LLM(str(folder), **ENGINE, limit_mm_per_prompt={"image": 0})
        assert llm.generate(["No picture"], GREEDY)
