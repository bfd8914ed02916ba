"""Read GGUF files: one file with weights, configuration and tokenizer. Imports no torch."""
