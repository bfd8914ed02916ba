"""The vendor's fused kernels, with their documented signatures, in plain torch."""
