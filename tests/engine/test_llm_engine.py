"""Test the synchronous engine over a fake core: how it joins outputs, and that nothing is left."""

import gc
import shutil
from dataclasses import replace

import pytest

from tests.engine.fakes import make_config
from tests.engine.tokenizers_for_tests import byte_level
from tests.fake_core import FakeEngineCore
from vllm.assets import BUNDLED_MODEL
from vllm.config import ObservabilityConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.errors import CapacityError, ConfigError, EngineDeadError, RequestError
from vllm.sampling_params import RequestOutputKind, SamplingParams

EOS, END_OF_TURN = 1, 6


def make_engine(core=None, tokenizer=True):
    return LLMEngine(
        make_config(),
        core or FakeEngineCore(),
        byte_level() if tokenizer else None,
        {"eos_token_ids": [EOS, END_OF_TURN], "temperature": 0.5},
    )


def encode(text):
    return byte_level()(text, add_special_tokens=False)["input_ids"]


def run(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_requests_run_to_their_ends():
    engine = make_engine(FakeEngineCore(lambda request: encode("import os")))
    engine.add_request("a", "x", SamplingParams(max_tokens=2))
    engine.add_request("b", [5], SamplingParams(max_tokens=1))
    assert engine.get_num_unfinished_requests() == 2
    ends = {output.request_id: output for output in run(engine) if output.finished}
    assert ends["a"].outputs[0].text == "import os"
    assert ends["a"].prompt == "x"
    assert ends["b"].outputs[0].text == "import"
    assert engine.get_num_unfinished_requests() == 0
    assert engine.step() == []


@pytest.mark.parametrize(("token_id", "stop_reason"), [(EOS, None), (END_OF_TURN, END_OF_TURN)])
def test_of_the_models_end_tokens_only_eos_ends_silently(token_id, stop_reason):
    engine = make_engine(FakeEngineCore(lambda request: [10, token_id]))
    engine.add_request("a", "x", SamplingParams())
    sample = run(engine)[-1].outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop_reason)
    assert sample.token_ids == [10, token_id]


def test_a_stop_string_ends_the_request_in_the_core_too():
    core = FakeEngineCore(lambda request: encode("a b c"))
    engine = make_engine(core)
    engine.add_request("a", "x", SamplingParams(stop=["b"]))
    assert run(engine)[-1].outputs[0].text == "a "
    assert core.aborted == ["a"]
    assert not core.has_unfinished_requests()


@pytest.mark.parametrize(
    ("request_id", "prompt", "params"),
    [
        ("new", [], SamplingParams()),
        ("new", "a", SamplingParams(logprobs=100)),
        ("running", "a", SamplingParams()),
    ],
)
def test_a_refused_request_leaves_nothing_behind(request_id, prompt, params):
    core = FakeEngineCore()
    engine = make_engine(core)
    engine.add_request("running", "a", SamplingParams(max_tokens=1))
    with pytest.raises(RequestError):
        engine.add_request(request_id, prompt, params)
    assert engine.get_num_unfinished_requests() == 1
    assert list(core.added) == ["running"]
    assert [output.request_id for output in run(engine)] == ["running"]


def test_when_the_core_refuses_one_sample_the_others_are_taken_back():
    class RefusesTheThird(FakeEngineCore):
        def add_request(self, request):
            if request.request_id.startswith("2_"):
                raise CapacityError("no room")
            super().add_request(request)

    core = RefusesTheThird()
    engine = make_engine(core)
    with pytest.raises(CapacityError, match="no room"):
        engine.add_request("a", "x", SamplingParams(n=3))
    assert core.aborted == ["0_a", "1_a"]
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "x", SamplingParams(n=2, max_tokens=1))
    assert run(engine)[-1].finished


def test_an_adapter_is_refused_by_name():
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest, got object"):
        make_engine().add_request("a", "x", SamplingParams(), lora_request=object())


@pytest.mark.parametrize("request_id", ["a", ["a"], iter(["a", "unknown"])])
def test_aborting_ends_every_sample_in_the_core_and_gives_the_last_output(request_id):
    core = FakeEngineCore()
    engine = make_engine(core)
    engine.add_request("a", "x", SamplingParams(n=2))
    engine.step()
    (output,) = engine.abort_request(request_id)
    assert [sample.finish_reason for sample in output.outputs] == ["abort", "abort"]
    assert core.aborted == ["0_a", "1_a"]
    assert not engine.has_unfinished_requests()


