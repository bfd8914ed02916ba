"""Test every family against `transformers`: greedy tokens, and log-probabilities of prompts and
outputs.

The tests run on the CPU and in each mode of a simulated card, with requests in different batches. A
line of the table is a family, a mode and a setting. An engine runs requests of many kinds, and one
forward pass of `transformers` over prompt and output checks each of them. A simulated card is
strict: in a warmed forward pass nothing compiles, and the host waits for nothing.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.e2e.reference import (
    LIMIT,
    Prompt,
    TransformersReference,
    assert_all_greedy,
    random_prompts,
)
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import core_of, executor_of, scheduler_of
from tests.tiny_models import (
    FAMILIES,
    MORE_FAMILIES,
    ONE_STAGE,
    RARE_FAMILIES,
    STATE_FAMILIES,
    make_tiny_model,
)
from vllm import LLM, SamplingParams
from vllm.attention.backends.prompt_masks import SlicedMask
from vllm.engine import engine_core
from vllm.engine.async_scheduling import AsyncSchedulingPolicy
from vllm.executor import uniproc
from vllm.outputs import RequestOutput
from vllm.transformers_utils.transformers_version import is_version_4

MAX_MODEL_LEN = 128
MAX_TOKENS = 8
LONGEST = 100
MIXED = random_prompts(10, LONGEST, vocab_size=4096)
PROMPTS = [*MIXED, *(max(MIXED, key=len)[start:][:60] for start in range(1, 5))]
"""Lengths around the size of a block; the last four need another block soon after their prompt, so
that a cache with few blocks has to preempt one."""
EMBEDDED = (1, 17, 33, 65, 97)
"""Lengths of prompts that are embeddings. Of 33 and 65 a chunk of 32 leaves one token, which must
not run as a decode: a decode reads token ids."""
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False}
KINDS = (
    SamplingParams(**GREEDY),
    SamplingParams(**GREEDY, logprobs=3),
    SamplingParams(**GREEDY, logprobs=0, prompt_logprobs=2),
)
"""Requests are of these kinds alternately. The last kind reads no cached prefix."""
FEW_TOKENS = SamplingParams(**GREEDY | {"max_tokens": 4})

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 200,
}
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}
WHOLE_PROMPTS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}
FEWEST_BLOCKS = MAX_MODEL_LEN // 16
TINY_CACHE = {"num_gpu_blocks_override": FEWEST_BLOCKS + 2}
TINY_CACHE_OF_64 = {"block_size": 64, "num_gpu_blocks_override": 4}
"""Three blocks and the null block: two of the last prompts cannot both get their second block."""
NO_PREFIXES = {"enable_prefix_caching": False}
EMBEDDINGS = {"enable_prompt_embeds": True}
PROMPT_SIZES = [f"VLLM_PROMPT_SEQ_BUCKET_{end}" for end in ("MIN", "STEP", "MAX")]
SLICES = {
    "VLLM_HPU_FSDPA_SLICE_ENABLED": 1,
    "VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD": 32,
    "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE": 12,
    "VLLM_HPU_SIM_BRIDGE": "1.21",
}
"""Prompts of more than 32 tokens with their context attend in slices of 12 queries; the kernel of
this release knows no windows, so that prompts without context have masks too."""


@dataclass(frozen=True)
class Setting:
    """The settings with which an engine runs.

    Attributes:
        arguments: engine arguments that differ from `DEFAULTS`.
        variables: environment variables, on a card.
        is_restless: requests arrive while others run, some are aborted, and the next step is always
            scheduled before the result of the last one.
        has_logprobs: requests on a card ask for log-probabilities, for which the warm-up compiles
            more. On the CPU they always ask for them.
    """

    arguments: dict[str, Any]
    variables: dict[str, Any] = field(default_factory=dict)
    is_restless: bool = False
    has_logprobs: bool = False


ALL_AT_ONCE = "chunks, preemption, prefix cache, embeddings, aborts"
PLAIN = "whole prompts"
CARD = "chunks, preemption, prefix cache"
CONTIGUOUS = "contiguous, chunks, preemption, prefix cache"
LAYERS_APART = "chunks, layers compiled apart"
TWO_BUCKETS = "two buckets, preemption"
LARGE_BLOCKS = "chunks, preemption, blocks of 64"
PAIRS = "chunks, preemption, prompts in pairs"
TWO_PROMPTS = {"VLLM_PROMPT_BS_BUCKET_MIN": 2, "VLLM_PROMPT_BS_BUCKET_MAX": 2}
LOGPROBS = "chunks, preemption, prefix cache, logprobs"

SETTINGS = {
    PLAIN: Setting(WHOLE_PROMPTS | {"max_num_seqs": 32}),
    ALL_AT_ONCE: Setting(CHUNKS | TINY_CACHE | EMBEDDINGS, is_restless=True),
    "bfloat16": Setting(CHUNKS | EMBEDDINGS | {"dtype": "bfloat16"}),
    "one sequence": Setting(WHOLE_PROMPTS | {"max_num_seqs": 1}),
    "one sequence, chunks, blocks of 128": Setting(CHUNKS | {"max_num_seqs": 1, "block_size": 128}),
    "chunks, no prefix cache": Setting(CHUNKS | NO_PREFIXES),
    "blocks of 128, no prefix cache": Setting(WHOLE_PROMPTS | NO_PREFIXES | {"block_size": 128}),
    "whole prompts, preemption": Setting(WHOLE_PROMPTS | TINY_CACHE),
    "chunks, preemption, no prefix cache": Setting(CHUNKS | TINY_CACHE | NO_PREFIXES),
    CARD: Setting(CHUNKS | TINY_CACHE),
    LOGPROBS: Setting(CHUNKS | TINY_CACHE, has_logprobs=True),
    "chunks, embeddings": Setting(CHUNKS | EMBEDDINGS),
    "contiguous, no prefix cache": Setting(
        WHOLE_PROMPTS | NO_PREFIXES, {"VLLM_CONTIGUOUS_PA": True}
    ),
    CONTIGUOUS: Setting(CHUNKS | TINY_CACHE, {"VLLM_CONTIGUOUS_PA": True}),
    "exponential buckets": Setting(CHUNKS, {"VLLM_EXPONENTIAL_BUCKETING": True}),
    "blocks of 128": Setting(WHOLE_PROMPTS | {"block_size": 128}),
    "merged prompts": Setting(CHUNKS, {"VLLM_MERGED_PREFILL": True}),
    "merged prompts, embeddings": Setting(CHUNKS | EMBEDDINGS, {"VLLM_MERGED_PREFILL": True}),
    "merged prompts, no prefix cache": Setting(
        WHOLE_PROMPTS | NO_PREFIXES,
        {"VLLM_MERGED_PREFILL": True, "VLLM_PROMPT_SEQ_BUCKET_MAX": 256},
    ),
    "other softmax": Setting(CHUNKS, {"VLLM_PA_SOFTMAX_IMPL": "wsum_head_amax"}),
    "plain attention": Setting(CHUNKS, {"VLLM_PROMPT_USE_FUSEDSDPA": False}),
    "slices": Setting(CHUNKS | {"max_num_batched_tokens": 48, "block_size": 64}, SLICES),
    "release 1.19": Setting(CHUNKS, {"VLLM_HPU_SIM_BRIDGE": "1.19"}),
    "no late kernels": Setting(
        CHUNKS, {"VLLM_HPU_SIM_ABSENT": "FusedSDPA,FusedRMSNorm,apply_rotary_pos_emb,metrics"}
    ),
    "gaudi3": Setting(CHUNKS, {"card": "gaudi3"}),
    "gaudi3, fused softmax of blocks": Setting(
        CHUNKS, {"card": "gaudi3", "VLLM_FUSED_BLOCK_SOFTMAX": 1}
    ),
    LAYERS_APART: Setting(CHUNKS | {"block_size": 64}, {"VLLM_REGIONAL_COMPILATION": True}),
    TWO_BUCKETS: Setting(
        WHOLE_PROMPTS | NO_PREFIXES | {"num_gpu_blocks_override": 14},
        dict.fromkeys(PROMPT_SIZES, 128),
    ),
    LARGE_BLOCKS: Setting(CHUNKS | TINY_CACHE_OF_64, has_logprobs=True),
    "contiguous, chunks, preemption, blocks of 64": Setting(
        CHUNKS | TINY_CACHE_OF_64, {"VLLM_CONTIGUOUS_PA": True}
    ),
    "merged prompts, blocks of 64": Setting(
        CHUNKS | {"block_size": 64}, {"VLLM_MERGED_PREFILL": True}
    ),
    PAIRS: Setting(CHUNKS | TINY_CACHE, TWO_PROMPTS, has_logprobs=True),
}

BUCKETS = FEW_BUCKETS | {
    "VLLM_PROMPT_BS_BUCKET_MAX": 2,
    "VLLM_PROMPT_SEQ_BUCKET_MIN": 64,
    "VLLM_PROMPT_SEQ_BUCKET_STEP": 64,
    "VLLM_PROMPT_SEQ_BUCKET_MAX": 64,
    "VLLM_DECODE_BS_BUCKET_MIN": 8,
}
"""Prompts beyond 64 tokens are launched in pieces."""
FEWER_TO_COMPILE = {
    "VLLM_PROMPT_BS_BUCKET_MAX": 1,
    "VLLM_DECODE_BLOCK_BUCKET_MIN": 64,
    "VLLM_DECODE_BLOCK_BUCKET_STEP": 64,
    "VLLM_REGIONAL_COMPILATION": False,
}
"""For torch.compile, which takes a second for each: the model as a whole, two decode buckets."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, GELU": ("llama", {"hidden_act": "gelu"}),
    "llama, GELU by tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
}
"""Families with other values in their config."""
PUBLISHED_NAMES = {"kimi_k2": "deepseek_v3"}
"""Model types of config.json that name the models of another family."""
WITHOUT_CACHE = ("mamba", "falcon_mamba", "mamba2")
"""Families without a KV cache: nothing is preempted."""
GROUPS = {
    "qwen2": 2,
    "gemma2": 2,
    "gemma3": 7,
    "olmo3": 4,
    "cohere2": 5,
    "gpt_oss": 2,
    "dots1": 2,
    "exaone4": 4,
    "gemma3n": 2,
    "cwm": 2,
    "vaultgemma": 2,
}
"""Families with windows in some layers. On the CPU each group of layers has blocks of its own."""
SCALED_IN_VERSION_4 = ("gemma", "gemma2")
"""Families of which transformers 4 scales the embeddings of a prompt."""
LIMITS = {"gemma3": 2e-4, "zamba2": 2e-4}
"""Limits of the difference of a log-probability. One value differs by 1.07e-4 with the seven layers
of Gemma 3, and with Zamba 2 by 1.24e-4 on a processor with AVX2."""
OTHER_ROTATIONS = ("llama3", "llama_linear", "llama_yarn")
SAME_LAYERS = (*OTHER_ROTATIONS, "bundled")
"""Llamas with other tables of rotations or other sizes, no concern of how requests are batched."""
SIBLINGS = (
    *("deepseek_v2_lite", "falcon_7b", "phi3_short", "gpt_bigcode_multi_head"),
    *("gpt_neox_sequential", "stablelm_head_norms", "stablelm_parallel", "cohere_head_norms"),
    *("granite_hybrid_dense", "falcon_h1_norms", "lfm2_moe", "qwen3_5_moe", "nemotron_h_latent"),
    "granite_hybrid",
    *(
        "qwen3",
        "phi",
        "phi3",
        "stablelm",
        "starcoder2",
        "cohere",
        "glm",
        "glm4",
        "gptj",
        "gpt_neox",
    ),
    *("olmo", "olmo2", "nemotron", "granite_code", "falcon_40b", "mpt", "gemma"),
    *("mixtral", "qwen3_moe", "olmoe", "granite_moe", "deepseek_v2"),
)
"""Differ from another family here within a layer only, which tests/model_executor compares."""

