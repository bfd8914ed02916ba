"""Prompts, chunks and log-probabilities: what several routes of the OpenAI API use."""
