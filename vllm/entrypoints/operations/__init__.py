"""Routes for machines and people that watch the server."""
