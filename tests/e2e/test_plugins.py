"""Test plug-ins: entry points of an installed package, which run once in every process of an
engine.
"""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model
from vllm import RequestOutput, SamplingParams, envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.utils import plugins

ENTRY_POINTS = """
[vllm.general_plugins]
broken = own_models:fail
own = own_models:register
"""
MODULE = '''
import os
from pathlib import Path


def register():
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    class OwnForCausalLM(LlamaForCausalLM):
        """Cannot be sent to another process, as it has no place there."""

    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write(f"{os.getpid()}\\n")
    ModelRegistry.register_model("OwnForCausalLM", OwnForCausalLM)


def fail():
    raise OSError("no licence")
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder for sys.path with the package own_models and its dist-info."""
    monkeypatch.delitem(sys.modules, "own_models", raising=False)  # of an earlier test
    info = tmp_path / "own_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "own_models.py").write_text(MODULE)
    return tmp_path


def test_plug_ins_run_once_in_every_process_and_one_that_raises_is_a_warning(
    installed, tmp_path, monkeypatch, capfd
):
    folder = make_tiny_model("llama", tmp_path / "model")
    monkeypatch.syspath_prepend(installed)  # of this process, which is the API process here
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr("vllm.model_executor.models.registry.ModelRegistry.models", {})

    async def generate() -> RequestOutput:
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder),
                load_format="dummy",
                dtype="float32",
                skip_tokenizer_init=True,
                hf_overrides={"architectures": ["OwnForCausalLM"]},
                max_model_len=32,
                tensor_parallel_size=2,
                num_gpu_blocks_override=8,
            )
        )
        try:
            params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
            outputs = engine.generate({"prompt_token_ids": [5, 6]}, params, "r")
            return [output async for output in outputs][-1]
        finally:
            engine.shutdown()

    plugins.load_general_plugins.cache_clear()
    try:
        assert asyncio.run(generate()).finished
    finally:
        plugins.load_general_plugins.cache_clear()
    # The plugin is called in the API process, in the core process, which is also rank 0, and in
    # rank 1.
    calls = (installed / "calls").read_text().split()
    assert len(calls) == len(set(calls)) == 3 and str(os.getpid()) in calls
    warning = (
        "the plug-in 'broken' (own_models:fail) has failed, so its models cannot be used: OSErr"
    )
    assert capfd.readouterr().err.count(warning) == 3


@pytest.mark.parametrize(
    ("names", "ran", "message"),
    [
        (None, ("own",), "'broken'"),
        ("own", ("own",), None),
        (
            "own, other",
            ("own",),
            "'other', but no installed package has it; installed plug-ins: broken",
        ),
        ("", (), None),
    ],
)
def test_the_environment_chooses_plug_ins(installed, names, ran, message, monkeypatch, caplog):
    monkeypatch.syspath_prepend(installed)
    if names is not None:
        monkeypatch.setenv("VLLM_PLUGINS", names)
    monkeypatch.setattr(envs, "get", envs.Envs.load)
    monkeypatch.setattr("vllm.model_executor.models.registry.ModelRegistry.models", {})
    assert plugins.load_general_plugins.__wrapped__() == ran
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == (message is not None)
    assert message is None or message in warnings[0]
