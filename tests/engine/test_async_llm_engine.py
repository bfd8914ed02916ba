"""Test the asynchronous engine over a fake core: streams, refused requests, limits, failures and
restarts.
"""

import asyncio
import threading

import pytest

from tests.engine.fakes import make_config
from tests.fake_core import FakeCoreClient, FakeEngineCore, fake_clients
from tests.reach import num_admitted_of, set_request_timeout
from tests.utils.test_deadline_worker import ends_within
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.input import background_tokenizer, preparation
from vllm.engine.input.background_tokenizer import preparation_cost
from vllm.engine.input.input_processor import LONG_TEXT_CHARS
from vllm.engine.input.prompt_tokenizer import PromptTokenizer
from vllm.engine.process import core_supervisor
from vllm.engine.process.admission import AdmissionLimits
from vllm.engine.process.core_supervisor import MAX_TOGETHER
from vllm.engine.process.wire import AddRequests, CoreFailed, CoreOutput
from vllm.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    EngineStoppedError,
    RequestError,
    RequestTimeoutError,
    TextTooLongError,
    WorkerCallError,
)
from vllm.messages import EngineOutput, Finished, FinishReason
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams
from vllm.structured_output.compiler import GrammarCompiler
from vllm.transformers_utils.token_bytes import TextLengthBound
from vllm.utils.process.deadline_worker import DeadlineWorker

STOPPED = Finished(FinishReason.STOP)
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "output_kind": DELTA, **fields})


async def collect(engine, request_id="r", prompt="import os", **fields):
    return [out async for out in engine.generate(prompt, params(**fields), request_id)]


async def until(condition):
    """Wait until a condition is true, for any number of turns of the event loop."""

    async def wait():
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), 120)


@pytest.fixture
def run(monkeypatch):
    """Run `check(engine, client)` on an engine with a fake core."""

    def run(check, *, clients=None, wait=True, **engine_args):
        clients = clients or [FakeCoreClient(FakeEngineCore(lambda request: [10, 11, 12]))]

        async def main():
            engine = AsyncLLM(config=make_config(), **engine_args)
            try:
                if wait:
                    await engine.start()
                await check(engine, clients[0])
            finally:
                engine.shutdown()
            assert all(client.is_closed for client in clients)

        # The config of these fakes is not resolved, so the bundled model has no name here.
        with fake_clients(*clients):
            asyncio.run(main())

    return run


def test_a_request_streams_its_tokens_and_ends(run):
    async def check(engine, client):
        outputs = await collect(engine)
        assert [out.outputs[0].token_ids for out in outputs] == [[10], [11], [12], [10]]
        assert [out.finished for out in outputs] == [False, False, False, True]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert engine.num_unfinished_requests == 0
        assert engine.stats.num_kv_blocks == 100

    run(check)


def test_the_first_request_starts_the_engine(run):
    async def check(engine, client):
        assert not engine.is_running
        assert (await collect(engine))[-1].finished
        assert engine.is_running and not engine.is_stopped

    run(check, wait=False)


def test_requests_run_side_by_side_and_keep_apart(run):
    async def check(engine, client):
        client.core.reply = lambda request: [20 + len(request.prompt_token_ids)]
        prompts = [[5] * n for n in range(1, 9)]
        found = await asyncio.gather(
            *(collect(engine, f"r{i}", prompt) for i, prompt in enumerate(prompts))
        )
        for prompt, outputs in zip(prompts, found, strict=True):
            assert [t for out in outputs for t in out.outputs[0].token_ids] == [
                20 + len(prompt)
            ] * 4

    run(check)


def test_a_wrong_request_is_refused_and_leaves_nothing(run):
    async def check(engine, client):
        for bad in ({"logprobs": 99}, {"logit_bias": {10**6: 1.0}}):
            with pytest.raises(RequestError):
                await collect(engine, **bad)
        with pytest.raises(RequestError, match="logits_processors"):
            await collect(engine, logits_processors=[lambda ids, logits: logits])
        assert engine.num_unfinished_requests == 0
        assert (await collect(engine))[-1].finished

    run(check)


