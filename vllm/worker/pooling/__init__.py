"""Runners of pooling models, which sample nothing."""
