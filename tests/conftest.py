"""Settings of every test process."""

import signal
import threading

import torch

# Test processes run side by side: more threads than cores would only wait for each other.
torch.set_num_threads(1)

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that.
is_main = threading.current_thread() is threading.main_thread()
if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
