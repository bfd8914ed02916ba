"""The Kubernetes manifest asks for what the server has."""

from pathlib import Path

import yaml

from vllm.entrypoints.middleware.asgi import PROBES
from vllm.entrypoints.openai.cli_args import make_arg_parser, read_args
from vllm.utils import FlexibleArgumentParser

MANIFEST = Path(__file__).parents[3] / "examples" / "kubernetes" / "vllm.yaml"


def read_pod():
    (deployment,) = (
        document
        for document in yaml.safe_load_all(MANIFEST.read_text())
        if document["kind"] == "Deployment"
    )
    return deployment["spec"]["template"]["spec"]


def test_the_probes_are_routes_that_need_no_key():
    (container,) = read_pod()["containers"]
    paths = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}
    assert set(paths.values()) <= PROBES


def test_the_flags_are_those_of_the_server_and_the_pod_waits_for_its_shutdown():
    pod = read_pod()
    (container,) = pod["containers"]
    program, command, *flags = container["command"] + container["args"]
    assert (program, command) == ("vllm", "serve")
    _, server = read_args(make_arg_parser(FlexibleArgumentParser()).parse_args(flags))
    assert server.port == container["ports"][0]["containerPort"]
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits_s + server.shutdown_timeout
