"""Serve the Anthropic Messages API: /v1/messages."""
