"""The catalog of buckets, the proof that it is complete, and the choice of captured graphs."""
