"""Start processes, watch them, and kill them at a deadline; helpers for their sockets and
memory.
"""
