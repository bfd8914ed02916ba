"""Operators on the C++ kernels of csrc/cpu."""
