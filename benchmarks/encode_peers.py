"""Time encoding and classifying texts beside other libraries, interleaved in one run.

    python benchmarks/encode_peers.py --lengths=16,128,512 --rounds=5 --output=DIR

A model of random weights, 6 layers of 384 (MiniLM's size) or `--layers` of `--size`, is written to
the output in their formats. All encode the same texts, of a number of tokens each, from strings to
vectors in memory: `encode` beside sentence-transformers and ONNX Runtime (float32, int8), and
`predict` beside transformers. Each runs in a process of its own, which waits while another runs.
The ratio to ours is taken in each round, and printed with its quartiles. The first vector's largest
difference from ours is printed too. Needs `pip install sentence-transformers onnx onnxruntime
onnxscript`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import record

PEERS = {
    "encode": ("bert-jax", "sentence-transformers", "onnx-float32", "onnx-int8"),
    "predict": ("bert-jax", "transformers"),
}
TOKENS = 16_384  # of a turn
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def texts(length: int) -> list[str]:
    """Return texts of `length` tokens, [CLS] and [SEP] among them."""
    random = np.random.default_rng(length)
    rows = random.integers(0, 20_000, (TOKENS // length, length - 2))
    return [" ".join(f"w{number}" for number in row) for row in rows]


def write_models(folder: Path, layers: int, size: int) -> None:
    """Write the encoder and a classifier as transformers does, and the encoder as ONNX."""
    import torch
    import transformers
    from onnxruntime.quantization import quantize_dynamic

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
            hidden = session.run(None, {name: arrays[name] for name in names})[0]
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            vectors |= dict(zip(indices, mean, strict=True))
        return np.stack([vectors[index] for index in range(len(texts))])

    return encode


def make(folder: Path, task: str, peer: str) -> Callable[[list[str]], np.ndarray]:
    """Return what turns texts into vectors, or into probabilities."""
    if peer == "bert-jax":
        import bert_jax
        from bert_jax.commands.memory import keep_host_memory

        keep_host_memory()
        bert = bert_jax.load(folder / task)
        if task == "encode":
            return bert.encode
        return lambda texts: np.array(
            [list(p["probabilities"].values()) for p in bert.predict(texts)]
        )
    if peer.startswith("onnx"):
        name = "model.onnx" if peer.endswith("32") else "model.int8.onnx"
        return onnx_encoder(folder, name)
    if peer == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder / task), device="cpu")
        model.max_seq_length = 512
        return lambda texts: np.asarray(model.encode(texts))
    import torch
    import transformers

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder / task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / task)

    def predict(texts: list[str]) -> np.ndarray:
        with torch.inference_mode():
            found = [
                classifier(**tokenizer(texts[i : i + 32], return_tensors="pt", padding=True)).logits
                for i in range(0, len(texts), 32)
            ]
            return torch.cat(found).softmax(-1).numpy()

    return predict


class Worker:
    """A process of a peer."""

    def __init__(self, folder: Path, task: str, peer: str):
        self.task, self.peer = task, peer
        command = [sys.executable, __file__, "--worker", str(folder), task, peer]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes)

    def turn(self, length: int) -> tuple[float, np.ndarray]:
        """Return the seconds that the texts of a length took, and the first vector."""
        self._process.stdin.write(f"{length}\n")
        self._process.stdin.flush()
        seconds, vector = json.loads(self._process.stdout.readline())
        return seconds, np.array(vector)

    def end(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def serve(folder: Path, task: str, peer: str) -> None:
    """Answer each length that comes in."""
    import time

    function = make(folder, task, peer)
    for line in sys.stdin:
        chosen = texts(int(line))
        started = time.perf_counter()
        vectors = function(chosen)
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, np.asarray(vectors[0]).tolist()]), flush=True)


def main() -> None:
    """Run the peers and print a table."""
    if "--worker" in sys.argv:
        _, _, folder, task, peer = sys.argv
        serve(Path(folder), task, peer)
        return
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lengths", default="16,128,512", help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--output", type=Path, required=True, help="a folder for the models")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    write_models(args.output, args.layers, args.size)
    print(record.heading(["jax", "torch", "sentence-transformers", "onnxruntime"], {}))
    workers = [Worker(args.output, task, peer) for task, peers in PEERS.items() for peer in peers]
    lengths = [int(length) for length in args.lengths.split(",")]
    print("| | tokens | texts/s | bert-jax is faster by | difference |\n|---|---|---|---|---|")
    for length in lengths:
        first = {worker: worker.turn(length)[1] for worker in workers}  # which also compiles
        times: dict[Worker, list[float]] = {worker: [] for worker in workers}
        for _ in range(args.rounds):
            for worker in workers:
                times[worker].append(worker.turn(length)[0])
        ours: dict[str, Worker] = {w.task: w for w in workers if w.peer == "bert-jax"}
        for worker in workers:
            own = ours[worker.task]
            rate = TOKENS // length / statistics.median(times[worker])
            ratio = record.ratio(times[worker], times[own])
            difference = f"{np.abs(first[worker] - first[own]).max():.1e}"
            name = f"{worker.task}, {worker.peer}"
            print(f"| {name} | {length} | {rate:.1f} | {ratio} | {difference} |", flush=True)
    for worker in workers:
        worker.end()


if __name__ == "__main__":
    main()
