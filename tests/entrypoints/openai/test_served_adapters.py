"""Test the LoRA adapters of a server: their names, and the routes that add and remove them."""

import json
import shutil
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from tests.entrypoints.openai.fakes import make_app
from vllm.config import LoRAConfig
from vllm.entrypoints.openai.routes import adapters as serving_lora
from vllm.entrypoints.openai.routes import models as serving_models
from vllm.entrypoints.shared.served_adapters import ServedAdapters
from vllm.errors import RequestError
from vllm.lora.request import LoRARequest


@pytest.fixture
def folder(tmp_path):
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("a", "must be written as name=path"),
        ('{"name": "a"}', "must be written as name=path"),
        ('{"name": "a", "path": ', "is not JSON"),
        ("a={folder}/missing", "'a': /.*/missing is not a folder"),
        ("base=", "must be written as name=path"),
        ("base={folder}", "the name 'base' of a LoRA adapter"),
    ],
)
def test_a_module_that_cannot_be_served_is_named(folder, module, message):
    with pytest.raises(RequestError, match=message):
        ServedAdapters([module.replace("{folder}", str(folder))], ["base"], 16)


def test_a_rank_above_the_limit_is_refused(folder):
    with pytest.raises(RequestError, match="max_lora_rank=8"):
        ServedAdapters([f"a={folder}"], ["base"], 4)


def test_adapters_come_and_go_as_models(folder):
    config = SimpleNamespace(
        model=SimpleNamespace(model="/base", served_model_name=("base",)),
        lora=LoRAConfig(enable_lora=True),
        scheduler=SimpleNamespace(max_model_len=64),
    )
    loaded: dict[int, str] = {}

    async def add_lora(adapter: LoRARequest) -> bool:
        if adapter.lora_path.endswith("misfit"):
            raise RequestError("x_proj does not belong to a layer that adapters can change")
        loaded[adapter.lora_int_id] = adapter.lora_path
        return True

    async def remove_lora(number: int) -> bool:
        return loaded.pop(number, None) is not None

    engine = SimpleNamespace(vllm_config=config, add_lora=add_lora, remove_lora=remove_lora)
    misfit = shutil.copytree(folder, folder.with_name("misfit"))
    routers = serving_models.router, serving_lora.router
    client = TestClient(make_app(engine, *routers, lora_modules=(f"one={folder}",)))

    def post(route: str, **body: str | bool) -> int:
        return client.post(f"/v1/{route}_lora_adapter", json=body).status_code

    def names() -> list[tuple[str, str | None]]:
        return [(card["id"], card["parent"]) for card in client.get("/v1/models").json()["data"]]

    assert names() == [("base", None), ("one", "base")]
    assert post("load", lora_name="two", lora_path=str(folder)) == 200
    assert post("load", lora_name="two", lora_path=str(folder)) == 400
    assert post("load", lora_name="three", lora_path=str(folder / "missing")) == 404
    assert post("load", lora_name="three", lora_path=str(misfit)) == 400
    (number,) = loaded
    other = shutil.copytree(folder, folder.with_name("other"))
    assert post("load", lora_name="two", lora_path=str(misfit), load_inplace=True) == 400
    assert loaded == {number: str(folder)}, "the one that was there stays"
    assert post("load", lora_name="two", lora_path=str(other), load_inplace=True) == 200
    assert loaded == {number: str(other)}
    assert post("unload", lora_name="one") == 200
    assert post("unload", lora_name="one") == 404
    assert names() == [("base", None), ("two", "base")]
    assert post("unload", lora_name="two") == 200 and not loaded


def test_a_folder_of_adapters_is_offered_when_one_is_named(folder, tmp_path):
    root = tmp_path / "adapters"
    for name, rank in (("sql", 8), ("large", 64), ("base", 8)):
        (root / name).mkdir(parents=True)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16}
        (root / name / "adapter_config.json").write_text(json.dumps(config))
    (root / "empty").mkdir()
    adapters = ServedAdapters([], ["base"], 16, str(root))
    assert adapters.all == []
    for name in (
        "",
        ".",
        "..",
        "../adapters/sql",
        f"{root}/sql",
        "empty",
        "base",
        "x\0",
        "x" * 999,
    ):
        assert adapters.find(name) is None
    found = adapters.find("sql")
    assert found is not None and found.path == str(root / "sql")
    assert adapters.find("sql") is found and adapters.all == [found]
    with pytest.raises(RequestError, match="the rank r is 64, and max_lora_rank is 16"):
        adapters.find("large")
