"""Share prompts, chunks and log-probabilities between routes of the OpenAI API."""
