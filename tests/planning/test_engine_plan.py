"""Test planned engines against engines on a simulated card and on a CPU: memory by class, buckets,
and the warm-up.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, MODES, captured_log, simulated_hpu
from tests.quantized_checkpoints import FORMATS, made_once, write
from tests.reach import replace_ops, report_of
from tests.speculators import make_speculator, make_target
from tests.tiny_images import make_tiny_images
from tests.tiny_models import make_tiny_model
from tests.worker.hpu_helpers import run_warm_up
from vllm.bucketing import Bucket, Phase
from vllm.bucketing.bucket import decode, prefill
from vllm.bucketing.ledger import GRAPHS, MemoryClass
from vllm.distributed import RankLayout, TPGroup
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.model_executor.loader import load_model
from vllm.model_executor.model_memory import model_storages
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops.cpu.operators.table import CPUOps
from vllm.planning.engine_plan import make_engine_plan
from vllm.planning.fit import planned_or_nearest
from vllm.planning.host import start_on_host
from vllm.planning.plan import describe
from vllm.planning.start import ShapeCosts, plan_start
from vllm.planning.text import plan_lines, wrapped
from vllm.planning.worker import AbsentPeers, on_planned_card
from vllm.platforms.habana.trials import TRIALS
from vllm.platforms.hpu import PlannedPlatform, create_hpu_platform
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory import divide_memory
from vllm.worker.hpu.memory.memory_profile import used_bytes
from vllm.worker.hpu.worker import HPUWorker

GIB, MIB = 2**30, 2**20
ROOT = Path(__file__).parents[2]

DENSE = (
    *("llama", "qwen2", "gemma2", "opt", "mixtral", "gpt_oss", "deepseek_v2", "bamba", "mamba"),
    "falcon_7b",
)
ORDERED = tuple(name for name in FORMATS if name.endswith("-order"))
"""Whether the inputs of a layer have an order of their own is known from the weights only."""
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
"""As published with Llama-3.1-8B."""


def example_of(page: str, heading: str) -> list[str]:
    """Return the lines of the first example, indented by four spaces, below a heading of a page."""
    blocks = re.findall(r"(?:^(?:    .+)?\n)+", page.partition(f"\n{heading}\n")[2], re.MULTILINE)
    first = next(block for block in blocks if block.strip())
    return [line[4:] for line in first.splitlines() if line]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """Return the folder of a tiny checkpoint, by the name of a family or of a format."""
    folder = tmp_path_factory.mktemp("checkpoints")
    quantized = made_once(folder)

    @cache
    def get(name: str) -> str:
        if name in FORMATS:
            return str(quantized(name)[0])
        if name == "mllama":
            return str(make_tiny_images(name, folder / name))
        return str(make_tiny_model(name, folder / name))

    return get


def write_config(folder, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changes), "utf-8")
    return str(folder)


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Return arguments of an engine, and the names of its checkpoint and card."""
    settings: dict[str, Any] = {
        "max_model_len": rng.choice([128, 200, 512]),
        "max_num_seqs": rng.choice([1, 3, 8]),
        "block_size": rng.choice([16, 128]),
        "dtype": rng.choice(["bfloat16", "bfloat16", "float32"]),
        "gpu_memory_utilization": rng.choice([0.3, 0.9]),
        "max_num_batched_tokens": rng.choice([256, 512]),
        "enable_prefix_caching": rng.random() < 0.6,
        "enforce_eager": rng.random() < 0.2,
    }
    if rng.random() < 0.2:
        settings["num_gpu_blocks_override"] = rng.choice([66, 300])
    elif rng.random() < 0.2:
        settings["kv_cache_memory_bytes"] = 2**28
    name = rng.choice(sorted(FORMATS)) if rng.random() < 0.4 else rng.choice(DENSE)
    if rng.random() < 0.2 and name not in FORMATS:
        settings["quantization"] = "fp8"
    if rng.random() < 0.2 and name in ("llama", "qwen2"):
        settings["kv_cache_dtype"] = "fp8_inc"
    return settings | {"name": name, "card": rng.choice(["gaudi2", "gaudi3"])}


def started_worker(args: EngineArgs) -> tuple[HPUWorker, int]:
    """Return the worker of a simulated card, with its cache, and the number of its blocks."""
    config = args.create_engine_config()
    worker = HPUWorker(config)
    worker.load(0)
    if config.parallel.world_size > 1:
        worker.join(AbsentPeers(rank=0, layout=RankLayout.of(config.parallel)))
    report = worker.measure()
    worker.allocate(report.num_blocks)
    return worker, report.num_blocks


