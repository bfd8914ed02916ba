"""LoRA adapters of a server: their names, and the routes that add and remove them."""

import json
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from tests.entrypoints.openai.fakes import make_app
from vllm.config import LoRAConfig
from vllm.entrypoints.openai import serving_lora, serving_models
from vllm.entrypoints.server.served_adapters import ServedAdapters
from vllm.errors import RequestError


@pytest.fixture
def folder(tmp_path):
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("a", "is written as name=path"),
        ('{"name": "a"}', "is written as name=path"),
        ('{"name": "a", "path": ', "is not JSON"),
        ("a=/nope", "'a': /nope is no folder"),
        ("base=", "is written as name=path"),
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
    engine = SimpleNamespace(vllm_config=config)
    routers = serving_models.router, serving_lora.router
    client = TestClient(make_app(engine, *routers, lora_modules=(f"one={folder}",)))

    def post(route: str, **body: str) -> int:
        return client.post(f"/v1/{route}_lora_adapter", json=body).status_code

    def names() -> list[tuple[str, str | None]]:
        return [(card["id"], card["parent"]) for card in client.get("/v1/models").json()["data"]]

    assert names() == [("base", None), ("one", "base")]
    assert post("load", lora_name="two", lora_path=str(folder)) == 200
    assert post("load", lora_name="two", lora_path=str(folder)) == 400
    assert post("load", lora_name="three", lora_path="/nope") == 400
    assert post("unload", lora_name="one") == 200
    assert post("unload", lora_name="one") == 404
    assert names() == [("base", None), ("two", "base")]
