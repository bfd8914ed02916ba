"""Serve the OpenAI Responses API: /v1/responses."""
