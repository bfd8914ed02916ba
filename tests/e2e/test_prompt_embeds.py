"""Test prompts that are embeddings: how they share blocks, and that they do not change other
requests.

Outputs are compared with `transformers` in test_equal_to_transformers.py.
"""

import msgspec
import pytest
import torch

from tests.e2e.reference import TransformersReference, assert_all_greedy
from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, simulated_hpu
from tests.reach import executor_of
from tests.reference_model import load_reference
from vllm import LLM, SamplingParams
from vllm.engine.input.prompt_embeds import cache_keys
from vllm.env import ranks as env_ranks
from vllm.errors import ConfigError, RequestError
from vllm.transformers_utils.transformers_version import is_version_4

MAX_TOKENS = 20
LENGTHS = (1, 2, 16, 17, 33, 48, 65, 100)
"""33 and 65 leave one token for the last chunk of 32."""
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}
TINY_CACHE = {"num_gpu_blocks_override": 14, "enable_prefix_caching": False, **CHUNKS}
SCALED_IN_VERSION_4 = ("gemma", "gemma2")
"""Families whose embeddings transformers 4 scales even if a prompt contains them."""
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False}


def make_llm(folder, **settings) -> LLM:
    return LLM(
        **{
            "model": str(folder),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 160,
            "num_gpu_blocks_override": 100,
            "enable_prompt_embeds": True,
            **settings,
        }
    )


def table_of(folder, dtype=torch.float32) -> torch.Tensor:
    """Return the embeddings of tokens, [vocab, size]."""
    model = load_reference(folder, dtype)
    return model.get_input_embeddings().weight.detach()


def make_embeds(table: torch.Tensor, length: int, seed: int = 0) -> torch.Tensor:
    """Return embeddings that are close to embeddings of tokens, but equal to none of them."""
    generator = torch.Generator().manual_seed(seed + length)
    token_ids = torch.randint(16, len(table), (length,), generator=generator)
    noise = torch.randn(length, table.shape[1], generator=generator)
    return table[token_ids] + 0.3 * table.std() * noise


def as_prompt(embeds):
    return {"prompt_embeds": embeds} if isinstance(embeds, torch.Tensor) else embeds


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_the_modules_of_transformers_do_the_same(family, models):
    """In some families, the embedding module of transformers scales its output. Given embeddings
    must not be scaled.
    """
    if is_version_4() and family in SCALED_IN_VERSION_4:
        pytest.skip("this transformers scales them")
    table = table_of(models(family))
    embeds = [make_embeds(table, length) for length in (5, 33)]
    params = SamplingParams(**{**GREEDY, "max_tokens": 5})
    llm = make_llm(models(family), model_impl="transformers")
    found = llm.generate([as_prompt(each) for each in embeds], params, use_tqdm=False)
    assert_all_greedy(found, embeds, params, TransformersReference(models(family)))


def test_the_embeddings_of_tokens_give_what_the_tokens_give(models):
    """The fused decoder and step, which read token ids, give the same bits as the modules, which
    read embeddings.
    """
    table = table_of(models("bundled"), torch.bfloat16)
    tokens = [[(7 * i * i + length) % 4096 for i in range(length)] for length in LENGTHS]
    embeds = [as_prompt(table[token_ids]) for token_ids in tokens]
    llm = make_llm(models("bundled"), dtype="bfloat16", **CHUNKS)

    def run(prompts, **more):
        found = llm.generate(prompts, SamplingParams(**GREEDY, **more), use_tqdm=False)
        return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in found]

    assert run(embeds, logprobs=2) == run(tokens, logprobs=2)
    for each, token_ids in zip(embeds, tokens, strict=True):
        # without cached prefixes and other requests, the last chunk is a step that looks like a
        # decode
        llm.reset_prefix_cache()
        assert run([each]) == run([token_ids])


@pytest.mark.exhaustive  # exhaustive: test_parallel_hpu.py tests stages on cards
def test_stages_on_cards_plan_alike(models, monkeypatch):
    """Every stage runs the last prompt token of 33 as a prefill, even a stage that reads no
    embeddings.
    """
    table = table_of(models("llama"))
    prompts = [as_prompt(make_embeds(table, length)) for length in (1, 33, 65)]
    params = SamplingParams(**{**GREEDY, "max_tokens": 4})
    settings = SMALL_ENGINE | {"enable_chunked_prefill": True}

    def run(llm):
        found = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in found]

    want = run(make_llm(models("llama"), **settings))
    for name, value in env_ranks.rank_variables(0, 1).items():
        # An engine changes these variables; monkeypatch restores them afterwards.
        monkeypatch.setenv(name, value)
    env = FEW_BUCKETS | {"PT_HPU_LAZY_MODE": 1, "PT_HPU_ENABLE_LAZY_COLLECTIVES": True}
    with simulated_hpu(**env):
        llm = make_llm(models("llama"), device="hpu", pipeline_parallel_size=2, **settings)
        assert run(llm) == want
        executor_of(llm).shutdown()


