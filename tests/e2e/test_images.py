"""Test images in prompts: tokens and log-probabilities are the same as in transformers, in any
batch.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from tests.engine.test_resolve_config import resolve
from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import media_of, replace_encoder, scheduler_of, worker_of
from tests.tiny_images import FAMILIES, draw_image, expected_generations, make_tiny_images
from tests.whole_items import WholeItems
from vllm import LLM, SamplingParams
from vllm.distributed import Stage, TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.loader.model_loader import load_model
from vllm.transformers_utils.transformers_version import is_version_4
from vllm.worker.parts.embedding_rows import EmbeddingRows

pytest.importorskip("PIL", reason="images need Pillow")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 120,
}
PROMPTS = [
    ("What is in IMAGE this picture?", [1]),
    ("IMAGEIMAGE Compare.", [1, 2]),
    ("No picture at all.", []),
    ("First IMAGE, then some words, then IMAGE", [3, 1]),
    ("IMAGE", [4]),
]


def images_of(seeds):
    shapes = [(40, 48), (32, 32), (100, 30), (17, 90), (64, 64)]
    return [draw_image(seed, *shapes[seed % len(shapes)]) for seed in seeds]


def requests_of(family):
    image = FAMILIES[family].in_text
    return [
        {"prompt": text.replace("IMAGE", image), "multi_modal_data": {"image": images_of(seeds)}}
        for text, seeds in PROMPTS
    ]


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_those_of_transformers(family, tmp_path):
    if is_version_4() and family in ("idefics3", "smolvlm", "qwen3_vl_moe"):
        pytest.skip("this transformers computes other positions of patches, or other experts")
    folder = make_tiny_images(family, tmp_path)
    outputs = LLM(str(folder), **ENGINE).generate(requests_of(family), GREEDY)
    prompts = [
        (output.prompt_token_ids, images_of(seeds))
        for output, (_, seeds) in zip(outputs, PROMPTS, strict=True)
    ]
    expected, logprobs = zip(*expected_generations(folder, prompts, GREEDY.max_tokens), strict=True)
    assert tokens_of(outputs) == list(expected)
    assert len({tuple(tokens) for tokens in expected}) > 3, "images make no difference"
    # Prompts run in chunks that end inside of images, except where image tokens see later ones
    # (Gemma 3).
    num_tokens = 23 if family == "gemma3" else 8
    llm = LLM(str(folder), **ENGINE, max_num_batched_tokens=num_tokens)
    params = GREEDY.clone()
    params.logprobs = 0
    outputs = llm.generate(requests_of(family), params)
    assert tokens_of(outputs) == list(expected)
    for output, values in zip(outputs, logprobs, strict=True):
        sample = output.outputs[0]
        pairs = zip(sample.logprobs, sample.token_ids, strict=True)
        found = [entries[token].logprob for entries, token in pairs]
        np.testing.assert_allclose(found, values, atol=2e-4, rtol=0)
    assert not scheduler_of(llm).media.holders


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return make_tiny_images("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def expected(llava):
    return tokens_of(LLM(str(llava), **ENGINE).generate(requests_of("llava"), GREEDY))


@pytest.mark.parametrize(
    "settings",
    [
        # prompts are cut at every token of an image
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        # a cache of 9 blocks, so that requests are preempted
        {"enable_prefix_caching": False, "max_model_len": 128, "num_gpu_blocks_override": 9},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_settings_change_no_token(llava, expected, settings):
    llm = LLM(str(llava), **{**ENGINE, **settings})
    assert tokens_of(llm.generate(requests_of("llava"), GREEDY)) == expected
    assert not scheduler_of(llm).media.holders


class BrokenEncoder(WholeItems):
    def encode(self, items):
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 8, "num_gpu_blocks_override": 9}, {"pipeline_parallel_size": 2}],
    ids=str,
)
def test_requests_whose_image_fails_end_and_leave_nothing_to_others(
    llava, expected, settings, monkeypatch
):
    llm = LLM(str(llava), **{**ENGINE, "max_model_len": 128, **settings})
    media = media_of(llm, EmbeddingRows)
    requests = requests_of("llava")
    with monkeypatch.context() as patched:
        replace_encoder(patched, media, BrokenEncoder())
        outputs = llm.generate([requests[3], requests[2], requests[3]], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "error"]
    assert tokens_of(outputs) == [[], expected[2], []]
    assert tokens_of(llm.generate(requests, GREEDY)) == expected


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        # Exhaustive: tests/worker/test_hpu_encoder.py runs the encoders of qwen2_vl and llava_next
        # on a card.
        exhaustive("llava", "HPU graphs"),
        exhaustive("qwen2_vl", "HPU graphs"),
        ("qwen3_vl", "HPU graphs"),  # its images are also added to hidden states
        *(
            pytest.param(family, mode, marks=pytest.mark.exhaustive)
            for mode in ("lazy", "torch.compile", "eager")
            for family in ("llava", "qwen2_vl", "qwen3_vl", "gemma3")
        ),
        *(
            pytest.param(family, "HPU graphs", marks=pytest.mark.exhaustive)
            for family in (
                "glm4v_moe",
                "qwen3_vl_moe",
                "qwen3_5",
                "mistral3",
                "idefics3",
                "internvl",
            )
        ),
        *(
            # Its encoder has windows.
            pytest.param("qwen2_5_vl", mode, marks=pytest.mark.exhaustive)
            for mode in MODES
        ),
    ],
)
def test_on_a_simulated_card_nothing_compiles_after_the_warm_up(family, mode, tmp_path):
    folder = make_tiny_images(family, tmp_path)
    expected = tokens_of(LLM(str(folder), **ENGINE).generate(requests_of(family), GREEDY))
    lazy, eager = MODES[mode]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **FEW_BUCKETS) as bridge:
        llm = LLM(str(folder), **ENGINE, enforce_eager=eager)
        before = bridge.counters()
        assert tokens_of(llm.generate(requests_of(family), GREEDY)) == expected
        assert bridge.counters().compilations == before.compilations


@pytest.fixture(scope="module")
def tiled(tmp_path_factory):
    return make_tiny_images("llava_next", tmp_path_factory.mktemp("tiled"))


@pytest.mark.parametrize("device", ["cpu", "hpu"])
def test_a_step_with_decodes_encodes_some_tiles_of_an_image(device, tiled, monkeypatch):
    text = {"prompt": "No picture at all."}
    image = {"prompt": "<image>Look.", "multi_modal_data": {"image": [draw_image(3, 100, 100)]}}
    params = [GREEDY.clone(), GREEDY]
    params[0].max_tokens = 40
    alone = LLM(str(tiled), **ENGINE)
    expected = [
        *tokens_of(alone.generate([text], params[0])),
        *tokens_of(alone.generate([image], params[1])),
    ]
    variables = FEW_BUCKETS | {"has_profiling_run": False, "PT_HPU_LAZY_MODE": 1}
    with simulated_hpu(**variables) if device == "hpu" else nullcontext():
        llm = LLM(str(tiled), **ENGINE, max_num_batched_tokens=32, enforce_eager=True)
        scheduler, steps = scheduler_of(llm), []
        schedule = scheduler.schedule
        monkeypatch.setattr(scheduler, "schedule", lambda: steps.append(schedule()) or steps[-1])
        engine, outputs = llm.llm_engine, {}
        engine.add_request("0", text, params[0])
        while not any(step.num_computed_tokens.any() for step in steps):
            engine.step()
        engine.add_request("1", image, params[1])
        while engine.has_unfinished_requests():
            outputs.update((output.request_id, output) for output in engine.step())
        assert tokens_of([outputs["0"], outputs["1"]]) == expected
    encoding = [step for step in steps if step.encoded_media]
    ranges = [parts for step in encoding for _, _, *parts in step.encoded_media]
    assert len(encoding) == len(ranges) > 1
    assert [first for first, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
    # The text request gets a token in each of these steps.
    assert all(step.num_scheduled_tokens[0] == 1 for step in encoding)


def test_on_a_card_embeddings_of_requests_add_nothing_to_hidden_states(tmp_path):
    folder = make_tiny_images("qwen3_vl", tmp_path)
    requests = requests_of("qwen3_vl")
    llm = LLM(str(folder), **ENGINE)
    table, token_ids = worker_of(llm).model.embedding.weight, list(range(10, 40))
    given = {"prompt_embeds": table[token_ids].detach().clone()}
    requests.append({"prompt_token_ids": token_ids})
    expected = tokens_of(llm.generate(requests, GREEDY))
    with simulated_hpu(VLLM_MERGED_PREFILL=1, has_profiling_run=False, **FEW_BUCKETS):
        llm = LLM(str(folder), **ENGINE, enable_prompt_embeds=True, enforce_eager=True)
        for last in (given, requests[-1], given):
            found = tokens_of(llm.generate([*requests[:-1], last], GREEDY))
            assert found == expected


def test_values_for_the_first_layers_need_these_layers_on_the_first_stage(tmp_path):
    folder = make_tiny_images("qwen3_vl", tmp_path, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="values to the first 2 layers, so the language model"):
        LLM(str(folder), **ENGINE)
    folder = make_tiny_images("qwen3_vl", tmp_path / "three", num_hidden_layers=3)
    config = resolve(model=str(folder), device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="the first stage has 1 layers, but images need at least"):
        load_model(config, TPGroup(), torch.device("cpu"), stage=Stage(0, 1, 0, 3))


@pytest.mark.exhaustive
def test_stages_of_a_pipeline_read_images(tmp_path):
    folder = make_tiny_images("qwen3_vl", tmp_path)
    expected = tokens_of(LLM(str(folder), **ENGINE).generate(requests_of("qwen3_vl"), GREEDY))
    llm = LLM(str(folder), **ENGINE, pipeline_parallel_size=2)
    assert tokens_of(llm.generate(requests_of("qwen3_vl"), GREEDY)) == expected


def test_the_cpu_leaves_memory_for_kept_embeddings(llava, monkeypatch):
    # The engine skips the forward pass that measures the memory of the encoder.
    llm = LLM(str(llava), **ENGINE, skip_mm_profiling=True)
    worker, capacity = worker_of(llm), scheduler_of(llm).media.capacity
    monkeypatch.setattr(type(worker.platform), "free_memory_bytes", lambda _: 2**30)
    # Each position of the encoder cache holds a hidden state of 48 elements of float32.
    assert worker.measure().free_bytes == 2**30 - capacity * 48 * 4
    monkeypatch.setattr(worker.model.media_encoder, "num_added", 2)
    assert worker.measure().free_bytes == 2**30 - capacity * 48 * 4 * 3
    worker.model.media_encoder = None
    assert worker.measure().free_bytes == 2**30
