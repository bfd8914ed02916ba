"""Settings of every test process."""

import torch

# Test processes run side by side: more threads than cores would only wait for each other.
torch.set_num_threads(1)
