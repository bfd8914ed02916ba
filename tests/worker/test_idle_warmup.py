"""Test that the remaining warm-up of the sampler runs while the engine has no requests."""

from collections import deque

from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, captured_log, simulated_hpu
from tests.reach import core_of, runner_of, worker_of
from vllm import LLM, SamplingParams
from vllm.bucketing import MemoryClass
from vllm.engine.process.core_process import CoreLoop
from vllm.engine.process.wire import AddRequests, CoreOutput, encode
from vllm.messages import EngineRequest

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 5},
    {"top_k": 300, "top_p": 0.9},
    {"min_p": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.3, "logprobs": 5},
    {"logprobs": 1},
    {"logit_bias": {5: 2.0, 9: -3.0}},
    {"min_tokens": 2},
    {"allowed_token_ids": [7, 8, 9]},
)


class Server:
    """The loop of a core process over the core of `llm`, which the test runs step by step.

    Attributes:
        inbox: messages from the client.
        sent: messages that the loop has sent.
        waits: whether each read of an empty inbox would have waited.
        warmed: batch sizes of the forward passes of the idle warm-up.
    """

    def __init__(self, llm: LLM, monkeypatch) -> None:
        self.core = core_of(llm)
        self.inbox, self.sent, self.waits = deque(), [], []
        self.loop = CoreLoop(self.core, self._receive, self.sent.append)
        self.runner = runner_of(self.core)
        self.warmed: list[int] = []
        run = self.runner.warm_up_sampling

        def warm_up_sampling(shape, metadata):
            self.warmed.append(shape.num_rows)
            return run(shape, metadata)

        monkeypatch.setattr(self.runner, "warm_up_sampling", warm_up_sampling)

    def _receive(self, wait: bool) -> bytes | None:
        if self.inbox:
            return self.inbox.popleft()
        self.waits.append(wait)
        return None

    def ask(self, request_id: str) -> None:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=[5, 6, 7],
            sampling_params=params,
            seed=1,
            eos_token_id=None,
            max_total_tokens=7,
            arrival_time=0.0,
        )
        self.inbox.append(encode(AddRequests(requests=[request])))


def test_an_idle_server_compiles_the_rest_and_requests_wait_for_one_launch_at_most(monkeypatch):
    with (
        simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS) as bridge,
        captured_log() as log,
    ):
        llm = LLM(**SMALL_ENGINE)
        server = Server(llm, monkeypatch)
        server.loop.turn()
        server.loop.turn()
        assert len(server.warmed) == 2 and server.waits == [False, False]

        server.ask("first")
        while True:  # the warm-up runs nothing before the last token of the request
            server.loop.turn()
            if not server.core.has_unfinished_requests():
                break
        assert len(server.warmed) == 2
        outputs = [message.output for message in server.sent if isinstance(message, CoreOutput)]
        assert sum(len(output.token_ids) for output in outputs) == 4

        while server.core.has_idle_work():
            before = len(server.warmed)
            server.loop.turn()
            assert len(server.warmed) <= before + 1
        server.waits.clear()
        server.loop.turn()
        assert server.waits == [True]

        before = bridge.counters().compilations
        for options in KINDS:
            params = SamplingParams(seed=1, max_tokens=3, ignore_eos=True, **options)
            llm.generate(["import os\n"], params, use_tqdm=False)
        assert bridge.counters().compilations == before
        assert server.core.stats().runner.num_late_compilations == 0
    assert not [line for line in log if "was not warmed-up!" in line]
    assert sum("Idle: compiling the remaining sampling graphs" in line for line in log) == 1
    assert sum("All sampling graphs are compiled" in line for line in log) == 1


def test_offline_nothing_is_warmed_between_calls_and_all_leaves_nothing(monkeypatch):
    for mode in ("basic", "all"):
        with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
            llm = LLM(**SMALL_ENGINE, sampling_warmup=mode)
            server = Server(llm, monkeypatch)
            params = SamplingParams(temperature=0, max_tokens=2)
            llm.generate(["import os\n"], params, use_tqdm=False)
            assert server.warmed == []
            if mode == "all":
                while server.core.has_idle_work():
                    server.loop.turn()
                assert server.warmed == []


def test_without_memory_it_gives_up_with_one_line(monkeypatch):
    with (
        simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS),
        captured_log() as log,
    ):
        llm = LLM(**SMALL_ENGINE)
        server = Server(llm, monkeypatch)

        ledger = worker_of(server.core).ledger
        ledger.release(MemoryClass.WORKSPACE, ledger.booked(MemoryClass.WORKSPACE))
        ledger.assign(
            MemoryClass.MARGIN, ledger.budget(MemoryClass.MARGIN) + ledger.unassigned_bytes
        )
        server.loop.turn()
        while server.core.has_idle_work():
            server.loop.turn()
    assert len(server.warmed) == 1
    assert (
        sum(
            "stopped compiling sampling graphs while idle: a forward pass takes" in line
            for line in log
        )
        == 1
    )