def check_case(settings: dict[str, Any], checkpoint: Callable[[str], str]) -> None:
    card, name = settings.pop("card"), settings.pop("name")
    args = {"model": checkpoint(name), "skip_tokenizer_init": True, **settings}
    what = f"{name} on {card} with {settings}"
    with simulated_hpu(card=card, PT_HPU_LAZY_MODE=1, VLLM_HPU_SIM_STRICT=0):
        try:
            worker, num_blocks = started_worker(EngineArgs(device="hpu", **args))
        except ConfigError as error:
            with pytest.raises(ConfigError) as refused:
                make_engine_plan(EngineArgs(**args), card)
            assert str(refused.value) == str(error), what
            return
        catalog, shapes = (
            worker.runner.launches.planner.catalog,
            worker.runner.launches.launch_shapes,
        )
        ledger, block_bytes = worker.ledger, report_of(worker).block_bytes
        plan = make_engine_plan(EngineArgs(**args), card)
        assert plan.report.block_bytes == block_bytes, what
        assert plan.ledger.total_bytes == ledger.total_bytes, what
        is_exact = name not in ORDERED
        for cls in MemoryClass:
            tolerance = 0.02 if cls is MemoryClass.WORKSPACE or name in ORDERED else 0
            least = 0 if cls is MemoryClass.WEIGHTS and is_exact else 2**20
            assert plan.ledger.budget(cls) == pytest.approx(ledger.budget(cls), tolerance, least), (
                what
            )
        if plan.report.launch_bytes == report_of(worker).launch_bytes and name not in ORDERED:
            assert plan.report == report_of(worker), what
        assert plan.report.num_blocks == pytest.approx(num_blocks, 1e-3), what
        assert plan.catalog.prefill == catalog.prefill, what
        assert plan.catalog.decode == catalog.decode, what
        buckets = [*catalog.prefill, *catalog.decode]
        assert list(plan.shapes) == [shape for each in buckets for shape in shapes(each)], what


@pytest.mark.parametrize(
    "seed",
    [
        *range(3),
        38,  # this seed chooses kernels that are tried before they are used
        192,  # this seed chooses latent attention whose weights are converted to FP8
        *(
            pytest.param(seed, marks=pytest.mark.exhaustive)
            for seed in range(3, 1000)
            if seed not in (38, 192)
        ),
    ],
)
def test_a_plan_has_the_memory_and_buckets_of_a_card(seed, checkpoint):
    check_case(random_settings(random.Random(seed)), checkpoint)


@pytest.mark.parametrize("quantization", ["int4", "int8", "bitsandbytes"])
def test_a_plan_has_the_weights_that_are_rounded_at_the_load(quantization, checkpoint):
    """Whether a card stores weights in few bits depends on their values."""
    settings = {"name": "mixtral", "card": "gaudi2", "dtype": "bfloat16", "max_num_seqs": 2}
    check_case({**settings, "max_model_len": 128, "quantization": quantization}, checkpoint)


@pytest.mark.parametrize("name", ["fp8-block", "gptq-4-rows", "ct-w8a16-channel", "nvfp4"])
def test_a_plan_has_the_weights_of_quantized_experts(name, checkpoint, tmp_path, monkeypatch):
    """A plan builds two experts of a layer, and a device may keep them without parameters."""
    folder = str(write(name, tmp_path, Path(checkpoint("qwen3_moe")))[0])
    config = json.loads(Path(folder, "config.json").read_text())
    assert config.get("num_experts", config.get("num_local_experts")) > 2
    settings = {"dtype": "bfloat16", "max_num_seqs": 2, "max_model_len": 128}
    check_case({**settings, "name": name, "card": "gaudi2"}, lambda _: folder)
    replace_ops(monkeypatch, CPUOps())
    args = EngineArgs(model=folder, skip_tokenizer_init=True, **settings)
    config = replace(args, device="cpu").create_engine_config()
    loaded = load_model(config, TPGroup(), torch.device("cpu"), CPUPacked())
    num_bytes = sum(map(len, model_storages(loaded)))
    assert start_on_host(args, 1, GIB).memory_uses[0].num_bytes == num_bytes


