"""Restrict the next token: allowed tokens, rules of a model, and processors of users."""
