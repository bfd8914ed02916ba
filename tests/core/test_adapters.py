"""Test how many LoRA adapters a step uses, and that no request waits for its adapter forever."""

from msgspec.structs import replace

from tests.core.helpers import Loop, make_request, make_scheduler
from vllm.messages import AdapterRef


def request(name: str, adapter: str | None, max_tokens: int = 4):
    ref = None if adapter is None else AdapterRef(adapter, "/" + adapter, adapter)
    return replace(make_request(name, [1, 2, 3], max_tokens), adapter=ref)


def test_a_step_uses_at_most_max_loras_and_requests_without_go_ahead():
    scheduler = make_scheduler(max_loras=2)
    for name, adapter in (("a1", "a"), ("b1", "b"), ("c1", "c"), ("a2", "a"), ("n", None)):
        scheduler.add_request(request(name, adapter))
    step = scheduler.schedule()
    admitted = {new.request.request_id for new in step.new_requests}
    assert admitted == {"a1", "b1", "n"}, "a2 waits behind c1, although its adapter is in use"


def test_every_adapter_gets_its_turn_while_others_keep_coming():
    loop = Loop(make_scheduler(max_loras=1, max_num_seqs=3))
    loop.add(request("a0", "a"))
    loop.add(request("b", "b"))
    for number in range(1, 20):
        loop.add(request(f"a{number}", "a"))
    used = []
    while loop.scheduler.num_unfinished_requests:
        loop.step()
        used.append(set(loop.scheduler.running.adapters))
    assert all(len(adapters) <= 1 for adapters in used)
    assert {"b"} in used[:12], "not after all of the others"
