"""POST /v1/chat/completions, and the turn of a conversation that other APIs use too."""
