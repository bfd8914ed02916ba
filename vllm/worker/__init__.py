"""The worker: the process of one device, with the model, the KV cache and the batch."""
