"""Frozen embeddings of texts: any layer or a sum of layers, by text, by piece or by word."""

import dataclasses
import math
import os
import shutil
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.config import ModelConfig
from bert_jax.distributed.mesh import make_mesh
from bert_jax.errors import UserError
from bert_jax.models.bert import BertModel
from bert_jax.text.tokenizer import Tokenizer

_Item = TypeVar("_Item")

POOLINGS = ("mean", "cls", "max", "tokens", "words")
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_BATCH_TOKENS = 4096
# Texts that are sorted by length together, and whose vectors are held together.
_CHUNK_TEXTS, _CHUNK_CHARACTERS = 4096, 400_000


@dataclasses.dataclass(frozen=True)
class Embedded:
    """The embedding of one text.

    Attributes:
      vectors: [D] float32; [n, D] for each of n pieces or words.
      spans: [n, 2] int32, where each piece or word begins and ends in the text, in characters; None
        for a text as a whole.
      is_truncated: whether the text was longer than the model's positions, and its end left out.
    """

    vectors: np.ndarray
    spans: np.ndarray | None
    is_truncated: bool


def word_spans(text: str) -> np.ndarray:
    """Returns where the words of a text begin and end, [n, 2].

    A word is what stands between spaces; punctuation and symbols at its begin and its end are words
    of their own, one a character.
    """
    spans: list[tuple[int, int]] = []
    place = 0
    for part in text.split():
        begin = text.index(part, place)
        place = end = begin + len(part)
        while begin < end and _is_mark(text[begin]):
            spans.append((begin, begin + 1))
            begin += 1
        marks = []
        while begin < end and _is_mark(text[end - 1]):
            marks.append((end - 1, end))
            end -= 1
        spans += [(begin, end)] if begin < end else []
        spans += reversed(marks)
    return np.array(spans, np.int32).reshape(-1, 2)


def _is_mark(char: str) -> bool:
    return unicodedata.category(char)[0] in "PS"


