"""Serve routes for monitoring and operating the server."""