def test_what_the_core_refuses_reaches_the_caller(run):
    async def check(engine, client):
        client.core.capacity = 5
        with pytest.raises(CapacityError, match="needs"):
            await collect(engine, prompt=[1] * 5)
        with pytest.raises(CapacityError):
            await collect(engine, prompt=[1] * 5, n=3, temperature=1.0)
        assert engine.num_unfinished_requests == 0
        assert (await collect(engine, prompt=[1]))[-1].finished

    run(check)


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_the_core_cannot_read_is_refused_alone(run, n):
    async def check(engine, client):
        other = asyncio.ensure_future(collect(engine, "other"))
        wrong = params(n=n)
        wrong.ignore_eos = 7  # set after the parameters were checked
        with pytest.raises(RequestError, match=r"cannot be read by the engine.*ignore_eos"):
            async for _ in engine.generate("import os", wrong, "r"):
                pass
        assert (await other)[-1].finished
        assert (await collect(engine))[-1].finished
        assert engine.num_unfinished_requests == 0 and num_admitted_of(engine) == 0

    run(check)


def test_requests_of_one_moment_are_sent_together_and_refused_alone(run, monkeypatch):
    async def check(engine, client):
        await collect(engine)
        sent, send = [], client.send

        def spy(message):
            sent.extend([len(message.requests)] if isinstance(message, AddRequests) else [])
            send(message)

        monkeypatch.setattr(client, "send", spy)
        tasks = [asyncio.ensure_future(collect(engine, f"r{i}")) for i in range(40)]
        await asyncio.gather(*tasks)
        assert sent == [MAX_TOGETHER, 40 - MAX_TOGETHER]
        code = {"logits_processors": [lambda ids, logits: logits]}
        outputs = await asyncio.gather(
            *(collect(engine, f"s{i}", **(code if i == 1 else {})) for i in range(3)),
            return_exceptions=True,
        )
        assert isinstance(outputs[1], RequestError) and outputs[1].param == "logits_processors"
        assert outputs[0][-1].finished and outputs[2][-1].finished
        left = asyncio.ensure_future(collect(engine, "left"))
        await asyncio.sleep(0)
        await engine.abort("left")  # the request has not been sent to the core yet
        assert (await left)[-1].outputs[0].finish_reason == "abort"
        assert engine.num_unfinished_requests == 0 and not client.core.running

    run(check)


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(run):
    async def check(engine, client):
        first = engine.generate("a b", params(), "same")
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await collect(engine, "same")
        assert [out async for out in first][-1].finished

    run(check)


def test_an_id_that_is_used_again_gets_nothing_of_the_request_before(run):
    async def check(engine, client):
        first = engine.generate("a b", params(max_tokens=40), "same")
        await anext(first)
        (old,) = client.core.running
        client.is_held = True  # the core does not know yet that the first request has left
        await first.aclose()
        second = asyncio.create_task(collect(engine, "same"))
        await until(lambda: engine.num_unfinished_requests)
        late = EngineOutput(request_ids=[old], token_ids=[99], finished={old: STOPPED})
        client.tell(CoreOutput(output=late, stats=client.core.stats()))
        client.is_held = False
        client.turn()
        tokens = [t for out in await second for t in out.outputs[0].token_ids]
        assert tokens == [10, 11, 12, 10]

    run(check)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_consumer_that_leaves_aborts_its_request(run, how):
    async def check(engine, client):
        if how == "close":
            outputs = engine.generate("a b", params(max_tokens=40), "r")
            await anext(outputs)
            await outputs.aclose()
        else:
            task = asyncio.create_task(collect(engine, max_tokens=40))
            client.is_held = True
            await until(lambda: client.received)
            task.cancel()
            client.is_held = False
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: client.core.aborted and not client.has_messages)
        assert client.core.aborted == list(client.core.added)
        assert engine.num_unfinished_requests == 0
        await until(lambda: engine.stats.num_running == 0)

    run(check)


def test_abort_ends_the_stream_with_its_reason(run):
    async def check(engine, client):
        outputs = engine.generate("a b", params(max_tokens=40), "r")
        await anext(outputs)
        await engine.abort(["r", "unknown"])
        rest = [out async for out in outputs]
        assert rest[-1].outputs[0].finish_reason == "abort"

    run(check)


