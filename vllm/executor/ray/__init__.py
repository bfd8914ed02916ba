"""Run ranks in Ray actors."""