def test_a_plan_has_a_speculator_whose_values_it_cannot_check(tmp_path):
    """EAGLE-3 maps its smaller vocabulary to tokens. The check of this map uses no memory of the
    card.
    """
    target = make_target(tmp_path / "target")
    drafts = make_speculator("eagle3", target, tmp_path / "eagle3").config
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 2, "max_model_len": 64}
    args = EngineArgs(
        model=str(target), skip_tokenizer_init=True, speculative_config=drafts, **settings
    )
    with simulated_hpu(PT_HPU_LAZY_MODE=1, VLLM_HPU_SIM_STRICT=0):
        worker, _ = started_worker(replace(args, device="hpu"))
        plan = make_engine_plan(args, "gaudi2")
    named = {use.what: use.num_bytes for use in plan.memory_uses}
    assert named["draft model"] > 0
    assert named == {use.what: use.num_bytes for use in worker.memory_uses}
    for cls in MemoryClass:
        assert plan.ledger.budget(cls) == worker.ledger.budget(cls), cls


def test_a_plan_of_quant_config_needs_no_measurement_and_writes_none(checkpoint, tmp_path):
    path = tmp_path / "quant.json"
    stats = {"dump_stats_path": str(tmp_path / "stats"), "scale_method": "maxabs_hw"}
    path.write_text(json.dumps({"mode": "QUANTIZE", **stats}))
    settings = {"model": checkpoint("llama"), "max_model_len": 128, "skip_tokenizer_init": True}
    settings["dtype"] = "bfloat16"
    with simulated_hpu(PT_HPU_LAZY_MODE=1, QUANT_CONFIG=path):
        plan = make_engine_plan(EngineArgs(**settings, quantization="inc"), "gaudi2")
        assert describe(plan, "gaudi2").as_json()["quantization"] == "inc"
    whole = make_engine_plan(EngineArgs(**settings), "gaudi2")
    weights = MemoryClass.WEIGHTS
    assert plan.ledger.budget(weights) < 0.9 * whole.ledger.budget(weights)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("card", ["gaudi2", "gaudi3"])
def test_a_planned_card_has_the_kernels_of_a_card(card):
    """A planned card tries the results of kernels, although it computes nothing else."""
    platform = PlannedPlatform(card)
    with on_planned_card(platform):
        planned = {name: platform.bridge.kernels.why_unused(name) for name in TRIALS}
    with simulated_hpu(card=card, PT_HPU_LAZY_MODE=1):
        kernels = create_hpu_platform().bridge.kernels
        assert planned == {name: kernels.why_unused(name) for name in TRIALS}
    assert None in planned.values()


def test_a_plan_has_the_weights_of_a_gguf_file(checkpoint, tmp_path):
    pytest.importorskip("gguf")
    from tests.gguf_files import Type, write_gguf

    path = write_gguf(Path(checkpoint("llama")), tmp_path, lambda name: Type.Q8_0)
    settings = {"model": str(path), "max_model_len": 128, "max_num_seqs": 2}
    settings |= {"max_num_batched_tokens": 128, "dtype": "bfloat16", "skip_tokenizer_init": True}
    with simulated_hpu(PT_HPU_LAZY_MODE=1, VLLM_HPU_SIM_STRICT=0):
        worker, _ = started_worker(EngineArgs(device="hpu", **settings))
        weights = MemoryClass.WEIGHTS
        plan = make_engine_plan(EngineArgs(**settings), "gaudi2")
        assert plan.ledger.budget(weights) == worker.ledger.budget(weights)
        assert plan.report == report_of(worker)


@pytest.mark.parametrize(("enforce_eager", "num_cards"), [(False, 1), (True, 1), (False, 2)])
def test_a_planned_start_makes_the_graphs_and_recipes_of_a_warm_up(
    enforce_eager, num_cards, checkpoint
):
    settings = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    settings |= {"enforce_eager": enforce_eager, "skip_tokenizer_init": True}
    settings |= {"dtype": "bfloat16", "model": checkpoint("llama"), "num_gpu_blocks_override": 9}
    variables = {"PT_HPU_LAZY_MODE": 1, "PT_HPU_ENABLE_LAZY_COLLECTIVES": 1}
    with simulated_hpu(VLLM_HPU_SIM_STRICT=0, **variables) as bridge:
        args = EngineArgs(device="hpu", tensor_parallel_size=num_cards, **settings)
        worker, _ = started_worker(args)
        before = bridge.counters()
        run_warm_up(worker)
        after = bridge.counters()
        plan = make_engine_plan(EngineArgs(**settings), "gaudi2", num_cards)
        start = plan_start(plan)
        # The memory measurement compiles some of these shapes, and others that never run again.
        assert after.compile_s - before.compile_s <= start.compile_s < after.compile_s
        for phase, cls in zip(start.phases, GRAPHS, strict=True):
            assert phase.graph_bytes == pytest.approx(worker.ledger.booked(cls), 0.02)
        num_graphs = sum(phase.num_graphs for phase in start.phases)
        assert num_graphs == (0 if enforce_eager else len(plan.catalog))
        captured = after.graph_captures - before.graph_captures
        assert captured == (0 if enforce_eager else len(plan.shapes))
        assert start.cold_s == start.compile_s + start.cached_s


