"""Keyed random numbers and permutations, so that any batch is drawn from its index alone."""

import numpy as np

# What a generator is used for: the second number of its key, so that no two draw the same numbers.
# The values are part of every batch ever drawn; do not change them.
PAIRS, BLOCKS, ORDER, EXTRA, SHIFT, BATCH, SEGMENTS, PACKING, MIXTURE, FORK = range(10)


def keyed_generator(*key: int) -> np.random.Generator:
    """Return a generator whose numbers depend on the key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def permute(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Return the image of indices under a random permutation: Feistel (Black and Rogaway 2002)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    rounds = keyed_generator(*key).integers(1 << 63, size=4, dtype=np.uint64)
    value = index.astype(np.uint64)
    outside = np.ones(value.shape, bool)
    while outside.any():
        left, right = value[outside] >> np.uint64(half), value[outside] & mask
        for constant in rounds:
            left, right = right, left ^ (_mix(right ^ constant) & mask)
        value[outside] = (left << np.uint64(half)) | right
        outside = value >= np.uint64(size)
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
