"""What the methods of `LLM` have in common."""
