"""The catalog of buckets, its proof, and what is captured."""
