"""Draft models and speculators: which tokens they have computed, and what they keep."""
