"""The train step and what surrounds it: optimizer, loop, metrics, checkpoints."""
