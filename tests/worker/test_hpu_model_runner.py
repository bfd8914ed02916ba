"""Test the runner on the simulated card: shapes that were not warmed up, subgraphs, and no
recompilation.
"""

import pytest
import torch

from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, captured_log, simulated_hpu
from tests.reach import runner_of
from vllm import LLM, SamplingParams
from vllm.bucketing.bucket import decode
from vllm.worker.hpu.launches.planner import PaddedShape

NUM_LAYERS = 6  # the number of layers of the bundled model
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


def generate(llm: LLM, *lengths: int) -> None:
    prompts = [{"prompt_token_ids": [20 + n] * n} for n in lengths]
    llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "mode",
    [m if m in ("HPU graphs", "eager") else exhaustive(m) for m in MODES],
)
def test_without_warm_up_every_shape_is_named_once(mode):
    is_lazy, is_eager = MODES[mode]
    variables = FEW_BUCKETS | {"VLLM_SKIP_WARMUP": 1, "PT_HPU_LAZY_MODE": is_lazy}
    with simulated_hpu(has_profiling_run=False, **variables) as bridge, captured_log() as log:
        llm = LLM(**SMALL_ENGINE, enforce_eager=is_eager)
        assert not any("[Warmup]" in line or "Warmup finished" in line for line in log)
        counts = []
        for lengths in ((20,), (25,), (40,), (20, 25, 40)):
            generate(llm, *lengths)
            counts.append(bridge.counters().compilations)
        assert bridge.counters().graph_captures == 0
    assert "Skipping warmup..." in log
    assert [line for line in log if line.startswith("Configuration")] == [
        "Configuration: (prompt, 1, 32) was not warmed-up!",
        "Configuration: (decode, 4, 32) was not warmed-up!",
        "Configuration: (prompt, 1, 32, 8) was not warmed-up!",
    ]
    assert counts[0] == counts[1]


def test_after_a_warm_up_no_shape_is_named():
    with (
        simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS),
        captured_log() as log,
    ):
        llm = LLM(**SMALL_ENGINE)
        for lengths in ((20,), (25,), (40,), (20, 25, 40)):
            generate(llm, *lengths)
        assert runner_of(llm).launches.report.compilations_after_warmup() == 0
    assert not any("was not warmed-up" in line for line in log)


@pytest.mark.usefixtures("all_layers")
@pytest.mark.parametrize("mode", ["HPU graphs", "lazy"])
@pytest.mark.parametrize("layers", [1, 2, 4, 6, 7])
def test_a_graph_ends_after_so_many_layers(layers, mode, monkeypatch):
    """The embedding belongs to the first graph, and norm and logits to the last one."""
    variables = FEW_BUCKETS | {"VLLM_CONFIG_HIDDEN_LAYERS": layers, "VLLM_SKIP_WARMUP": 1}
    with (
        simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **variables) as bridge,
        captured_log(),
    ):
        llm = LLM(**SMALL_ENGINE, enforce_eager=mode == "lazy")
        runner, shape = runner_of(llm), PaddedShape(decode(3, 20))
        launches: list[int] = []
        with torch.inference_mode():
            (given,) = runner.launches.padding_inputs(shape)
            if mode == "HPU graphs":
                replay = bridge.card.replay
                monkeypatch.setattr(
                    bridge.card,
                    "replay",
                    lambda capture: launches.append(capture.num_subgraphs) or replay(capture),
                )
                runner.launches.execution.capture(given, shape)
                runner.launches.execution.run(given, shape)
            else:
                bridge.mark_step()
                before = bridge.counters().compilations
                runner.launches.execution.run(given, shape)
                launches.append(bridge.counters().compilations - before)
    num_parts = NUM_LAYERS // layers
    # In lazy mode, all parts between the first and the last part have the same recipe.
    assert launches == [1 + (num_parts if mode == "HPU graphs" else min(num_parts, 2))]


def test_a_full_warm_up_makes_a_later_compilation_an_error():
    variables = FEW_BUCKETS | {"VLLM_FULL_WARMUP": 1}
    with simulated_hpu(has_profiling_run=False, **variables) as bridge, captured_log():
        # With large blocks, the contexts of prompts have two sizes to compile instead of four.
        llm = LLM(**SMALL_ENGINE | {"block_size": 64})
        before = bridge.counters().compilations
        generate(llm, 20, 70)
        assert bridge.counters().compilations == before
        with pytest.raises(RuntimeError, match="skip_guard_eval_unsafe"):
            runner_of(llm).warm_up(PaddedShape(decode(3, 7)), sampling="none")


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
def test_blocks_of_a_request_that_computed_nan_spoil_no_later_request(is_contiguous):
    """The NaN values are after the tokens of the request that gets the blocks next."""
    variables = {"VLLM_SKIP_WARMUP": 1, "PT_HPU_LAZY_MODE": 1, "VLLM_CONTIGUOUS_PA": is_contiguous}
    prompts = [{"prompt_token_ids": [20 + n] * n} for n in (33, 7, 20)]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with simulated_hpu(has_profiling_run=False, **FEW_BUCKETS | variables), captured_log():
        llm = LLM(
            **SMALL_ENGINE | {"num_gpu_blocks_override": 9},
            enable_prefix_caching=False,
            enforce_eager=True,
        )

        def tokens() -> list[list[int]]:
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        before, runner = tokens(), runner_of(llm)
        weight = runner.model.model.embed_tokens.weight
        row = weight[16].clone()
        weight[16] = torch.nan
        (spoiled,) = llm.generate({"prompt_token_ids": [16] * 127}, greedy, use_tqdm=False)
        assert spoiled.outputs[0].finish_reason == "error"
        weight[16] = row  # the output head is tied to this weight
        caches = [layer.kv_caches for layer in runner.attention_layers]
        assert all(keys.cpu().isnan().any() for keys, _ in caches), "it has left something"
        assert all(values.cpu().isfinite().all() for _, values in caches)
        assert tokens() == before


def test_a_chunk_of_one_token_has_the_log_probabilities_of_its_prompt():
    """The token budget leaves one token for the first chunk of the second prompt."""
    prompts = [{"prompt_token_ids": [20 + n] * n} for n in (32, 40)]
    wants = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=1)
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        llm = LLM(**SMALL_ENGINE | {"max_num_batched_tokens": 33, "enable_chunked_prefill": True})
        outputs = llm.generate(prompts, [GREEDY, wants], use_tqdm=False)
        alone = llm.generate(prompts[1], wants, use_tqdm=False)[0].prompt_logprobs
    found = outputs[1].prompt_logprobs
    assert len(found) == 40 and found[0] is None
    for got, want in zip(found[1:], alone[1:], strict=True):
        assert {t: p.rank for t, p in got.items()} == {t: p.rank for t, p in want.items()}
