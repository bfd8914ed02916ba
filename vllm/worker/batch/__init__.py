"""The running requests of a worker, and the inputs and results of a forward pass."""
