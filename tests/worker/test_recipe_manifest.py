"""Test the file that lists the buckets with recipes on disk, and the second start on a card, which
reads it.
"""

import json
from dataclasses import replace
from pathlib import Path

from tests.engine.fakes import make_config
from tests.full_disk import full_disk
from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, captured_log, simulated_hpu
from tests.reach import core_of
from vllm import LLM, SamplingParams
from vllm.bucketing.bucket import decode, prefill
from vllm.config import HPUConfig
from vllm.platforms.habana import versions
from vllm.worker.hpu.warmup.recipe_manifest import FILE_NAME, RecipeManifest

FIELDS = {"model": "/models/a", "num_blocks": "4107", "mode": "HPU graphs"}


def test_what_was_added_is_found_by_an_engine_of_the_same_configuration(tmp_path):
    path = tmp_path / FILE_NAME
    manifest = RecipeManifest(path, FIELDS)
    assert not manifest.found
    manifest.add([decode(4, 128), prefill(1, 256, 3)])
    RecipeManifest(path, FIELDS | {"num_blocks": "9"}).add([decode(1, 1)])
    manifest.add([decode(8, 128)])
    RecipeManifest(path, FIELDS, is_writer=False).add([decode(2, 2)])
    found = RecipeManifest(path, FIELDS).found
    assert found == {decode(4, 128), prefill(1, 256, 3), decode(8, 128)}
    assert RecipeManifest(path, FIELDS | {"num_blocks": "9"}).found == {decode(1, 1)}
    assert [each.name for each in tmp_path.iterdir()] == [FILE_NAME]


def test_the_fields_that_differ_are_named_in_one_line(tmp_path):
    path = tmp_path / FILE_NAME
    for blocks, mode in (("4102", "HPU graphs"), ("1", "lazy")):
        RecipeManifest(path, FIELDS | {"num_blocks": blocks, "mode": mode}).add([decode(1, 1)])
    with captured_log() as log:
        assert not RecipeManifest(path, FIELDS).found
        assert not RecipeManifest(path, FIELDS, is_writer=False).found
    assert log == [
        f"The compiled recipes in {tmp_path} belong to a different configuration: num_blocks is "
        "4107 but it was 4102. They are compiled again"
    ]


def test_recipes_of_other_settings_or_software_are_not_those_of_this_engine(tmp_path, monkeypatch):
    config = make_config()
    hpu = replace(config.hpu, recipe_cache=f"{tmp_path},false,64")
    config = replace(config, hpu=hpu, scheduler=replace(config.scheduler, max_loras=2))
    others = (
        replace(config, model=replace(config.model, quantization="fp8")),
        replace(config, lora=replace(config.lora, max_lora_rank=64)),
        replace(config, hpu=replace(config.hpu, merged_prefill=True)),
    )
    RecipeManifest.of(config, "lazy", 9, 0, "GAUDI2").add([decode(1, 1)])
    assert RecipeManifest.of(config, "lazy", 9, 0, "GAUDI2").found
    assert not RecipeManifest.of(config, "lazy", 9, 0, "GAUDI3").found
    monkeypatch.setattr(versions, "version", lambda name: "1.24.1.12")
    with captured_log() as log:
        assert not RecipeManifest.of(config, "lazy", 9, 0, "GAUDI2").found
    assert "gaudi_software is 1.24.1.12 but it was None. They are compiled again" in log[0]
    monkeypatch.undo()
    assert not any(RecipeManifest.of(other, "lazy", 9, 0, "GAUDI2").found for other in others)


def test_a_damaged_or_newer_file_is_no_reason_to_fail(tmp_path):
    path = tmp_path / FILE_NAME
    good = {"format": "vllm recipes", "version": 1, "configurations": []}
    entry = {"fields": FIELDS, "buckets": [["decode", 0, 1, 1]]}
    for content in (
        *("{", "[]", "null", json.dumps(good | {"configurations": [entry]})),
        json.dumps(good | {"configurations": [{"fields": FIELDS}]}),
        json.dumps(good | {"configurations": [{"fields": [], "buckets": []}]}),
        json.dumps(good | {"configurations": [entry | {"buckets": [["decode", 1e999, 1, 1]]}]}),
        "[" * 100_000,
        json.dumps(good | {"version": 2}),
    ):
        path.write_text(content)
        with captured_log() as log:
            manifest = RecipeManifest(path, FIELDS)
            assert not manifest.found and all("cannot be read" in line for line in log)
            manifest.add([decode(4, 8)])
        assert RecipeManifest(path, FIELDS).found == {decode(4, 8)}
    with captured_log() as log:
        lost = RecipeManifest(tmp_path / "none" / FILE_NAME, FIELDS)
        lost.add([decode(4, 8)])
        lost.add([decode(4, 8)])
    assert len(log) == 1 and "cannot be written" in log[0]


def test_a_full_or_read_only_folder_is_a_warning_and_leaves_no_parts(tmp_path, monkeypatch):
    path = tmp_path / FILE_NAME
    RecipeManifest(path, FIELDS).add([decode(1, 1)])

    def fail(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    manifest = RecipeManifest(path, FIELDS)
    with captured_log() as log:
        with full_disk():
            manifest.add([decode(2, 2)])
            manifest.add([decode(2, 2), decode(3, 3)])
        monkeypatch.setattr(Path, "unlink", fail)
        settings = HPUConfig(recipe_cache=f"{tmp_path},true,64")
        RecipeManifest.of(replace(make_config(), hpu=settings), "lazy", 9, 0, "GAUDI2")
        monkeypatch.undo()
    written, deleted, _ = log  # the last line is about another configuration
    assert "File too large. The next start will not know" in written
    assert "cannot be deleted" in deleted
    assert [each.name for each in tmp_path.iterdir()] == [FILE_NAME]
    assert RecipeManifest(path, FIELDS).found == {decode(1, 1)}


def test_a_second_start_warms_up_first_what_is_on_disk_and_knows_that_it_is_fast(tmp_path):
    variables = FEW_BUCKETS | {
        "PT_HPU_LAZY_MODE": 1,
        "PT_HPU_RECIPE_CACHE_CONFIG": f"{tmp_path},false,64",
        "VLLM_DECODE_BLOCK_BUCKET_STEP": 4,
        "VLLM_DECODE_BLOCK_BUCKET_MIN": 4,
    }
    engine = SMALL_ENGINE | {"ready_when": "first", "first_buckets": 3, "warm_up_share": 1.0}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    compiled, answers = [], []
    for _ in range(2):
        with simulated_hpu(has_profiling_run=False, **variables) as bridge, captured_log() as log:
            llm = LLM(**engine)
            core = core_of(llm)
            compiled.append(bridge.counters().compilations)
            first = core.stats().warm_up
            assert first.num_warm < first.num_wanted
            before = json.loads((tmp_path / FILE_NAME).read_text())["configurations"][0]
            answers.append(llm.generate(["import os\n"], params, use_tqdm=False)[0].outputs[0])
            while core.stats().warm_up.num_warm < first.num_wanted:
                core.idle_step()
        assert not [line for line in log if "different configuration" in line]
        after = json.loads((tmp_path / FILE_NAME).read_text())["configurations"]
        assert len(after) == 1 and len(after[0]["buckets"]) == first.num_wanted
    assert answers[0].token_ids == answers[1].token_ids
    assert len(before["buckets"]) == first.num_wanted  # the buckets of the first run
    assert compiled[1] < compiled[0] / 2
