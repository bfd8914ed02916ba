"""Shared code of the methods of `LLM`."""
