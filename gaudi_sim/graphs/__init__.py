"""Captured graphs of the simulated card: rules, recording and replay."""
