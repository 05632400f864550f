"""The numbers that a setting accepts."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Range(NamedTuple):
    """The numbers that a field accepts, in words and as a predicate."""

    description: str
    contains: Callable[[float], bool]


LIMIT = 1 << 32

POSITIVE = Range("a positive number below 2**32", lambda x: 0 < x < LIMIT)
STEPS = Range("a positive number below 2**31", lambda x: 0 < x < 1 << 31)
NOT_NEGATIVE = Range("at least 0 and below 2**32", lambda x: 0 <= x < LIMIT)
SHARE = Range("at least 0 and below 1", lambda x: 0 <= x < 1)
SHARE_OR_ALL = Range("at least 0 and at most 1", lambda x: 0 <= x <= 1)
SHARE_OR_STEPS = Range(
    "a share below 1 or a whole number of steps", lambda x: 0 <= x < 1 or 1 <= x == x // 1 < 1 << 31
)
POSITIVE_SHARE = Range("above 0 and at most 1", lambda x: 0 < x <= 1)
SIZE = Range("a positive number of at most 2**24", lambda x: 0 < x <= 1 << 24)
SIZE_OR_ZERO = Range("at least 0 and at most 2**24", lambda x: 0 <= x <= 1 << 24)
COUNT_OR_REST = Range("a positive number, or -1 for the rest", lambda x: x == -1 or 0 < x < LIMIT)
FINITE = Range("a finite number", math.isfinite)
