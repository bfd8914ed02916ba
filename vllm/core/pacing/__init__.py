"""Estimate the time of steps, and keep steps short while running requests wait for tokens."""
