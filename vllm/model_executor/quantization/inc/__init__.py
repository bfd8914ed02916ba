"""FP8 quantization with files of Intel Neural Compressor: measuring, scales, weights."""
