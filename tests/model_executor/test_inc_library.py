"""Test against neural-compressor-pt, if it is installed, on the simulated card.

It measures, converts and runs a model there, and its scales equal the scales of this package.
"""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.model_executor.inc_library import Model
from vllm.config.quantization.inc import MEASURED_SCALE_METHODS, SCALE_METHODS
from vllm.model_executor.quantization.inc.scales import RANGES, input_scale, weight_scales

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("neural_compressor") is None,
    reason="neural-compressor-pt is not installed",
)

SAME = [m for m in MEASURED_SCALE_METHODS if m not in ("unit_scale", "maxabs_pow2_opt_weight")]
"""The library writes no file of unit scales, and searches other powers of two."""


@pytest.mark.parametrize("card", ["gaudi2", "gaudi3"])
def test_the_library_runs_on_the_simulated_card_with_the_same_scales(card):
    command = [sys.executable, "-m", "tests.model_executor.inc_library", card, *SAME]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    limit = RANGES[card.upper()]
    for method in SAME:
        assert max(found[method]["errors"]) < 0.1
        nodes, measured = (found[method][part]["Nodes"] for part in ("scales", "measured"))
        rule = SCALE_METHODS[method]
        for index, layer in enumerate(Model().layers):
            name = f"layers.{index}"
            largest = measured[name]["inputs"][0][0][0]
            want = input_scale(largest, rule, limit, 0.25)
            assert_same(nodes[name]["inputs"][0], torch.tensor([want]))
            weight = nodes[name]["params"]["weight"]
            # A dictionary has the scales of the outputs, then of the inputs.
            if isinstance(weight, dict):
                weight = weight["0"]
            exact = replace(rule, weights="none", is_searched=False)
            found_here = (weight_scales(layer.weight, r, limit, 0.5) for r in (rule, exact))
            assert_same(weight, *found_here)


def assert_same(got, want: Tensor, exact: Tensor | None = None) -> None:
    """Check that scales are equal, up to the rounding of the library.

    The library computes in bfloat16, even logarithms. If the exact scale is close to a power of
    two, its result may be the next power of two.
    """
    ratios = torch.tensor(got).flatten().log2() - want.log2()
    is_apart = ratios.abs() > 2**-6
    if is_apart.any():
        assert exact is not None
        exponents = exact.log2()[is_apart]
        assert ((exponents - exponents.round()).abs() < 2**-5).all()
        assert (ratios[is_apart].abs() == 1).all()
