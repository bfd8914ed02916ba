"""POST /v1/chat/completions, and the chat turn that other APIs use too."""
