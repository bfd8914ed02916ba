"""Serve the routes of the OpenAI API that need only one file each."""
