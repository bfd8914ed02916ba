"""Interfaces of media, and of the rules of a family for them. Knows no families."""
