"""Operators on the C++ kernels of csrc/cpu.

`library` loads the kernels; `operators` has the table of the platform, with `attention`. `linear`
has packed weights, also from the int4 checkpoints that `int4_layouts` reads, and `moe` experts of
them. `sampling` is called by the sampler. `recorder` writes down what modules compute as a
`program`, which `decode_step` runs for the runner.
"""