def test_a_request_that_takes_too_long_is_ended(run):
    async def check(engine, client):
        client.is_held = True
        with pytest.raises(RequestTimeoutError, match=r"0\.02 s"):
            await collect(engine)
        client.is_held = False
        client.turn()
        await until(lambda: not client.has_messages)
        assert not client.core.running
        set_request_timeout(engine, 120.0)
        assert (await collect(engine, "quick"))[-1].finished

    run(check, limits=AdmissionLimits(request_timeout=0.02))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (AdmissionLimits(max_queued_requests=2), "max_queued_requests"),
        (AdmissionLimits(max_queued_tokens=25), "max_queued_tokens"),
    ],
)
def test_more_than_may_wait_is_refused_with_503(run, limits, message):
    async def check(engine, client):
        client.is_held = True
        tasks = [asyncio.create_task(collect(engine, f"r{i}", [1, 2])) for i in range(20)]
        await until(
            lambda: sum(task.done() for task in tasks) + engine.num_unfinished_requests == 20
        )
        refused = [task for task in tasks if task.done()]
        assert 0 < len(refused) < 20
        for task in refused:
            with pytest.raises(CapacityError, match=message) as caught:
                await task
            assert caught.value.status == 503
        client.is_held = False
        client.turn()
        for task in tasks:
            if task not in refused:
                assert (await task)[-1].finished

    run(check, limits=limits)


def test_a_dead_core_ends_every_request_and_tells_once(run):
    async def check(engine, client):
        deaths = []
        engine.on_death(deaths.append)
        client.core.reply = lambda request: [10]
        tasks = [asyncio.create_task(collect(engine, f"r{i}", max_tokens=50)) for i in range(3)]
        client.is_held = True
        await until(lambda: len(client.received) == 3)
        client.die()
        for task in tasks:
            with pytest.raises(EngineDeadError, match="signal 9"):
                await task
        with pytest.raises(EngineDeadError):
            await collect(engine, "later")
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()
        assert len(deaths) == 1 and engine.errored

    run(check)


def test_a_stopped_engine_ends_every_request_wherever_it_is(run):
    """Check requests in the core, in the thread of long texts, in its queue, and later ones."""
    started, release = threading.Event(), threading.Event()

    def work(processor):
        started.set()
        release.wait()

    async def check(engine, client):
        client.is_held = True
        tasks = [asyncio.create_task(collect(engine, "r"))]
        await until(lambda: client.received)
        busy = asyncio.create_task(engine.run_in_background(work))
        await asyncio.to_thread(started.wait)
        tasks.append(asyncio.create_task(engine.run_in_background(work)))
        await asyncio.sleep(0)
        engine.shutdown()
        release.set()
        tasks += [asyncio.create_task(engine.run_in_background(work))]
        for task in tasks:
            with pytest.raises(EngineStoppedError, match="before this request had finished"):
                await task
        await busy
        with pytest.raises(EngineStoppedError):
            await collect(engine, "later")

    run(check)


def test_a_failed_step_kills_the_core_and_says_why(run):
    async def check(engine, client):
        client.core.fail = EngineDeadError("step 3 failed: boom")
        with pytest.raises(EngineDeadError, match="boom"):
            await collect(engine)

    run(check)


def test_a_core_that_died_is_started_again_as_often_as_allowed(run):
    clients = [FakeCoreClient(FakeEngineCore()) for _ in range(3)]

    async def check(engine, client):
        for number, current in enumerate(clients[:2]):
            current.is_held = True
            num_before = len(current.received)  # the last client has run r0
            task = asyncio.create_task(collect(engine, f"lost{number}"))
            await until(lambda c=current, n=num_before: len(c.received) > n)
            current.die()
            assert not engine.is_running and not engine.errored
            with pytest.raises(EngineDeadError):
                await task
            assert (await collect(engine, f"r{number}"))[-1].finished
        assert engine.num_restarts_done == 2
        clients[2].die()
        assert engine.errored

    run(check, clients=clients, num_restarts=2)


