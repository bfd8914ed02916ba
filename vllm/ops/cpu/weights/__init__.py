"""Weights as the C++ kernels read them, and matmuls with them.

`linear` has one weight, `head_linear` one of each head, `moe` the experts of a layer. `stored`
packs what quantized checkpoints store.
"""
