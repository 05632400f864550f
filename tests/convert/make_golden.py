"""Makes the golden files: tiny random models, and the numbers that others compute from them.

    python tests/convert/make_golden.py PART [PART ...]

Each part was written, on a CPU, where its packages are installed:

    transformers  bert/ and roberta/: transformers 5.23.0, torch 2.13.0
    relative      relative_key/ and relative_key_query/: transformers 4.57.6, torch 2.13.0 (the last
                  release whose BERT has them)
    tensorflow    google/ and google_sharded/: TensorFlow 2.21.0, by `tf.compat.v1.train.Saver`

A folder is a checkpoint; `expected.safetensors` in it has inputs and what was computed from them.
Weights and outputs are of size about 1, so that a difference of 1e-5 says something. The reference
computes in float64 from the float32 weights; its numbers are kept as float32. What Google's files
hold is `google_variables`, to the bit.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = "the quick brown fox jumps over a lazy dog while it rains on plains of spain"
WORDS = TEXT.split()
SIZES = dict(
    hidden_size=12,
    num_attention_heads=2,
    intermediate_size=20,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
LENGTHS = ((14, 6), (9, 5), (12, 7), (5, 3))  # tokens of each row, and of its first segment


def rows(first_piece: int, vocab_size: int, ends: tuple[int, int, int], *, types: bool):
    """Returns rows `[CLS] A [SEP] B [SEP]` of random pieces, padded, and what is predicted."""
    pad, begin, end = ends
    generator = np.random.default_rng(0)
    ids = np.full((len(LENGTHS), LENGTHS[0][0]), pad)
    kinds, mask = np.zeros_like(ids), np.zeros_like(ids)
    for row, (size, first) in enumerate(LENGTHS):
        ids[row, :size] = generator.integers(first_piece, vocab_size, size)
        ids[row, 0], ids[row, [first - 1, size - 1]] = begin, end
        kinds[row, first:size], mask[row, :size] = int(types), 1
    return {
        "input_ids": ids,
        "token_type_ids": kinds,
        "attention_mask": mask,
        "positions": np.array([[1, 4, 9], [2, 7, 0], [5, 10, 9], [1, 0, 0]]),  # 0: no prediction
        "labels": generator.integers(first_piece, vocab_size, (len(LENGTHS), 3)),
        "next_sentence_label": np.array([0, 1, 1, 0]),
    }


def write(folder: Path, model, inputs: dict[str, np.ndarray], vocabulary: dict[str, str]) -> None:
    """Writes a model of `transformers` with random weights, and what it computes."""
    import safetensors.numpy
    import torch

    generator = np.random.default_rng(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = value.shape[-1] ** -0.5 if value.ndim == 2 else 0.3
            values = generator.normal(0, scale, tuple(value.shape))
            values += name.lower().replace("_", "").endswith("layernorm.weight")
            value.copy_(torch.from_numpy(values))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name, text in vocabulary.items():
        (folder / name).write_text(text, encoding="utf-8")
    model = model.double().eval()
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    labels = torch.full_like(tensors["input_ids"], -100)
    row, column = np.nonzero(inputs["positions"])
    labels[row, inputs["positions"][row, column]] = tensors["labels"][row, column]
    model_inputs = {k: tensors[k] for k in ("input_ids", "token_type_ids", "attention_mask")}
    model_inputs["labels"] = labels
    if hasattr(model, "cls"):
        model_inputs["next_sentence_label"] = tensors["next_sentence_label"]
    output = model(**model_inputs, output_hidden_states=True, output_attentions=True)
    output.loss.backward()
    expected = {"loss": output.loss}
    expected |= {f"hidden/{i}": value for i, value in enumerate(output.hidden_states)}
    expected |= {f"attention/{i}": value for i, value in enumerate(output.attentions)}
    if hasattr(model, "cls"):
        expected |= {"mlm": output.prediction_logits, "nsp": output.seq_relationship_logits}
        expected["pooled"] = model.bert.pooler(output.hidden_states[-1])
    else:
        expected["mlm"] = output.logits
    expected["mlm"] = torch.take_along_dim(expected["mlm"], tensors["positions"][..., None], 1)
    parameters = model.named_parameters()
    expected |= {f"gradient/{n}": p.grad for n, p in parameters if p.grad is not None}
    expected = {k: v.detach().numpy().astype(np.float32) for k, v in expected.items()}
    expected |= {f"input/{k}": v.astype(np.int32) for k, v in inputs.items()}
    safetensors.numpy.save_file(expected, folder / "expected.safetensors")


def make_bert(name: str, kind: str) -> None:
    import transformers

    vocabulary = [*SPECIAL, *WORDS]
    config = transformers.BertConfig(
        **SIZES,
        num_hidden_layers=2 if kind == "absolute" else 1,
        vocab_size=len(vocabulary),
        max_position_embeddings=20,
        attn_implementation="eager",
    )
    if kind != "absolute":
        config.position_embedding_type = kind
    inputs = rows(5, len(vocabulary), (0, 2, 3), types=True)
    files = {"vocab.txt": "".join(f"{piece}\n" for piece in vocabulary)}
    write(GOLDEN / name, transformers.BertForPreTraining(config), inputs, files)


def make_roberta() -> None:
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("o", "x"), ("f", "ox")]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, *map("".join, merges), "<mask>"]
    config = transformers.RobertaConfig(
        **SIZES,
        num_hidden_layers=2,
        vocab_size=len(pieces),
        max_position_embeddings=18,
        type_vocab_size=1,
        attn_implementation="eager",
    )
    inputs = rows(4, len(pieces), (1, 0, 2), types=False)
    ids = {piece: index for index, piece in enumerate(pieces)}
    files = {
        "vocab.json": json.dumps(ids, ensure_ascii=False),
        "merges.txt": "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges),
    }
    write(GOLDEN / "roberta", transformers.RobertaForMaskedLM(config), inputs, files)


def google_variables() -> dict[str, np.ndarray]:
    """Returns what google-research/bert saves: a model's variables, and two of the optimizer's."""
    vocab, hidden, wide, length = len(SPECIAL) + len(WORDS), 12, 20, 20
    shapes: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (vocab, hidden),
        "bert/embeddings/token_type_embeddings": (2, hidden),
        "bert/embeddings/position_embeddings": (length, hidden),
    }

    def norm(name: str) -> None:
        shapes.update({f"{name}/LayerNorm/{part}": (hidden,) for part in ("beta", "gamma")})

    def dense(name: str, before: int, after: int) -> None:
        shapes.update({f"{name}/kernel": (before, after), f"{name}/bias": (after,)})

    norm("bert/embeddings")
    for layer in range(2):
        at = f"bert/encoder/layer_{layer}"
        for name in ("query", "key", "value"):
            dense(f"{at}/attention/self/{name}", hidden, hidden)
        dense(f"{at}/attention/output/dense", hidden, hidden)
        norm(f"{at}/attention/output")
        dense(f"{at}/intermediate/dense", hidden, wide)
        dense(f"{at}/output/dense", wide, hidden)
        norm(f"{at}/output")
    dense("bert/pooler/dense", hidden, hidden)
    dense("cls/predictions/transform/dense", hidden, hidden)
    norm("cls/predictions/transform")
    shapes["cls/predictions/output_bias"] = (vocab,)
    shapes["cls/seq_relationship/output_weights"] = (2, hidden)
    shapes["cls/seq_relationship/output_bias"] = (2,)
    shapes["bert/pooler/dense/kernel/adam_m"] = (hidden, hidden)
    shapes["bert/pooler/dense/kernel/adam_v"] = (hidden, hidden)
    values = {"global_step": np.array(1234567890123, np.int64)}
    for number, (name, shape) in enumerate(shapes.items()):
        # No generator, which could give others one day; every step of this is exact.
        integers = (np.arange(np.prod(shape)) * 7919 + 101 * number) % 10007 - 5003
        values[name] = np.float32(integers / 4096).reshape(shape)
    return values


def make_google(folder: Path, devices: int) -> None:
    """Writes a checkpoint with one data file a device, of at most two."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf1 = tf.compat.v1
    values = google_variables()
    folder.mkdir(parents=True, exist_ok=True)
    config = tf1.ConfigProto(device_count={"CPU": 2})
    with tf.Graph().as_default(), tf1.Session(config=config) as session:
        for index, (name, value) in enumerate(values.items()):
            with tf.device(f"/cpu:{index % devices}"):
                tf1.get_variable(name, initializer=value, use_resource=False)
        session.run(tf1.global_variables_initializer())
        saver = tf1.train.Saver(sharded=devices > 1)
        saver.save(session, str(folder / "bert_model.ckpt"), write_meta_graph=False)
    (folder / "checkpoint").unlink()
    config = {
        **SIZES,
        "num_hidden_layers": 2,
        "vocab_size": len(SPECIAL) + len(WORDS),
        "max_position_embeddings": 20,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "initializer_range": 0.02,
    }
    (folder / "bert_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in [*SPECIAL, *WORDS]))


def main(parts: list[str]) -> None:
    if not parts or not {*parts} <= {"transformers", "relative", "tensorflow"}:
        sys.exit(__doc__)
    if "transformers" in parts:
        make_bert("bert", "absolute")
        make_roberta()
    if "relative" in parts:
        make_bert("relative_key", "relative_key")
        make_bert("relative_key_query", "relative_key_query")
    if "tensorflow" in parts:
        make_google(GOLDEN / "google", 1)
        make_google(GOLDEN / "google_sharded", 2)


if __name__ == "__main__":
    main(sys.argv[1:])
