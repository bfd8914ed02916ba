"""Settings of quantized checkpoints."""
