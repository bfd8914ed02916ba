"""Test layers whose weights remain on the host and are copied to the simulated card in each
step.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, captured_log, simulated_hpu
from tests.reach import worker_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.bucketing.ledger import MemoryClass
from vllm.errors import ConfigError
from vllm.worker.hpu.memory.offload import StreamedLayers, choose_layers, stream_layers

GIB = 2**30
LAYER_BYTES = 4 * (4 * 4 + 4)


class Layered(nn.Module):
    """Linear layers, one after another. Each reads as many elements of its input as it has input
    features.
    """

    def __init__(self, *sizes):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(size, 4) for size in sizes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x[: layer.in_features])
        return x


class RecordingBridge:
    """A bridge that uses memory of the host instead of a card."""

    def __init__(self):
        self.num_marks = 0

    def zeros(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def mark_step(self):
        self.num_marks += 1


@torch.no_grad()
def run(model, value=1.0):
    return model(torch.full((4,), value)).tolist()


# ---- which layers are offloaded -----------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "spared", "chosen"),
    [
        (8, 1, [2, 6]),
        (8, LAYER_BYTES, [2, 6]),
        (8, LAYER_BYTES + 1, [1, 4, 6]),
        (8, 3 * LAYER_BYTES, [1, 3, 5, 7]),
        (8, 7 * LAYER_BYTES, list(range(8))),
        (8, GIB, list(range(8))),
        (1, 1, [0]),
        (0, 1, []),
    ],
)
def test_as_few_layers_as_spare_the_card_so_much_are_spread_evenly(num_layers, spared, chosen):
    model = Layered(*[4] * num_layers)
    layers = list(model.layers)
    assert [layers.index(layer) for layer in choose_layers(model, spared)] == chosen


# ---- copies -------------------------------------------------------------------------------


def test_layers_share_the_memory_of_one_and_compute_what_they_did():
    model, bridge = Layered(*[4] * 6), RecordingBridge()
    want = run(model), run(model, 2.0)
    streamed = StreamedLayers(bridge, [model.layers[i] for i in (1, 3, 4)])
    assert (streamed.host_bytes, streamed.device_bytes) == (3 * LAYER_BYTES, LAYER_BYTES)
    assert sum(p.numel() * 4 for p in model.parameters()) == 4 * LAYER_BYTES
    assert (run(model), run(model, 2.0), run(model)) == (*want, want[0])


def test_each_layer_is_copied_once_in_a_step_and_what_was_recorded_launched_before():
    model, bridge = Layered(*[4] * 6), RecordingBridge()
    StreamedLayers(bridge, [model.layers[i] for i in (1, 3, 4)])
    run(model)
    assert bridge.num_marks == 3 + 1  # the copy for the first layer of the next step has begun
    run(model)
    assert bridge.num_marks == 6 + 1


def test_layers_of_different_sizes_have_memory_of_their_own():
    model, bridge = Layered(4, 3, 4, 3, 4), RecordingBridge()
    want = run(model)
    streamed = StreamedLayers(bridge, list(model.layers))
    assert streamed.device_bytes == LAYER_BYTES + 4 * (4 * 3 + 4)
    assert (run(model), run(model)) == (want, want)


def test_after_a_step_that_was_broken_off_the_next_one_is_right():
    model, bridge = Layered(*[4] * 5), RecordingBridge()
    want = run(model)
    StreamedLayers(bridge, list(model.layers))

    def fail(*_):
        raise RuntimeError("broken off")

    handle = model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"):
        run(model)
    handle.remove()
    assert run(model) == want


def test_a_model_that_is_moved_to_other_memory_is_filled_again():
    model, bridge = Layered(*[4] * 3), RecordingBridge()
    want = run(model)
    StreamedLayers(bridge, list(model.layers))
    run(model)
    weight, bias = (nn.Parameter(torch.zeros_like(p)) for p in model.layers[0].parameters())
    for layer in model.layers:
        layer.weight, layer.bias = weight, bias
    assert (run(model), run(model)) == (want, want)


def test_how_much_stays_on_the_host_is_told_and_when_that_is_too_little():
    model = Layered(*[4] * 5)
    with captured_log() as log:
        stream_layers(RecordingBridge(), model, list(model.layers[1:]), 3 * LAYER_BYTES)
    assert log == [
        "4 of 5 layers stay on the host with 320 B of weights; each step copies them to the card, "
        "into a buffer of 80 B"
    ]
    model = Layered(*[4] * 5)
    with captured_log() as log:
        stream_layers(RecordingBridge(), model, list(model.layers), GIB)
    assert log[1] == (
        "cpu_offload_gb asks to keep 1024 MiB of weights off the card, but even all layers on the "
        "host save only 320 B of its memory"
    )


# ---- on the card --------------------------------------------------------------------------

PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 40, 17)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0)
ENGINE = SMALL_ENGINE | {
    "sampling_warmup": "all",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "num_gpu_blocks_override": 10,
}
POOL_BYTES = 13 * 2**20
SPARED_BYTES = 2 * 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("deep"), num_hidden_layers=12)


def generate(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


@pytest.fixture(scope="module")
def whole(folder):
    """Return the output of the model with all of its weights on the card, and the bytes of these
    weights.
    """
    with simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        llm = LLM(str(folder), **ENGINE)
        ledger = worker_of(llm).ledger
        return generate(llm), ledger.booked(MemoryClass.WEIGHTS)


@pytest.mark.parametrize("mode", ["lazy", exhaustive("eager")])
def test_a_model_too_large_for_the_card_runs_and_computes_the_same(folder, whole, mode):
    want, weights = whole
    variables = {"PT_HPU_LAZY_MODE": MODES[mode][0], **FEW_BUCKETS}
    with (
        simulated_hpu(pool_bytes=POOL_BYTES, **variables),
        pytest.raises(ConfigError, match=r"no memory.*\(--cpu-offload-gb, with --enforce-eager\)"),
    ):
        LLM(str(folder), **ENGINE)
    with simulated_hpu(pool_bytes=POOL_BYTES, **variables) as bridge, captured_log() as log:
        llm = LLM(str(folder), cpu_offload_gb=SPARED_BYTES / GIB, **ENGINE)
        before = bridge.counters()
        assert generate(llm) == want
        after = bridge.counters()
        ledger = worker_of(llm).ledger
    assert any("of 12 layers stay on the host with" in line for line in log)
    assert ledger.booked(MemoryClass.WEIGHTS) <= weights - SPARED_BYTES
    assert after.compilations == before.compilations
    assert after.h2d_bytes - before.h2d_bytes > 4 * SPARED_BYTES


@pytest.mark.parametrize("is_lazy", [0, 1])
def test_a_mode_that_needs_all_weights_on_the_card_is_refused(folder, is_lazy):
    arguments = ENGINE | {"enforce_eager": False}
    with (
        simulated_hpu(PT_HPU_LAZY_MODE=is_lazy),
        pytest.raises(ConfigError, match=r"^cpu_offload_gb=0\.5 needs enforce_eager: an HPU graph"),
    ):
        LLM(str(folder), cpu_offload_gb=0.5, **arguments)
