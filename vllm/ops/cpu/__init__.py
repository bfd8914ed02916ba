"""Operators that use the C++ kernels of csrc/cpu.

`library` loads the kernels; `operators` has the table of the platform, and `weights` the packed
weights. `attention`, `low_rank`, `state_space` and `row_operations` call kernels for the table, and
`sampling` for the sampler. Symbols take the position of tensors while a model is recorded.
"""
