"""Tokens to batches: sentence pairs, full blocks, packing, length buckets, the loader."""
