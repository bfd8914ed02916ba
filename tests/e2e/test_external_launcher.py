"""Test ranks that an external launcher has started: each process makes the same engine and gets all
outputs.
"""

import asyncio
import json
import os
import sys
from contextlib import ExitStack

import pytest

from tests.e2e import ranks
from tests.e2e.server import ROOT, free_port
from tests.forked_programs import FORKS
from vllm import LLM
from vllm.assets import BUNDLED_MODEL
from vllm.config import ParallelConfig
from vllm.distributed import Rendezvous
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.replicas.core_replicas import CoreReplicas
from vllm.errors import ConfigError
from vllm.executor.external import ExternalExecutor

pytestmark = pytest.mark.e2e

EXTERNAL = "external_launcher"


def main() -> None:
    """Run one process of the launcher, and print its tokens and log-probabilities as JSON.

    Arguments of the process: tensor-parallel size, number of stages, and the draft method or "".
    """
    tensor, stages, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    drafts = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    if method == "draft_model":
        drafts["model"] = str(BUNDLED_MODEL)
    llm = LLM(
        **ranks.ENGINE,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        speculative_config=drafts if method else {},
        distributed_executor_backend=EXTERNAL,
    )
    outputs = ranks.generate(llm)
    found = [(output.outputs[0].token_ids, ranks.logprobs_of(output)) for output in outputs]
    sys.stdout.write(json.dumps(found) + "\n")


@pytest.mark.parametrize(
    ("tensor", "stages", "method"),
    [
        pytest.param(2, 1, "", marks=pytest.mark.exhaustive),
        (1, 2, "draft_model"),
        pytest.param(1, 2, "", marks=pytest.mark.exhaustive),
        pytest.param(2, 2, "", marks=pytest.mark.exhaustive),
        pytest.param(1, 3, "ngram", marks=pytest.mark.exhaustive),
    ],
)
def test_every_process_gets_the_outputs_of_one_device(tensor, stages, method, tmp_path):
    count = tensor * stages
    # Set what torchrun sets, without its process, whose imports take as long as a rank needs.
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", __name__, str(tensor), str(stages), method]
    files = [(tmp_path / f"out-{rank}", tmp_path / f"log-{rank}") for rank in range(count)]
    processes = []
    with ExitStack() as stack:
        for rank, (out, log) in enumerate(files):
            process = FORKS(
                command,
                cwd=ROOT,
                env=shared | {"RANK": str(rank), "WORLD_SIZE": str(count)},
                stdout=stack.enter_context(out.open("w")),
                stderr=stack.enter_context(log.open("w")),
            )
            stack.callback(process.kill)
            processes.append(process)
        for process, (_, log) in zip(processes, files, strict=True):
            assert process.wait(300) == 0, log.read_text()
    one, *others = (json.loads(out.read_text()) for out, _ in files)
    assert others == [one] * (count - 1)
    wanted = ranks.generate(LLM(**ranks.ENGINE))
    for (token_ids, logprobs), output in zip(one, wanted, strict=True):
        assert token_ids == output.outputs[0].token_ids
        for mine, theirs in zip(logprobs, ranks.logprobs_of(output), strict=True):
            assert mine == pytest.approx({str(k): v for k, v in theirs.items()}, abs=1e-4)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "the environment variable RANK is not set. Start the program with a launcher"),
        ({"RANK": "one"}, "the environment variable RANK is 'one'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the environment variable MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE=4 was started, but tensor_parallel_size"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "process RANK=2 of WORLD_SIZE=2 was started"),
    ],
)
def test_a_launcher_that_does_not_fit_is_one_line(variables, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        LLM(tensor_parallel_size=2, distributed_executor_backend=EXTERNAL)


class OtherRank:
    """A rendezvous in which the other rank was started with other settings."""

    def __init__(self, **differs):
        self.differs = differs

    def exchange(self, name, value, what):
        return [value, json.dumps(json.loads(value) | self.differs).encode()]

    def close(self):
        """Do nothing: no connection is open."""


@pytest.mark.parametrize("differs", [{"version": "0.1"}, {"max_num_seqs": "3"}])
def test_a_rank_that_was_started_differently_is_refused_before_it_loads(differs, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    config = EngineArgs(
        tensor_parallel_size=2, distributed_executor_backend=EXTERNAL, max_num_seqs=5
    ).create_engine_config()
    monkeypatch.setattr(Rendezvous, "at", lambda *args, **options: OtherRank(**differs))
    executor = ExternalExecutor(config)
    ((name, value),) = differs.items()
    with pytest.raises(ConfigError, match=rf"{name} is .* on rank 0 and {value} on rank 1\. Start"):
        executor.start()


def test_it_has_no_replicas():
    with pytest.raises(ConfigError, match="needs data_parallel_size=1"):
        ParallelConfig(distributed_executor_backend=EXTERNAL, data_parallel_size=2)


def test_a_server_refuses_it(monkeypatch):
    monkeypatch.setattr(CoreReplicas, "prepare", lambda replicas: None)  # starts no process
    config = EngineArgs(distributed_executor_backend=EXTERNAL).create_engine_config()
    ignore = {"on_output": print, "on_refused": print, "on_lost": print}
    replicas = CoreReplicas(config.parallel, 0, **ignore)
    with pytest.raises(ConfigError, match="is for the offline engine"):
        asyncio.run(replicas.start(lambda: config, print))


def test_ranks_must_not_decide_by_their_clocks(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="set adaptive to false in speculative_config"):
        LLM(distributed_executor_backend=EXTERNAL, speculative_config=drafts)


def test_other_backends_are_not_known():
    with pytest.raises(ConfigError, match="must be one of uni, mp, ray, external_launcher, got"):
        ParallelConfig(distributed_executor_backend="k8s")


if __name__ == "__main__":
    main()
