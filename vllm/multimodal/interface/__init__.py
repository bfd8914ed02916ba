"""Interfaces of media, and of a family's rules for them. Independent of families."""
