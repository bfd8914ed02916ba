"""Images and sounds of requests: fetching, decoding, and killable processes for it."""
