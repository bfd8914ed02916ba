"""Captured graphs: their rules, their recording and their replay."""
