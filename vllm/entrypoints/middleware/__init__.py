"""Middleware in front of the routes: plain ASGI, each with one task."""
