"""Measure models for FP8 and load them with the measured scales, for the tests of INC."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from tests.model_executor.helpers import logits_of, make_config
from vllm.config import IncConfig
from vllm.distributed import Stage, TPGroup
from vllm.model_executor.loader import load_model
from vllm.model_executor.quantization.inc import measure as inc_measure


def write(path: Path, content) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def measure(folder: Path, files: Path):
    config = IncConfig(
        path="measure.json", mode="MEASURE", dump_stats_path=str(files / "inc_output")
    )
    model = load_inc(folder, config)
    tokens = torch.arange(3, 40)
    logits_of(model, tokens)
    inc_measure.reset(model)
    logits_of(model, tokens)
    path = inc_measure.save(model, config, TPGroup(), None, adds=False)
    return json.loads(Path(path).read_text())


def quantize(folder, files: Path, stage: Stage | None = None, **settings):
    return load_inc(folder, quantize_config(files, **settings), stage)


def quantize_config(files: Path, **settings) -> IncConfig:
    stats = str(files / "inc_output")
    return IncConfig(path="quant.json", mode="QUANTIZE", dump_stats_path=stats, **settings)


def load_inc(
    folder: Path, inc: IncConfig, stage: Stage | None = None, device: str = "cpu", **kinds
):
    config = make_config(folder, **kinds)
    model = replace(config.model, quantization="inc", inc=inc)
    return load_model(replace(config, model=model), TPGroup(), torch.device(device), stage=stage)


def without(content, name):
    return {**content, "Nodes": {n: v for n, v in content["Nodes"].items() if n != name}}
