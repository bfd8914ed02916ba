"""Strategies that generate buckets."""
