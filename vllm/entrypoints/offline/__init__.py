"""Share code between the methods of `LLM`."""
