"""Two machines, as far as the network is concerned: each has its own address, and a link that can
be cut in the middle of a load."""

import json
import os
import subprocess
import sys
import threading

import pytest

from tests.e2e import ranks
from tests.e2e.namespaces import Machine, two_machines
from tests.e2e.server import ROOT, free_port, start_server, wait_until
from tests.e2e.test_far_replicas import FLAGS, complete, machine
from vllm import LLM
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


def main() -> None:
    """A rank of another machine: prints its tokens, then how its load has ended, as JSON."""
    llm = LLM(
        **ranks.ENGINE,
        tensor_parallel_size=2,
        distributed_executor_backend="external_launcher",
        distributed_timeout_s=15.0,
    )
    print(json.dumps([output.outputs[0].token_ids for output in ranks.generate(llm)]), flush=True)
    try:
        while True:
            ranks.generate(llm)
    except EngineDeadError as error:
        print(json.dumps(str(error)), flush=True)


def start_rank(rank: int, place: Machine, host: Machine, port: int) -> "subprocess.Popen[str]":
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": host.address, "MASTER_PORT": str(port)}
    variables |= {"GLOO_SOCKET_IFNAME": place.interface}
    with place.here():
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
        )


def test_ranks_of_two_machines_give_the_tokens_of_one_and_end_when_a_link_is_cut():
    want = [output.outputs[0].token_ids for output in ranks.generate(LLM(**ranks.ENGINE))]
    port = free_port()
    with two_machines() as places:
        processes = [start_rank(n, place, places[0], port) for n, place in enumerate(places)]
        try:
            outputs = [process.stdout for process in processes]
            for output in outputs:
                assert output is not None and json.loads(output.readline()) == want
            places[1].set_link("down")
            for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
                assert output is not None
                assert f"on rank {rank} failed" in json.loads(output.readline())
                assert process.wait(120) == 0
        finally:
            for process in processes:
                process.kill()
                process.communicate()


if __name__ == "__main__":
    main()
