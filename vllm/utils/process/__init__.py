"""Processes and sockets: started, watched, killed at a deadline."""