EVERY_FAMILY = (*FAMILIES, *MORE_FAMILIES, *STATE_FAMILIES, "bundled")
GRAPHS, COMPILED = "HPU graphs", "torch.compile"

ON_CPU = {
    *(
        (family, "CPU", ALL_AT_ONCE)
        for family in (*EVERY_FAMILY, *VARIANTS)
        if family not in (*RARE_FAMILIES, *SIBLINGS, *OTHER_ROTATIONS)
    ),
    *((family, "CPU", "bfloat16") for family in ("bundled", "gemma2", "opt", "phi")),
    *(
        ("llama", "CPU", setting)
        for setting in (
            PLAIN,
            "one sequence",
            "one sequence, chunks, blocks of 128",
            "chunks, no prefix cache",
            "blocks of 128, no prefix cache",
            "whole prompts, preemption",
            "chunks, preemption, no prefix cache",
        )
    ),
    *(
        (family, "CPU", "chunks, preemption, no prefix cache")
        for family in ("mistral", "qwen2", "opt_post_norm")
    ),
}
"""Everything at once for most families; for a llama what that leaves out; windows without cached
prefixes, as these keep more blocks."""

ON_A_CARD = {
    *((family, GRAPHS, LOGPROBS) for family in ("llama", "deepseek_v3")),
    # These families have: ALiBi; learned positions, biases and one key/value head; LongRoPE.
    *((family, GRAPHS, CARD) for family in ("falcon_rw", "gpt_bigcode", "phi3_short")),
    # Llama 4 has experts and attention in chunks; later layers of Gemma 4 read the keys and values
    # of earlier layers.
    *((family, GRAPHS, CARD) for family in ("llama4", "gemma4")),
    *((family, GRAPHS, PAIRS) for family in ("bamba", "mamba")),
    # Settings that did not run with all families above, and that may change the result.
    *(
        ("llama", GRAPHS, setting)
        for setting in (
            PLAIN,
            "blocks of 128",
            "merged prompts",
            "other softmax",
            "plain attention",
            "chunks, embeddings",
        )
    ),
    ("opt_post_norm", GRAPHS, "chunks, embeddings"),
    # An operator that has a recipe in lazy mode has one in eager mode too.
    ("llama", "lazy", CONTIGUOUS),
    # Each number of blocks that the context of a prompt may have is a graph to compile: 1, 2, 4 and
    # 8 blocks of 16 tokens, 1 and 2 blocks of 64 tokens.
    ("mistral", COMPILED, LAYERS_APART),
    ("gemma2", GRAPHS, "slices"),
    # Simulated builds of the bridge: a build without the kernels that were added late, a build
    # without kernels that every build should have, and a build with kernels for the softmax of
    # blocks. These families have sinks and experts, windows in most layers with norms of heads, and
    # layers without rotary embedding; the family with slices above has soft caps.
    ("gpt_oss", GRAPHS, "release 1.19"),
    ("gemma3", GRAPHS, "no late kernels"),
    ("cohere2", GRAPHS, "gaudi3, fused softmax of blocks"),
}

