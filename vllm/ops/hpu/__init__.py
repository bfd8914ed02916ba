"""The operators of a Gaudi card."""
