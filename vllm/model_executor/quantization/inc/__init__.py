"""FP8 by Intel Neural Compressor: measurements, scales, stored weights."""