def test_several_samples_come_back_as_one_request():
    engine = make_engine(FakeEngineCore(lambda request: [10 + int(request.request_id[0])]))
    params = SamplingParams(n=3, max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("a", "x", params)
    (output,) = run(engine)
    assert [sample.token_ids for sample in output.outputs] == [[10, 10], [11, 11], [12, 12]]


def test_arrival_time_and_priority_reach_the_core():
    core = FakeEngineCore()
    make_engine(core).add_request("a", "x", SamplingParams(), 12.5, priority=-3)
    assert (core.added["a"].arrival_time, core.added["a"].priority) == (12.5, -3)


def test_a_core_that_loses_requests_is_told_of_instead_of_waited_for():
    core = FakeEngineCore()
    engine = make_engine(core)
    engine.add_request("lost", "x", SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    core.running.clear()
    with pytest.raises(EngineDeadError, match="lost"):
        engine.step()


def test_after_shutdown_the_engine_says_so():
    core = FakeEngineCore()
    engine = make_engine(core)
    engine.check_health()
    engine.shutdown()
    engine.shutdown()
    assert core.calls["shutdown"] == 1
    for use in (engine.check_health, engine.step):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()
    with pytest.raises(EngineDeadError):
        engine.add_request("a", "x", SamplingParams())


def test_an_engine_that_nobody_holds_releases_its_core():
    core = FakeEngineCore()
    engine = make_engine(core)
    engine.add_request("a", "x", SamplingParams())
    engine.step()
    del engine
    gc.collect()
    assert core.calls["shutdown"] == 1


def test_without_a_tokenizer_asking_for_it_is_an_error():
    assert make_engine().get_tokenizer() is byte_level()
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        make_engine(tokenizer=False).get_tokenizer()


@pytest.mark.parametrize("tokenizer", [None, "damaged", '{"model": 5}'])
def test_a_tokenizer_that_cannot_be_used_is_told_before_weights_are_read(
    tokenizer, tmp_path, monkeypatch
):
    def load(config):
        pytest.fail("the core was made")

    monkeypatch.setattr("vllm.engine.engine_core.EngineCore", load)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, tmp_path)
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(ConfigError, match=r"no usable tokenizer in .* skip_tokenizer_init") as told:
        LLMEngine.from_engine_args(EngineArgs(model=str(tmp_path)))
    assert "\n" not in str(told.value)


def test_the_configs_are_where_users_look_for_them():
    engine = make_engine()
    assert engine.get_vllm_config() is engine.vllm_config
    assert engine.model_config.max_model_len == engine.scheduler_config.max_model_len == 64
    assert engine.cache_config.block_size == 16


def test_statistics_are_counted_unless_they_are_off():
    engine = make_engine()
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=2))
    run(engine)
    found = {metric.name: metric for metric in engine.get_metrics()}
    assert found["vllm:prompt_tokens"].value == 3 and found["vllm:generation_tokens"].value == 2
    assert found["vllm:e2e_request_latency_seconds"].count == 1
    silent = replace(make_config(), observability=ObservabilityConfig(disable_log_stats=True))
    engine = LLMEngine(silent, FakeEngineCore(), byte_level(), {})
    engine.add_request("a", [5], SamplingParams(max_tokens=1))
    assert run(engine)[-1].finished
    with pytest.raises(RequestError, match="disable_log_stats=False"):
        engine.get_metrics()
    engine.do_log_stats()


def test_the_settings_of_the_engine_can_be_asked_for():
    engine = make_engine()
    config = engine.vllm_config
    assert engine.get_model_config() is config.model is engine.model_config
    assert engine.get_scheduler_config() is config.scheduler
    assert engine.get_parallel_config() is config.parallel
    assert engine.get_decoding_config() is config.structured_output
    assert engine.get_lora_config() is None and engine.list_loras() == set()
    assert engine.reset_mm_cache() and not engine.is_tracing_enabled()
    for refused in (engine.remove_lora, engine.pin_lora):
        with pytest.raises(RequestError, match="started without LoRA"):
            refused(1)


def test_the_tokenizer_is_where_programs_for_each_release_look_for_it():
    engine = make_engine()
    tokenizer = engine.get_tokenizer()
    for group in (engine.tokenizer, engine.get_tokenizer_group()):
        assert group.tokenizer is group.get_lora_tokenizer() is tokenizer
        assert group.encode("a b") == tokenizer.encode("a b")
        assert group("a b") == tokenizer("a b") and len(group) == len(tokenizer)
    other = byte_level()
    engine.tokenizer.tokenizer = other
    assert engine.get_tokenizer() is other
    without = make_engine(tokenizer=False)
    assert without.tokenizer is None
    with pytest.raises(RequestError, match="runs without a tokenizer"):
        without.get_tokenizer_group()


def test_the_configs_have_the_names_that_programs_read():
    engine = make_engine()
    config = engine.vllm_config
    assert config.model_config is config.model and config.cache_config is engine.cache_config
    assert config.scheduler_config is config.scheduler
    assert config.parallel_config is config.parallel
    assert config.device_config is config.device and config.load_config is config.load
    assert config.decoding_config is config.structured_outputs_config is config.structured_output
    assert config.observability_config is config.observability
    assert config.lora_config is config.speculative_config is config.kv_transfer_config is None
    assert engine.cache_config.num_gpu_blocks == 100 and engine.cache_config.num_cpu_blocks == 0
    assert engine.cache_config.cache_dtype == "auto"


@pytest.mark.parametrize("part", ["model_executor", "model_executor.driver_worker"])
def test_a_program_may_end_the_engine_by_deleting_its_workers(part):
    engine = make_engine()
    owner, _, name = f"engine.{part}".rpartition(".")
    delattr(eval(owner), name)
    with pytest.raises(EngineDeadError):
        engine.check_health()


def test_the_model_of_a_worker_is_an_error_that_names_the_method_to_use():
    engine = make_engine()
    with pytest.raises(AttributeError, match=r"driver_worker.*LLM\.apply_model"):
        _ = engine.model_executor.driver_worker.model_runner.model
    assert engine.model_executor.collective_rpc(lambda worker: 7) == [7]
    engine.model_executor.shutdown()
    with pytest.raises(EngineDeadError):
        engine.check_health()


def test_an_engine_that_is_shut_down_cannot_be_controlled():
    engine = make_engine()
    engine.shutdown()
    for call in (engine.sleep, engine.wake_up, lambda: engine.collective_rpc("stats")):
        with pytest.raises(EngineDeadError):
            call()
