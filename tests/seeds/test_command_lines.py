"""Test every command line of the documents, by parsing and resolving it on the simulated card.

The named model is replaced by a tiny one of its architecture, and a draft model by the same tiny
model.
"""

import shlex
from pathlib import Path

import pytest

from tests.hpu import captured_log, simulated_hpu
from tests.loops import loop_over
from tests.seeds.table import Statement, read_table
from tests.tiny_models import make_tiny_model
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.catalog.closure import prove
from vllm.config import VllmConfig
from vllm.entrypoints.cli.main import create_parser
from vllm.entrypoints.openai.cli_args import make_arg_parser, read_args
from vllm.utils import FlexibleArgumentParser

EXAMPLES = [row for row in read_table() if row.command]
SERVER = ["python", "-m", "vllm.entrypoints.openai.api_server"]
BLOCKS = 4108


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Return a function that makes a folder for the model of an example."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {kind(row): row for row in EXAMPLES}
    return {
        key: make_tiny_model(row.family, folder / str(n), **row.model)
        for n, (key, row) in enumerate(kinds.items())
    }


def kind(row: Statement) -> str:
    return f"{row.family} {row.model}"


def resolve(row: Statement, model: Path) -> VllmConfig:
    """Return the config of an example's engine, for the tiny model."""
    words = shlex.split(row.command)
    if words[:3] == SERVER:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(words[3:])
    else:
        assert words[:2] == ["vllm", "serve"]
        args = create_parser(words[1:]).parse_args(words[1:])
        del args.command, args.run
    engine, _ = read_args(args)
    assert engine.model
    engine.model, engine.skip_tokenizer_init = str(model), True
    if "model" in engine.speculative_config:
        engine.speculative_config = {**engine.speculative_config, "model": str(model)}
    return engine.create_engine_config()


def setting(config: VllmConfig, name: str) -> object:
    sections = (config.scheduler, config.cache, config.model, config.hpu)
    sections += (config.device, config.parallel)
    (section,) = [s for s in sections if hasattr(s, name)][:1]
    return getattr(section, name)


@pytest.mark.parametrize("row", EXAMPLES, ids=lambda row: row.says)
def test_an_example_is_taken(row, models):
    """The flags give the expected settings, and every step of the engine has a bucket."""
    with simulated_hpu(**row.env), captured_log():
        config = resolve(row, models[kind(row)])
        assert config.device.device == "hpu"
        assert {name: setting(config, name) for name in row.expect} == row.expect
        plan = plan_buckets(config, BLOCKS)
    assert prove(plan.catalog, plan.limits).is_covered
    assert plan.warnings == ()
    assert len(plan.catalog.prefill) < 120


def test_the_recipe_for_32k_works_as_it_is_written(models):
    (row,) = [row for row in EXAMPLES if "32K recipe" in row.says]
    with simulated_hpu(**row.env), captured_log() as lines:
        config = resolve(row, models[kind(row)])
        plan = plan_buckets(config, BLOCKS)
    (line,) = [line for line in lines if "max_num_batched_tokens" in line]
    assert line.startswith(
        "max_num_batched_tokens is raised from 8192 to 32768: the smallest prompt bucket has 24576"
    )
    lengths = {bucket.query_len for bucket in plan.catalog.prefill}
    assert lengths == {24576, 26624, 28672, 30720, 32768}
    assert plan.limits.max_query_len == 32768
    assert len(plan.catalog.prefill) < 20


def test_a_budget_that_was_given_is_raised_no_further_than_it_has_to_be(models):
    (row,) = [row for row in EXAMPLES if "32K recipe" in row.says]
    with simulated_hpu(**row.env), captured_log():
        words = [*shlex.split(row.command)[3:], "--max-num-batched-tokens", "4096"]
        engine, _ = read_args(make_arg_parser(FlexibleArgumentParser()).parse_args(words))
        engine.model, engine.skip_tokenizer_init = str(models[kind(row)]), True
        assert engine.create_engine_config().scheduler.max_num_batched_tokens == 24576


SCRIPTS = {
    "--gpu-memory-util 0.5 --block-size 128 --disable-log-requests --async-scheduling": {
        "gpu_memory_utilization": 0.5,
        "block_size": 128,
    },
    "--gpu_memory_util=0.99 --use-padding-aware-scheduling --max-num-prefill-seqs 16 "
    "--num_scheduler_steps 16": {"gpu_memory_utilization": 0.99, "num_scheduler_steps": 16},
    "--device hpu --num-lookahead-slots 1 --use-v2-block-manager --weights-load-device cpu "
    "--distributed_executor_backend ray": {"device": "hpu"},
    "--guided-decoding-backend lm-format-enforcer --max-seq_len-to-capture 2048": {
        "max_seq_len_to_capture": 2048
    },
    "--enable-expert-parallel --enable-ep-weight-filter -tp 8": {
        "enable_expert_parallel": True,
        "tensor_parallel_size": 8,
    },
    """--limit-mm-per-prompt '{"image": {"count": 1, "width": 864, "height": 480}}'""": {},
}
"""Flags as scripts for the Gaudi fork and its plugin write them, and what they set."""


@loop_over("flags", SCRIPTS)
def test_flags_of_scripts_for_the_fork_are_taken(flags, capsys):
    engine, _ = read_args(
        make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", *shlex.split(flags)])
    )
    for name, value in SCRIPTS[flags].items():
        assert getattr(engine, name) == value, name
