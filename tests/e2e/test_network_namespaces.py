"""Test two simulated machines in network namespaces: each has its own address, and the link between
them can be cut during a load.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e import ranks
from tests.e2e.namespaces import Machine, two_machines
from tests.e2e.server import ROOT, free_port, start_server, wait_until
from tests.e2e.test_far_replicas import FLAGS, complete, machine
from tests.e2e.test_kv_transfer import SMALL, generate
from tests.reach import core_of, forget_host_blocks
from vllm import LLM
from vllm.distributed.kv_transfer import block_peers
from vllm.errors import EngineDeadError

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]


def test_a_replica_whose_link_is_cut_loses_its_requests_and_returns(tmp_path):
    port = free_port()
    with two_machines() as (first, second), first.here():
        address = ("--data-parallel-address", first.address)
        flags = ("--data-parallel-size-local", "1", "--data-parallel-rpc-port", str(port))
        dev = {"VLLM_SERVER_DEV_MODE": "1"}
        with start_server(
            *FLAGS, *address, *flags, "--restart-engine", "1", variables=dev, is_awaited=False
        ) as server:
            with second.here():
                far = machine(port, *address, log=tmp_path / "machine.log")
                far.__enter__()
            try:
                server.wait_for()
                assert f"connected from ('{second.address}'" in server.log_text()
                answers = []

                def ask():
                    answers.append(complete(server, max_tokens=200, prompt=[[5], [6], [7], [8]]))

                threads = [threading.Thread(target=ask) for _ in range(8)]
                for thread in threads:
                    thread.start()
                wait_until(lambda: server.metric("vllm:num_requests_running") > 8)
                second.set_link("down")
                for thread in threads:
                    thread.join()
                lost = [body for status, _, body in answers if status == 500]
                assert lost and all(b"connection to its machine was lost" in body for body in lost)
                assert len(answers) == 8 and complete(server)[0] == 200
                second.set_link("up")
                wait_until(lambda: server.replica_states() == ["ready", "ready"])
            finally:
                far.__exit__(None, None, None)


def run_ranks(tensor: str, pipeline: str) -> None:
    """Run a rank on another machine. Print its tokens, then the end of its load, as JSON."""
    llm = LLM(
        **ranks.ENGINE,
        tensor_parallel_size=int(tensor),
        pipeline_parallel_size=int(pipeline),
        distributed_executor_backend="external_launcher",
        distributed_timeout_s=15.0,
    )
    print(json.dumps(tokens_of(llm)), flush=True)
    try:
        while True:
            ranks.generate(llm)
    except EngineDeadError as error:
        print(json.dumps(str(error)), flush=True)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in ranks.generate(llm)]


def start(place: Machine, *arguments: object, **variables: object) -> "subprocess.Popen[str]":
    """Start this module as a program on a machine."""
    with place.here():
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def result_of(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_of_two_machines_give_the_tokens_of_one_and_end_when_a_link_is_cut(tensor, pipeline):
    """With four ranks, each machine has one pipeline stage."""
    want, port, count = tokens_of(LLM(**ranks.ENGINE)), free_port(), tensor * pipeline
    with two_machines() as places:
        processes = [
            start(
                places[rank * 2 // count],
                *("run_ranks", tensor, pipeline),
                RANK=rank,
                WORLD_SIZE=count,
                LOCAL_RANK=rank % (count // 2),
                LOCAL_WORLD_SIZE=count // 2,
                MASTER_ADDR=places[0].address,
                MASTER_PORT=port,
                GLOO_SOCKET_IFNAME=places[rank * 2 // count].interface,
            )
            for rank in range(count)
        ]
        try:
            for process in processes:
                assert result_of(process) == want
            places[1].set_link("down")
            for rank, process in enumerate(processes):
                assert f"on rank {rank} failed" in result_of(process)
                assert process.wait(120) == 0
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def connector(role: str, address: str, port: int) -> dict[str, Any]:
    return {
        "kv_connector": "TCPConnector",
        "kv_role": role,
        "kv_ip": address,
        "kv_port": port,
        "kv_connector_extra_config": {"timeout_s": 2},
    }


def run_producer(address: str, port: str) -> None:
    """Run an engine whose blocks other engines may take: print its tokens, and wait."""
    llm = LLM(**SMALL, kv_transfer_config=connector("kv_producer", address, int(port)))
    print(json.dumps(generate(llm)[0]), flush=True)
    sys.stdin.read()


def test_blocks_of_another_machine_are_computed_here_while_its_link_is_cut(monkeypatch):
    """The link is cut between two parts of the blocks of a prompt."""
    want, port = generate(LLM(**SMALL))[0], free_port()
    receiver, num_parts = block_peers.receiver, 0

    def receiver_that_cuts(*args: Any) -> Callable[[int], bytes]:
        read = receiver(*args)

        def read_and_cut(size: int) -> bytes:
            nonlocal num_parts
            num_parts += 1
            if num_parts == 20:
                first.set_link("down")
            return read(size)

        return read_and_cut

    with two_machines() as (first, second):
        producer = start(second, "run_producer", second.address, port)
        try:
            assert result_of(producer) == want
            with first.here():
                config = connector("kv_consumer", second.address, port)
                llm = LLM(**SMALL, kv_transfer_config=config)

                def cached_again() -> list[int]:
                    core = core_of(llm)
                    forget_host_blocks(core)
                    assert llm.reset_prefix_cache()
                    tokens, cached = generate(llm)
                    assert tokens == want
                    return cached

                assert all(cached_again())
                monkeypatch.setattr(block_peers, "receiver", receiver_that_cuts)
                assert not all(cached_again()) and num_parts >= 20
                first.set_link("up")
                wait_until(lambda: all(cached_again()))
                llm.llm_engine.shutdown()
        finally:
            producer.kill()
            producer.communicate()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
