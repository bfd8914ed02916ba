"""Estimate the time of steps, and keep steps short while streams wait for tokens."""
