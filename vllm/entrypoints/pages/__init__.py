"""Serve pages for people with a browser: chat, status, and the description of the API."""
