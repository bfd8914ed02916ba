"""Test LoRA adapters: they give the outputs of merged weights in any batch."""

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lora_files import ALL, ATTENTION, greedy, merged_model, run_on_engine, write_adapter
from tests.reach import host_adapters_of, log_cache_events, runner_of, stats_of
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.errors import ConfigError, RequestError
from vllm.lora.reader import AdapterReader
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams

PROMPT = "def main(args):\n    "
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)


def merged_output(folder: Path, token_ids: list[int]) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log-probabilities by transformers, with the adapter merged."""
    return greedy(merged_model(BUNDLED_MODEL, folder), token_ids, GREEDY.max_tokens)


def make(folder: Path, seed: int, rank: int, modules: tuple[str, ...], **config) -> Path:
    return write_adapter(folder, BUNDLED_MODEL, seed, rank, modules, **config)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [
        make(root / "plain", 1, 8, ("q_proj", "v_proj")),
        make(root / "rslora", 2, 16, ALL, use_rslora=True),
        make(root / "ranks", 3, 4, ATTENTION, rank_pattern={"layers.1.self_attn.q_proj": 2}),
        make(root / "one", 4, 1, ("down_proj",)),
    ]
    return [LoRARequest(f.name, i + 1, str(f)) for i, f in enumerate(folders)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_model_len=128, enable_lora=True, max_loras=2, max_num_seqs=8)


def seen(output) -> tuple[list[int], list[float]]:
    sample = output.outputs[0]
    ids = list(sample.token_ids)
    return ids, [row[i].logprob for i, row in zip(ids, sample.logprobs, strict=True)]


def test_adapters_in_one_batch_give_what_merged_weights_give(llm, adapters):
    mixed = [None, *adapters, None, *reversed(adapters)]
    outputs = llm.generate([PROMPT] * len(mixed), GREEDY, use_tqdm=False, lora_request=mixed)
    token_ids = outputs[0].prompt_token_ids
    for adapter, output in zip(mixed, outputs, strict=True):
        assert output.lora_request == adapter
        assert adapter is None or output.lora_request.lora_int_id == adapter.lora_int_id
        ids, logprobs = seen(output)
        if adapter is not None:
            want_ids, want_logprobs = merged_output(Path(adapter.path), token_ids)
            assert ids == want_ids, adapter.name
            assert logprobs == pytest.approx(want_logprobs, abs=1e-4)
    assert len({tuple(seen(output)[0]) for output in outputs}) == 5


def test_rows_without_an_adapter_keep_their_bits(adapters):
    """The weights are packed, so bits do not depend on the batch."""
    alone = LLM(max_model_len=64).generate([PROMPT], GREEDY, use_tqdm=False)[0]
    llm = LLM(max_model_len=64, enable_lora=True)
    mixed = [adapters[0], None, adapters[1]]
    outputs = llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False, lora_request=mixed)
    assert seen(outputs[1]) == seen(alone)
    assert seen(outputs[0]) != seen(alone) != seen(outputs[2])


def test_a_prefix_is_shared_by_content_and_not_by_name(llm, adapters, tmp_path):
    prompt = PROMPT * 8
    first = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=adapters[0])[0]
    again = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=adapters[0])[0]
    assert again.num_cached_tokens > 0
    assert seen(again)[0] == seen(first)[0]
    folder = make(tmp_path / "new", 9, 8, ("q_proj", "v_proj"))
    renamed = LoRARequest(adapters[0].lora_name, 1, str(folder))
    other = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=renamed)[0]
    assert other.num_cached_tokens == 0
    assert seen(other)[0] == merged_output(folder, other.prompt_token_ids)[0]


def test_weights_may_be_a_pickle_of_tensors(llm, adapters, tmp_path):
    shutil.copytree(adapters[0].path, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    both = [adapters[0], LoRARequest("pickled", 8, str(tmp_path))]
    want, got = llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False, lora_request=both)
    assert seen(got)[0] == seen(want)[0]
    assert seen(got)[1] == pytest.approx(seen(want)[1], abs=1e-5)


class _RunsCode:
    """An object that makes a folder when a pickle with it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def broken(folder: Path, kind: str) -> Path:
    make(folder, 5, 4, ("q_proj",))
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    other = name.replace("lora_A", "lora_B")
    given = json.loads(config.read_text())
    pair = {name: torch.zeros(4, 256), other: torch.zeros(256, 4)}
    if kind == "no weights":
        weights.unlink()
    elif kind == "not JSON":
        config.write_text("{")
    elif kind == "nested":
        config.write_text("[" * 200_000)
    elif kind == "pipe":
        config.unlink()
        os.mkfifo(config)
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    elif kind == "long header":
        weights.write_bytes((10**10).to_bytes(8, "little") + b"{}")
    elif kind == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    elif kind == "in a subfolder":
        (folder / "default").mkdir()
        config.rename(folder / "default" / config.name)
    elif kind == "wide":
        save_file(pair | {name: torch.zeros(4, 999)}, weights)
    elif kind == "empty":  # as DeepSpeed ZeRO-3 saves weights that it has not gathered
        save_file({each: torch.zeros(0) for each in pair}, weights)
    elif kind == "of mlx":
        weights.rename(folder / "adapters.safetensors")
    elif kind == "NaN":
        save_file(pair | {name: torch.full((4, 256), float("nan"))}, weights)
    elif kind == "half":
        save_file({name: pair[name]}, weights)
    elif kind == "pickle":
        weights.unlink()
        torch.save({name: Path("/")}, weights.with_suffix(".bin"))
    elif kind == "huge pickle":
        weights.unlink()
        huge = torch.zeros(1).expand(2**40, 4)
        torch.save(pair | {name: huge}, weights.with_suffix(".bin"))
    elif kind == "code":
        weights.unlink()
        torch.save({name: _RunsCode(folder / "ran")}, weights.with_suffix(".bin"))
    elif kind == "numbers":
        weights.unlink()
        torch.save({1: pair[name]}, weights.with_suffix(".bin"))
    elif kind == "sparse":
        weights.unlink()
        torch.save(pair | {name: pair[name].to_sparse()}, weights.with_suffix(".bin"))
    elif kind == "many":
        entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        header = json.dumps({f"t{number}": entry for number in range(90_000)}).encode()
        weights.write_bytes(len(header).to_bytes(8, "little") + header)
    elif kind == "integers":
        save_file(pair | {name: pair[name].to(torch.int8)}, weights)
    elif kind == "lines":
        save_file({name.replace("q_proj", "q\nproj"): pair[name]}, weights)
    elif kind == "twice":
        save_file(pair | {name.removeprefix("base_model.model."): pair[name].clone()}, weights)
    elif kind == "link":
        weights.unlink()
        weights.symlink_to("/etc/passwd")
    elif kind == "long config":
        config.write_text(" " * (2 << 20) + config.read_text())
    elif kind == "many patterns":
        patterns = {f"n{number}.*q": 4 for number in range(3000)}
        config.write_text(json.dumps(given | {"rank_pattern": patterns}))
    elif kind == "norm":
        norm = "base_model.model.model.norm.lora_A.weight"
        save_file({norm: pair[name], norm.replace("lora_A", "lora_B"): pair[other]}, weights)
    elif kind == "tokens":
        table = "base_model.model.model.embed_tokens.base_layer.weight"
        save_file(pair | {table: torch.ones(4098, 256)}, weights)
    elif kind == "whole":
        save_file(pair | {"base_model.model.model.norm.weight": torch.ones(256)}, weights)
    elif kind == "row":
        config.write_text(json.dumps(given | {"trainable_token_indices": [4096]}))
        rows = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
        save_file(pair | {rows: torch.ones(1, 256)}, weights)
    else:
        key, value = kind.split("=", 1)
        config.write_text(json.dumps(given | {key: json.loads(value)}))
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no weights", r"cannot be read: .*\(adapter_model.safetensors\)"),
        ("of mlx", "It has adapters.safetensors, as mlx-lm writes adapters: fuse it into"),
        ("not JSON", "adapter_config.json is not JSON"),
        ("nested", "adapter_config.json is nested too deeply"),
        ("pipe", "must be plain files"),
        ("in a subfolder", r"Its subfolder has an adapter: name .*/adapter/default"),
        ('init_lora_weights="pissa_niter_4"', "was trained against modified base weights"),
        ('init_lora_weights="corda"', "Save it with path_initial_model_for_weight_conversion of"),
        ('use_rslora="no"', "use_rslora must be true or false, got 'no'"),
        ('arrow_config={"top_k": 2}', "adapters that choose among adapters are not supported"),
        ('rank_pattern={"(a+)+x": 4}', "is too complex: at most 256 characters, 2 repeats"),
        ('alpha_pattern={"a.*b.*c.*d": 4}', "is too complex"),
        ("r=64", "the rank r is 64, and max_lora_rank is 16"),
        ('r="8"', "r must be an integer above 0, got '8'"),
        ("lora_alpha=null", "lora_alpha must be a number between -1e6 and 1e6, got None"),
        ("use_dora=true", "use_dora is True; DoRA is not supported. Merge the adapter into"),
        ("alora_invocation_tokens=[5]", "activated LoRA is not supported. Train a LoRA adapter"),
        ('kasa_config={"beta": 1}', "adapters with singular values are not supported. Merge"),
        ('peft_type="IA3"', "peft_type is 'IA3'; only LORA is supported. Merge the adapter"),
        ('peft_type="XLORA"', "It chooses among LoRA adapters: name one of them in each request"),
        ('peft_type="PREFIX_TUNING"', "only LORA is supported. Train a LoRA adapter in its place"),
        ('init_lora_weights="LoftQ"', "modified base weights, .* Merge the adapter into the"),
        (
            'target_parameters=["mlp.bias"]',
            "only weights of layers, and gate_up_proj, up_proj and down_proj of experts",
        ),
        ('rank_pattern={"(": 4}', "is not a regular expression"),
        (
            'rank_pattern={"a{99999999999999999999}": 4}',
            "is not a regular expression: .* too large",
        ),
        ('rank_pattern=["q_proj"]', "rank_pattern and alpha_pattern must be objects"),
        ("many patterns", "at most 2048 entries together, got 3000"),
        ("long config", r"adapter_config.json has more than 1048576 bytes$"),
        ("r=" + "9" * 300, r"the rank r is 9{80}\.\.\., and max_lora_rank is 16"),
        ("lora_alpha=1e300", "a number between -1e6 and 1e6, got 1e\\+300"),
        ("lora_alpha=NaN", "a number between -1e6 and 1e6, got nan"),
        (f"layer_replication={json.dumps([[0, 4]] * 9999)}", r"is \[\[0, 4\], .{60,72}\.\.\.;"),
        ("modules_to_save=[1]", r"modules_to_save must be a list of names of modules, got \[1\]"),
        (
            'trainable_token_indices={"lm_head": [-1]}',
            r"a list of token ids, or an object .*\[-1\]",
        ),
        ("trainable_token_indices=[5, 5]", "names a token twice"),
    ],
)
def test_a_wrong_folder_is_refused_at_once(llm, tmp_path, kind, message):
    adapter = LoRARequest("broken", 9, str(broken(tmp_path / "adapter", kind)))
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=adapter)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "is damaged"),
        ("long header", "its header has 10000000000 bytes"),
        ("pointer", "is a pointer of Git LFS, without the contents of the file. Run `git lfs pull"),
        ("empty", "q_proj is empty (its shape is [0]). DeepSpeed ZeRO-3 writes such files"),
        ("wide", "has the shape [4, 999], but [4, 256] is expected"),
        ("NaN", "has values that are NaN, infinite"),
        ("half", "has no .lora_B.weight"),
        ("pickle", "contains objects other than tensors, which are not loaded for security"),
        ("huge pickle", "has the shape [1099511627776, 4], but [4, 256] is expected"),
        ("code", "contains objects other than tensors, which are not loaded for security"),
        ("numbers", "is not a dict of names and dense tensors"),
        ("sparse", "is not a dict of names and dense tensors"),
        ("many", "an adapter of this model needs at most"),
        ("integers", "has the dtype torch.int8; accepted are torch.float32"),
        ("lines", r"q\nproj.lora_A.weight' is not the name of an adapter's tensor"),
        ("twice", "name the same tensor of model.layers.0.self_attn.q_proj"),
        ("link", "is damaged"),
        ("norm", "does not belong to a layer that adapters can change in this engine"),
        ("tokens", "an adapter that changes the size of the vocabulary is not supported"),
        ("whole", "norm.weight replaces a weight of model.norm. Adapters may replace only weights"),
        ("row", "indices [4096] and a vocabulary of 4096 tokens. Is it an adapter of a different"),
    ],
)
def test_wrong_weights_fail_their_request_and_no_other(llm, adapters, tmp_path, kind, message):
    adapter = LoRARequest("broken", 9, str(broken(tmp_path / "adapter", kind)))
    mixed = [adapters[0], adapter, None]
    outputs = run_on_engine(llm, [PROMPT] * 3, GREEDY, mixed)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert message in outputs[1].outputs[0].stop_reason
    assert "\n" not in outputs[1].outputs[0].stop_reason and not (tmp_path / "adapter/ran").exists()
    with pytest.raises(RequestError, match="prompt 1 of 3: ") as error:
        llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False, lora_request=mixed)
    assert outputs[1].outputs[0].stop_reason in str(error.value)
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].finished


