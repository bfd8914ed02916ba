"""Test the example for Ray Serve: its application serves with its own engine. Ray is a fake."""

import os
import runpy
import signal
import sys
import types
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.reach import core_pid_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "online_serving" / "ray_serve" / "app.py"


class FakeServe(types.SimpleNamespace):
    """Records the calls of the example to Ray Serve."""

    Application = object

    def __init__(self):
        super().__init__(options={}, build=None)

    def deployment(self, **options):
        self.options.update(options)

        def wrap(cls):
            cls.bind = classmethod(lambda cls: cls)
            return cls

        return wrap

    def ingress(self, build):
        self.build = build
        return lambda cls: cls


@pytest.fixture
def serve(monkeypatch):
    fake = FakeServe()
    cloudpickle = types.SimpleNamespace(register_pickle_by_value=lambda module: None)
    monkeypatch.setitem(
        sys.modules, "ray", types.SimpleNamespace(serve=fake, cloudpickle=cloudpickle)
    )
    # The example finds its own module by name in sys.modules, for its annotations and for pickling.
    monkeypatch.setitem(sys.modules, "ray_serve_app", types.ModuleType("ray_serve_app"))
    return fake


def make(**settings):
    example = runpy.run_path(str(EXAMPLE), run_name="ray_serve_app")
    return example["make"](example["Settings"](**settings))


def test_a_replica_serves_and_tells_when_its_engine_has_died(serve):
    replica = make(flags="--max-model-len 128 --max-num-seqs 4", max_replicas=3, num_hpus=2)()
    assert serve.options["autoscaling_config"]["max_replicas"] == 3
    assert serve.options["ray_actor_options"]["resources"] == {"HPU": 2}
    app = serve.build()
    with TestClient(app) as client:
        answer = client.post("/v1/completions", json={"prompt": "import os\n", "max_tokens": 3})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        assert client.post("/v1/completions", json={"max_tokens": -1}).status_code == 400
        replica.check_health()
        os.kill(core_pid_of(app), signal.SIGKILL)
        while client.get("/health").status_code == 200:
            pass
        with pytest.raises(RuntimeError, match="the engine has died"):
            replica.check_health()


def test_a_wrong_flag_ends_the_start(serve):
    make(model="/no/such/model")
    with pytest.raises(Exception, match="/no/such/model"), TestClient(serve.build()):
        pass
