"""The operator table of the CPU, and programs: recorded operators that run in one call.

`table` has the operators. `recorder` records the operators of a model as a `program`, and
`decode_step` runs the program for the runner.
"""

from vllm.ops.cpu.operators.table import CPUOps, load_cpu_kernels

__all__ = ["CPUOps", "load_cpu_kernels"]
