"""Test recipes on disk: recipes that one process compiled are not compiled by the next one."""

import logging
import os
from pathlib import Path

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.recipes import RecipeCache
from tests.full_disk import full_disk
from tests.hpu import captured_log
from vllm.errors import ConfigError


def compilations_of(config: str, *, model: str = "gaudi2", is_strict: bool = False) -> int:
    """Return the numbers of compilations of two steps on a new card, as in a new process."""
    bridge = SimBridge(model, is_lazy=True, is_strict=is_strict, recipe_cache=config)
    x = torch.ones(4).to("hpu")
    with bridge.warmed_section():
        for number in (1.5, 2.5):
            x * number
            bridge.mark_step()
    return bridge.counters().compilations


def test_a_recipe_is_compiled_once_for_all_processes(tmp_path):
    config = f"{tmp_path / 'new' / 'folder'},false,16"
    assert compilations_of(config) == 2
    assert compilations_of(config, is_strict=True) == 0
    assert compilations_of(config, model="gaudi3") == 2
    for recipe in (tmp_path / "new" / "folder").iterdir():
        recipe.unlink()
    assert compilations_of(config) == 2


def test_a_graph_is_captured_again_though_its_recipes_are_known(tmp_path):
    for num_compilations in (1, 0):
        bridge = SimBridge("gaudi2", is_lazy=True, recipe_cache=str(tmp_path))
        bridge.wrap_in_hpu_graph(torch.nn.ReLU())(torch.ones(4).to("hpu"))
        assert bridge.counters().graph_captures == 1
        assert bridge.counters().compilations == num_compilations


@pytest.mark.parametrize(("config", "expected"), [("true", 2), ("1,8", 2), ("False", 0), ("0,", 0)])
def test_the_folder_is_emptied_at_start_if_asked(tmp_path, config, expected):
    compilations_of(str(tmp_path))
    bystander = tmp_path / "notes.txt"
    bystander.touch()
    assert compilations_of(f"{tmp_path},{config}") == expected
    assert bystander.exists()


def test_a_full_disk_is_one_warning_and_leaves_no_parts_of_recipes(tmp_path):
    with full_disk(), captured_log(logging.WARNING) as log:
        assert compilations_of(str(tmp_path)) == 2
    [line] = log
    assert "cannot keep recipes in" in line and "File too large. The next start" in line
    assert list(tmp_path.iterdir()) == []
    assert compilations_of(str(tmp_path)) == 2


def test_the_oldest_recipes_make_room_for_new_ones(tmp_path):
    cache = RecipeCache(tmp_path, max_bytes=25)
    for age, text in enumerate(["first" * 2, "second" * 2, "third" * 2]):
        cache.add(text)
        newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, ns=(age, age))
    assert "firstfirst" not in cache
    assert "secondsecond" in cache and "thirdthird" in cache


def test_no_path_is_no_cache_and_eager_operators_are_not_kept(tmp_path):
    assert RecipeCache.from_config(",false,1024,false") is None
    bridge = SimBridge("gaudi2", recipe_cache=str(tmp_path))
    torch.ones(4).to("hpu") + 1
    assert list(tmp_path.iterdir()) == [] and bridge.card.clock.compile_s > 0


@pytest.mark.parametrize(
    "config", ["{},perhaps", "{},false,0", "{},false,8,false,9", "/dev/null/x"]
)
def test_what_cannot_be_used_is_an_error_that_names_the_variable(tmp_path, config):
    with pytest.raises(ConfigError, match=r"^PT_HPU_RECIPE_CACHE_CONFIG[=:]"):
        SimBridge("gaudi2", recipe_cache=config.format(Path(tmp_path)))
