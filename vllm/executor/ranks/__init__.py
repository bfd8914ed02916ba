"""Ranks in processes of this machine: started, called, watched."""
