"""The HTTP server itself, and the responses that end when their reader leaves."""