class Encoder:
    """Embeds texts with frozen parameters, on all local devices.

    Args:
      config: of the model.
      params: of its encoder.
      tokenizer: of the model.
      layers: whose outputs are added up: 0 for the embeddings, i for layer i, -1 for the last.
      pooling: "mean" or "max" over all pieces of a row, [CLS] and [SEP] among them; "cls", the
        first; "tokens", one vector for each piece of the text; "words", for each of `word_spans`
        the mean of its pieces, not a number where the model sees none of it.

    Raises:
      UserError: there is no such layer or pooling.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer,
        layers: Sequence[int],
        pooling: str,
    ):
        if pooling not in POOLINGS:
            raise UserError(f"pooling is {pooling!r}; choose one of {', '.join(POOLINGS)}")
        count = config.num_hidden_layers
        if not layers or not all(-count - 1 <= layer <= count for layer in layers):
            raise UserError(
                f"layer is {', '.join(map(str, layers))}; the model has layers 0 (the embeddings) "
                f"to {count}, and -1 is the last"
            )
        self._tokenizer, self._pooling = tokenizer, pooling
        self._longest = config.max_position_embeddings
        mesh = make_mesh(devices=jax.local_devices())
        whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        self._devices = mesh.size
        self._params = jax.device_put(params, whole)
        model = BertModel(config, add_pooling_layer=False)
        features = partial(_features, model, tuple(layers), pooling)
        each = jax.shard_map(
            features,
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P("data"),
            check_vma=False,
        )
        self._features = jax.jit(each, in_shardings=(whole, rows, rows), out_shardings=rows)

    def __call__(self, texts: Iterable[str]) -> Iterator[Embedded]:
        """Yields the embedding of each text, in their order, some thousands at a time."""
        for chunk in chunks(texts, len):
            yield from self.chunk(chunk)

    def chunk(self, texts: Sequence[str]) -> list[Embedded]:
        """Returns the embedding of each text, all at once."""
        tokenizer = self._tokenizer
        if self._pooling in ("tokens", "words"):
            encoded = [tokenizer.encode_with_offsets(text) for text in texts]
            pieces: Sequence[Sequence[int]] = [ids for ids, _ in encoded]
        else:
            encoded, pieces = [], tokenizer.encode(texts)
        room = self._longest - 2
        rows = [[tokenizer.cls_id, *ids[:room], tokenizer.sep_id] for ids in pieces]
        vectors = self._run(rows)
        result = []
        for index, (text, ids) in enumerate(zip(texts, pieces, strict=True)):
            found, spans = vectors[index], None
            if encoded:
                offsets = np.array(encoded[index][1], np.int32).reshape(-1, 2)[:room]
                found, spans = found[1:-1], offsets
                if self._pooling == "words":
                    spans = word_spans(text)
                    found = _by_word(found, offsets, spans)
            result.append(Embedded(found, spans, len(ids) > room))
        return result

    def _run(self, rows: list[list[int]]) -> list[np.ndarray]:
        """Returns what the device gives for each row, without the places of its padding."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        results: list[np.ndarray] = [np.empty(0)] * len(rows)
        running: list[tuple[list[int], jax.Array]] = []

        def fetch() -> None:
            indices, values = running.pop(0)
            host = np.asarray(values)
            for place, index in enumerate(indices):
                value = host[place] if host.ndim == 2 else host[place, : len(rows[index])]
                results[index] = value.copy()  # not a view, which would keep the padding too

        place = 0
        while place < len(order):
            length = min(_static_length(len(rows[order[place]])), self._longest)
            indices = order[place : place + max(1, _BATCH_TOKENS // length)]
            place += len(indices)
            # All batches of a length have one size, but for the last of all.
            size = len(indices) if place < len(order) else 1 << (len(indices) - 1).bit_length()
            size = -(-size // self._devices) * self._devices
            ids = np.full((size, length), self._tokenizer.pad_id, np.int32)
            mask = np.zeros((size, length), np.int32)
            for row, index in enumerate(indices):
                ids[row, : len(rows[index])] = rows[index]
                mask[row, : len(rows[index])] = 1
            running.append((indices, self._features(self._params, ids, mask)))
            if len(running) > 1:  # the device works on one while the host takes the other
                fetch()
        while running:
            fetch()
        return results


def chunks(items: Iterable[_Item], size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yields some thousands of items at a time, fewer where their sizes add up to much."""
    chunk: list[_Item] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += size(item)
        if len(chunk) == _CHUNK_TEXTS or total >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _static_length(length: int) -> int:
    return next((size for size in _LENGTHS if size >= length), -(-length // 256) * 256)


def _features(
    model: BertModel,
    layers: tuple[int, ...],
    pooling: str,
    params: Any,
    input_ids: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    output: Any = model.apply(
        {"params": params}, input_ids, jnp.zeros_like(input_ids), mask, output_hidden_states=True
    )
    chosen = [output.hidden_states[layer].astype(jnp.float32) for layer in layers]
    hidden: Any = sum(chosen[1:], chosen[0])
    seen = mask[:, :, None] > 0
    if pooling == "mean":
        # At least one: a row that fills up the batch has no pieces.
        return (hidden * seen).sum(1) / jnp.maximum(seen.sum(1), 1)
    if pooling == "max":
        return jnp.where(seen, hidden, -jnp.inf).max(1)
    return hidden[:, 0] if pooling == "cls" else hidden


def _by_word(vectors: np.ndarray, pieces: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns the mean of the pieces that overlap each word: [words, D] from [pieces, D]."""
    result = np.full((len(words), vectors.shape[1]), np.nan, np.float32)
    # Pieces and words both stand in the order of the text.
    first = np.searchsorted(pieces[:, 1], words[:, 0], side="right")
    last = np.searchsorted(pieces[:, 0], words[:, 1], side="left")
    for word in np.flatnonzero(first < last):
        result[word] = vectors[first[word] : last[word]].mean(0)
    return result


class NpzWriter:
    """Writes arrays that grow row by row into an `.npz`, with none of them held in memory.

    Used in a `with`, at whose end the file is put in its place; or not, after an error.

    Raises:
      UserError: the file cannot be written.
    """

    def __init__(self, path: Path):
        self._path = path
        self._arrays: dict[str, tuple[BinaryIO, np.dtype, tuple[int, ...]]] = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        """Adds rows, [n, ...], to an array."""
        if name not in self._arrays:
            temporary = self._path.with_name(f".{self._path.name}.{name}.tmp")
            self._arrays[name] = (temporary.open("w+b"), rows.dtype, rows.shape[1:])
        self._arrays[name][0].write(np.ascontiguousarray(rows).data)

    def __enter__(self) -> "NpzWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: Any
    ) -> None:
        try:
            if error is None:
                self._join()
        except OSError as failure:
            error = failure
        finally:
            for file, _, _ in self._arrays.values():
                file.close()
                Path(file.name).unlink()
        if isinstance(error, OSError):
            raise UserError(f"{self._path} cannot be written ({error.strerror})") from error

    def _join(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            with zipfile.ZipFile(temporary, "w") as archive:
                for name, (file, dtype, shape) in self._arrays.items():
                    rows = file.tell() // (dtype.itemsize * math.prod(shape))
                    header = {"descr": dtype.str, "fortran_order": False, "shape": (rows, *shape)}
                    file.seek(0)
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array_header_2_0(entry, header)
                        shutil.copyfileobj(file, entry)
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)
