"""Test prompts that are embeddings: accepted and refused values, and the requests that they
become.
"""

import asyncio
import base64
import io

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.engine.fakes import make_config
from tests.engine.tokenizers_for_tests import byte_level
from tests.fake_core import FakeCoreClient, FakeEngineCore, fake_clients
from tests.loops import loop_over
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.process.wire import AddRequests, decode_to_core, encode
from vllm.errors import RequestError
from vllm.messages import TokenEmbeddings
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

SIZE = make_config().model.resolved_arch.hidden_size
EMBEDS = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(0))


def make_processor(**model) -> InputProcessor:
    return InputProcessor(make_config(enable_prompt_embeds=True, **model), byte_level(), {})


def process(embeds, processor=None, **params):
    prompt = {"prompt_embeds": embeds}
    return (processor or make_processor()).process("r", prompt, SamplingParams(**params))[1]


def to_base64(tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "form",
    [
        *(EMBEDS, EMBEDS.numpy(), EMBEDS[None], EMBEDS.clone().requires_grad_(), EMBEDS.t().t()),
        *(
            to_base64(EMBEDS),
            to_base64(EMBEDS).rstrip("=").replace("A", "A\n"),
            base64.b64encode(safetensors.torch.save({"x": EMBEDS})).decode(),
        ),
    ],
    ids=lambda form: type(form).__name__,
)
def test_embeddings_of_every_form_become_the_same_request(form):
    request = process(form)
    assert request.prompt_token_ids == [0] * 5 and request.known_prompt_token_ids is None
    (embeddings,) = request.embeddings
    assert (embeddings.start, embeddings.end, embeddings.shape) == (0, 5, (5, SIZE))
    found = torch.frombuffer(bytearray(embeddings.data), dtype=torch.float32).view(5, SIZE)
    assert torch.equal(found, EMBEDS)
    assert request.cache_extra_keys == process(EMBEDS).cache_extra_keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_of_the_user_is_kept_for_the_runner(dtype):
    (embeddings,) = process(EMBEDS.to(dtype)).embeddings
    assert embeddings.dtype == str(dtype).removeprefix("torch.")
    found = torch.frombuffer(bytearray(embeddings.data), dtype=dtype).view(5, SIZE)
    assert torch.equal(found, EMBEDS.to(dtype))


def test_other_embeddings_never_share_the_prefix_cache():
    changed = EMBEDS.clone()
    changed[0, 0] += 1e-3
    forms = [EMBEDS, changed, EMBEDS[:4], EMBEDS.half(), EMBEDS.double(), EMBEDS.flip(0)]
    keys = {process(form).cache_extra_keys for form in forms}
    assert len(keys) == len(forms) and () not in keys


@loop_over(
    "embeds, message",
    [
        (EMBEDS[0], rf"got \[{SIZE}\]"),
        (EMBEDS[:, :-1], rf"shape \[tokens, {SIZE}\], .*, got \[5, {SIZE - 1}\]"),
        (EMBEDS.repeat(2, 1, 1), r"got \[2, 5"),
        (EMBEDS[:0], r"got \[0, "),
        (EMBEDS.expand(20, 5, SIZE).reshape(100, SIZE), "prompt has 100 tokens"),
        (to_base64(EMBEDS.repeat(13, 1)), "prompt has 65 tokens"),
        (EMBEDS.long(), "has dtype int64; accepted: "),
        (EMBEDS.numpy().astype(np.int8), "has dtype int8; accepted: "),
        (EMBEDS.to_sparse(), "must be a dense tensor"),
        (EMBEDS.to("meta"), "the device 'meta'"),
        (EMBEDS.index_fill(0, torch.tensor([3]), torch.nan), "NaN, infinite"),
        (EMBEDS.bfloat16().index_fill(0, torch.tensor([3]), torch.inf), "NaN, infinite"),
        (EMBEDS.half().index_fill(0, torch.tensor([3]), -torch.inf), "NaN, infinite"),
        (EMBEDS.double() * 1e300, "NaN, infinite, or too large"),
        (to_base64(EMBEDS.long()), "the file holds a tensor of the unsupported dtype int64; it"),
        ("no base64!", "is not base64"),
        ("é", "is not base64"),
        (b"\xff\xff", "is not base64: it has a character that is not of the standard"),
        ("AA__", "is not base64: it has URL-safe base64"),
        ("AAAA", "the file is neither a torch.save"),
        ("A" * 10**6, "characters long, more than any prompt"),
        (EMBEDS.tolist(), "must be a tensor or an array, got list"),
        (5, "must be a tensor or an array, got int"),
    ],
)
def test_what_is_no_embedding_of_the_model_is_refused(embeds, message):
    with pytest.raises(RequestError, match=message):
        process(embeds)


