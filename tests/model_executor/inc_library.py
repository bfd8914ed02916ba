"""Use neural-compressor-pt on a simulated card through its public interface: measure, convert and
run a small model with each method. Prints one JSON object.

    python -m tests.model_executor.inc_library gaudi2 METHOD...
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 16
MAGNITUDES = (0.003, 0.1, 1.0, 40.0)
"""Of the inputs and of the weights of its layers; powers of two are not among them."""


class Model(nn.Module):
    """Parallel layers, each with inputs and weights of a different magnitude."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, 8, bias=False) for _ in MAGNITUDES)
        for layer, magnitude in zip(self.layers, MAGNITUDES, strict=True):
            layer.weight = nn.Parameter(
                torch.randn(8, FEATURES, generator=generator).bfloat16() * magnitude, False
            )

    def forward(self, x: Tensor) -> Tensor:
        parts = [m * layer(x * m) for m, layer in zip(MAGNITUDES, self.layers, strict=True)]
        return torch.stack(parts)


def run(method: str, x: Tensor) -> dict[str, Any]:
    """Return the scales of inputs and weights of each layer, and the difference of the results from
    bf16 results.
    """
    from neural_compressor.torch.quantization import (
        FP8Config,
        convert,
        finalize_calibration,
        prepare,
    )

    with tempfile.TemporaryDirectory() as folder:
        settings = {"observer": "maxabs", "dump_stats_path": f"{folder}/m", "scale_method": method}
        model = prepare(Model().eval(), FP8Config(mode="MEASURE", **settings))
        want = model(x).float().cpu()
        finalize_calibration(model)
        model = convert(Model().eval(), FP8Config(mode="QUANTIZE", **settings))
        got = model(x).float().cpu()
        measured = json.loads(Path(f"{folder}/m_hooks_maxabs.json").read_text())
        scales = json.loads(Path(f"{folder}/m_hooks_maxabs_{method.upper()}.json").read_text())
    error = (got - want).abs().amax((1, 2)) / want.abs().amax((1, 2))
    return {"measured": measured, "scales": scales, "errors": error.tolist()}


def main() -> None:
    card, *methods = sys.argv[1:]
    os.environ |= {"VLLM_HPU_SIM": card, "PT_HPU_LAZY_MODE": "1"}
    from gaudi_sim.vendor import install_vendor
    from vllm.platforms import resolve_platform

    resolve_platform("hpu").bridge  # noqa: B018  (starts the card)
    install_vendor()
    make = torch.tensor

    def on_host_first(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        """Make a tensor on the host and move it to the device, because torch 2.13 cannot make
        tensors from values on a device that is written in Python.
        """
        made = make(data, *args, **options)
        return made if device is None else made.to(device)

    torch.tensor = on_host_first
    x = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(1)).bfloat16().to("hpu")
    with torch.no_grad():
        found = {method: run(method, x) for method in methods}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
