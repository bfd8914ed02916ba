"""Everything that is read with transformers: config.json, tokenizers, the hub."""