def test_only_modules_that_are_named_can_be_changed(adapters):
    settings = {"enable_lora": True, "max_model_len": 128}
    llm = LLM(**settings, lora_target_modules=["down_proj"])
    asked = [None, *adapters[2:]]
    outputs = run_on_engine(llm, [PROMPT] * 3, GREEDY, asked)
    base, refused, found = (output.outputs[0] for output in outputs)
    assert base.token_ids != found.token_ids and found.finish_reason == "length"
    assert (
        "Accepted layers: down_proj. These as well if lora_target_modules names them: "
        in refused.stop_reason
    )
    with pytest.raises(
        ConfigError, match="'k_prj' is not the name of a module for which this engine"
    ):
        LLM(**settings, lora_target_modules=["q_proj", "k_prj"])


@pytest.mark.parametrize("path", ["a" * 5000, "x\0y", "/etc/passwd", "../../../etc", "http://x/y"])
def test_a_path_that_is_no_folder_of_an_adapter_is_refused(llm, path):
    with pytest.raises(RequestError, match="that peft's save_pretrained has written") as error:
        llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=LoRARequest("p", 9, path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_beams_of_several_adapters_are_searched_together(llm, adapters, tmp_path):
    params = BeamSearchParams(beam_width=1, max_tokens=GREEDY.max_tokens, ignore_eos=True)
    mixed = [adapters[0], None, adapters[1]]
    want = llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False, lora_request=mixed)
    for beams, output in zip(llm.beam_search([PROMPT] * 3, params, mixed), want, strict=True):
        prompt = output.prompt_token_ids
        assert beams.sequences[0].tokens == prompt + list(output.outputs[0].token_ids)
    wrong = LoRARequest("broken", 9, str(broken(tmp_path / "adapter", "wide")))
    with pytest.raises(RequestError, match=r"has the shape \[4, 999\]"):
        llm.beam_search([PROMPT], params, wrong)
    chat = [{"role": "user", "content": "x"}]
    template = "{{ messages[0]['content'] }}"
    prompts = [llm.preprocess_chat(chat, each, template) for each in (None, adapters[0])]
    assert prompts[0] == prompts[1]