def test_a_core_that_cannot_be_started_again_is_given_up(run, monkeypatch):
    def no_process():
        raise OSError("no memory for a process")

    async def check(engine, client):
        loop = asyncio.get_running_loop()
        # End this patch before `run` removes its fake clients: otherwise undoing it would bring
        # them back.
        with monkeypatch.context() as patch:
            patch.setattr(
                core_supervisor,
                "start_core_here",
                lambda: loop.run_in_executor(None, no_process),
            )
            client.die()
            with pytest.raises(EngineDeadError, match="no memory for a process"):
                await asyncio.wait_for(collect(engine), 120)
        assert engine.errored and engine.num_restarts_done == 2

    run(check, num_restarts=2)


def test_a_wrong_setting_ends_the_start_with_its_message(monkeypatch):
    failure = CoreFailed(message="no memory for the KV cache", is_config_error=True)
    client = FakeCoreClient(FakeEngineCore(), failure)

    async def main():
        engine = AsyncLLM(config=make_config())
        with pytest.raises(ConfigError, match="no memory"):
            await engine.start()
        with pytest.raises(ConfigError, match="no memory"):
            await collect(engine)
        assert engine.startup.phase == "failed" and client.is_closed
        engine.shutdown()

    with fake_clients(client):
        asyncio.run(main())


def test_calls_reach_the_core(run):
    async def check(engine, client):
        assert await engine.reset_prefix_cache() is True
        client.core.running["x"] = None
        assert await engine.reset_prefix_cache() is False
        client.core.running.clear()

    run(check)


def test_a_long_text_is_tokenised_as_a_short_one_is(run):
    async def check(engine, client):
        text = "import os\n" * 2000
        with pytest.raises(RequestError, match="more than 63 tokens"):
            await collect(engine, prompt=text)
        outputs = await collect(engine, prompt=text, truncate_prompt_tokens=20)
        expected = engine.input_processor.prompts.tokenize(text).token_ids[-20:]
        assert outputs[0].prompt_token_ids == expected

    run(check)


def test_a_tokenizer_for_long_texts_is_there_from_the_start(run, monkeypatch):
    """No stream has to wait while the tokenizer is copied, which blocks the interpreter."""

    async def check(engine, client):
        monkeypatch.setattr(background_tokenizer, "copy", None)
        assert (await engine.tokenize("import os\n" * 2000)).token_ids

    run(check)


def test_a_text_far_too_long_is_refused_before_it_is_tokenised(run, monkeypatch):
    counted = []

    def count(self, text):
        counted.append(len(text))
        return len(text)

    async def check(engine, client):
        monkeypatch.setattr(PromptTokenizer, "count_tokens", count)
        with pytest.raises(TextTooLongError, match=r"20000000 bytes.*more than 63"):
            await collect(engine, prompt="import os\n" * 2_000_000)
        assert not counted  # no token has 300 KB of text, so nothing has to be counted
        monkeypatch.setattr(TextLengthBound, "min_tokens", lambda self, text, num_bytes: 0)
        with pytest.raises(TextTooLongError):
            await collect(engine, prompt="import os\n" * 2_000_000)
        assert len(counted) == 1  # the first piece shows that the text is too long
        assert engine.num_unfinished_requests == 0

    run(check)