EXHAUSTIVE = {
    *((family, "CPU", ALL_AT_ONCE) for family in (*RARE_FAMILIES, *SIBLINGS)),
    *((family, "CPU", ALL_AT_ONCE) for family in (*OTHER_ROTATIONS, *PUBLISHED_NAMES)),
    *((family, GRAPHS, LOGPROBS) for family in (*FAMILIES, *MORE_FAMILIES)),
    *((family, GRAPHS, PAIRS) for family in STATE_FAMILIES),
    *(
        (family, mode, PAIRS)
        for family in ("granite_hybrid", "mamba")
        for mode in ("lazy", "eager")
    ),
    *((family, "CPU", PLAIN) for family in FAMILIES if family not in SAME_LAYERS),
    *((family, GRAPHS, CARD) for family in (*FAMILIES, "bundled", "cohere2", "gemma2", "gpt_oss")),
    *(("llama", mode, CONTIGUOUS) for mode in ("eager", GRAPHS)),
    ("llama", GRAPHS, "exponential buckets"),
    *(("opt", mode, CARD) for mode in ("lazy", "eager")),
    *((family, GRAPHS, "slices") for family in ("falcon_rw", "gpt_oss", "llama4")),
    *(("llama", mode, LOGPROBS) for mode in ("lazy", "eager")),
    *(
        ("llama", GRAPHS, setting)
        for setting in (
            "contiguous, no prefix cache",
            "chunks, preemption, no prefix cache",
            "merged prompts, embeddings",
            "merged prompts, no prefix cache",
        )
    ),
    # Each kind of forward pass, in the modes without graphs.
    *(
        ("llama", mode, setting)
        for mode in ("lazy", "eager")
        for setting in (PLAIN, "merged prompts", "chunks, embeddings")
    ),
    ("gemma3", GRAPHS, "chunks, embeddings"),
    ("gemma2", GRAPHS, "gaudi3"),
    *((family, COMPILED, LARGE_BLOCKS) for family in (*FAMILIES, *MORE_FAMILIES)),
    *((family, COMPILED, TWO_BUCKETS) for family in ("llama", "opt")),
    ("mistral", COMPILED, "contiguous, chunks, preemption, blocks of 64"),
    ("llama", COMPILED, "chunks, embeddings"),
    ("mistral", COMPILED, "merged prompts, blocks of 64"),
    ("falcon_rw", COMPILED, "slices"),
    *((family, COMPILED, PAIRS) for family in STATE_FAMILIES),
}
"""The other families on a card, settings that compile for seconds, and parts of what `ON_CPU` and
`ON_A_CARD` run at once: whole prompts, and families whose other settings are there."""