def test_no_recipe_has_only_an_all_reduce(checkpoint):
    """A recipe begins with each all-reduce. The last one of a layer begins the next layer."""
    args = EngineArgs(model=checkpoint("llama"), max_model_len=128, skip_tokenizer_init=True)
    plan = make_engine_plan(args, "gaudi2", 2)
    _, work = plan.record(partial(plan.worker.runner.launches.run_padding, plan.shapes[-1]))
    exchanges = [recipe for recipe in work.recipes if recipe[0].text.startswith("c10d::allreduce")]
    assert exchanges and min(map(len, exchanges)) > 1
    num_layers = plan.config.model.resolved_arch.num_layers
    # The embedding has an all-reduce, and each layer has two.
    assert work.num_launches == pytest.approx(2 * num_layers + 2, abs=1)


# Exhaustive: a recipe of eager mode differs from one of torch.compile only in its operators.
@pytest.mark.parametrize("mode", [exhaustive("torch.compile"), "eager"])
def test_a_plan_compiles_the_recipes_of_an_engine_in_eager_mode(mode, checkpoint):
    """In a plan, a layer is one recipe as well, although torch does not trace it."""
    settings = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    settings |= {"enforce_eager": MODES[mode][1], "skip_tokenizer_init": True}
    settings |= {"dtype": "bfloat16", "model": checkpoint("llama"), "num_gpu_blocks_override": 9}
    with simulated_hpu(PT_HPU_LAZY_MODE=0, VLLM_HPU_SIM_STRICT=0, **FEW_BUCKETS) as bridge:
        worker, _ = started_worker(EngineArgs(device="hpu", **settings))
        run_warm_up(worker)
        made = bridge.counters()
        plan = make_engine_plan(EngineArgs(**settings), "gaudi2")
        for shape in plan.shapes:
            plan.record(partial(plan.worker.runner.warm_up, shape, sampling="warm_up"))
        planned, start = plan.bridge.counters(), plan_start(plan)
        assert plan.worker.runner.launches.execution.name == mode
        assert planned.compilations == made.compilations
        assert (made.compilations > 0) == (mode == "torch.compile")
        assert planned.compile_s == pytest.approx(made.compile_s, 0.03)
        assert plan.report.launch_bytes == pytest.approx(report_of(worker).launch_bytes, 0.02)
        launches = worker.runner.launches
        buckets = (*launches.planner.catalog.prefill, *launches.planner.catalog.decode)
        assert [*plan.catalog.prefill, *plan.catalog.decode] == list(buckets)
        assert sum(phase.num_shapes for phase in start.phases) == sum(
            len(launches.launch_shapes(bucket)) for bucket in buckets
        )
        assert not any(phase.num_graphs for phase in start.phases) and start.compile_s > 0


def test_plans_of_other_cards_leave_the_work_of_a_plan_as_it_is(checkpoint):
    args = EngineArgs(model=checkpoint("llama"), max_model_len=128, skip_tokenizer_init=True)
    plan = make_engine_plan(args, "gaudi2")
    shape = plan.shapes[-1]
    run = plan.worker.runner.launches.run_padding
    work = plan.record(partial(run, shape))[1]
    other = make_engine_plan(args, "gaudi3", 2)
    halves = other.record(partial(other.worker.runner.launches.run_padding, shape))[1]
    for cost in ("flops", "num_bytes"):
        half, whole = (sum(getattr(x, cost) for x in w.operators) for w in (halves, work))
        assert half < whole
    again = plan.record(partial(run, shape))[1]
    assert (again.operators, again.num_ops) == (work.operators, work.num_ops)


