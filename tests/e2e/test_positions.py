"""Test that requests with their own positions give the output of `transformers` for the same
`position_ids`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl import modeling_qwen2_vl

from tests.e2e.test_pipeline_parallel import in_stages
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import (
    executor_of,
    leave_weights_unpacked,
    program_of,
    runner_of,
    scheduler_of,
    stats_of,
)
from tests.reference_model import load_reference
from tests.speculators import make_speculator, make_target
from tests.tiny_models import VOCAB_SIZE, make_tiny_model, spelled
from vllm import LLM, SamplingParams
from vllm.engine.input.token_positions import with_positions
from vllm.errors import RequestError
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep
from vllm.worker.cpu import speculator_runner
from vllm.worker.cpu.speculator_runner import SpeculatorRunner

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
SECTIONS = {1: [8], 3: [2, 3, 3]}
"""Pairs of a head that rotate by each of so many positions."""
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 60,
}
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 24}
TINY_CACHE = {"num_gpu_blocks_override": 10, **CHUNKS}


@dataclass(frozen=True)
class Given:
    """A request.

    Attributes:
        prompt: token ids.
        positions: [P, n] positions of the prompt tokens; None: their indices.
        offset: offset of the positions after the prompt; None: they follow the largest position.
    """

    prompt: list[int]
    positions: np.ndarray | None = None
    offset: int | None = None


def layout(num_positions: int, *parts: int | tuple[int, int]) -> np.ndarray:
    """Return the positions of texts with these numbers of tokens, and of images with these rows and
    columns.
    """
    columns: list[tuple[int, int, int]] = []
    for part in parts:
        first = max((max(column) for column in columns), default=-1) + 1
        if isinstance(part, int):
            columns += [(first + i,) * 3 for i in range(part)]
        else:
            columns += [
                (first, first + i, first + j) for i in range(part[0]) for j in range(part[1])
            ]
    return np.array(columns, np.int32).T[-num_positions:]


def requests_of(num_positions: int) -> list[Given]:
    layouts = [
        layout(num_positions, *parts)
        for parts in (
            (5, (3, 4), 6),
            ((4, 5), 3),
            (20, (5, 6), 2, (2, 2), 17),
            (3, (4, 4)),  # this prompt ends with an image
            (1, (6, 7), 1),
            ((1, 1),),
        )
    ]
    generator = np.random.default_rng(1)
    given = [
        Given(generator.integers(16, VOCAB_SIZE, positions.shape[1]).tolist(), positions)
        for positions in layouts
    ]
    texts = [generator.integers(16, VOCAB_SIZE, n).tolist() for n in (1, 17, 40)]
    long = given[2]
    return [
        *given[:3],
        Given(texts[1]),
        *given[3:],
        Given(texts[0]),
        # The same tokens at other positions share no block with the prompts before.
        Given(long.prompt),
        Given(long.prompt, layout(num_positions, (5, 6), 22, 21)),
        Given(texts[2], layout(num_positions, 40), 30),
        Given(texts[2], layout(num_positions, 40) + 7),
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return model folders, by the number of positions of a token."""
    found = {}
    for num_positions, sections in SECTIONS.items():
        folder = tmp_path_factory.mktemp("positions")
        make_tiny_model("qwen2", folder, use_sliding_window=False)
        take_positions(folder, sections)
        found[num_positions] = folder
    return found