def test_who_leaves_the_long_texts_gives_its_turn_up(run):
    started, release, done = threading.Event(), threading.Event(), []

    def first(processor):
        started.set()
        release.wait()

    async def check(engine, client):
        busy = asyncio.ensure_future(engine.run_in_background(first))
        await asyncio.to_thread(started.wait)
        waiting = [
            asyncio.ensure_future(engine.run_in_background(lambda processor: done.append(1)))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        waiting[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[1]
        release.set()
        await asyncio.gather(busy, waiting[0], waiting[2])
        assert len(done) == 2

    run(check)


def test_a_huge_text_is_tokenised_in_a_process_as_a_short_one_is(run, monkeypatch):
    monkeypatch.setattr(preparation, "HUGE_TEXT_CHARS", 20_000)

    async def check(engine, client):
        text = "import os\n" * 2000
        expected = engine.input_processor.prompts.tokenize(text).token_ids
        prompt = {"prompt": text, "add_special_tokens": False, "cache_salt": "s"}
        tokenized = await engine.tokenize(prompt)
        assert tokenized.token_ids == expected[1:]
        assert (tokenized.text, tokenized.cache_salt) == (text, "s")
        (*_, output) = await collect(engine, prompt=text, truncate_prompt_tokens=20)
        assert output.prompt_token_ids == expected[-20:] and output.prompt == text
        with pytest.raises(RequestError, match="not valid text"):
            await engine.tokenize(text + "\ud800")

    run(check)


def test_who_leaves_ends_the_process_that_tokenises(run, monkeypatch):
    workers, has_begun = [], threading.Event()
    call = DeadlineWorker.call

    def watched_call(self, argument, timeout_s):
        workers.append(self)
        has_begun.set()
        return call(self, argument, timeout_s)

    async def check(engine, client):
        monkeypatch.setattr(DeadlineWorker, "call", watched_call)
        task = asyncio.ensure_future(engine.tokenize("import os\n" * 10**6))
        await asyncio.to_thread(has_begun.wait)
        pid = workers[0].pid
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends_within(pid, 50)

    run(check)


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": ["word"] * 1000},
        {"allowed_token_ids": [1] * 200_000},
        {"logit_bias": dict.fromkeys(range(200_000), 1.0)},
        {"guided_decoding": GuidedDecodingParams(json={"enum": ["x"] * 20_000})},
    ],
)
def test_every_long_list_makes_a_request_expensive(fields):
    assert preparation_cost("a", params(**fields)) >= LONG_TEXT_CHARS
    assert preparation_cost([1] * 200_000, params()) >= LONG_TEXT_CHARS
    assert preparation_cost("a" * 1000, params(stop_token_ids=[1, 2])) < LONG_TEXT_CHARS


def test_a_request_for_many_samples_is_sent_once(run):
    async def check(engine, client):
        sent = []
        send = client.send
        client.send = lambda message: (sent.append(message), send(message))
        (output,) = await collect(engine, n=8, temperature=1.0, output_kind=FINAL)
        assert len(output.outputs) == 8
        assert [len(message.requests) for message in sent if hasattr(message, "requests")] == [1]

    run(check)


def test_what_is_not_available_is_refused(run):
    async def check(engine, client):
        for more, message in (
            ({"lora_request": "x"}, "lora_request must be a LoRARequest, got str"),
            ({"prompt_adapter_request": "x"}, "are not supported"),
        ):
            with pytest.raises(RequestError, match=message):
                await anext(engine.generate("a", params(), "r", **more))
        with pytest.raises(RequestError, match="lora_request must be a LoRARequest, got str"):
            await engine.add_lora("x")

    run(check)


def test_metrics_count_what_was_computed(run):
    async def check(engine, client):
        await collect(engine, prompt=[1, 2, 3])
        await collect(engine, "s", prompt=[1, 2, 3], n=2, temperature=1.0)
        metrics = engine.metrics
        assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (6, 12)
        assert [r.n for r in metrics.recent] == [1, 2]
        assert metrics.recent[1].num_generation_tokens == 8

    run(check)


def test_the_line_of_statistics_is_written_on_request_and_at_its_pace(run, monkeypatch):
    logged = []
    monkeypatch.setattr(
        "vllm.engine.metrics.stats_log.logger.info", lambda *args: logged.append(args)
    )

    async def check(engine, client):
        await collect(engine)
        await engine.do_log_stats()
        assert len(logged) == 1 and "generation throughput" in logged[0][0]
        assert not await engine.is_tracing_enabled()

    run(check)


class Worker:
    """Methods that the engine may call."""

    def __init__(self) -> None:
        self.profiles: list[str] = []

    def add(self, a: int, b: int = 0) -> dict[str, int]:
        return {"sum": a + b}

    def fail(self) -> None:
        raise KeyError("layer 3")

    def give(self) -> object:
        return object()

    def start_profile(self) -> None:
        self.profiles.append("start")

    def stop_profile(self) -> str:
        self.profiles.append("stop")
        return "rank0.json"


