"""Planned engines against the ones that a simulated card has started: memory by class, and buckets."""

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.hpu import simulated_hpu
from tests.quantized_checkpoints import FORMATS, made_once
from tests.tiny_models import make_tiny_model
from vllm.bucketing.ledger import MemoryClass
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.planning.engine_plan import make_engine_plan
from vllm.worker.hpu.worker import HPUWorker

GIB, MIB = 2**30, 2**20

DENSE = (
    "llama",
    "qwen2",
    "gemma2",
    "opt",
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "bamba",
    "falcon_7b",
)
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], str]:
    """The folder of a tiny checkpoint, by the name of a family or of a format."""
    folder = tmp_path_factory.mktemp("checkpoints")
    quantized = made_once(folder)

    @cache
    def get(name: str) -> str:
        if name in FORMATS:
            return str(quantized(name)[0])
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


def started_worker(card: str, args: EngineArgs) -> tuple[HPUWorker, int]:
    """Return the worker of a simulated card, with its cache, and the number of its blocks."""
    worker = HPUWorker(args.create_engine_config())
    worker.load(0)
    report = worker.measure()
    worker.allocate(report.num_blocks)
    return worker, report.num_blocks


def check_case(seed: int, checkpoint: Callable[[str], str]) -> None:
    settings = random_settings(random.Random(seed))
    card, name = settings.pop("card"), settings.pop("name")
    args = {"model": checkpoint(name), "skip_tokenizer_init": True, **settings}
    what = f"{seed}: {name} on {card} with {settings}"
    with simulated_hpu(card=card, PT_HPU_LAZY_MODE=1, VLLM_HPU_SIM_STRICT=0):
        try:
            worker, num_blocks = started_worker(card, EngineArgs(device="hpu", **args))
        except ConfigError as error:
            with pytest.raises(ConfigError) as refused:
                make_engine_plan(EngineArgs(**args), card)
            assert str(refused.value) == str(error), what
            return
        catalog, shapes = (
            worker.runner.launches.planner.catalog,
            worker.runner.launches.launch_shapes,
        )
        ledger, block_bytes = worker.ledger, worker._report.block_bytes
        plan = make_engine_plan(EngineArgs(**args), card)
        assert plan.report.block_bytes == block_bytes, what
        assert plan.ledger.total_bytes == ledger.total_bytes, what
        for cls in MemoryClass:
            tolerance = 0.02 if cls is MemoryClass.WORKSPACE else 1e-6
            assert plan.ledger.budget(cls) == pytest.approx(ledger.budget(cls), tolerance), what
        is_equal = plan.report.launch_bytes == worker._report.launch_bytes
        assert not is_equal or plan.report == worker._report, what
        assert plan.report.num_blocks == pytest.approx(num_blocks, 1e-3), what
        assert plan.catalog.prefill == catalog.prefill, what
        assert plan.catalog.decode == catalog.decode, what
        buckets = [*catalog.prefill, *catalog.decode]
        assert list(plan.shapes) == [shape for each in buckets for shape in shapes(each)], what


@pytest.mark.parametrize(
    "seed",
    [
        *range(20),
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(20, 1000)),
    ],
)
def test_a_plan_has_the_memory_and_buckets_of_a_card(seed, checkpoint):
    check_case(seed, checkpoint)
