"""The counted memory of an encoder against the tensors of a real forward pass."""

import pytest
import torch

from tests.tiny_audio import make_tiny_audio
from tests.tiny_images import FAMILIES, make_tiny_images
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.text_of_images import make_encoder
from vllm.multimodal.job import family_of_model
from vllm.ops import get_ops
from vllm.worker.cpu.encoder_memory import PeakBytes, encoder_bytes, peak_bytes


def make_config(folder, **flags) -> VllmConfig:
    return EngineArgs(model=str(folder), device="cpu", **flags).create_engine_config()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_is_that_of_a_real_forward_pass(family, tmp_path):
    config = make_config(make_tiny_images(family, tmp_path), dtype="float32")
    encoder = make_encoder(config.model.resolved_arch)
    for parameter in encoder.parameters():
        parameter.data.zero_()
    item = family_of_model(config).largest().tensors
    given = encoder.prepare(
        encoder.divide({name: torch.from_numpy(array) for name, array in item.items()})
    )
    ops = get_ops()
    found = peak_bytes(config, given)
    assert get_ops() is ops
    with torch.inference_mode(), PeakBytes() as real:
        encoder.run(**given)
    assert found == real.peak + sum(each.nbytes for each in given.values())


def test_an_item_has_room_in_a_prompt_and_a_step_encodes_several(tmp_path):
    sizes = {}
    for family in ("qwen2_vl", "llava"):
        folder = make_tiny_images(family, tmp_path / family)
        for limit in (32, 128):
            flags = {"max_model_len": limit, "max_num_batched_tokens": limit}
            config = make_config(folder, **flags)
            encoder = make_encoder(config.model.resolved_arch)
            sizes[family, limit] = encoder_bytes(config, encoder)
    # 69 tokens in the first model, of which 32 fit; images of 16 in the second, two in a step.
    assert sizes["qwen2_vl", 32] == pytest.approx(sizes["qwen2_vl", 128] * 32 / 69, rel=1e-6)
    assert sizes["llava", 128] == 4 * sizes["llava", 32]


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
