"""Read everything that needs transformers: config.json, tokenizers, the hub."""
