"""The KV cache as the scheduler sees it: blocks, their contents and who holds them."""
