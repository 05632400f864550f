"""Time exact search over random vectors of unit length; with --peers beside NumPy and FAISS.

    OPENBLAS_NUM_THREADS=1 python benchmarks/search.py --texts=1000000
    OPENBLAS_NUM_THREADS=1 python benchmarks/search.py --peers

Prints a Markdown table of the fastest of five calls, in seconds. The peers are float32 vectors,
NumPy's own conversion and product, and FAISS, which is timed where it is installed.
"""

import argparse
import importlib.util
import os
import time
from collections.abc import Callable

import numpy as np
import record

from bert_jax.retrieval.search import normalize, top_k

CALLS, TOP_K, PART = 5, 10, 10_000


def fastest(function: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of several calls."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def peers(halves: np.ndarray) -> dict[str, Callable[[np.ndarray], object]]:
    """Returns other searches of the same vectors."""
    vectors = halves.astype(np.float32)

    def plain(queries: np.ndarray) -> np.ndarray:
        scores = queries @ halves.astype(np.float32).T
        return np.argpartition(-scores, TOP_K, 1)[:, :TOP_K]

    found: dict[str, Callable[[np.ndarray], object]]
    found = {"float32": lambda queries: top_k(vectors, queries, TOP_K)}
    found["float16, by NumPy's conversion"] = plain
    if importlib.util.find_spec("faiss"):
        import faiss  # pyright: ignore[reportMissingImports]

        faiss.omp_set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", "0")) or 1)
        flat = faiss.IndexFlatIP(halves.shape[1])
        flat.add(vectors)
        found["float32, FAISS IndexFlatIP"] = lambda queries: flat.search(queries, TOP_K)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--peers", action="store_true")
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    queries = normalize(generator.normal(size=(1000, args.size)).astype(np.float32))
    halves = np.empty((args.texts, args.size), np.float16)
    for start in range(0, args.texts, PART):
        part = halves[start : start + PART]
        part[:] = normalize(generator.standard_normal(part.shape, np.float32))
    searches = {"float16": lambda queries: top_k(halves, queries, TOP_K)}
    searches |= peers(halves) if args.peers else {}
    print(record.heading(["numpy", "scipy"]))
    print(f"| {args.texts:,} texts of {args.size} | queries | seconds |")
    print("|---|---:|---:|")
    for name, function in searches.items():
        for number in (1, 10, 100) if args.peers else (1, 10):
            some = queries[:number]
            seconds = fastest(lambda call=function, some=some: call(some))
            print(f"| {name} | {number} | {seconds:.4f} |")


if __name__ == "__main__":
    main()
