"""Images and sounds of requests: fetching, decoding, and processes that can be killed for it."""
