"""Run replicas of the engine core on this machine and on others."""
