"""Start processes, watch them, kill them at a deadline, and exchange messages with them."""
