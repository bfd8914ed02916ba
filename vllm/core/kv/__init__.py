"""Manage the KV cache for the scheduler: blocks, their contents, and the requests that hold
them.
"""
