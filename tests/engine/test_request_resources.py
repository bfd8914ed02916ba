"""Test requests that wait for an adapter or a grammar."""

from concurrent.futures import Future

from tests.core.helpers import make_request
from vllm.engine.request_resources import RequestResources


def test_the_id_of_a_refused_request_is_in_use_until_its_end_is_told():
    resources = RequestResources(lambda request_ids: None)
    refused: Future[str | None] = Future()
    refused.set_result("its adapter has wrong tensors")
    resources.await_load(make_request("a", prompt=[1]), refused)
    assert "a" in resources
    assert resources.take_loaded(0.0) == []
    assert "a" in resources
    (end,) = resources.take_refused().values()
    assert end.error == "its adapter has wrong tensors"
    assert "a" not in resources
