"""One file for each quantization format, of checkpoints or made of dense weights."""
