"""Test that a pipeline gives the tokens and log-probabilities of one process."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from tests.e2e.ranks import (
    ENGINE,
    PARAMS,
    PROMPTS,
    assert_death_of_a_rank_ends_requests,
    assert_nothing_left,
    assert_same,
    generate,
    random_load,
    ranks_of,
)
from tests.executor.thread_ranks import ThreadRanks
from tests.exhaustive import exhaustive
from tests.quantized_checkpoints import FORMATS, write
from tests.reach import core_of, executor_of, scheduler_of
from tests.shared_memory import named_files
from tests.tiny_models import ALL_FAMILIES, ONE_STAGE, make_tiny_model
from tools.save_sharded_state import save
from vllm import LLM, RequestOutput, envs
from vllm.engine import engine_core
from vllm.errors import ConfigError, EngineDeadError
from vllm.executor.ranks.rank_group import RankError
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep
from vllm.ops.cpu.operators.program import Program

DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear")
MORE_BLOCKS = ENGINE | {"num_gpu_blocks_override": 60}
"""More blocks, for layers with windows, which have blocks of their own."""


def in_stages(monkeypatch: pytest.MonkeyPatch, folder: str, **values: object) -> LLM:
    """Make an engine whose ranks are threads of this process. By default each stage has a step."""
    values.setdefault("pipeline_steps_in_flight", values["pipeline_parallel_size"])
    with monkeypatch.context() as patched:
        patched.setattr(engine_core, "make_executor", ThreadRanks)
        return LLM(folder, **values)


def assert_stages_are_one(
    folder: Path,
    tensor: int,
    stages: int,
    monkeypatch: pytest.MonkeyPatch,
    tolerance: float = 1e-4,
    **values: object,
) -> None:
    want = generate(LLM(str(folder), **MORE_BLOCKS))
    llm = in_stages(
        monkeypatch,
        str(folder),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **MORE_BLOCKS | values,
    )
    assert_same(generate(llm), want, tolerance)
    assert_same(generate(llm), want, tolerance)  # the prompts are in the prefix cache now
    assert executor_of(llm).most_in_flight == stages
    executor_of(llm).shutdown()


@pytest.mark.parametrize(
    ("family", "tensor", "stages"),
    [
        ("llama", 1, 2),  # this model has three layers
        ("llama", 2, 2),
        ("qwen2", 1, 2),  # only one of the stages has windows
        ("mamba", 1, 2),  # this family has states and no KV cache
        # Exhaustive: `test_stages_of_every_family` runs every family in two and in three stages.
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                *(("llama", 1, 3), ("opt", 1, 2), ("gpt_oss", 1, 2)),
                ("granite_code", 1, 2),  # this family has tied embeddings
                ("opt_post_norm", 1, 2),  # this family has projections before and after the layers
            )
        ),
    ],
)
def test_stages_give_the_tokens_of_one_process(family, tensor, stages, tmp_path, monkeypatch):
    assert_stages_are_one(make_tiny_model(family, tmp_path), tensor, stages, monkeypatch)


def test_stages_that_take_turns_give_the_tokens_of_one_process(folder, monkeypatch):
    want = generate(LLM(folder, **MORE_BLOCKS))
    llm = in_stages(
        monkeypatch, folder, pipeline_parallel_size=2, pipeline_steps_in_flight=1, **MORE_BLOCKS
    )
    assert_same(generate(llm), want)
    assert executor_of(llm).most_in_flight == 1
    assert executor_of(llm).most_rows == len(PROMPTS), "a step has all requests"
    executor_of(llm).shutdown()


def test_layers_that_read_earlier_ones_need_one_stage(tmp_path):
    folder = str(make_tiny_model("gemma4", tmp_path))
    with pytest.raises(ConfigError, match="must be 1 for Gemma4ForCausalLM, got 2"):
        LLM(folder, pipeline_parallel_size=2, **MORE_BLOCKS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("family", [f for f in ALL_FAMILIES if f not in ONE_STAGE])
def test_stages_of_every_family_give_the_tokens_of_one_process(
    family, tensor, stages, tmp_path, monkeypatch
):
    # With stages, prompts are divided into other chunks, and so are the chunks of the delta rule.
    tolerance = 3e-4 if family in DELTA_NETS else 1e-4
    folder = make_tiny_model(family, tmp_path)
    assert_stages_are_one(folder, tensor, stages, monkeypatch, tolerance)


@pytest.mark.parametrize(
    ("family", "tensor", "stages"),
    [
        ("qwen3_moe", 2, 3),  # one stage has no experts
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in [
                ("mixtral", 2, 2),
                ("qwen2_moe", 4, 2),  # each rank has one or two experts
                ("deepseek_v3", 2, 3),
                ("gpt_oss", 4, 2),
                ("llama4", 2, 2),
                ("glm4_moe", 2, 2),
                ("minimax_m2", 4, 2),
                ("phimoe", 2, 2),
                ("granite_hybrid", 2, 2),
                ("nemotron_h", 2, 2),  # these experts have no gates
                ("lfm2_moe", 2, 3),
                ("qwen3_next", 2, 2),
                ("kimi_linear", 2, 2),
            ]
        ),
    ],
)
def test_whole_experts_in_stages_give_the_tokens_of_one_process(
    family, tensor, stages, tmp_path, monkeypatch
):
    folder = make_tiny_model(family, tmp_path)
    assert_stages_are_one(folder, tensor, stages, monkeypatch, enable_expert_parallel=True)


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize(
    ("name", "family", "tensor", "stages", "values"),
    [
        ("gptq-8-order", "llama", 1, 3, {}),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in [
                *((name, "llama", 1, 3, {}) for name in FORMATS),
                ("fp8-block", "llama", 2, 2, {}),
                ("ct-w8a16-int8", "llama", 2, 3, {}),
                *(
                    ("fp8-block", "qwen3_moe", tensor, stages, {"enable_expert_parallel": True})
                    for tensor, stages in [(2, 1), (2, 2), (4, 1)]
                ),
                ("ct-w8a16-int8", "mixtral", 2, 2, {"enable_expert_parallel": True}),
                ("ct-w8a16-channel", "deepseek_v3", 2, 1, {"enable_expert_parallel": True}),
            ]
        ),
    ],
)
def test_stages_of_quantized_checkpoints_give_the_tokens_of_one_process(
    name, family, tensor, stages, values, tmp_path, monkeypatch
):
    source = make_tiny_model(family, tmp_path / "source", intermediate_size=192)
    folder, _ = write(name, tmp_path, source)
    assert_stages_are_one(folder, tensor, stages, monkeypatch, **values)


def generate_plain(llm: LLM) -> list[RequestOutput]:
    """Run requests whose decodes need only a distribution from the sampler."""
    params = [
        replace(each, logprobs=None, prompt_logprobs=None, presence_penalty=0.0) for each in PARAMS
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, params, use_tqdm=False)


def test_stages_on_the_cpu_run_as_programs_and_give_the_bits_of_one(folder, monkeypatch):
    if load_cpu_kernels() is None:
        pytest.skip("the kernels are not built")
    # Weights of float32 are not packed, so use bfloat16. Prompts run in chunks. Use a cache without
    # preemption: tokens that are computed again as a prompt are rounded at other points, in one
    # process too.
    values = MORE_BLOCKS | {"dtype": "bfloat16"}
    one = LLM(folder, **values)
    want, want_plain = generate(one), generate_plain(one)
    widths, given, in_one_call = [], [], []
    forward, run = Program.forward, FusedDecodeStep.run

    def note_step(self, *args, **options):
        given.append(options["given"])
        found = run(self, *args, **options)
        in_one_call.append(found is not None)
        return found

    monkeypatch.setattr(
        Program,
        "forward",
        lambda self, *args: widths.append(self.given_width) or forward(self, *args),
    )
    monkeypatch.setattr(FusedDecodeStep, "run", note_step)
    llm = in_stages(monkeypatch, folder, pipeline_parallel_size=3, **values)
    assert_same(generate(llm), want, tolerance=0)
    assert scheduler_of(llm).num_preemptions == 0
    # The last stage refuses to run a step in one call if the step has penalties. It decides this
    # after it received the hidden states, which the forward pass then uses.
    assert False in in_one_call and not any(each is None for each in given)
    assert widths.count(64) == 2 * widths.count(0) - in_one_call.count(True) > 0
    # The last stage runs batches that only decode in one call.
    widths.clear(), in_one_call.clear()
    assert_same(generate_plain(llm), want_plain)
    num_calls = in_one_call.count(True)
    assert widths.count(64) == 2 * widths.count(0) - num_calls
    assert num_calls > widths.count(0) // 2
    executor_of(llm).shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


def test_a_stage_has_the_weights_of_its_layers_alone(folder, monkeypatch):
    llm = in_stages(monkeypatch, folder, pipeline_parallel_size=3, **ENGINE | {"dtype": "float16"})
    names = [
        {name.partition(".layers.")[2][:1] or name for name, _ in worker.model.named_parameters()}
        for worker in executor_of(llm).workers
    ]
    assert names == [
        {"0", "model.embed_tokens.weight"},
        {"1"},
        {"2", "model.norm.weight", "lm_head.weight"},
    ]
    executor_of(llm).shutdown()


def test_stages_read_files_of_their_own(folder, tmp_path, monkeypatch):
    save(folder, tmp_path / "split", 2, "float32", 2)
    llm = in_stages(
        monkeypatch,
        str(tmp_path / "split"),
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        load_format="sharded_state",
        **ENGINE,
    )
    assert_same(generate(llm), generate(LLM(folder, **ENGINE)))
    executor_of(llm).shutdown()


@pytest.mark.parametrize(
    ("method", "num_blocks"), [("ngram", 12), exhaustive("ngram", 30), exhaustive("suffix", 12)]
)
def test_drafts_in_stages_change_no_token(folder, monkeypatch, method, num_blocks):
    values = ENGINE | {"num_gpu_blocks_override": num_blocks}
    want = generate(LLM(folder, **values))
    drafts = {"method": method, "num_speculative_tokens": 3}
    drafts |= {"prompt_lookup_max": 2} if method == "ngram" else {}
    llm = in_stages(
        monkeypatch, folder, pipeline_parallel_size=2, speculative_config=drafts, **values
    )
    assert_same(generate(llm), want)
    executor_of(llm).shutdown()


@pytest.fixture
def partition(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    envs.get.cache_clear()


def test_a_partition_decides_the_layers_of_each_stage(folder, partition):
    partition.setenv("VLLM_PP_LAYER_PARTITION", "1, 2")
    envs.get.cache_clear()
    llm = in_stages(partition, folder, pipeline_parallel_size=2, **ENGINE)
    stages = [worker.stage for worker in executor_of(llm).workers]
    assert [(stage.first_layer, stage.end_layer) for stage in stages] == [(0, 1), (1, 3)]
    executor_of(llm).shutdown()


@pytest.mark.parametrize("text", ["1,1", "3", "0,3", "one,two", "4,-1"])
def test_a_partition_that_is_not_one_is_refused(folder, partition, text):
    partition.setenv("VLLM_PP_LAYER_PARTITION", text)
    envs.get.cache_clear()
    wanted = (
        rf"^VLLM_PP_LAYER_PARTITION='{text}' must be 2 layer counts.*sum is the 3 .*such as 2,1$"
    )
    with pytest.raises(ConfigError, match=wanted):
        LLM(folder, pipeline_parallel_size=2, **ENGINE)


def test_more_stages_than_layers_are_refused(folder):
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size=4: the model has 3 layers"):
        LLM(folder, pipeline_parallel_size=4, **ENGINE)


@pytest.fixture(scope="module")
def running() -> Iterator[list[LLM]]:
    """Return a list for the engine with two processes; a test that kills one empties it."""
    files = named_files()
    engines: list[LLM] = []
    yield engines
    pids = [pid for llm in engines for pid in ranks_of(llm)]
    for llm in engines:
        core_of(llm).shutdown()
    assert_nothing_left(pids, files)


@pytest.fixture
def two(folder: str, running: list[LLM]) -> LLM:
    """Return an engine with two processes, the same for all tests while it runs."""
    if not running:
        running.append(LLM(folder, pipeline_parallel_size=2, enable_sleep_mode=True, **ENGINE))
    return running[0]


def test_processes_give_the_tokens_of_one_under_a_random_load(two, folder):
    one = LLM(folder, **ENGINE)
    alone = generate(one)
    assert_same(generate(two), alone)
    want = [list(output.outputs[0].token_ids) for output in alone]
    scheduler = scheduler_of(two)
    before = scheduler.num_preemptions
    got = random_load(two, random.Random(3))
    assert len(got) > 12 and scheduler.num_preemptions > before
    for index, token_ids in got.items():
        assert token_ids == want[index % len(PROMPTS)]


def test_stages_read_their_weights_again_after_requests(two):
    want = generate(two)
    two.collective_rpc("reload_weights")
    assert_same(generate(two), want)
    for level in (1, 2):
        two.sleep(level)
        assert two.collective_rpc("sleeping_tags") == [["weights", "kv_cache"]] * 2
        two.wake_up()
        assert_same(generate(two), want)


def test_a_stage_that_is_killed_ends_all_requests_at_once(two, running):
    running.clear()
    (pid,) = ranks_of(two)
    assert_death_of_a_rank_ends_requests(two)
    core_of(two).shutdown()
    assert not psutil.pid_exists(pid)


@pytest.mark.exhaustive  # exhaustive: test_tensor_parallel.py tests a rank that is stopped
def test_a_stage_that_is_stopped_is_named_when_time_is_up(folder):
    files = named_files()
    llm = LLM(folder, pipeline_parallel_size=2, distributed_timeout_s=1.0, **ENGINE)
    (pid,) = ranks_of(llm)
    os.kill(pid, signal.SIGSTOP)
    unanswered = rf"rank 1 \(process {pid}\) is stopped.*has not answered sleeping_tags\(\) within"
    with pytest.raises(RankError, match=unanswered):
        llm.collective_rpc("sleeping_tags")
    with pytest.raises(TimeoutError, match=r"rank 1 has not answered sleeping_tags\(\) within 0.1"):
        llm.collective_rpc("sleeping_tags", timeout=0.1)
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pid}\) is stopped"):
        llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0], use_tqdm=False)
    core_of(llm).shutdown()
    assert_nothing_left([pid], files)


@pytest.mark.exhaustive  # exhaustive: test_tensor_parallel.py tests a rank that cannot load
def test_a_stage_that_fails_in_the_warm_up_is_named(folder):
    files = named_files()
    with pytest.raises(
        RuntimeError, match=r"^rank 1 .*failed: RuntimeError: no memory for a graph"
    ):
        LLM(
            folder,
            pipeline_parallel_size=2,
            worker_cls="tests.executor.failing_workers.RaisesInWarmUp",
            **ENGINE,
        )
    assert_nothing_left([], files)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rank", "signum", "message"),
    [
        (1, signal.SIGKILL, "has ended: killed by signal 9"),
        (3, signal.SIGSTOP, r"is stopped \(SIGSTOP\): .*rank [0-2] failed: .*rank 3"),
    ],
)
def test_a_rank_of_four_that_fails_is_the_one_that_is_named(folder, rank, signum, message):
    files, sizes = named_files(), {"tensor_parallel_size": 2}
    sizes |= {"pipeline_parallel_size": 2, "distributed_timeout_s": 2.0}
    llm = LLM(folder, **sizes, **ENGINE)
    pids = ranks_of(llm)
    assert_same(generate(llm), generate(LLM(folder, **ENGINE)))
    pid = pids[rank - 1]
    os.kill(pid, signum)
    with pytest.raises(EngineDeadError, match=rf"rank {rank} \(process {pid}\) {message}"):
        generate(llm)
    core_of(llm).shutdown()
    assert_nothing_left(pids, files)
