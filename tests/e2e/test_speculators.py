"""Test speculators that read hidden states of the model: the same outputs, and guesses as described
in the papers.
"""

import json
import random
import shutil

import pytest
import torch

from tests.executor.thread_ranks import ThreadRanks
from tests.exhaustive import exhaustive
from tests.lora_files import ALL, write_adapter
from tests.reach import core_of, decode_step_of, draft_model_of, runner_of, stats_of, worker_of
from tests.speculators import VOCAB_SIZE, Made, make_mtp, make_right, make_speculator, make_target
from vllm import LLM, SamplingParams
from vllm.engine import engine_core
from vllm.errors import ConfigError, WeightLoadError
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_memory import model_storages
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.platforms.cpu import CPUPlatform
from vllm.worker.cpu import speculator_runner
from vllm.worker.cpu.speculator_runner import SpeculatorRunner

needs_kernels = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

METHODS = ("eagle", "eagle3", "mtp", "mlp_speculator", "mlp_speculator_tied", "medusa")
ON_TWO_RANKS = ("eagle3", "mtp", "mlp_speculator_tied")
MTP_FAMILIES = ("glm4_moe", "mimo", "bailing_moe_v2", "qwen3_next")
RARE_MTP_FAMILIES = ("qwen3_5", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")
"""Other families with a layer for `mtp`."""
COMMON = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "skip_tokenizer_init": True}
COMMON |= {"block_size": 8}
FEW_BLOCKS = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 24}

_rng = random.Random(3)


def _tokens(count: int) -> list[int]:
    return [_rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


_SHARED = _tokens(30)
PROMPTS = [
    [*_SHARED[:shared], *_tokens(own)]
    for shared, own in ((0, 1), (30, 7), (17, 20), (27, 8), (0, 40), (30, 1), (26, 0))
]
"""Some share blocks of 8 tokens, and the token after them (`worker/drafts/draft_progress`)."""
_LONG = {"ignore_eos": True, "detokenize": False}
PARAMS = [
    SamplingParams(max_tokens=30, temperature=0, **_LONG),
    SamplingParams(max_tokens=25, temperature=0.9, seed=5, top_p=0.9, **_LONG),
]


def prompts() -> list:
    return [{"prompt_token_ids": ids} for ids in PROMPTS]


def run(llm: LLM) -> list[list[int]]:
    params = [PARAMS[index % 4 == 3] for index in range(len(PROMPTS))]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts(), params, use_tqdm=False)]


class _MadeOnce(dict):
    """A dictionary whose values are made when they are first read."""

    def __init__(self, make, known=()):
        super().__init__(known)
        self.make = make

    def __missing__(self, name):
        return self.setdefault(name, self.make(name))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculators")
    target = make_target(folder / "target")
    known = {
        name: make_speculator(name, target, folder / f"head-{name}")
        for name in METHODS
        if name != "mtp"
    }
    return _MadeOnce(
        lambda family: make_mtp(folder / family, family=family), known | {"mtp": make_mtp(folder)}
    )


@pytest.fixture(scope="module")
def expected(made):
    of_target = _MadeOnce(lambda target: run(LLM(str(target), **COMMON)))
    return _MadeOnce(lambda name: of_target[made[name].target])


def with_speculator(made: Made, **more) -> LLM:
    config = {"adaptive": False, **made.config, **more.pop("config", {})}
    return LLM(str(made.target), speculative_config=config, **{**COMMON, **more})


