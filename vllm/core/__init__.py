"""Schedule requests and account for KV blocks. Pure logic: nothing here uses torch, a device or
text.
"""