def test_equal_embeddings_share_cached_blocks_and_others_never_do(models):
    table = table_of(models("llama"))
    llm = make_llm(models("llama"))
    first, second = make_embeds(table, 40), make_embeds(table, 40, seed=1)
    params = SamplingParams(**GREEDY)

    def run(prompt):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    one, two = run(as_prompt(first)), run(as_prompt(second))
    assert (one[1], two[1]) == (0, 0) and one[0] != two[0]
    # tokens with the id of the placeholder share no cached prefix with embeddings
    assert run({"prompt_token_ids": [0] * 40})[1] == 0
    assert run(as_prompt(first)) == (one[0], 32)
    assert run({**as_prompt(first), "cache_salt": "x"}) == (one[0], 0)
    assert run(as_prompt(torch.cat([first[:39], second[39:]])))[1] == 0


def test_prompts_share_the_blocks_of_the_text_before_their_embeddings(models):
    table = table_of(models("llama"))
    text = list(range(20, 60))

    def run(llm, embeds):
        """Return tokens and cache hits of a prompt whose text is followed by embeddings."""
        engine = llm.llm_engine
        params = SamplingParams(**GREEDY)
        _, request = engine.input_processor.process("a", as_prompt(embeds), params)
        (part,) = request.embeddings
        parts = (msgspec.structs.replace(part, start=len(text)),)
        engine.engine_core.add_request(
            msgspec.structs.replace(
                request,
                prompt_token_ids=text + request.prompt_token_ids,
                embeddings=parts,
                cache_extra_keys=cache_keys(parts),
                max_total_tokens=request.max_total_tokens + len(text),
            )
        )
        token_ids, num_cached = [], []
        while engine.engine_core.has_unfinished_requests():
            output = engine.engine_core.step()
            token_ids += output.token_ids
            num_cached += output.num_cached_tokens.values()
        return token_ids, num_cached

    first, second = make_embeds(table, 20), make_embeds(table, 20, seed=1)
    fresh = [run(make_llm(models("llama")), embeds) for embeds in (first, second)]
    assert fresh[0][0] != fresh[1][0]
    llm = make_llm(models("llama"))
    assert run(llm, first) == (fresh[0][0], [0])
    assert run(llm, second) == (fresh[1][0], [32])
    assert run(llm, first) == (fresh[0][0], [48])


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_extreme_embeddings_harm_no_other_request(family, models):
    """Their keys and values are never read by a later request that gets the blocks."""
    llm = make_llm(models(family), dtype="bfloat16", **TINY_CACHE)
    tokens = [list(range(20, 20 + length)) for length in (1, 15, 33, 40)]
    params = SamplingParams(**GREEDY)

    def run(prompts):
        return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]

    alone = [sample.token_ids for sample in run(tokens)]
    extreme = [as_prompt(torch.full((n, 64), 3e38) * (-1) ** torch.arange(64)) for n in (7, 60)]
    run(extreme)
    both = run([*tokens, *extreme])
    assert [sample.token_ids for sample in both[:4]] == alone
    # OPT adds to its residual stream before the first norm, so extreme values overflow
    if family == "opt":
        assert [sample.finish_reason for sample in both[4:]] == ["error", "error"]
    assert [sample.token_ids for sample in run(tokens)] == alone


def test_penalties_and_processors_know_no_token_of_such_a_prompt(models):
    table = table_of(models("llama"))
    llm = make_llm(models("llama"))
    seen = []

    def look(prompt_ids, output_ids, logits):
        seen.append((list(prompt_ids), len(output_ids)))
        assert logits[0] == logits[0].clamp(max=99)
        logits[0] = 100.0  # id 0 is the placeholder: a penalty on it would change the next token
        return logits

    params = SamplingParams(
        **{**GREEDY, "max_tokens": 2}, repetition_penalty=5.0, logits_processors=[look]
    )
    (output,) = llm.generate(as_prompt(make_embeds(table, 20)), params, use_tqdm=False)
    assert seen == [([], 0), ([], 1)]
    assert output.outputs[0].token_ids[0] == 0


def test_beam_search_and_pooling_models_refuse_them(models):
    llm = make_llm(models("llama"))
    from vllm.sampling_params import BeamSearchParams

    with pytest.raises(RequestError, match="a pooling model does not accept embeddings"):
        llm.beam_search(
            [as_prompt(torch.zeros(3, 64))], BeamSearchParams(beam_width=2, max_tokens=2)
        )
    with pytest.raises(ConfigError, match="enable_prompt_embeds=True needs a model that generates"):
        make_llm(models("llama"), task="embed")