@pytest.mark.parametrize(
    "method",
    [
        # The second line is exhaustive: EAGLE-3 has all parts of EAGLE, and other files run models
        # with MTP.
        *("eagle3", "mtp", "mlp_speculator_tied", "medusa"),
        *map(exhaustive, ("eagle", "mlp_speculator", *MTP_FAMILIES, *RARE_MTP_FAMILIES)),
    ],
)
def test_outputs_are_the_same_and_guesses_those_of_the_paper(method, made, expected, monkeypatch):
    speculator, seen, size = made[method], [], 1 + (method in ON_TWO_RANKS)
    if size > 1:
        monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    known: dict[int, int] = {}
    original, propose = speculator_runner.append_drafts, SpeculatorRunner.propose

    def start(runner, step):
        if not runner.rank:
            known.update(enumerate(runner.batch.num_tokens.tolist()))
        propose(runner, step)

    def note(runner, rows, logits):
        for row, found in zip(rows.tolist(), logits, strict=True):
            if runner.rank:
                break
            tokens = runner.batch.token_ids[row, : runner.batch.num_tokens[row]].tolist()
            seen.append((tokens[: known[row]], tokens[known[row] :], found.clone()))
        original(runner, rows, logits)

    llm = with_speculator(speculator, tensor_parallel_size=size, **FEW_BLOCKS)
    monkeypatch.setattr(SpeculatorRunner, "propose", start)
    monkeypatch.setattr(speculator_runner, "append_drafts", note)
    assert run(llm) == expected[method]
    num_cold = len(seen)
    assert run(llm) == expected[method], "with a prefix cache"
    stats = stats_of(llm)
    assert stats.num_preemptions and stats.num_prefix_hits
    assert 0 < sum(stats.drafts.accepted) < stats.drafts.num_draft_tokens

    core_of(llm).shutdown()
    rng = random.Random(1)
    chosen = [*rng.sample(seen[:num_cold], 12), *rng.sample(seen[num_cold:], 12)]
    for tokens, drafts, found in chosen:
        want = speculator.reference.logits(tokens, drafts)
        is_token = want.isfinite()
        assert torch.equal(is_token, found.isfinite())
        scale = float(want[is_token].abs().max())
        torch.testing.assert_close(found / scale, want / scale, rtol=0, atol=2e-3)
    assert {len(drafts) for _, drafts, _ in chosen} >= {0, 1, 2}


@pytest.mark.parametrize(
    "method", [m if m in ("eagle3", "medusa", "mtp") else exhaustive(m) for m in METHODS]
)
def test_a_speculator_that_is_always_right(method, tmp_path):
    """Requests share prefixes and are aborted at any time."""
    if method == "mtp":
        made = make_mtp(tmp_path)
    else:
        made = make_speculator(method, make_target(tmp_path / "t"), tmp_path / "eagle")
    make_right(made)
    few = FEW_BLOCKS | {"num_gpu_blocks_override": 10, "max_model_len": 64}
    llm = with_speculator(made, **few)
    engine, rng = llm.llm_engine, random.Random(2)
    todo, last = list(range(24)), {}
    while todo or engine.has_unfinished_requests():
        if todo and rng.random() < 0.8:
            index = todo.pop()
            # Each of these prompts ends with a token that the draft vocabulary of EAGLE-3 has.
            ids = _SHARED[: rng.choice([8, 20, 24, 30])]
            params = SamplingParams(max_tokens=rng.randint(1, 30), temperature=0, **_LONG)
            if rng.random() < 0.3:
                # Requests with a logits processor get no drafts.
                params.logits_processors = [lambda tokens, logits: logits]
            last[str(index)] = ids[-1]
            engine.add_request(str(index), {"prompt_token_ids": ids}, params)
        if rng.random() < 0.1:
            engine.abort_request(str(rng.choice(range(24))))
        for output in engine.step():
            assert set(output.outputs[0].token_ids) <= {last[output.request_id]}
    stats = stats_of(engine)
    assert sum(stats.drafts.accepted) == stats.drafts.num_draft_tokens > 100
    assert stats.num_preemptions and stats.num_prefix_hits


def test_a_speculator_beside_adapters(made, tmp_path):
    speculator = made["eagle"]
    folder = write_adapter(tmp_path / "a", speculator.target, 1, 4, ALL, size=0.2)
    adapters = [LoRARequest("a", 1, str(folder)), None, LoRARequest("a", 1, str(folder))]
    found = []
    for llm in (
        LLM(str(speculator.target), enable_lora=True, **COMMON),
        with_speculator(speculator, enable_lora=True),
    ):
        outputs = llm.generate(prompts()[:3], PARAMS[0], use_tqdm=False, lora_request=adapters)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    assert stats_of(llm).drafts.num_draft_tokens > 20


