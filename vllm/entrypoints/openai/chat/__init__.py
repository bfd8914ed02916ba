"""Serve POST /v1/chat/completions, and provide the chat turn that other APIs use."""
