"""Test the predicted memory of an encoder against the tensors of a real forward pass."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.reach import replace_ops
from tests.tiny_audio import make_tiny_audio
from tests.tiny_images import FAMILIES, make_tiny_images
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.text_of_images import make_encoder
from vllm.multimodal.job import family_of_model
from vllm.ops import get_ops
from vllm.ops.native.operators import NativeOps
from vllm.worker.cpu.encoder_memory import PeakBytes, encoder_bytes, peak_bytes
from vllm.worker.cpu.worker import CPUWorker


@contextmanager
def calls_of(*paths: str) -> Iterator[list[str]]:
    """List the calls of functions of these files."""
    found: list[str] = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.endswith(paths):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def make_config(folder, **flags) -> VllmConfig:
    return EngineArgs(model=str(folder), device="cpu", **flags).create_engine_config()


WITH_PIXTRAL = ("mistral3", "llava with the tower of Pixtral")
USUAL = ("llava_next", "qwen2_5_vl", "qwen3_vl", "mllama", "mistral3")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in USUAL else pytest.mark.exhaustive)
        for each in FAMILIES
    ],
)
def test_the_peak_is_that_of_a_real_forward_pass(family, tmp_path, monkeypatch):
    # Use the operators of torch: the C++ kernels, which an earlier engine may have installed,
    # allocate tensors that are not counted.
    replace_ops(monkeypatch, NativeOps())
    config = make_config(make_tiny_images(family, tmp_path), dtype="float32")
    encoder = make_encoder(config.model.resolved_arch)
    for parameter in encoder.parameters():
        parameter.data.zero_()
    item = family_of_model(config).largest().tensors
    given = encoder.prepare(
        encoder.divide({name: torch.from_numpy(array) for name, array in item.items()})
    )
    ops = get_ops()
    with calls_of("torch/_compile.py", "symbolic_shapes.py") as calls:
        found = peak_bytes(config, given)
    if torch.__version__ >= "2.10":  # older releases check shapes with their compiler
        assert not calls, "torch would import its compiler"
    assert get_ops() is ops
    with torch.inference_mode(), PeakBytes() as real:
        encoder.run(**given)
    of_real = real.peak + sum(each.nbytes for each in given.values())
    # In the encoder of Pixtral, attention needs the most memory, including a sum of 4 bytes for
    # each of 4 heads and 64 patches. `found` includes these sums, but the real count does not see
    # tensors inside of an operator.
    assert found - of_real == (1024 if family in WITH_PIXTRAL else 0)


def test_an_item_has_room_in_a_prompt_and_a_step_encodes_several(tmp_path):
    sizes = {}
    for family in ("qwen2_vl", "llava"):
        folder = make_tiny_images(family, tmp_path / family)
        for limit in (32, 128):
            flags = {"max_model_len": limit, "max_num_batched_tokens": limit}
            for videos in (0, 1):
                counts = {"limit_mm_per_prompt": {"video": videos}}
                config = make_config(folder, **flags, **counts)
                encoder = make_encoder(config.model.resolved_arch)
                sizes[family, limit, videos] = encoder_bytes(config, encoder)
    # The largest image of the first model has 69 tokens, of which a budget of 32 holds 32. Images
    # of the second model have 16 tokens, so that two of them fit into a budget of 32.
    whole = sizes["qwen2_vl", 128, 0]
    assert sizes["qwen2_vl", 32, 0] == pytest.approx(whole * 32 / 69, rel=1e-6)
    # Videos use the whole budget.
    assert sizes["qwen2_vl", 128, 1] == pytest.approx(whole * 128 / 69, rel=1e-6)
    assert sizes["qwen2_vl", 32, 1] == sizes["qwen2_vl", 32, 0]
    assert sizes["llava", 128, 0] == sizes["llava", 128, 1] == 4 * sizes["llava", 32, 0]


def test_the_kv_cache_leaves_room_for_the_encoder(tmp_path):
    folder = make_tiny_images("llava", tmp_path)
    found = {}
    for is_skipped in (False, True):
        worker = CPUWorker(make_config(folder, skip_mm_profiling=is_skipped, max_model_len=64))
        worker.platform.free_memory_bytes = lambda: 2**30
        worker.load(0)
        found[is_skipped] = worker.measure().free_bytes
    config = make_config(folder, max_model_len=64)
    used = encoder_bytes(config, make_encoder(config.model.resolved_arch))
    assert found[True] - found[False] == used > 0


def test_sounds_are_encoded_few_at_a_time_whatever_their_length(tmp_path):
    sizes = set()
    for limit in (512, 8192):
        for family in ("qwen2_audio", "voxtral"):
            folder = make_tiny_audio(family, tmp_path / f"{family} {limit}")
            config = make_config(folder, max_num_batched_tokens=limit, dtype="float32")
            encoder = make_encoder(config.model.resolved_arch)
            largest = family_of_model(config).largest().tensors
            parts = encoder.divide({name: torch.from_numpy(x) for name, x in largest.items()})
            given = encoder.prepare((parts * 4)[:4])
            found = encoder_bytes(config, encoder)
            assert found == peak_bytes(config, given)
            sizes.add((family, found))
    assert len(sizes) == 2


def test_freed_tensors_are_not_counted():
    with PeakBytes() as count:
        for _ in range(3):
            made = torch.zeros(100) + 1
            made += 1
            del made
    assert count.peak == 2 * 400
