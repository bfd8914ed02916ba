"""Pages for people with a browser: the chat page and the status page."""
