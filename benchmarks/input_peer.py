"""Prepare text as transformers' `run_mlm.py` does, in a subprocess, and print the seconds.

input.py starts it with the files, the tokenizer's folder, a folder for the cache and the number of
processes. This project need not be installed.
"""

import itertools
import json
import sys
import time

import datasets
import transformers

LENGTH = 128


def in_blocks(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Join the texts of a batch and split them into blocks; an incomplete block is dropped."""
    joined = {name: list(itertools.chain(*values)) for name, values in examples.items()}
    end = len(joined["input_ids"]) // LENGTH * LENGTH
    starts = range(0, end, LENGTH)
    return {name: [values[i : i + LENGTH] for i in starts] for name, values in joined.items()}


def main() -> None:
    """Prepare the text once."""
    files, folder, cache, processes = sys.argv[1:]
    datasets.disable_progress_bars()
    start = time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = datasets.load_dataset(
        "text", data_files=json.loads(files), cache_dir=cache, split="train"
    )
    tokenized = lines.map(
        lambda examples: tokenizer(examples["text"], return_special_tokens_mask=True),
        batched=True,
        num_proc=int(processes),
        remove_columns=["text"],
    )
    blocks = tokenized.map(in_blocks, batched=True, num_proc=int(processes))
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "blocks": len(blocks)}))


if __name__ == "__main__":
    main()
