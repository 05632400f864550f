"""Print what the steps of a trace spent their time on: python costs.py DIR

DIR is that of `bert-jax benchmark --profile=DIR`, on a CPU. A program's operations are told apart
by the names that XLA gives them.
"""

import collections
import re
import sys
from pathlib import Path

from jax.profiler import ProfileData

KINDS = (
    ("matmuls", r"dot|onednn|ynn|matmul|eigen"),
    ("gathers, scatters", r"gather|scatter|dynamic"),
    ("copies, transposes", r"copy|transpose|bitcast|concatenate|slice|pad"),
    ("sums, maxima", r"reduce(?!.?precision)"),
    ("random numbers, sorting", r"rng|threefry|sort"),
    ("elementwise", r"fusion|add|multiply|convert|select|exp|broadcast|compare|subtract|divide"),
)
seconds: collections.Counter[str] = collections.Counter()
names: collections.Counter[str] = collections.Counter()
(path,) = Path(sys.argv[1]).rglob("*.xplane.pb")
for plane in ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
        for event in line.events:
            if any(key == "hlo_op" for key, _ in event.stats):
                name = re.sub(r"[.\d]+$", "", event.name)
                found = (kind for kind, pattern in KINDS if re.search(pattern, name))
                seconds[next(found, "other")] += event.duration_ns
                names[name] += event.duration_ns
for counter in (seconds, names):
    total = counter.total()
    print("\n".join(f"{value / total:6.1%}  {name}" for name, value in counter.most_common(14)))
    print()
