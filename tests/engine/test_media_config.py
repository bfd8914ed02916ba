"""Test that models load their encoder of images or sounds, or log the reason why not."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.test_resolve_config import resolve
from tests.tiny_audio import FAMILIES as SOUND_FAMILIES
from tests.tiny_audio import make_tiny_audio
from tests.tiny_images import FAMILIES, make_tiny_images
from vllm.engine.resolve import media
from vllm.multimodal.families.qwen2_audio import Qwen2AudioFamily

pytest.importorskip("PIL", reason="images need Pillow")

_SETTINGS = ("preprocessor_config.json", "processor_config.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    makers = dict.fromkeys(FAMILIES, make_tiny_images)
    makers |= dict.fromkeys(SOUND_FAMILIES, make_tiny_audio)
    return {
        family: make(family, tmp_path_factory.mktemp("model")) for family, make in makers.items()
    }


def media_of(folder, **settings):
    return resolve(model=str(folder), **settings).model.resolved_arch.media_config


@pytest.mark.parametrize("family", [*FAMILIES, *SOUND_FAMILIES])
def test_every_family_reads_text_only_for_these_reasons(family, folders, tmp_path, caplog):
    folder = folders[family]
    assert media_of(folder) is not None
    assert media_of(folder, load_format="dummy") is not None

    def reason(folder, **settings):
        caplog.clear()
        assert media_of(folder, **settings) is None
        (line,) = [r.getMessage() for r in caplog.records if "serves text" in r.getMessage()]
        return line.partition(", because ")[2]

    modality, items, processor = "image", "images", "an image processor"
    if family in SOUND_FAMILIES:
        modality, items, processor = "audio", "sounds", "a feature extractor"
    limit = {"limit_mm_per_prompt": {modality: 0}}
    assert reason(folder, **limit).startswith(f"limit_mm_per_prompt allows no {items}")
    assert not any("has no effect" in record.getMessage() for record in caplog.records)

    for path in folder.iterdir():
        if path.name not in _SETTINGS:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert reason(tmp_path).startswith(f"{tmp_path} has no settings of {processor}")

    for name in _SETTINGS:
        if (folder / name).exists():
            (tmp_path / name).write_text((folder / name).read_text())
    tensors = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "language_model." in name or name.startswith("lm_head.")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert reason(tmp_path) == f"the checkpoint has no tensors of an encoder of {items}"

    # An index of files that have not been downloaded gives the same error.
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    assert reason(tmp_path) == f"the checkpoint has no tensors of an encoder of {items}"


def test_without_the_reader_of_files_a_model_reads_text_only(folders, monkeypatch, caplog):
    monkeypatch.setattr(media, "find_spec", lambda name: None)
    assert media_of(folders["llava"]) is None
    assert "Pillow is not installed: pip install 'vllm[image]'" in caplog.text
    assert media_of(folders["voxtral"]) is None
    assert "PyAV is not installed: pip install 'vllm[audio]'" in caplog.text


def test_sizes_that_the_config_of_qwen2_audio_leaves_out_are_the_defaults(folders, tmp_path):
    for path in folders["qwen2_audio"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = {"model_type": "qwen2", "vocab_size": 156032, "max_position_embeddings": 8192}
    config = json.loads((tmp_path / "config.json").read_text()) | {"text_config": text}
    del config["audio_config"]["d_model"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = resolve(model=str(tmp_path), load_format="dummy").model.resolved_arch
    assert (arch.hidden_size, arch.num_layers, arch.num_kv_heads) == (4096, 32, 32)
    assert arch.media_config is not None and arch.media_module == "qwen2_audio"
    assert Qwen2AudioFamily.read_encoder(arch.media_config).d_model == 1280


def test_the_modules_of_transformers_read_text_only(folders):
    assert media_of(folders["mistral3"], model_impl="transformers") is None


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_config_with_the_text_values_at_the_top_also_reads_images(family, folders, tmp_path):
    for path in folders[family].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    scaling = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    flat = text | config | {"rope_theta": 10000.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    found = media_of(tmp_path)
    assert found is not None and found["vision_config"] == config["vision_config"]