def test_metrics_and_events_name_adapters(adapters, monkeypatch):
    """One adapter runs, and another one waits for its slot."""
    llm = LLM(max_model_len=64, enable_lora=True, max_loras=1, disable_log_stats=False)
    engine = llm.llm_engine
    core = engine.engine_core
    events = log_cache_events(core)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for number, adapter in enumerate((adapters[0], adapters[1], None)):
        engine.add_request(str(number), PROMPT, params, lora_request=adapter)
    while not core.stats().running_adapters:
        engine.step()
    stats = core.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (["plain"], ["rslora"])
    engine.step()
    (info,) = [m for m in engine.get_metrics() if m.name == "vllm:lora_requests_info"]
    labels = {"running_lora_adapters": "plain", "waiting_lora_adapters": "rslora", "max_lora": "1"}
    assert labels.items() <= info.labels.items() and info.value > 1e9
    while engine.has_unfinished_requests():
        engine.step()
    assert core.stats().running_adapters == core.stats().waiting_adapters == []
    named = {(event.lora_id, event.lora_name) for event in events.drain()}
    assert named == {(1, "plain"), (2, "rslora"), (None, None)}


def test_no_step_reads_an_adapter(adapters, monkeypatch):
    """More adapters wait than fit into memory, and requests are preempted."""
    readers = set()
    read = AdapterReader.load

    def note(layers, folder, rest):
        readers.add(threading.current_thread().name)
        return read(layers, folder, rest)

    monkeypatch.setattr(AdapterReader, "load", note)
    small = {"max_model_len": 128, "max_num_seqs": 3, "num_gpu_blocks_override": 10}
    small |= {"max_loras": 2, "max_cpu_loras": 2, "enable_prefix_caching": False}
    llm = LLM(enable_lora=True, **small)
    mixed = [*adapters, None, *reversed(adapters), *adapters]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    outputs = llm.generate([PROMPT] * len(mixed), params, use_tqdm=False, lora_request=mixed)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(mixed)
    assert stats_of(llm).num_preemptions
    assert readers == {"adapter"}
    runner = runner_of(llm)
    for number in llm.llm_engine.list_loras():
        assert llm.llm_engine.remove_lora(number)
    assert host_adapters_of(runner) == [None, None], "an adapter is kept"


