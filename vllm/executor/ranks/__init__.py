"""Start, call and watch ranks in processes of this machine."""