def test_the_stage_with_the_fewest_kv_blocks_decides_on_a_pipeline(checkpoint):
    """Each stage counts the weights that its worker loads."""
    args = EngineArgs(
        model=checkpoint("llama"),
        max_model_len=128,
        max_num_seqs=2,
        skip_tokenizer_init=True,
        pipeline_parallel_size=2,
    )
    with simulated_hpu(PT_HPU_LAZY_MODE=1, VLLM_HPU_SIM_STRICT=0, VLLM_PP_LAYER_PARTITION="1,2"):
        weights = []
        for rank in range(2):
            worker = HPUWorker(replace(args, device="hpu").create_engine_config())
            before = used_bytes(worker.bridge)
            worker.load(rank)
            weights.append(used_bytes(worker.bridge) - before)
        plan = make_engine_plan(args, "gaudi2")
        assert [x.weight_bytes for x in plan.stages] == pytest.approx(weights, abs=16)
        assert [(x.first_layer, x.end_layer) for x in plan.stages] == [(0, 1), (1, 3)]
        few, many = plan.stages
        assert many.num_blocks < few.num_blocks
        assert plan.report.num_blocks == many.num_blocks
        assert plan.ledger.budget(MemoryClass.WEIGHTS) == many.weight_bytes
    described = describe(plan, "gaudi2")
    lines = list(plan_lines(described))
    assert "The other figures are for stage 2, which has room for the fewest blocks" in lines
    assert [stage["first_layer"] for stage in described.as_json()["stages"]] == [0, 1]


def test_llama_8b_takes_what_published_logs_say(tmp_path):
    """Published logs have 14.97 to 15.05 GiB of weights, and 4,107 blocks in 64.17 GiB."""
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    args = EngineArgs(model=write_config(folder), max_model_len=8192, skip_tokenizer_init=True)
    plan = make_engine_plan(args, "gaudi2")
    parameters = sum(p.nbytes for p in plan.worker.model.parameters())
    assert parameters == int(14.9575 * GIB) + parameters % MIB - int(14.9575 * GIB) % MIB
    assert 14.97 * GIB < plan.ledger.budget(MemoryClass.WEIGHTS) < 15.05 * GIB
    assert plan.report.block_bytes == 16 * MIB
    free_bytes = int(79.2247 * GIB)
    divided = divide_memory(
        plan.config,
        free_bytes=free_bytes + 504 * MIB,
        launch_bytes=504 * MIB,
        block_bytes=plan.report.block_bytes,
    )
    assert divided.num_blocks == 4107

    # The log of another start shows 24 + 48 buckets, 15 + 48 of them with graphs, in 49 s.
    costs = ShapeCosts(plan)
    lengths = range(128, 1025, 128)
    prompts = [PaddedShape(prefill(batch, size)) for batch in (1, 2, 4) for size in lengths]
    decodes = [
        PaddedShape(decode(batch, batch * blocks)) for batch in (1, 2, 4) for blocks in range(1, 17)
    ]
    compiled = sum(costs.compile_s(shape) + costs.run_s(shape) for shape in prompts + decodes)
    compiled += costs.shared_s + 3 * costs.sampling_s()
    captured = 15 * costs.capture_s(prompts[0]) + 48 * costs.capture_s(decodes[0])
    assert compiled == pytest.approx(28, rel=0.15)
    assert captured == pytest.approx(21, rel=0.15)

    # The page has two examples, which show parts of this plan.
    page = (ROOT / "docs" / "planning.md").read_text("utf-8")
    printed = [line for line in wrapped(plan_lines(describe(plan, "gaudi2"))) if line]
    start = next(i for i, line in enumerate(printed) if line.startswith("Throughput by"))
    assert printed[:start] == example_of(page, "## An example")
    header, *lines = example_of(page, "## Throughput")
    assert printed[start + 1] == header
    assert len(lines) > 2 and set(lines) < set(printed[start:])


def test_a_model_that_is_too_large_is_told_the_nearest_that_fits(tmp_path):
    # A plan takes time for each layer, so the model has few large ones.
    big = {"hidden_size": 8192, "intermediate_size": 131072, "num_attention_heads": 64}
    folder = tmp_path / "Llama-wide"
    folder.mkdir()
    args = EngineArgs(
        model=write_config(folder, num_hidden_layers=20, **big),
        max_model_len=1024,
        max_num_seqs=8,
        skip_tokenizer_init=True,
    )
    with pytest.raises(ConfigError) as found:
        planned_or_nearest(args, "gaudi2", 1)
    assert str(found.value) == (
        "Llama-wide in bfloat16 takes 129.6 GiB, a gaudi2 card has 94.62 GiB. Use "
        "--num-cards 2, or an FP8 checkpoint (66.81 GiB)"
    )


