"""Decide how many tokens to draft, and find drafts in earlier tokens."""
