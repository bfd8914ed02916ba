"""Test images that cross-attention layers read: no setting of the engine changes a token."""

from collections import Counter

import numpy as np
import pytest

from tests.e2e.test_images import ENGINE, GREEDY, BrokenEncoder, requests_of, tokens_of
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import held_media_of, media_of, replace_encoder, runner_of, scheduler_of, worker_of
from tests.tiny_images import make_tiny_images
from vllm import LLM, SamplingParams
from vllm.errors import ConfigError
from vllm.lora.methods import LoRALinearMethod
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep
from vllm.ops.cpu.operators.program import Program
from vllm.worker.cpu import launches as cpu_launches
from vllm.worker.parts.item_rows import ItemRows

pytest.importorskip("PIL", reason="images need Pillow")

FAMILY = "mllama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_images(FAMILY, tmp_path_factory.mktemp(FAMILY))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **ENGINE)


@pytest.fixture(scope="module")
def expected(llm):
    return tokens_of(llm.generate(requests_of(FAMILY), GREEDY))


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        # a cache of 9 blocks, so that requests are preempted
        {"enable_prefix_caching": False, "max_model_len": 128, "num_gpu_blocks_override": 9},
        {"num_scheduler_steps": 4},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"max_num_batched_tokens": 8, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_settings_change_no_token(folder, expected, settings):
    llm = LLM(str(folder), **{**ENGINE, **settings})
    assert tokens_of(llm.generate(requests_of(FAMILY), GREEDY)) == expected
    assert not held_media_of(scheduler_of(llm))


def test_requests_alone_and_again_get_the_tokens_that_they_get_together(llm, expected):
    requests = requests_of(FAMILY)
    for index in (2, 3, 1, 3):
        assert tokens_of(llm.generate(requests[index : index + 1], GREEDY)) == [expected[index]]
    assert scheduler_of(llm).media.stats().num_hits


def test_items_that_do_not_fit_together_run_one_after_the_other(folder, expected):
    llm = LLM(str(folder), **ENGINE)
    media = scheduler_of(llm).media
    media.capacity = 2 * worker_of(llm).model.media_encoder.max_states
    assert tokens_of(llm.generate(requests_of(FAMILY) * 2, GREEDY)) == expected * 2
    assert media.num_kept <= media.capacity


def test_a_request_whose_image_fails_ends_and_leaves_nothing_to_others(
    folder, expected, monkeypatch
):
    llm = LLM(str(folder), **ENGINE)
    media = media_of(llm, ItemRows)
    requests = requests_of(FAMILY)
    with monkeypatch.context() as patched:
        replace_encoder(patched, media, BrokenEncoder())
        outputs = llm.generate([requests[3], requests[2], requests[3]], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "error"]
    assert tokens_of(outputs) == [[], expected[2], []]
    assert tokens_of(llm.generate(requests, GREEDY)) == expected


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"repetition_penalty": 1.5}], ids=str)
def test_the_token_of_an_image_is_in_prompts_and_has_no_probability(llm, params):
    sampling = SamplingParams(temperature=0, max_tokens=3, logprobs=0, **params)
    (output,) = llm.generate(requests_of(FAMILY)[:1], sampling)
    assert len(output.outputs[0].token_ids) == 3
    image = max(output.prompt_token_ids)
    if output.prompt_logprobs is not None:
        at = output.prompt_token_ids.index(image)
        found = output.prompt_logprobs[at]
        assert found[image].logprob == -np.inf
        assert found[image].rank == image + 1
        assert all(each.logprob > -np.inf for token, each in found.items() if token != image)


def test_ranks_share_the_heads_of_items(folder, expected):
    llm = LLM(str(folder), **ENGINE, tensor_parallel_size=2)
    assert tokens_of(llm.generate(requests_of(FAMILY), GREEDY)) == expected


def test_stages_of_a_pipeline_are_refused_with_images_only(folder, expected):
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2.*--limit-mm-per-prompt"):
        LLM(str(folder), **ENGINE, pipeline_parallel_size=2)
    llm = LLM(str(folder), **ENGINE, pipeline_parallel_size=2, limit_mm_per_prompt={"image": 0})
    assert tokens_of(llm.generate([requests_of(FAMILY)[2]["prompt"]], GREEDY)) == [expected[2]]


