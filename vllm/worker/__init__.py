"""Everything that runs beside the device: batch state, launches, the model, the KV cache."""
