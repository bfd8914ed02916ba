"""Define settings of quantized checkpoints."""
