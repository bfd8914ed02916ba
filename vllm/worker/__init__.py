"""The process of a device: its batch, forward passes, the model, the KV cache."""