@pytest.mark.parametrize(
    "mode",
    [
        "HPU graphs",
        *(
            pytest.param(mode, marks=pytest.mark.exhaustive)
            for mode in ("lazy", "torch.compile", "eager")
        ),
    ],
)
def test_on_a_simulated_card_nothing_compiles_after_the_warm_up(folder, expected, mode):
    """Requests with and without images share batches, and two requests have the same image."""
    lazy, eager = MODES[mode]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **FEW_BUCKETS) as bridge:
        llm = LLM(str(folder), **ENGINE, enforce_eager=eager)
        before = bridge.counters()
        requests = requests_of(FAMILY)
        assert tokens_of(llm.generate([*requests, requests[3]], GREEDY)) == [*expected, expected[3]]
        assert tokens_of(llm.generate(requests[2:4], GREEDY)) == expected[2:4]
        assert bridge.counters().compilations == before.compilations


def test_memory_is_divided_between_items_and_blocks(llm, monkeypatch):
    worker = worker_of(llm)
    monkeypatch.setattr("vllm.worker.cpu.worker.encoder_bytes", lambda config, encoder: 0)
    largest = worker.model.media_encoder.max_states
    # One request has 16 items. Each item needs float32 keys and values of 2 heads of 12 elements in
    # 2 layers.
    each = 2 * 2 * 12 * 2 * 4
    # Memory is planned for the larger of two numbers: images of one request (16), and requests.
    for free, count in ((2**30, 16 * largest), (each * largest * 5, largest * 5 // 4)):
        monkeypatch.setattr(type(worker.platform), "free_memory_bytes", lambda _, free=free: free)
        report = worker.measure()
        assert report.num_item_states == count
        assert report.free_bytes == free - count * each
    monkeypatch.setattr(type(worker.platform), "free_memory_bytes", lambda _: 1000)
    with pytest.raises(
        ConfigError, match=rf"{largest} hidden states takes .*, but only 1000 B are free"
    ):
        worker.measure()


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_a_program_gives_the_bits_of_the_modules(folder, monkeypatch):
    """Recorded programs run as many layers as possible. Each program has a part with
    cross-attention and one without.
    """
    settings = ENGINE | {"dtype": "bfloat16"}
    runs = Counter()
    for name, kind in (("run", FusedDecodeStep), ("forward", Program)):
        original = getattr(kind, name)

        def counted(self, *args, method=original, name=name, **options):
            runs[name] += 1
            return method(self, *args, **options)

        monkeypatch.setattr(kind, name, counted)
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True, logprobs=0
        )
        if i == 3
        else SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True)
        for i in range(5)
    ]

    def found(**more):
        llm = LLM(str(folder), **settings, **more)
        runs.clear()
        outputs = [
            *llm.generate(requests_of(FAMILY)[:3], params[:3]),
            *llm.generate(requests_of(FAMILY), params),
            *llm.generate(requests_of(FAMILY)[2:3], params[:1]),
        ]
        if "tensor_parallel_size" not in more:
            launches = runner_of(llm).launches
            assert all(launches.programs) == all(launches.decode_steps) == bool(runs)
            assert len(runs) in (0, 2)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]

    for more in (
        {},
        {"num_scheduler_steps": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"tensor_parallel_size": 2},
    ):
        got = found(**more)
        assert runs or "tensor_parallel_size" in more
        with monkeypatch.context() as patch:
            patch.setattr(cpu_launches, "fuse", lambda *args, **options: None)
            assert got == found(**more)
            assert not runs


def test_adapters_change_what_launches_run_and_not_what_items_are_made_of(folder, expected):
    llm = LLM(str(folder), **ENGINE, enable_lora=True)
    modules = dict(worker_of(llm).model.model.named_modules())
    adapted = {name for name, module in modules.items() if has_adapters(module)}
    of_items = {name for name in modules if name.endswith(("attn.k_proj", "attn.v_proj"))}
    assert of_items and adapted.isdisjoint(of_items)
    assert {name.rpartition(".")[0] for name in of_items} == {
        name.rpartition(".")[0] for name in adapted if name.endswith("attn.q_proj")
    }
    assert tokens_of(llm.generate(requests_of(FAMILY), GREEDY)) == expected


def has_adapters(module):
    return isinstance(getattr(module, "method", None), LoRALinearMethod)