def test_methods_of_the_workers_are_called_by_name(run):
    async def check(engine, client):
        client.core.worker = worker = Worker()
        assert await engine.collective_rpc("add", args=(1,), kwargs={"b": 2}) == [{"sum": 3}]
        await engine.start_profile()
        await engine.stop_profile()
        assert worker.profiles == ["start", "stop"]

    run(check)


@pytest.mark.parametrize(
    ("method", "args", "error", "message"),
    [
        ("nothing", (), RequestError, "no method 'nothing'"),
        ("add", (), RequestError, "'add'.*missing a required argument"),
        ("add", (object(),), RequestError, "arguments cannot be sent"),
        ("give", (), RequestError, "the result of collective_rpc cannot be sent"),
        ("fail", (), WorkerCallError, "KeyError: 'layer 3'"),
        (len, (), RequestError, "takes the name of a method"),
    ],
)
def test_a_call_that_fails_is_the_callers_and_the_engine_goes_on(run, method, args, error, message):
    async def check(engine, client):
        client.core.worker = Worker()
        with pytest.raises(error, match=message):
            await engine.collective_rpc(method, args=args)
        assert (await collect(engine))[-1].finished

    run(check)


def test_a_call_that_takes_too_long_is_not_waited_for(run):
    async def check(engine, client):
        client.core.worker = Worker()
        client.is_held = True
        with pytest.raises(RequestTimeoutError, match=r"'add' did not finish within timeout=0.01"):
            await engine.collective_rpc("add", 0.01, (1,))
        client.is_held = False
        assert await engine.collective_rpc("add", 60, (4,)) == [{"sum": 4}]

    run(check)


def test_a_sleeping_engine_refuses_requests_and_stays_alive(run):
    async def check(engine, client):
        first = engine.generate("a", params(max_tokens=3), "first")
        await anext(first)
        with pytest.raises(CapacityError) as refusal:
            await engine.sleep()
        assert refusal.value.status == 409
        await first.aclose()
        await engine.sleep(2)
        assert await engine.is_sleeping()
        with pytest.raises(CapacityError, match="wake_up") as refusal:
            await collect(engine)
        assert refusal.value.status == 503
        await engine.check_health()
        await engine.wake_up(["weights"])
        assert await engine.is_sleeping()
        await engine.wake_up()
        assert not await engine.is_sleeping()
        assert (await collect(engine))[-1].finished

    run(check)


def test_the_settings_of_the_engine_can_be_asked_for(run):
    async def check(engine, client):
        config = engine.vllm_config
        assert await engine.get_model_config() is config.model
        assert await engine.get_parallel_config() is config.parallel
        assert await engine.get_decoding_config() is config.structured_output
        assert await engine.get_lora_config() is None and await engine.list_loras() == set()
        assert not await engine.is_tracing_enabled()
        await engine.reset_mm_cache()
        for refused in (engine.remove_lora(1), engine.pin_lora(1)):
            with pytest.raises(RequestError, match="started without LoRA"):
                await refused

    run(check)


def test_other_requests_go_on_while_a_grammar_is_compiled(run):
    async def check(engine, client):
        compiling, may_end = threading.Event(), threading.Event()

        def attach_grammar(request):
            compiling.set()
            assert may_end.wait(120)
            raise RequestError("guided_regex: compiled at last", param="guided_regex")

        engine.input_processor.attach_grammar = attach_grammar
        engine.input_processor.attach_cached_grammar = lambda request: None
        guided = GuidedDecodingParams(regex="a", field="guided_regex")
        slow = asyncio.create_task(collect(engine, "slow", guided_decoding=guided))
        await asyncio.to_thread(compiling.wait, 120)
        assert (await collect(engine, "other"))[-1].finished
        assert not slow.done()
        may_end.set()
        with pytest.raises(RequestError, match="compiled at last"):
            await slow

    run(check)


def test_what_compiles_is_started_while_the_core_loads(run, monkeypatch):
    started = []
    monkeypatch.setattr(GrammarCompiler, "start", lambda self, **_: started.append(self))

    async def check(engine, client):
        assert started == [engine.input_processor.grammar_compiler]

    run(check)