def test_a_float16_model_takes_no_number_above_its_range():
    assert process(EMBEDS + 7e4)
    with pytest.raises(RequestError, match="too large for the dtype of the model"):
        process(EMBEDS + 7e4, make_processor(dtype="float16"))


def test_an_engine_without_the_flag_says_which_one():
    for embeds in (EMBEDS, to_base64(EMBEDS)):
        with pytest.raises(RequestError, match="--enable-prompt-embeds") as caught:
            process(embeds, InputProcessor(make_config(), byte_level(), {}))
        assert caught.value.param == "prompt_embeds"


@pytest.mark.parametrize("name", ["prompt_logprobs", "truncate_prompt_tokens"])
def test_what_needs_the_tokens_of_the_prompt_is_refused_by_name(name):
    with pytest.raises(RequestError, match=f"{name} needs the tokens of the prompt") as caught:
        process(EMBEDS, **{name: 1})
    assert caught.value.param == name


def test_embeddings_are_a_whole_prompt_and_for_generation_only():
    processor = make_processor()
    for more in ({"prompt": "a"}, {"prompt_token_ids": [5]}, {"other": 1}):
        with pytest.raises(RequestError, match="the embeddings are the whole prompt"):
            processor.process("r", {"prompt_embeds": EMBEDS, **more}, SamplingParams())
    salted = {"prompt_embeds": EMBEDS, "cache_salt": "x"}
    assert processor.process("r", salted, SamplingParams())[1].cache_salt == "x"
    with pytest.raises(RequestError, match="a pooling model does not accept embeddings"):
        processor.prompts.tokenize({"prompt_embeds": EMBEDS})
    with pytest.raises(RequestError):
        processor.pooling.process("r", {"prompt_embeds": EMBEDS}, PoolingParams())


def test_samples_of_a_prompt_send_its_embeddings_once(monkeypatch):
    embeds = EMBEDS.repeat(10, 1)
    sizes = []

    class Client(FakeCoreClient):
        def send(self, message):
            if isinstance(message, AddRequests):
                sizes.append(len(encode(message)))
            super().send(message)

    client = Client(FakeEngineCore(lambda request: [10, 11]))

    async def main():
        config = make_config(enable_prompt_embeds=True)
        engine = AsyncLLM(config=config)
        try:
            params = SamplingParams(max_tokens=2, n=8)
            found = [o async for o in engine.generate({"prompt_embeds": embeds}, params, "r")]
            assert found[-1].finished and found[-1].prompt_token_ids is None
        finally:
            engine.shutdown()

    with fake_clients(client):
        asyncio.run(main())
    assert len(client.core.added) == 8
    data = embeds.numpy().tobytes()
    assert {r.embeddings[0].data for r in client.core.added.values()} == {data}
    assert len(data) < sizes[0] < 1.2 * len(data)


def test_embeddings_cross_the_socket_as_they_are():
    request = process(EMBEDS.bfloat16())
    (arrived,) = decode_to_core(encode(AddRequests(requests=[request]))).requests
    assert arrived == request and type(arrived.embeddings[0]) is TokenEmbeddings