@needs_kernels
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_fused_program_hands_over_what_modules_do(method, made):
    """The load has prompts, steps with drafts, and steps in one call while several requests run."""
    states, outputs = [], []
    for is_fused in (True, False):
        config = {"disable_by_batch_size": 3}
        # No steps that run ahead: they leave states of rejected tokens, how many depends on the
        # time.
        llm = with_speculator(made[method], dtype="bfloat16", config=config, async_scheduling=False)
        runner = runner_of(llm)
        runner.launches.is_fused = not is_fused
        alone = llm.generate(prompts()[1:2], PARAMS[0], use_tqdm=False)
        outputs.append([*run(llm), alone[0].outputs[0].token_ids])
        assert (decode_step_of(runner) is not None) == is_fused
        states.append(runner.drafter.kept_states[0])
        assert stats_of(llm).drafts.num_draft_tokens > 20
    assert outputs[0] == outputs[1]
    assert torch.equal(*states) and states[0].any(1).sum() > 200


WRONG = [
    ("eagle", {"hidden_size": 32, "head_dim": 8}, {}, "hidden_size is 32, but the model"),
    ("eagle", {"num_hidden_layers": 2}, {"method": "eagle"}, "must be 1 for EAGLE, got 2"),
    ("eagle3", {"draft_vocab_size": 99}, {}, "must be at most 16, the vocabulary of .*, got 99"),
    ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}}, {},
     r"indices from 0 to 4, .* got \[0, 3, 5\]"),
    ("medusa", {"vocab_size": 99}, {}, "vocab_size is 99"),
    ("medusa", {"medusa_num_heads": "3"}, {}, "medusa_num_heads or num_heads must be 1 or more"),
    ("medusa", {}, {"num_speculative_tokens": 4}, "must be from 1 to 3, the number of heads"),
    ("medusa", {"medusa_num_heads": 4}, {}, "tensors missing from the checkpoint: heads.3"),
    ("mlp_speculator", {"emb_dim": 32}, {}, "emb_dim is 32, but the model"),
    ("mlp_speculator", {"n_predict": None}, {}, "n_predict must be 1 or more, got None"),
    ("mlp_speculator", {"inner_dim": 40}, {}, "has shape"),
    ("eagle", {}, {"method": "mtp"}, "needs a model with multi-token prediction layers"),
    ("eagle", {}, {"method": "eagle3"}, r"fc.weight has shape \[64, 128\]"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "changes", "given", "message"), WRONG)
def test_what_does_not_fit_the_model_is_refused(method, changes, given, message, made, tmp_path):
    folder = tmp_path / "eagle"
    shutil.copytree(made[method].config["model"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    wrong = Made(made[method].target, {"model": str(folder), **given}, made[method].reference)
    with pytest.raises((ConfigError, WeightLoadError), match=message) as caught:
        with_speculator(wrong)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text or "mtp" in text


def test_what_a_speculator_cannot_be_combined_with(made):
    transfer = {"kv_connector": "OffloadingConnector"}
    with pytest.raises(ConfigError, match="cannot be used together with kv_transfer_config"):
        with_speculator(made["eagle"], kv_transfer_config=transfer)


@pytest.mark.parametrize("method", ["eagle", "mtp", "medusa"])
def test_a_speculator_sleeps_and_wakes_up_with_the_model(method, made, expected):
    llm = with_speculator(made[method], enable_sleep_mode=True)
    worker = worker_of(llm)
    weight = max(model_storages(draft_model_of(worker)), key=len)
    num_right = []
    for level in (1, 2, None):
        assert run(llm) == expected[method]
        num_right.append(sum(stats_of(llm).drafts.accepted))
        (states,) = worker.runner.drafter.kept_states
        sizes = int(weight.count_nonzero()), int(states.count_nonzero())
        if level is not None:
            llm.sleep(level)
            # Only whole pages of memory are given back.
            assert weight.count_nonzero() < sizes[0] / 2 and states.count_nonzero() < sizes[1]
            llm.wake_up()
    assert num_right[2] - num_right[1] == num_right[1] - num_right[0] == num_right[0] > 0


def test_a_platform_that_hands_over_no_hidden_states(made, monkeypatch):
    monkeypatch.setattr(CPUPlatform, "can_run_speculators", False)
    with pytest.raises(ConfigError, match="the method eagle does not run on the device 'cpu'"):
        with_speculator(made["eagle"])
