"""Weights in the layout of the C++ kernels, and matmuls with them.

`linear` has the weight of a linear layer, `head_linear` one matrix per head, `moe` the experts of a
layer. `stored` packs the weights of quantized checkpoints.
"""