def take_positions(folder: Path, sections: list[int]) -> None:
    """Let a model accept requests with positions."""
    config = json.loads((folder / "config.json").read_text())
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(name) or {"rope_type": "default"}
    config[name] = rope | {"mrope_section": sections}
    (folder / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Greedy:
    """The greedy output of `transformers` for one request.

    Attributes:
        token_ids: tokens of the output.
        logprobs: [output, vocab] float32.
        margins: for each output token, the largest logit minus the second largest.
    """

    token_ids: list[int]
    logprobs: torch.Tensor
    margins: list[float]


@pytest.fixture(scope="module")
def wanted(folders) -> dict[int, list[Greedy]]:
    """Return the outputs of transformers for the requests, by the number of positions of a
    token."""
    return {count: list(reference(folder, count)) for count, folder in folders.items()}


@torch.inference_mode()
def reference(folder: Path, num_positions: int):
    model: Any = load_reference(folder)
    if num_positions == 3:
        # The family's own language model needs three positions; its weights have the same names.
        values = json.loads((folder / "config.json").read_text())
        keep = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        keep += ("num_key_value_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings")
        rope = {"rope_theta": 10000.0} | (values.get("rope_parameters") or values["rope_scaling"])
        config = modeling_qwen2_vl.Qwen2VLTextConfig(
            **{name: values[name] for name in keep},
            **spelled({"rope_parameters": rope}),
            attn_implementation="eager",
        )
        images = modeling_qwen2_vl.Qwen2VLTextModel(config).eval()
        images.load_state_dict(model.model.state_dict())
        model.model = images
    for given in requests_of(num_positions):
        yield one(model, given, num_positions)


def one(model: Any, given: Given, num_positions: int) -> Greedy:
    n, positions = len(given.prompt), given.positions
    offset = given.offset
    if positions is None:
        positions, offset = np.tile(np.arange(n), (num_positions, 1)), 0
    elif offset is None:
        offset = int(positions.max()) + 1 - n
    behind = np.tile(np.arange(n, n + MAX_TOKENS) + offset, (num_positions, 1))
    known = torch.from_numpy(np.concatenate((positions, behind), axis=1).astype(np.int64))
    token_ids, margins, rows = list(given.prompt), [], []
    for _ in range(MAX_TOKENS):
        at = known[:, : len(token_ids)]
        ids = torch.tensor([token_ids])
        hidden = model.model(ids, position_ids=at if num_positions == 1 else at[:, None])
        logits = model.lm_head(hidden.last_hidden_state[0]).float()
        rows.append(logits[-1:].log_softmax(-1))
        best = logits[-1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        token_ids.append(int(best.indices[0]))
    return Greedy(token_ids[n:], torch.cat(rows), margins)


def give_positions(llm: LLM, given: Sequence[Given]) -> None:
    """Let the next requests of an engine have their own positions."""
    processor, waiting = llm.llm_engine.input_processor, list(given)
    arch = llm.llm_engine.vllm_config.model.resolved_arch
    process = type(processor).process

    def process_next(*args: Any, **options: Any) -> Any:
        text, request = process(processor, *args, **options)
        own = waiting.pop(0)
        assert own.prompt == request.prompt_token_ids
        if own.positions is not None:
            request = with_positions(request, own.positions, arch, own.offset)
        return text, request

    processor.process = process_next


def run(llm: LLM, given: Sequence[Given], params: SamplingParams = GREEDY) -> list[Any]:
    give_positions(llm, given)
    prompts = [{"prompt_token_ids": each.prompt} for each in given]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def check(llm: LLM, num_positions: int, wanted: dict[int, list[Greedy]]) -> None:
    outputs = run(llm, requests_of(num_positions))
    for got, want in zip(outputs, wanted[num_positions], strict=True):
        pairs = zip(got.token_ids, want.token_ids, strict=True)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        # After a token for which two candidates were nearly equal in transformers, outputs may
        # differ.
        assert first is None or want.margins[first] < 1e-4, (first, got.token_ids, want)


def test_positions_matter(wanted):
    for references in wanted.values():
        of_long = [references[index].token_ids for index in (2, 8, 9)]
        assert len({tuple(token_ids) for token_ids in of_long}) == 3
        assert references[10].token_ids != references[11].token_ids


CPU_SETTINGS = {
    "whole prompts": {},
    "chunks, preemption": TINY_CACHE,
    "several decodes": {"num_scheduler_steps": 5},
    "no prefix cache": {"enable_prefix_caching": False, **CHUNKS},
}


@pytest.mark.parametrize("num_positions", SECTIONS)
@pytest.mark.parametrize("setting", CPU_SETTINGS)
def test_tokens_equal_transformers(setting, num_positions, folders, wanted, monkeypatch):
    in_one_call: list[bool] = []
    step = FusedDecodeStep.run

    def note(*args: Any, **options: Any) -> Any:
        found = step(*args, **options)
        in_one_call.append(found is not None)
        return found

    monkeypatch.setattr(FusedDecodeStep, "run", note)
    llm = LLM(str(folders[num_positions]), **ENGINE | CPU_SETTINGS[setting])
    check(llm, num_positions, wanted)
    check(llm, num_positions, wanted)  # the prompts are in the prefix cache now
    assert any(in_one_call) or load_cpu_kernels() is None
    if "preemption" in setting:
        assert scheduler_of(llm).num_preemptions
    elif llm.llm_engine.vllm_config.cache.enable_prefix_caching:
        assert stats_of(llm).num_prefix_hits


def test_logprobs_equal_transformers(folders, wanted):
    llm = LLM(str(folders[3]), **ENGINE | CHUNKS)
    params = GREEDY.clone()
    params.logprobs = 1
    outputs = run(llm, requests_of(3), params)
    for got, want in zip(outputs, wanted[3], strict=True):
        for place, (token_id, entry) in enumerate(zip(got.token_ids, got.logprobs, strict=True)):
            assert entry[token_id].logprob == pytest.approx(
                float(want.logprobs[place, token_id]), abs=1e-3
            )


def test_modules_give_the_same(folders, wanted, monkeypatch):
    leave_weights_unpacked(monkeypatch)
    llm = LLM(str(folders[3]), **ENGINE | CHUNKS)
    check(llm, 3, wanted)
    assert program_of(runner_of(llm)) is None


def test_stages_give_the_same(folders, wanted, monkeypatch):
    llm = in_stages(monkeypatch, str(folders[3]), pipeline_parallel_size=2, **ENGINE | TINY_CACHE)
    check(llm, 3, wanted)
    executor_of(llm).shutdown()


def with_drafts(folder: Path, **more: Any) -> dict[str, Any]:
    drafts = {"model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    return {**ENGINE, **more, "speculative_config": drafts}


@pytest.mark.parametrize("more", [{}, TINY_CACHE], ids=["plenty", "crowded"])
def test_drafts_at_the_same_positions_are_right(more, folders, wanted):
    llm = LLM(str(folders[3]), **with_drafts(folders[3], **more))
    check(llm, 3, wanted)
    stats = stats_of(llm).drafts
    assert sum(stats.accepted) > 0.9 * stats.num_draft_tokens > 50


@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    """Return the folders of a speculator and of its model; both need one position per token."""
    folder = tmp_path_factory.mktemp("eagle")
    made = make_speculator("eagle", make_target(folder / "target"), folder / "head-eagle")
    for part in (folder / "target", folder / "head-eagle"):
        take_positions(part, [8])
    return made


AFTER_IMAGE = Given(
    [3 + 5 * place % 13 for place in range(30)],
    np.array([[*range(9), *[9] * 15, *range(16, 22)]], np.int32),
)
"""Its last tokens are text, which is where drafts are made."""


def run_eagle(eagle, max_tokens: int, **settings: Any) -> tuple[list[int], tuple[int, ...]]:
    """Return the output of a request with positions, and the number of accepted drafts by
    their order in a step.
    """
    arguments = ENGINE | {"speculative_config": eagle.config | {"adaptive": False}} | settings
    llm = LLM(str(eagle.target), **arguments)
    params = GREEDY.clone()
    params.max_tokens = max_tokens
    (output,) = run(llm, [AFTER_IMAGE], params)
    return list(output.token_ids), stats_of(llm).drafts.accepted


def test_a_speculator_guesses_at_the_same_positions(eagle, monkeypatch):
    seen: list[tuple[list[int], int, torch.Tensor]] = []
    append, propose, known = speculator_runner.append_drafts, SpeculatorRunner.propose, [0]

    def start(runner, step):
        known[0] = int(runner.batch.num_tokens[0])
        propose(runner, step)

    def note(runner, rows, logits):
        (row,) = rows.tolist()
        tokens = runner.batch.token_ids[row, : runner.batch.num_tokens[row]].tolist()
        seen.append((tokens, known[0], logits[0].clone()))
        append(runner, rows, logits)

    monkeypatch.setattr(SpeculatorRunner, "propose", start)
    monkeypatch.setattr(speculator_runner, "append_drafts", note)
    run_eagle(eagle, 40)
    reference = eagle.reference
    known_positions = torch.cat((torch.from_numpy(AFTER_IMAGE.positions[0]), torch.arange(22, 99)))
    reference.positions = lambda n: known_positions[:n]
    for tokens, count, found in seen:
        want = reference.logits(tokens[:count], tokens[count:])
        # These logits have a standard deviation of 20 to 30. The largest difference was 1.6e-3
        # before exponents of attention became powers of two, and 2.9e-3 since then, while the rms
        # errors of float32 attention against float64 stayed the same within 2 %: other last bits,
        # not larger errors. On a processor with AVX2 it is 4.08e-3.
        torch.testing.assert_close(found, want, rtol=0, atol=6e-3)
    assert len(seen) > 20

    # Compare one step with drafts only: on a card, later steps read other states.
    on_cpu = run_eagle(eagle, 5)
    assert sum(on_cpu[1]) == 3
    with simulated_hpu(has_profiling_run=False, **FEW_BUCKETS | {"PT_HPU_LAZY_MODE": 1}):
        assert run_eagle(eagle, 5, enforce_eager=True, max_num_seqs=4) == on_cpu


HPU_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunks, preemption": (TINY_CACHE, {}),
    "merged prompts": (CHUNKS, {"VLLM_MERGED_PREFILL": True}),
    "several decodes": ({"num_scheduler_steps": 5}, {}),
}


@pytest.mark.parametrize(
    ("setting", "mode", "num_positions"),
    [
        ("chunks, preemption", "HPU graphs", 3),
        pytest.param("chunks, preemption", "torch.compile", 3, marks=pytest.mark.exhaustive),
        pytest.param("merged prompts", "lazy", 3, marks=pytest.mark.exhaustive),
        pytest.param("merged prompts", "eager", 1, marks=pytest.mark.exhaustive),
        ("several decodes", "lazy", 3),
    ],
)
def test_a_card_gives_the_same(setting, mode, num_positions, folders, wanted):
    arguments, variables = HPU_SETTINGS[setting]
    lazy, eager = MODES[mode]
    variables = FEW_BUCKETS | variables | {"PT_HPU_LAZY_MODE": lazy}
    with simulated_hpu(has_profiling_run=False, **variables):
        llm = LLM(
            str(folders[num_positions]),
            enforce_eager=eager,
            **ENGINE | {"max_num_seqs": 4} | arguments,
        )
        check(llm, num_positions, wanted)
        check(llm, num_positions, wanted)


@pytest.mark.exhaustive  # exhaustive: drafts on the CPU and a card without drafts are tested above
def test_drafts_on_a_card_are_right(folders, wanted):
    with simulated_hpu(has_profiling_run=False, **FEW_BUCKETS | {"PT_HPU_LAZY_MODE": 1}):
        arguments = with_drafts(folders[3], **CHUNKS) | {"max_num_seqs": 4}
        llm = LLM(str(folders[3]), enforce_eager=True, **arguments)
        check(llm, 3, wanted)
        stats = stats_of(llm).drafts
        # After a prompt that ends with an image, the first drafts may be wrong.
        assert sum(stats.accepted) > 0.7 * stats.num_draft_tokens > 50


def test_a_request_whose_positions_do_not_fit_is_refused(folders, models):
    llm = LLM(str(folders[3]), **ENGINE)
    prompt, arch = list(range(20, 30)), llm.llm_engine.vllm_config.model.resolved_arch
    limit = arch.derived_max_model_len
    flat = np.tile(np.arange(10, dtype=np.int32), (3, 1))
    wrong: list[tuple[np.ndarray, int | None, str]] = [
        (flat[:1], None, r"must have the shape \[3, 10\].*got \[1, 10\]"),
        (flat[:, :9], None, r"must have the shape \[3, 10\].*got \[3, 9\]"),
        (flat - 1, None, f"must be from 0 to {limit - 1}, got -1 to 28"),
        (flat, -11, "got -1 to 18"),
        (flat, limit - 29, f"got 0 to {limit}"),
    ]
    for positions, offset, message in wrong:
        with pytest.raises(RequestError, match=message):
            run(llm, [Given(prompt, positions, offset)])
    run(llm, [Given(prompt, flat, limit - 30)])

    text = LLM(str(models("llama")), **ENGINE)
    with pytest.raises(RequestError, match=r"positions must have the shape \[0, 10\]"):
        run(text, [Given(prompt, flat)])
