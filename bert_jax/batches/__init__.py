"""Tokens to batches: sentence pairs, full blocks, packing, length buckets, the loader."""

from collections.abc import Mapping

import numpy as np

Batch = Mapping[str, np.ndarray]
