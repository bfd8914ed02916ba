"""The HTTP server, and responses that end when their client disconnects."""
