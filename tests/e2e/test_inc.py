"""Test calibrating the bundled model and serving it in FP8, on the CPU and on simulated cards."""

import csv
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hpu import FEW_BUCKETS, captured_log, needs_simulated_device, simulated_hpu
from vllm import LLM, envs
from vllm.assets import BUNDLED_MODEL
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.calibration.perplexity import perplexity
from vllm.entrypoints.cli.main import main
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.transformers_utils.tokenizer import get_tokenizer

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

SMALL = ["--num-samples", "4", "--sample-tokens", "96", "--output-tokens", "2", "--batch-size", "2"]
ENGINE = ["--max-num-seqs", "4", "--num-gpu-blocks-override", "80", "--block-size", "16"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    source = Path(random.__file__).read_text()
    pieces = [source[start : start + 300] for start in range(2000, 5600, 300)]
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return path


def calibrate(texts, out, *flags) -> int:
    return main(["calibrate", "--dataset", str(texts), "--out", str(out), *SMALL, *ENGINE, *flags])


@pytest.fixture(scope="module")
def calibrated(texts, tmp_path_factory) -> Path:
    """Return the folder of the bundled model, calibrated for Gaudi 2."""
    out = tmp_path_factory.mktemp("calibrated")
    assert calibrate(texts, out, "--device-for-scales", "g2") == 0
    return out / "stdlib-llama-5m"


def test_a_calibration_writes_what_serving_needs_and_says_what_it_costs(calibrated, capsys):
    files = {path.name for path in (calibrated / "g2").iterdir()}
    assert files >= {
        "inc_output_hooks_maxabs_0_1.json",
        "inc_output_hooks_maxabs_0_1.npz",
        "inc_output_hooks_maxabs_0_1_mod_list.json",
        "inc_output_hooks_maxabs_MAXABS_HW_0_1.json",
    }
    state = json.loads((calibrated / "calibration_g2.json").read_text())
    found = state["perplexity"]
    assert found["before"] != found["after"]
    assert found["after"] == pytest.approx(found["before"], rel=0.03)
    quant = json.loads((calibrated / "maxabs_quant_g2.json").read_text())
    assert quant["mode"] == "QUANTIZE"
    assert quant["device_for_scales"] == "GAUDI2"


def test_what_is_done_is_not_done_again(calibrated, texts, capsys):
    before = (calibrated / "calibration_g2.json").read_text()
    assert calibrate(texts, calibrated.parent, "--device-for-scales", "g2") == 0
    captured = capsys.readouterr()
    assert captured.err.count("done before") == 5
    assert f"QUANT_CONFIG={calibrated}/maxabs_quant_g2.json vllm serve" in captured.out
    assert (calibrated / "calibration_g2.json").read_text() == before


def test_a_folder_that_was_moved_has_the_paths_of_its_new_place(
    calibrated, texts, tmp_path, capsys
):
    shutil.copytree(calibrated, tmp_path / calibrated.name)
    flags = ("--device-for-scales", "g2")
    assert calibrate(texts, tmp_path, *flags) == 0
    assert capsys.readouterr().err.count("done before") == 5
    for name in ("measure", "quant"):
        config = json.loads((tmp_path / calibrated.name / f"maxabs_{name}_g2.json").read_text())
        assert config["dump_stats_path"] == str(tmp_path / calibrated.name / "g2/inc_output")
    (tmp_path / calibrated.name / "calibration_g2.json").write_text("{")
    assert calibrate(texts, tmp_path, *flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "calibration_g2.json is not valid JSON" in error
    assert error.endswith("Delete the file to begin again")


def test_a_calibration_that_was_stopped_goes_on_after_its_last_batch(
    calibrated, texts, tmp_path, monkeypatch
):
    """The continued calibration finds the same scales."""
    num_calls, real = 0, LLM.generate

    def stop_at_the_second(self, *args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    flags = ("--device-for-scales", "g2")
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate", stop_at_the_second)
        assert calibrate(texts, tmp_path, *flags) == 130
    folder = tmp_path / "stdlib-llama-5m"
    state = json.loads((folder / "calibration_g2.json").read_text())
    assert (state["done"], state["num_measured"]) == (["prepare"], 2)
    for step in ("measure", "postprocess"):
        assert calibrate(texts, tmp_path, *flags, "--step", step) == 0
    name = "g2/inc_output_hooks_maxabs_0_1.json"
    assert json.loads((folder / name).read_text()) == json.loads((calibrated / name).read_text())


# Exhaustive: tests/model_executor/test_inc_ranks.py tests the files of ranks.
@pytest.mark.exhaustive
def test_two_ranks_are_measured_and_unified_to_one(calibrated, texts, tmp_path, capsys):
    """The command uses the short flags. The values equal the values of one rank, up to the order of
    sums.
    """
    short = ["-d", str(texts), "-o", str(tmp_path), "-l", "4", "-b", "2", "-t", "2", "-r", "1"]
    common = ["calibrate", *short, *SMALL[2:6], *ENGINE, "--device-for-scales", "g2"]
    for step in ("1", "2", "3", "unify", "4"):
        assert main([*common, "--step", step, "--weights-load-device", "cpu"]) == 0
    assert capsys.readouterr().out.strip().endswith("fp8_inc --weights-load-device cpu")
    prefix = "g2/inc_output_hooks_maxabs"
    for name in ("_0_1", "_MAXABS_HW_0_1"):
        got, want = (
            json.loads((folder / f"{prefix}{name}.json").read_text())["Nodes"]
            for folder in (tmp_path / "stdlib-llama-5m", calibrated)
        )
        assert got.keys() == want.keys()
        for key, node in want.items():
            if name == "_0_1":
                assert got[key]["inputs"][0][0] == pytest.approx(node["inputs"][0][0], rel=0.05)
                assert got[key].get("params") == node.get("params")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantization", "fp8"], "--quantization and --quant-config: leave them out"),
        (["--num-samples", "0"], "--num-samples must be at least 1, got 0"),
        (["--step", "unify"], "--step unify needs --unify-ranks"),
        (["--step", "6"], "--step expand needs --expand-ranks"),
        (["-r", "1", "-w", "2"], "--unify-ranks and --expand-ranks cannot be used together"),
        (["--step", "postprocess"], "If there are none, measure the model with `vllm calibrate`"),
    ],
)
def test_a_wrong_call_is_one_line(texts, tmp_path, capsys, flags, message):
    assert calibrate(texts, tmp_path, *flags) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


class Started(Exception):
    """Raised at the point where the engine would start."""


@pytest.mark.parametrize(
    ("flags", "variable", "is_skipped"),
    [
        ([], "", True),
        ([], "true", True),
        ([], "false", False),
        (["--warmup"], "", False),
        (["--warmup"], "true", False),
        (["--no-warmup"], "false", True),
    ],
)
def test_engines_of_a_calibration_warm_up_only_where_that_is_asked_for(
    texts, tmp_path, monkeypatch, flags, variable, is_skipped
):
    def start(config):
        assert config.hpu.skip_warmup is is_skipped
        raise Started

    monkeypatch.setattr(LLMEngine, "from_vllm_config", start)
    monkeypatch.setenv("VLLM_SKIP_WARMUP", variable)
    envs.get.cache_clear()
    try:
        with pytest.raises(Started):
            calibrate(texts, tmp_path, "--step", "quantize", *flags)
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()


# exhaustive: the tests above calibrate on the CPU, and test_fp8_cache.py runs FP8 on a card
@pytest.mark.exhaustive
@pytest.mark.parametrize("card", ["gaudi2", "gaudi3"])
def test_a_simulated_card_is_calibrated_and_serves_the_model(card, tmp_path):
    """Calibrate and serve only on the card: with FP8 weights and an FP8 cache, and with FP8
    attention of prompts as well.

    The card is strict, so a compilation in a warmed step fails. Perplexity is computed over 1,500
    tokens of a module that was not measured.
    """
    source = Path(shutil.__file__).read_text()
    pieces = [source[start : start + 1500] for start in range(0, 30000, 1500)]
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(pieces))
    sizes = ["--num-samples", "12", "--sample-tokens", "126", "--output-tokens", "2"]
    sizes += ["--max-num-batched-tokens", "128", "--max-num-seqs", "4", "--batch-size", "4"]
    sizes += ["--num-gpu-blocks-override", "33", "--block-size", "16"]
    buckets = {f"VLLM_PROMPT_SEQ_BUCKET_{name}": 128 for name in ("MIN", "STEP", "MAX")}
    simulated = {"card": card, "has_profiling_run": False, "PT_HPU_LAZY_MODE": 1}
    simulated |= FEW_BUCKETS | buckets
    with simulated_hpu(**simulated), captured_log() as log:
        for step in ("prepare", "measure", "postprocess", "quantize"):
            command = ["calibrate", "-d", str(texts), "-o", str(tmp_path), "--step", step, *sizes]
            assert main(command) == 0
    assert log.count("Skipping warmup...") == 2
    path = tmp_path / "stdlib-llama-5m" / f"maxabs_quant_g{card[-1]}.json"
    assert json.loads(path.read_text())["device_for_scales"] == card.upper()
    ids = get_tokenizer(str(BUNDLED_MODEL)).encode(Path(csv.__file__).read_text())
    samples = [ids[start : start + 126] for start in range(0, 1500, 126)]
    settings = {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 33,
        "block_size": 16,
        "use_tqdm_on_load": False,
    }
    found = []
    quantized = {"quant_config": str(path), "kv_cache_dtype": "fp8_inc"}
    fp8_prompts = {"VLLM_PROMPT_USE_FP8_FUSEDSDPA": 1}
    for changes, variables in (({}, {}), (quantized, {}), (quantized, fp8_prompts)):
        with simulated_hpu(**simulated, **variables) as bridge:
            llm = LLM(**settings, **changes)
            num_compilations = bridge.counters().compilations
            llm.generate("import os", use_tqdm=False)
            found.append(perplexity(llm, samples))
            assert bridge.counters().compilations == num_compilations
            llm.llm_engine.shutdown()
    assert found[0] != found[1]
    assert found[1] == pytest.approx(found[0], rel=0.01)
    assert found[2] != found[1]
    assert found[2] == pytest.approx(found[0], rel=0.03)


