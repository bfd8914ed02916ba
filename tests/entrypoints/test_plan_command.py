"""Test `vllm plan` on the command line: tables, JSON, and one line for bad input."""

import json
import re
from typing import Any

import pytest

from tests.hpu import needs_simulated_device
from vllm import envs
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.pages.plan_page import plan_page

pytestmark = pytest.mark.usefixtures("plans_removed")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    return str(tmp_path)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restore the variable of torch that the command changes."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


@needs_simulated_device
def test_the_table_the_object_and_the_page_have_the_same_figures(model, tmp_path, capsys):
    flags = ["plan", model, "--device", "gaudi2", "--max-num-seqs", "4", "--num-cards", "2"]
    assert main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].endswith("bfloat16, on 2 gaudi2 cards. Planned, not measured.")
    assert lines[1] == "Planned for lazy mode with HPU graphs: serve with PT_HPU_LAZY_MODE=1"
    file = tmp_path / "plan.html"
    assert main([*flags, "--json", "--html", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert data_of(file.read_text("utf-8")) == found
    memory, start = found["memory"], found["start"]
    assert (found["version"], found["device"], found["num_cards"]) == (1, "gaudi2", 2)
    assert sum(num_bytes for _, num_bytes in memory["uses"]) == memory["total_bytes"]
    text = "\n".join(lines)
    assert f"KV cache: {memory['num_blocks']} blocks of {memory['block_size']} tokens" in text
    assert memory["num_sequences"] > memory["max_num_seqs"] == 4
    assert "At most 4 requests run at a time (--max-num-seqs)" in text
    assert f"the longest possible: {memory['longest_context']} tokens" in text
    prefill = start["prefill"]
    line = next(line for line in lines if line.startswith("  prompts"))
    assert line.split()[1:3] == [str(prefill["num_buckets"]), str(prefill["num_shapes"])]
    sizes = lines[next(i for i, x in enumerate(lines) if x.startswith("Sizes of buckets")) + 1]
    found_sizes = re.findall(r"(\d+)(?: \(.*?\)|  |$)", sizes)
    assert found_sizes == [str(n) for n in prefill["num_sizes"].values()]
    assert start["cold_s"] > start["cached_s"] > 0
    num_buckets = prefill["num_buckets"] + start["decode"]["num_buckets"]
    assert len(found["buckets"]) == len(found["bucket_s"]) == num_buckets
    assert min(found["bucket_s"]) > 0


@needs_simulated_device
def test_a_plan_does_not_load_the_compiler_of_torch(model, monkeypatch, capsys):
    """Loading it takes more than two seconds."""

    def fail(compile_for_card: object) -> None:
        raise AssertionError("the compiler is loaded")

    monkeypatch.setattr("gaudi_sim.bridge.register_compiler", fail)
    assert main(["plan", model, "--device", "gaudi2", "--max-num-seqs", "1"]) == 0
    assert "vllm serve answers after" in capsys.readouterr().out


@needs_simulated_device
def test_the_mode_that_is_planned_is_said(model, monkeypatch, capsys):
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    envs.get.cache_clear()
    try:
        assert main(["plan", model, "--device", "gaudi2", "--max-num-seqs", "1", "-tp", "1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == "Planned for torch.compile: serve with PT_HPU_LAZY_MODE=0"
        assert any(" are reserved for graphs, and torch.compile has no HPU" in x for x in lines)
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
        envs.get.cache_clear()
        flags = ["--device", "gaudi2", "--max-num-seqs", "1", "--enforce-eager", "--json"]
        drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
        assert main(["plan", model, *flags, *drafts]) == 0
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()
    found = json.loads(capsys.readouterr().out)
    mode = "lazy mode without HPU graphs (--enforce-eager)"
    assert found["mode"] == f"Planned for {mode}: serve with PT_HPU_LAZY_MODE=1"
    assert found["start"]["decode"]["num_graphs"] == 0
    assert not found["reserved"], "nothing is reserved with --enforce-eager"
    assert found["not_in_speed"] == "Predicted for requests without drafts (--speculative-config)"


@needs_simulated_device
def test_an_encoder_has_no_kv_cache_and_generates_nothing(tmp_path, capsys):
    config = {"architectures": ["BertModel"], "model_type": "bert", "type_vocab_size": 2}
    config |= {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config), "utf-8")
    flags = ["--device", "gaudi2", "--max-num-seqs", "1", "--task", "embed"]
    assert main(["plan", str(tmp_path), *flags]) == 0
    text = capsys.readouterr().out
    assert "This model needs no KV cache" in text
    assert not any(word in text for word in ("decodes", "Throughput", "0 B"))
    goal = ["--goal-ttft", "1", "--input-len", "100", "--output-len", "1"]
    assert main(["plan", str(tmp_path), *flags, *goal]) == 2
    assert "the speed of models that pool prompts is not predicted" in capsys.readouterr().err


def test_a_plan_without_the_part_for_images_says_so(tmp_path, capsys):
    vision = {"model_type": "clip_vision_model", "hidden_size": 64, "num_hidden_layers": 2}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 500,
        "text_config": {**CONFIG, "model_type": "llama"},
        "vision_config": vision,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert main(["plan", str(tmp_path), "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Planned for text input only, because" in text
    assert "has no settings of an image processor (preprocessor_config.json" in text


@needs_simulated_device
def test_without_a_warm_up_a_server_answers_at_once(model, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "true")
    envs.get.cache_clear()
    try:
        assert main(["plan", model, "--device", "gaudi2", "--max-num-seqs", "1"]) == 0
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()
    text = " ".join(capsys.readouterr().out.split())
    assert "Nothing is warmed up at the start (VLLM_SKIP_WARMUP=true)" in text
    assert "vllm serve answers after" not in text


def test_a_page_that_cannot_be_written_gets_one_line(model, tmp_path, capsys):
    assert main(["plan", model, "--device", "cpu", "--html", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    *logged, error = err.splitlines()
    assert error.startswith(f"error: --html {tmp_path} cannot be written: ")
    assert out == "" and all(line.startswith("INFO") for line in logged)


def test_the_page_has_a_policy_and_no_text_of_a_plan_is_html():
    plan = {"model": "</script><script>alert('<!-- plan -->')</script>"}
    page = plan_page(plan)
    assert data_of(page) == plan
    assert "alert('<" not in page
    [policy] = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy and "frame-ancestors" not in policy
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}


def data_of(page: str) -> Any:
    """Return the plan that a page contains as data."""
    [text] = re.findall('<script type="application/json" id="plan">(.*?)</script>', page)
    return json.loads(text)


def test_a_plan_for_a_cpu_has_the_memory_of_a_machine(model, capsys):
    assert main(["plan", model, "--device", "cpu", "--host-memory", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["total_bytes"] == 2**29
    assert found["start"] is None
    assert sum(num_bytes for _, num_bytes in found["memory"]["uses"]) == 2**29


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ([], "--device is missing"),
        (["--device", "gaudi4"], "--device gaudi4 is not known; accepted: gaudi2, gaudi3, cpu"),
        (
            ["--device", "gaudi2", "--num-cards", "0"],
            "--num-cards must be an integer of at least 1, got 0",
        ),
        (
            ["--device", "gaudi2", "--num-cards", "two"],
            "--num-cards must be an integer of at least 1, got two",
        ),
        (["--device", "gaudi2", "--num-cards", "2", "-tp", "4"], "are the same setting"),
        (["--device", "gaudi2", "--num-cards", "3"], "error: --num-cards (3) must divide the num"),
        (["--device", "gaudi2", "-tp", "3"], "error: --tensor-parallel-size (3) must divide the"),
        (
            ["--device", "gaudi2", "--host-memory", "4"],
            "--host-memory must be given with --device",
        ),
        (["--device", "cpu", "--host-memory", "nan"], "--host-memory nan must be a number of GiB"),
        (["--device", "cpu", "--host-memory", "1e30"], "must be a number of GiB"),
        (["--device", "gaudi2", "--traffic", ""], "--traffic must be the name of a file, got ''"),
        (["--device", "gaudi2", "--html", ""], "--html must be the name of a file, got ''"),
        (["--device", "gaudi3", "--max-model-len", "9000"], "at most 512 tokens"),
    ],
)
def test_bad_flags_get_one_line(flags, error, model, capsys):
    assert main(["plan", model, *flags]) == 2
    text = capsys.readouterr().err
    assert error in text and text.startswith("error: ") and text.count("\n") == 1


def test_a_config_file_decides_the_number_of_cards(model, tmp_path, capsys):
    (tmp_path / "flags.yaml").write_text("tensor-parallel-size: 3\n", "utf-8")
    given = ["plan", model, "--device", "gaudi2", "--config", str(tmp_path / "flags.yaml")]
    assert main(given) == 2
    assert "error: --tensor-parallel-size (3) must divide" in capsys.readouterr().err
    assert main([*given, "--num-cards", "2"]) == 2
    assert "--num-cards 2 and -tp 3 are the same setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("absent", None, "does not exist"),
        ("empty", "", "has no config.json. Name the folder of a checkpoint"),
        ("broken", "{", "config.json"),
        ("unknown", json.dumps(CONFIG | {"architectures": ["NoSuchModel"]}), "NoSuchModel"),
    ],
)
def test_bad_models_get_one_line(name, content, error, tmp_path, capsys):
    folder = tmp_path / name
    if content is not None:
        folder.mkdir()
    if content:
        (folder / "config.json").write_text(content, "utf-8")
    assert main(["plan", str(folder), "--device", "gaudi2"]) == 2
    text = capsys.readouterr().err
    assert error in text and text.startswith("error: ") and text.count("\n") == 1
