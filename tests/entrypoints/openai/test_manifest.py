"""Test that the Kubernetes manifests use only routes and flags that the server has."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from vllm.entrypoints.http.asgi import PROBES
from vllm.entrypoints.openai.cli_args import make_arg_parser, read_args
from vllm.utils import FlexibleArgumentParser

FOLDER = Path(__file__).parents[3] / "examples" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
ONE, SEVERAL = (FOLDER / name for name in ("vllm.yaml", "several-machines.yaml"))


def read_pods(manifest: Path) -> list[dict]:
    """Return the pods of the deployments; the first pod has the server."""
    return [
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(manifest.read_text())
        if document["kind"] == "Deployment"
    ]


def server_command(container: dict) -> list[str]:
    """Return the server's command as a list, even if it is the last command of a script."""
    command = [*container["command"], *container["args"]]
    if command[:2] == ["sh", "-c"]:
        script = command[2].replace("\\\n", " ")
        command = shlex.split(script[script.index("vllm serve") :])
    return command


def read_flags(container: dict):
    """Return the parsed arguments (engine, server)."""
    program, command, *flags = server_command(container)
    assert (program, command) == ("vllm", "serve")
    return read_args(make_arg_parser(FlexibleArgumentParser()).parse_args(flags))


def test_both_manifests_are_there():
    assert {ONE, SEVERAL} <= set(MANIFESTS)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_probes_are_routes_that_need_no_key(manifest):
    (container,) = read_pods(manifest)[0]["containers"]
    paths = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}
    assert set(paths.values()) <= PROBES


def test_the_pods_run_in_the_default_image():
    """The bridge refuses lazy mode in an image with an upstream PyTorch."""
    text = (FOLDER.parents[1] / "Dockerfile.hpu").read_text()
    release = re.search(r"^ARG GAUDI_VERSION=(.+)$", text, re.MULTILINE)[1]
    image = re.search(rf"^FROM (\S+) AS gaudi-{re.escape(release)}$", text, re.MULTILINE)[1]
    is_upstream = "/pytorch-upstream-installer-" in image
    for manifest in MANIFESTS:
        for pod in read_pods(manifest):
            env = {each["name"]: each.get("value") for each in pod["containers"][0].get("env", ())}
            assert not (is_upstream and env.get("PT_HPU_LAZY_MODE", "0") != "0")


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_flags_are_those_of_the_server_and_the_pod_waits_for_its_shutdown(manifest):
    pod = read_pods(manifest)[0]
    (container,) = pod["containers"]
    _, server = read_flags(container)
    assert server.port == container["ports"][0]["containerPort"]
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits_s + server.shutdown_timeout


def test_the_machines_have_a_card_for_each_worker():
    pods = read_pods(SEVERAL)
    engine, _ = read_flags(pods[0]["containers"][0])
    assert engine.distributed_executor_backend == "ray"
    cards = [pod["containers"][0]["resources"]["limits"]["habana.ai/gaudi"] for pod in pods]
    assert cards == [engine.tensor_parallel_size] * engine.pipeline_parallel_size
    for pod, num_cards in zip(pods, cards, strict=True):
        script = " ".join(pod["containers"][0]["args"])
        assert f'"HPU": {num_cards}' in script, "what Ray is told"
    assert f'.get("HPU", 0) < {sum(cards)}' in pods[0]["containers"][0]["args"][0]


def test_machines_find_the_head():
    documents = list(yaml.safe_load_all(SEVERAL.read_text()))
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    worker = read_pods(SEVERAL)[1]["containers"][0]["args"][0]
    address = worker.split("--address=")[1].split()[0]
    name, port = address.split(":")
    assert [int(port)] == [each["port"] for each in services[name]["ports"]]
    assert services[name]["publishNotReadyAddresses"]
