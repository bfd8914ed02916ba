"""Provide the middleware before the routes: plain ASGI, each with one task."""