def test_an_adapter_of_another_model_or_with_unknown_keys_is_warned_of(llm, tmp_path, caplog):
    base = {"base_model_name_or_path": "org/some-other-model"}
    new = {"use_newlora": True, "newlora_config": None}
    folder = make(tmp_path / "foreign", 3, 4, ("q_proj",), **base, **new)
    assert llm.llm_engine.add_lora(LoRARequest("foreign", 20, str(folder)))
    assert "was trained on 'org/some-other-model', but this model is" in caplog.text
    assert "not known and are ignored: ['use_newlora']." in caplog.text


def test_without_lora_an_adapter_is_refused(adapters):
    llm = LLM(dtype="float32", max_model_len=64)
    with pytest.raises(RequestError, match="started without LoRA, and the adapter 'plain'"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=adapters[0])


def test_adapters_are_loaded_ahead_pinned_and_dropped(adapters, tmp_path):
    """This is the interface of the synchronous engine."""
    small = {"max_model_len": 64, "max_num_seqs": 2, "max_loras": 1, "max_cpu_loras": 2}
    llm = LLM(enable_lora=True, **small)
    engine, (one, two, three, four) = llm.llm_engine, adapters
    assert engine.list_loras() == set() and engine.add_lora(one)
    assert not engine.add_lora(one)  # this adapter is already loaded
    assert engine.list_loras() == {1} and engine.pin_lora(1)
    for adapter in (two, three):  # loading `three` removes `two`, since `one` is pinned
        assert engine.add_lora(adapter)
    assert engine.list_loras() == {1, 3}
    with pytest.raises(
        RequestError, match=r"pin_lora: cannot pin the adapter 3: .* too many adapters are pinned"
    ):
        engine.pin_lora(3)
    with pytest.raises(
        RequestError, match=r"cannot pin the adapter 9: it is not loaded \(load it with"
    ):
        engine.pin_lora(9)
    params = SamplingParams(max_tokens=1)
    llm.generate("x", params, use_tqdm=False, lora_request=four)
    assert engine.list_loras() == {1, 4}
    assert engine.remove_lora(1) and not engine.remove_lora(1)
    assert engine.list_loras() == {4}

    broken = make(tmp_path / "broken", 5, 4, ("q_proj",))
    (broken / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RequestError, match="is damaged"):
        engine.add_lora(LoRARequest("broken", 5, str(broken)))
    assert llm.generate("x", params, use_tqdm=False, lora_request=one)[0].finished