@pytest.mark.exhaustive
@needs_simulated_device
def test_two_simulated_cards_have_files_of_their_own(texts, tmp_path):
    """Two cards, one process for each, measure, quantize and serve the model."""
    card = {"VLLM_HPU_SIM": "gaudi2", "PT_HPU_LAZY_MODE": 1, "PT_HPU_ENABLE_LAZY_COLLECTIVES": 1}
    buckets = {f"VLLM_PROMPT_SEQ_BUCKET_{name}": 128 for name in ("MIN", "STEP", "MAX")}
    changes = card | FEW_BUCKETS | buckets
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "calibrate", "--device", "hpu"]
    command += ["-t", "2", "-d", str(texts), "-o", str(tmp_path), *SMALL, *ENGINE]
    command += ["--max-num-batched-tokens", "128", "--device-for-scales", "g2"]
    environment = os.environ | {name: str(value) for name, value in changes.items()}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().endswith("--tensor-parallel-size 2")
    folder = tmp_path / "stdlib-llama-5m"
    for rank in range(2):
        for name in (f"{rank}_2", f"MAXABS_HW_{rank}_2"):
            content = json.loads((folder / f"g2/inc_output_hooks_maxabs_{name}.json").read_text())
            assert content["Nodes"]["model.layers.0.mlp.down_proj"]["inputs"]
    perplexities = json.loads((folder / "calibration_g2.json").read_text())["perplexity"]
    assert perplexities["after"] == pytest.approx(perplexities["before"], rel=0.03)
