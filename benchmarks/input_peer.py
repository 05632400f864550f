"""Prepares text as transformers' `run_mlm.py` does, in a process of its own, and says how long.

Started by input.py with the files, the tokenizer's folder, a folder for the cache and the number of
processes; this project need not be installed.
"""

import itertools
import json
import sys
import time

import datasets
import transformers

LENGTH = 128


def in_blocks(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Joins the texts of a batch and cuts them into blocks; what is left at its end is dropped."""
    joined = {name: list(itertools.chain(*values)) for name, values in rows.items()}
    end = len(joined["input_ids"]) // LENGTH * LENGTH
    starts = range(0, end, LENGTH)
    return {name: [values[i : i + LENGTH] for i in starts] for name, values in joined.items()}


def main() -> None:
    """Prepares the text once."""
    files, folder, cache, processes = sys.argv[1:]
    datasets.disable_progress_bars()
    started = time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = datasets.load_dataset(
        "text", data_files=json.loads(files), cache_dir=cache, split="train"
    )
    tokenized = lines.map(
        lambda rows: tokenizer(rows["text"], return_special_tokens_mask=True),
        batched=True,
        num_proc=int(processes),
        remove_columns=["text"],
    )
    blocks = tokenized.map(in_blocks, batched=True, num_proc=int(processes))
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "rows": len(blocks)}))


if __name__ == "__main__":
    main()