def test_an_asynchronous_engine_loads_an_adapter_ahead(adapters):
    async def check() -> None:
        engine = AsyncLLM(EngineArgs(max_model_len=64, max_num_seqs=2, enable_lora=True))
        try:
            assert await engine.add_lora(adapters[0]) and not await engine.add_lora(adapters[0])
            assert await engine.list_loras() == {1} and await engine.remove_lora(1)
            with pytest.raises(
                RequestError, match=r"cannot pin the adapter 1: it is not loaded \(load it with"
            ):
                await engine.pin_lora(1)
        finally:
            engine.shutdown()

    asyncio.run(check())


def _with_adapter_name(tensors, given):
    return {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}, {}


def _with_model_weights(tensors, given):
    base = load_file(BUNDLED_MODEL / "model.safetensors")
    names = (TABLE, "lm_head.weight")  # these two weights are tied
    beside = {f"base_model.model.{name}": base[TABLE].clone() for name in names}
    linear = "model.layers.0.self_attn.q_proj"
    beside[f"base_model.model.{linear}.base_layer.weight"] = base[f"{linear}.weight"]
    return tensors | beside, {}


def _with_bias_key(tensors, given):
    return tensors, {"bias": "all"}


def _with_outer_names(tensors, given):
    """Name each layer as a different program does."""
    ways = [
        lambda name: f"_orig_mod.{name}",
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda name: name.replace("base_model.model.", "module.base_model.model."),
        lambda name: f"base_model.model.{name}",
        lambda name: name.replace("model.layers", "language_model.layers"),
        lambda name: name.replace("model.layers", "model.language_model.layers"),
        lambda name: name.removeprefix("base_model.model.model."),
        lambda name: name.replace(".self_attn.", "._fsdp_wrapped_module.self_attn."),
    ]
    modules = sorted({name.partition(".lora_")[0] for name in tensors})
    way_of = {module: ways[number % len(ways)] for number, module in enumerate(modules)}
    return {way_of[name.partition(".lora_")[0]](name): t for name, t in tensors.items()}, {}


