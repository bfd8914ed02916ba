"""Check whether a Gaudi card computes what the engine needs: `vllm hpu-check`.

The checks run small cases of every fused kernel, of attention, of sampling, of graphs and of
compilation, and one decoder layer of a model, and compare them with torch on the host. Prints
nothing.
"""

from vllm.hpu_check.check import CheckResult, Outcome
from vllm.hpu_check.run import CHECKS, NAMES, run_checks

__all__ = ["CHECKS", "NAMES", "CheckResult", "Outcome", "run_checks"]
