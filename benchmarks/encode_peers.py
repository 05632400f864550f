"""Time encoding and classifying texts beside other libraries, interleaved in one run.

    python benchmarks/encode_peers.py --lengths=16,128,512 --rounds=5 --output=DIR

A model of random weights, 6 layers of 384 (MiniLM's size) or `--layers` of `--size`, is written to
the output in their formats. All encode the same texts, of a number of tokens each, from strings to
vectors in memory: `encode` beside sentence-transformers and ONNX Runtime (float32, int8), and
`predict` beside transformers. Each runs in a process of its own, which waits while another runs.
Each round gives bert-jax's speed beside the peer's; the median is printed with its quartiles, and
the largest difference of the first vector. A peer that fails is dropped, and the reason is printed.
PyTorch takes a GPU if it has one. With `--dtype=bfloat16` bert-jax and PyTorch (under autocast)
compute in it. Needs `pip install sentence-transformers onnx onnxruntime onnxscript`, for the peers
that are named.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import record

from bert_jax.commands import process
from bert_jax.errors import UserError, first_line

PEERS = {
    "encode": ("bert-jax", "sentence-transformers", "onnx-float32", "onnx-int8"),
    "predict": ("bert-jax", "transformers"),
}
BERT_JAX = "bert-jax"
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@cache  # 100,000 take seconds
def texts(count: int, length: int) -> list[str]:
    """Return texts of `length` tokens, [CLS] and [SEP] among them."""
    random = np.random.default_rng(length)
    rows = random.integers(0, 20_000, (count, length - 2))
    return [" ".join(f"w{number}" for number in row) for row in rows]


def write_models(folder: Path, layers: int, size: int) -> None:
    """Write the encoder and a classifier as transformers does."""
    import torch
    import transformers

    vocabulary = folder / "words.txt"
    vocabulary.write_text("\n".join(_SPECIAL + [f"w{number}" for number in range(20_000)]))
    tokenizer = transformers.BertTokenizer(str(vocabulary))
    config = transformers.BertConfig(
        vocab_size=20_005,
        hidden_size=size,
        num_hidden_layers=layers,
        num_attention_heads=size // 32,
        intermediate_size=4 * size,
    )
    torch.manual_seed(0)
    encoder = transformers.BertModel(config).eval()
    classifier = transformers.BertForSequenceClassification(config).eval()
    for name, model in (("encode", encoder), ("predict", classifier)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_onnx(folder: Path) -> None:
    """Write the encoder of the folder as ONNX, in float32 and in int8."""
    import torch
    import transformers
    from onnxruntime.quantization import quantize_dynamic

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "encode")
    encoder = transformers.BertModel.from_pretrained(folder / "encode").eval()
    example = tokenizer(["w1 w2 w3", "w4 w5 w6"], return_tensors="pt")
    axes = {name: {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")} for name in example}
    torch.onnx.export(
        encoder,
        (),
        str(folder / "model.onnx"),
        kwargs=dict(example),
        dynamic_shapes=axes,
        dynamo=True,
    )
    quantize_dynamic(folder / "model.onnx", folder / "model.int8.onnx")


def onnx_encoder(folder: Path, name: str) -> Callable[[list[str]], np.ndarray]:
    """Return an encoder as one would write it with ONNX Runtime: sorted, in batches of 32."""
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "encode/tokenizer.json"))
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding()
    session = onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def encode(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors = {}
        for start in range(0, len(order), 32):
            indices = order[start : start + 32]
            encoded = tokenizer.encode_batch([texts[index] for index in indices])
            mask = np.array([each.attention_mask for each in encoded])
            arrays = {
                "input_ids": np.array([each.ids for each in encoded]),
                "attention_mask": mask,
                "token_type_ids": np.zeros_like(mask),
            }
            hidden: Any = session.run(None, {name: arrays[name] for name in names})[0]
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            vectors |= dict(zip(indices, mean, strict=True))
        return np.stack([vectors[index] for index in range(len(texts))])

    return encode


def make(folder: Path, task: str, peer: str, dtype: Any) -> Callable[[list[str]], np.ndarray]:
    """Return what turns texts into vectors, or into probabilities."""
    if peer == BERT_JAX:
        import bert_jax
        from bert_jax.commands.memory import keep_host_memory

        keep_host_memory()
        bert = bert_jax.load(folder / task, dtype=dtype)
        if task == "encode":
            return bert.encode
        return lambda texts: np.array(
            [list(p["probabilities"].values()) for p in bert.predict(texts)]
        )
    if peer.startswith("onnx"):
        name = "model.onnx" if peer.endswith("32") else "model.int8.onnx"
        return onnx_encoder(folder, name)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = 32 if device == "cpu" else 1024
    cast = partial(torch.autocast, device, torch.bfloat16, enabled=dtype == "bfloat16")
    if peer == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder / task), device=device)
        model.max_seq_length = 512

        def encode(texts: list[str]) -> np.ndarray:
            with cast():
                return np.asarray(model.encode(texts, batch_size=batch))

        return encode
    import transformers

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder / task)
    classifier.to(device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / task)

    def predict(texts: list[str]) -> np.ndarray:
        found = []
        with torch.inference_mode(), cast():
            for i in range(0, len(texts), batch):
                inputs = tokenizer(texts[i : i + batch], return_tensors="pt", padding=True)
                found.append(classifier(**inputs.to(device)).logits)
            return torch.cat(found).float().softmax(-1).cpu().numpy()

    return predict


class PeerError(Exception):
    """Why a peer cannot go on."""


class Worker:
    """A process of a peer."""

    def __init__(self, folder: Path, task: str, peer: str, dtype: str):
        self.task, self.peer = task, peer
        command = [sys.executable, __file__, "--worker", str(folder), task, peer, dtype]
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}  # workers share a GPU
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert self._process.stdin
        assert self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def turn(self, count: int, length: int) -> tuple[float, np.ndarray]:
        """Return the seconds that the texts of a length took, and the first vector.

        Raises:
          PeerError: the process has ended, or its function has raised an error.
        """
        try:
            self._requests.write(f"{count} {length}\n")
            self._requests.flush()
            found = json.loads(self._answers.readline())
        except (OSError, ValueError):
            raise PeerError("its process has ended") from None
        if isinstance(found, str):
            raise PeerError(found)
        return found[0], np.array(found[1])

    def end(self) -> None:
        """End the process."""
        self._requests.close()
        self._process.wait()


def serve(folder: Path, task: str, peer: str, dtype: str) -> None:
    """Answer each length that comes in."""
    try:
        function = make(folder, task, peer, dtype)
        for line in sys.stdin:
            chosen = texts(*map(int, line.split()))
            started = time.perf_counter()
            vectors = function(chosen)
            seconds = time.perf_counter() - started
            print(json.dumps([seconds, np.asarray(vectors[0]).tolist()]), flush=True)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {first_line(error)}"), flush=True)


def main() -> None:
    """Run the peers and print a table."""
    if "--worker" in sys.argv:
        _, _, folder, task, peer, dtype = sys.argv
        serve(Path(folder), task, peer, dtype)
        return
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lengths", default="16,128,512", help="tokens of a text")
    parser.add_argument("--tokens", type=int, default=16_384, help="of all texts of a turn")
    parser.add_argument("--peers", default="", help="comma separated, beside bert-jax (all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--output", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--figures", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()
    known = [*dict.fromkeys(peer for peers in PEERS.values() for peer in peers)]
    chosen = {BERT_JAX, *(args.peers.split(",") if args.peers else known)}
    if unknown := chosen - {*known}:
        raise UserError(f"--peers {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    lengths = [int(each) for each in args.lengths.split(",") if each.isdecimal()]
    is_range = bool(lengths) and min(lengths) >= 3 and max(lengths) <= 512
    if ",".join(map(str, lengths)) != args.lengths or not is_range:
        raise UserError("--lengths are numbers from 3 to 512, comma separated")
    if args.rounds < 1 or args.tokens < max(lengths):
        raise UserError("--rounds must be positive, and --tokens those of a text at least")
    args.output.mkdir(parents=True, exist_ok=True)
    write_models(args.output, args.layers, args.size)
    if any(peer.startswith("onnx") for peer in chosen):
        write_onnx(args.output)
    peers = {peer.partition("-float")[0].partition("-int")[0] for peer in chosen - {BERT_JAX}}
    packages = sorted({"onnxruntime" if peer == "onnx" else peer for peer in peers})
    print(record.heading(["jax", "torch", *packages]))
    jobs = [(task, peer) for task, peers in PEERS.items() for peer in peers if peer in chosen]
    workers = [Worker(args.output, task, peer, args.dtype) for task, peer in jobs]
    print("| | tokens | texts/s | bert-jax is faster by | difference |\n|---|---|---|---|---|")
    figures = [row for length in lengths for row in measure(workers, args, length)]
    for worker in workers:
        worker.end()
    if args.figures:
        args.figures.write_text("".join(json.dumps(row) + "\n" for row in figures))


def measure(workers: list[Worker], args: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """Print the rows of a length, and return them; a worker that fails is dropped."""
    count = args.tokens // length
    first: dict[Worker, np.ndarray] = {}
    times: dict[Worker, list[float]] = {worker: [] for worker in workers}
    for number in range(args.rounds + 1):
        for worker in list(workers):
            try:
                seconds, vector = worker.turn(count, length)
            except PeerError as error:
                if worker.peer == BERT_JAX:
                    raise
                print(f"{worker.task}, {worker.peer}: {error}", file=sys.stderr, flush=True)
                workers.remove(worker)
                worker.end()
                continue
            first.setdefault(worker, vector)
            times[worker] += [seconds] if number else []  # the first also compiles
    ours = {worker.task: worker for worker in workers if worker.peer == BERT_JAX}
    rows = []
    for worker in workers:
        own = ours[worker.task]
        rate = count / statistics.median(times[worker])
        ratio = record.ratio(times[worker], times[own])
        difference = f"{np.abs(first[worker] - first[own]).max():.1e}"
        name = f"{worker.task}, {worker.peer}"
        print(f"| {name} | {length} | {rate:.1f} | {ratio} | {difference} |", flush=True)
        rows.append({"what": name, "tokens": length, "texts_per_second": rate, "ratio": ratio})
    return rows


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