TABLE = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "change", [_with_adapter_name, _with_model_weights, _with_bias_key, _with_outer_names]
)
def test_other_ways_to_save_an_adapter_mean_the_same(llm, adapters, tmp_path, change, caplog):
    caplog.set_level("INFO")
    folder = shutil.copytree(adapters[0].path, tmp_path / "adapter")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, settings = change(load_file(weights), json.loads(config.read_text()))
    save_file(tensors, weights)
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    same = LoRARequest(change.__name__, 30, str(folder))
    want, found, base = (
        llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=each)[0].outputs[0].token_ids
        for each in (adapters[0], same, None)
    )
    assert want == found != base
    said = [r.getMessage() for r in caplog.records if "weights of the base model" in r.message]
    assert len(said) == (change is _with_model_weights)
    llm.llm_engine.remove_lora(30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_beside_an_adapter_replace_those_of_the_model(dtype, adapters, tmp_path):
    llm = LLM(dtype=dtype, max_model_len=128, enable_lora=True)
    base = load_file(BUNDLED_MODEL / "model.safetensors")[TABLE]
    folder = shutil.copytree(adapters[0].path, tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    tensors, head = load_file(weights), "base_model.model.lm_head.weight"
    save_file(tensors | {head: base.clone()}, weights)
    same = LoRARequest("same", 30, str(folder))
    want, found = llm.generate(
        [PROMPT] * 2, GREEDY, use_tqdm=False, lora_request=[adapters[0], same]
    )
    assert seen(found)[0] == seen(want)[0]
    chosen = found.outputs[0].token_ids[0]
    base[chosen] = -base[chosen]
    save_file(tensors | {head: base}, weights)
    other = LoRARequest("x", 31, str(folder))
    (found,) = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=other)
    assert chosen not in found.outputs[0].token_ids
    bias = {"base_model.model.model.layers.0.self_attn.q_proj.bias": torch.ones(256)}
    save_file(bias, weights)
    config = json.loads((folder / "adapter_config.json").read_text()) | {"bias": "all"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="bias is 'all'; only 'none' is supported"):
        llm.generate(
            [PROMPT], GREEDY, use_tqdm=False, lora_request=LoRARequest("x", 31, str(folder))
        )