def test_a_model_for_no_number_of_cards_is_refused(tmp_path):
    huge = {"hidden_size": 65536, "intermediate_size": 262144, "num_attention_heads": 512}
    args = EngineArgs(
        model=write_config(tmp_path, num_hidden_layers=24, head_dim=128, **huge),
        max_model_len=1024,
        skip_tokenizer_init=True,
    )
    with pytest.raises(ConfigError, match=r"It fits on no number of cards up to 8\. Use a smaller"):
        planned_or_nearest(args, "gaudi3", 1)


# ---- plans for a CPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gptq-4"])
def test_a_plan_for_a_cpu_has_the_weights_of_the_loaded_model(
    name, quantization, checkpoint, monkeypatch
):
    replace_ops(monkeypatch, CPUOps())
    if name == "gptq-4" and quantization is not None:
        return
    settings = {"model": checkpoint(name), "dtype": "bfloat16", "max_model_len": 128}
    settings |= {"skip_tokenizer_init": True, "quantization": quantization}
    try:
        config = EngineArgs(device="cpu", **settings).create_engine_config()
    except ConfigError as error:
        with pytest.raises(ConfigError, match=re.escape(str(error)[:40])):
            start_on_host(EngineArgs(**settings), 1, GIB)
        return
    loaded = load_model(config, TPGroup(), torch.device("cpu"), CPUPacked())
    num_bytes = sum(map(len, model_storages(loaded)))
    worker = start_on_host(EngineArgs(**settings), 1, GIB)
    assert worker.memory_uses[0].num_bytes == num_bytes
    left = int((GIB - num_bytes) * config.cache.gpu_memory_utilization)
    assert worker.report.num_blocks * worker.report.block_bytes <= left


def test_a_machine_that_is_too_small_is_refused(checkpoint):
    args = EngineArgs(model=checkpoint("llama"), max_model_len=128, skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match=r"takes .* MiB, but the machine has only 2 MiB\. Use a"):
        start_on_host(args, 1, 2 * MIB)


# ---- the first buckets ---------------------------------------------------------------------------


def test_more_first_buckets_than_the_engine_has_are_all_of_them(checkpoint):
    args = EngineArgs(model=checkpoint("llama"), max_model_len=128, skip_tokenizer_init=True)
    plan = make_engine_plan(replace(args, first_buckets=1000), "gaudi2")
    with captured_log() as log:
        first = plan.first_buckets()
    assert {*plan.catalog.prefill, *plan.catalog.decode} <= {*first}
    assert log == [f"Ready after warming up all {len(first)} buckets (--first-buckets is 1000)"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", {"num_speculative_tokens": 7, "disable_by_batch_size": 8}),
        ("mllama", {"num_speculative_tokens": 2}),
    ],
)
def test_no_later_bucket_needs_a_larger_workspace_than_the_first(name, settings, checkpoint):
    """This includes drafts, whose decodes have fewer requests and more logits, and
    cross-attention.
    """
    drafts = {"method": "ngram", "prompt_lookup_max": 2, **settings} if settings else None
    args = EngineArgs(
        model=checkpoint(name),
        dtype="bfloat16",
        block_size=16,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=65,
        first_buckets=1,
        speculative_config=drafts,
        skip_tokenizer_init=True,
    )
    plan = make_engine_plan(args, "gaudi2")
    first = plan.first_buckets()
    every = {*plan.catalog.prefill, *plan.catalog.decode, *first}
    assert len(first) < len(every)
    runner, pool = plan.worker.runner, plan.bridge.card.memory

    def needed_bytes(bucket: Bucket) -> int:
        needed = []
        for shape in plan.shapes_of(bucket):
            pool.workspace_bytes = 0  # drop the workspace of the forward pass before
            plan.record(partial(runner.warm_up, shape, sampling="none"))
            needed.append(pool.workspace_bytes)
        return max(needed)

    needed = {bucket: needed_bytes(bucket) for bucket in every}
    for phase in Phase:
        most = max(needed[bucket] for bucket in first if bucket.phase is phase)
        assert most == max(needed[bucket] for bucket in every if bucket.phase is phase)