TABLE = [
    *sorted(ON_CPU),
    *sorted(ON_A_CARD),
    *(
        pytest.param(*line, marks=pytest.mark.exhaustive)
        for line in sorted(EXHAUSTIVE - ON_CPU - ON_A_CARD)
    ),
]


@pytest.fixture(scope="module")
def folder_of(models, tmp_path_factory):
    """Return the folder of a family or of one of its variants, which is made once."""

    @cache
    def folder(name: str) -> Path:
        if name in VARIANTS:
            family, values = VARIANTS[name]
            return make_tiny_model(family, tmp_path_factory.mktemp("variant"), **values)
        if name in PUBLISHED_NAMES:
            original, copy = models(PUBLISHED_NAMES[name]), tmp_path_factory.mktemp(name)
            config = json.loads((original / "config.json").read_text()) | {"model_type": name}
            (copy / "config.json").write_text(json.dumps(config))
            (copy / "model.safetensors").symlink_to(original / "model.safetensors")
            return copy
        return models(name)

    return folder


def make_embeddings(table: Tensor) -> list[Tensor]:
    """Return prompts of embeddings, close to embeddings of tokens.

    Args:
        table: [vocab, size] embeddings of tokens.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in EMBEDDED:
        token_ids = torch.randint(16, len(table), (length,), generator=generator)
        noise = torch.randn(length, table.shape[1], generator=generator)
        prompts.append(table[token_ids] + 0.3 * table.std() * noise)
    return prompts


def as_request(prompt: Prompt) -> dict[str, Any]:
    return {"prompt_embeds" if isinstance(prompt, Tensor) else "prompt_token_ids": prompt}


def run_restless(
    llm: LLM, prompts: list[Prompt], params: list[SamplingParams]
) -> list[RequestOutput]:
    """Add requests while others run. Copies of some requests are added as well, most of which are
    aborted.
    """
    engine, rng = llm.llm_engine, random.Random(1)
    todo, finished, copies = list(range(len(prompts))), {}, []
    while todo or engine.has_unfinished_requests():
        for _ in range(min(len(todo), rng.randint(0, 5))):
            index = todo.pop()
            engine.add_request(str(index), as_request(prompts[index]), params[index])
            if index % 4 == 3:
                copies.append(f"copy of {index}")
                engine.add_request(copies[-1], as_request(prompts[index]), params[index])
        if copies and rng.random() < 0.3:
            engine.abort_request(copies.pop())
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return [finished[str(index)] for index in range(len(prompts))]


@lru_cache(maxsize=1)
def reference_of(folder: Path) -> TransformersReference:
    """Return the reference of a model, the same for one setting after another."""
    return TransformersReference(folder)


def run_and_compare(
    llm: LLM,
    setting: Setting,
    kinds: Sequence[SamplingParams],
    reference: TransformersReference,
    limit: float,
) -> None:
    """Run all requests, then some of them one by one, and compare the outputs with the reference.

    Args:
        llm: the engine.
        setting: setting of the engine.
        kinds: kinds of requests with token ids, used alternately.
        reference: reference for the model of the engine.
        limit: largest difference of two log-probabilities.
    """
    has_embeddings = llm.llm_engine.vllm_config.model.enable_prompt_embeds
    embedded = make_embeddings(reference.table) if has_embeddings else []
    prompts: list[Prompt] = [*PROMPTS, *embedded]
    params = [kinds[index % len(kinds)] for index in range(len(PROMPTS))]
    params += [kinds[index % len(kinds[:2])] for index in range(len(embedded))]
    if setting.is_restless:
        outputs = run_restless(llm, prompts, params)
    else:
        requests = [as_request(prompt) for prompt in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)
    assert_all_greedy(outputs, prompts, params, reference, limit)
    longest = max(PROMPTS, key=len)
    num_cached = []
    for prompt in (longest, longest, *embedded[2:4]):
        alone = llm.generate(as_request(prompt), FEW_TOKENS, use_tqdm=False)
        assert_all_greedy(alone, [prompt], FEW_TOKENS, reference, limit)
        num_cached.append(alone[0].num_cached_tokens)
    config = llm.llm_engine.vllm_config.cache
    keeps_some = config.enable_prefix_caching and config.block_size < LONGEST
    assert (num_cached[1] > 0) == keeps_some


@torch.inference_mode()
def limit_in_bfloat16(folder: Path, reference: TransformersReference) -> float:
    """Return twice the largest error that transformers has in bfloat16."""
    rounded = TransformersReference(folder, torch.bfloat16)
    logprobs = [each(max(PROMPTS, key=len), []).log_softmax(-1) for each in (reference, rounded)]
    return 2 * float((logprobs[0] - logprobs[1]).abs().max())


@pytest.mark.parametrize(("family", "mode", "setting"), TABLE)
def test_outputs_are_those_of_transformers(family, mode, setting, folder_of, monkeypatch):
    how, folder, sliced, attend = SETTINGS[setting], folder_of(family), [], SlicedMask.attend
    arguments = DEFAULTS | how.arguments
    if family in ONE_STAGE or (is_version_4() and family in SCALED_IN_VERSION_4):
        arguments["enable_prompt_embeds"] = False
    reference = reference_of(folder_of(PUBLISHED_NAMES.get(family, family)))
    limit = LIMITS.get(family, LIMIT)
    if arguments["dtype"] == "bfloat16":
        limit = limit_in_bfloat16(folder, reference)
    if mode == "CPU":
        num_groups = GROUPS.get(family, 1)
        arguments["num_gpu_blocks_override"] += (num_groups - 1) * FEWEST_BLOCKS
        if how.is_restless:
            monkeypatch.setattr(
                engine_core,
                "AsyncSchedulingPolicy",
                lambda allowed: AsyncSchedulingPolicy(allowed, 0),
            )
            monkeypatch.setattr(uniproc, "has_core_to_spare", lambda: True)
        llm = LLM(str(folder), **arguments)
        run_and_compare(llm, how, KINDS, reference, limit)
        assert executor_of(llm).is_asynchronous or not how.is_restless
    else:
        monkeypatch.setattr(
            SlicedMask, "attend", lambda self, *given: sliced.append(1) or attend(self, *given)
        )
        is_lazy, is_eager = MODES[mode]
        fewer = FEWER_TO_COMPILE if mode == COMPILED else {}
        variables = BUCKETS | fewer | how.variables
        kinds, warmup = (KINDS, "all") if how.has_logprobs else (KINDS[:1], "basic")
        with simulated_hpu(
            has_profiling_run=False, PT_HPU_LAZY_MODE=is_lazy, **variables
        ) as bridge:
            unused = bridge.counters()
            llm = LLM(str(folder), enforce_eager=is_eager, sampling_warmup=warmup, **arguments)
            before = bridge.counters()
            run_and_compare(llm, how, kinds, reference, limit)
            after = bridge.counters()
        assert after.compilations == before.compilations
        assert after.cpu_fallbacks == unused.cpu_fallbacks
        assert after.cache_copies == unused.cache_copies
        assert (mode == GRAPHS) == (after.graph_replays > before.graph_replays)
        # A compiled forward pass does not call the Python function that it was traced from, so no
        # slices are counted.
        assert mode == COMPILED or bool(sliced) == (setting == "slices")
    scheduler = scheduler_of(llm)
    windows = core_of(llm).executor.cache_windows
    # test_windows.py tests preemption with windows.
    if windows == (None,) and family not in WITHOUT_CACHE:
        assert (scheduler.num_preemptions > 0) == ("preemption" in setting)
    if family in STATE_FAMILIES and mode == "CPU":
        assert scheduler.stats().num_prefix_hits
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable_blocks
    assert len(windows) == (GROUPS.get(family, 1) if mode == "CPU" else 1)
