"""Ranks in Ray actors."""
