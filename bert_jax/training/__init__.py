"""The train step and what surrounds it: masks, losses, optimizer, devices, checkpoints."""
