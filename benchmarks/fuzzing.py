"""Mutate small valid files and give them to every reader of files in the package.

A reader may succeed or raise a `UserError` of one line. Anything else is a fault. Where Python has
`sys.monitoring` (3.12), an input that reaches a new line of the package is mutated further.
"""

import base64
import contextlib
import dataclasses
import faulthandler
import functools
import gzip
import hashlib
import json
import lzma
import os
import random
import re
import resource
import shutil
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bert_jax
from bert_jax import UserError, console
from bert_jax.batches.loader import TrainBatches
from bert_jax.config import DataConfig, DataFiles, FinetuneConfig, ModelConfig, TaskConfig, settings
from bert_jax.config.schedule import Stage
from bert_jax.convert import config_json, google, huggingface, tensor_bundle
from bert_jax.errors import CommandError
from bert_jax.runs import workdir as workdirs
from bert_jax.storage import json_files
from bert_jax.tasks.datasets import load_datasets
from bert_jax.tasks.question_answering import QuestionAnsweringConfig
from bert_jax.text import prepare, store, tokenizer, tokenizer_loading
from bert_jax.text.sources import open_source
from bert_jax.training.metrics import Writer

PACKAGE = str(Path(bert_jax.__file__).parent)
GOLDEN = Path(__file__).parents[1] / "tests/convert/golden"
MEMORY = 1 << 30  # bytes that a worker may allocate beyond what its imports did
SECONDS = 20.0  # that an input may take
_LARGEST = 1 << 18  # bytes of an input
_CORPUS = 200  # inputs of a file that are kept because they reached new lines

Sealed = tuple[bytes, Callable[[bytes], bytes]]

# --- Mutations -----------------------------------------------------------------------------------

_NUMBERS = "0 -1 1e999 1e-999 NaN Infinity 2147483648 4294967296 18446744073709551616 0.1 ٣"
_NUMBERS = [*_NUMBERS.split(" "), "9" * 400, "9" * 5000]
_WRITTEN = (
    '\0 \r \n \r\n\r\n \t \x0b \ufeff \u2028\x85é🙂 \' "" \\ \\ud800 \\u0000 null {} [MASK] ##'
)
_TOKENS = [b" ", b"\xff", b"\xed\xa0\x80", b"\x80\x80\x01", *_WRITTEN.encode().split(b" ")]
_VALUES: list[Any] = [None, True, 0, -1, 2**31, 2**64, 10**400, 0.5, 1e308, float("nan"), "", "x"]
_VALUES += ["\ud800", "\n", "../x", [], {}, [None], {"x": None}, [[]], {"": {}}, ["x"] * 3]


def _span(size: int, draw: random.Random) -> tuple[int, int]:
    """Return where a random range, short or long, starts and ends."""
    start = draw.randrange(size + 1)
    return start, min(size, start + int(2 ** draw.uniform(0, 12)))


def _flip(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 3, 16))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = _span(len(data), draw)
    noise = draw.choice((draw.randbytes(end - start), bytes(end - start), b"\xff" * (end - start)))
    return data[:start] + noise + data[end:]


def _truncate(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _delete(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = _span(len(data), draw)
    return data[:start] + data[end:]


def _duplicate(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = _span(len(data), draw)
    return data[:start] + data[start:end] * draw.choice((2, 2, 2, 100)) + data[end:]


def _splice(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    other = draw.choice(others)
    start, end = _span(len(other), draw)
    at = draw.randrange(len(data) + 1)
    return data[:at] + other[start:end] + data[draw.choice((at, at + end - start)) :]


def _insert(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(_TOKENS) * draw.choice((1, 1, 2, 300)) + data[at:]


def _number(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    found = list(re.finditer(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?", data))
    if not found:
        return _insert(data, draw, others)
    match = draw.choice(found)
    return data[: match.start()] + draw.choice(_NUMBERS).encode() + data[match.end() :]


def _nest(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    depth, at = draw.choice((10, 500, 2000, 50_000)), draw.randrange(len(data) + 1)
    first, last = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"\x0a\x7f", b"")))
    return data[:at] + first * depth + draw.choice((b"", b"0" + last * depth)) + data[at:]


def _json(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """Change a random value of a JSON, or of one of its lines, to one of another type."""
    lines, at = [data], 0
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
        at = draw.randrange(len(lines))
        try:
            value = json.loads(lines[at])
        except (ValueError, RecursionError):
            return _insert(data, draw, others)
    holder: Any = [value]
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.8:
        holder = holder[key]
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    if draw.random() < 0.7:
        holder[key] = draw.choice(_VALUES)
    elif isinstance(holder, dict) and draw.random() < 0.5:
        holder[draw.choice(("", "x", "\ud800", *holder))] = holder.pop(key)
    else:
        del holder[key]
    value = holder[0] if isinstance(holder, list) and holder and holder[0] is value else value
    return b"\n".join([*lines[:at], json.dumps(value).encode(), *lines[at + 1 :]])


_MUTATIONS = (_flip, _flip, _overwrite, _truncate, _delete, _duplicate, _splice, _insert, _insert)
_MUTATIONS += (_number, _number, _nest, _json, _json, _json)


def mutate(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """Return the data after one to four random changes."""
    if draw.random() < 0.002:
        return b""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = draw.choice(_MUTATIONS)(data, draw, others)[:_LARGEST]
    return data


def seal(name: str, data: bytes) -> Sealed | None:
    """Return what is inside a file that compression or a checksum seals, and how to seal it."""
    if name.endswith(".gz"):
        return gzip.decompress(data), lambda inner: gzip.compress(inner, 1)
    if name.endswith(".xz"):
        return lzma.decompress(data), lambda inner: lzma.compress(inner, preset=0)
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(data[:8], "little")
        return data[8:end], lambda inner: struct.pack("<Q", len(inner)) + inner + data[end:]
    if name.endswith("ckpt.index"):
        return data, _seal_table
    if name.endswith("progress.json"):
        return data, _seal_record
    if name.endswith("tokenizer/metadata"):
        ((inside, text),) = json.loads(data).items()
        return base64.b64decode(text), lambda inner: json.dumps(
            {inside: base64.b64encode(inner).decode()}
        ).encode()
    return None


def _seal_record(data: bytes) -> bytes:
    """Correct the checksum of a JSON record, if it is still one."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(record := json.loads(data), dict):
            record.pop("crc32c", None)
            return json.dumps({**record, "crc32c": json_files._checksum(record)}).encode()
    return data


def _seal_table(data: bytes) -> bytes:
    """Correct the checksums of a LevelDB table's only block of data and of its index."""
    changed = bytearray(data)
    with contextlib.suppress(Exception):  # where there is no such block there is nothing to do
        handles, position = [], len(data) - 48
        for _ in range(4):
            value, position = tensor_bundle._varint(data, position)
            handles.append(value)
        for offset, size in ((0, handles[0] - 5), handles[:2], handles[2:]):
            crc = tensor_bundle._masked_crc(bytes(changed[offset : offset + size + 1]))
            changed[offset + size + 1 : offset + size + 5] = struct.pack("<I", crc)
    return bytes(changed)


# --- Readers -------------------------------------------------------------------------------------

_TEXT = (
    "The river bank.\nA model reads the token.\n\n今天天气好。 Ünïcode é.\nnumbers 1 2 3\n\n" * 6
)
_JSONL = '{"text": "The river bank. A model reads."}\n{"text": "Ünï 今天", "n": [1, {"a": null}]}\n'
_TSV = "sentence\tlabel\nThe river bank.\tfirst\nA model reads.\tsecond\n今天\tfirst\n\nx\tsecond\n"
_CSV = 'sentence,label\n"The ""river"", bank.",0.5\n"A\nmodel reads.",1\nx,2e0\ny,3\nz,4\n'
_EXAMPLES = '{"sentence": "The river.", "label": "a"}\n{"sentence": "A bank.", "label": "b"}\n' * 3
_CONLL = "-DOCSTART- O\n\nThe O\nriver B-x\nbank I-x\n\nA O\nmodel B-y\n\nreads O\n今天 B-x\n\n" * 2
_WORDS = '{"tokens": ["The", "bank"], "tags": ["O", "B-x"]}\n{"tokens": ["A"], "tags": ["B-x"]}\n'
_ANSWERED = {
    "id": "1",
    "question": "Who reads?",
    "answers": [{"text": "A model", "answer_start": 0}],
}
_SQUAD = [_ANSWERED, {**_ANSWERED, "id": "2", "is_impossible": True, "answers": []}]
_CONTEXT = "A model reads the token at the river bank. " * 4
_NESTED = {"data": [{"title": "t", "paragraphs": [{"context": _CONTEXT, "qas": _SQUAD}] * 1}]}
_FLAT = {"id": "1", "question": "Who?", "context": _CONTEXT}
_FLAT |= {"answers": {"text": ["A model"], "answer_start": [0]}}
_CHOICES = '{"c": "A bank", "s": "it", "e": "x", "f": "y", "label": 1}\n' * 3
_COLA = "gj04\t1\t\tThe river.\ngj04\t0\t*\tBank the.\nx\t1\t\tA model.\ny\t0\t*\tReads.\n"
_TASKS = {  # by file name: the task, its columns and a small file
    "a.tsv": (TaskConfig(), "sentence", _TSV),
    "a.jsonl": (TaskConfig(), "sentence", _EXAMPLES),
    "a.csv": (TaskConfig(kind="regression"), "sentence", _CSV),
    "a.csv.gz": (TaskConfig(kind="regression"), "sentence", _CSV),
    "a.conll": (TaskConfig(kind="token_classification"), "tokens", _CONLL),
    "b.jsonl": (TaskConfig(kind="token_classification"), "tokens", _WORDS * 3),
    "a.json": (
        QuestionAnsweringConfig(with_unanswerable=True),
        "sentence",
        json.dumps(_NESTED),
    ),
    "c.jsonl": (QuestionAnsweringConfig(), "sentence", json.dumps(_FLAT) + "\n"),
    "d.jsonl": (TaskConfig(kind="multiple_choice"), "c,s,e,f", _CHOICES),
    "cola.tsv": (bert_jax.tasks.glue.task("cola"), "sentence", _COLA),
}


@dataclasses.dataclass(frozen=True)
class Reader:
    """What reads the files of a folder, and a small valid folder: contents by path."""

    files: Mapping[str, bytes]
    read: Callable[[Path], Any]
    changed: Sequence[str] = ()  # the files that are mutated; all of them by default
    writes: bool = False  # whether it changes the folder


def _read_text(folder: Path) -> None:
    (path,) = folder.iterdir()
    field = "sentence" if path.suffix == ".csv" else "text"
    source = open_source(str(path), DataConfig(text_field=field))
    source.identity()
    list(source.documents())


def _read_task(folder: Path) -> None:
    (path,) = folder.iterdir()
    task, text, _ = _TASKS[path.name]
    label = "tags" if path.name == "b.jsonl" else "label"
    data = DataFiles(train=str(path), eval=str(path), test=str(path), text=text, label=label)
    task, datasets = load_datasets(FinetuneConfig(task=task, data=data))
    task.features(datasets.train, wordpiece(), ModelConfig(), 128)


@functools.cache
def wordpiece() -> tokenizer.Tokenizer:
    """Return a tokenizer of ASCII."""
    letters = [chr(number) for number in range(ord("!"), 127)]
    tokens = [*tokenizer.WordPieceTokenizer.special, *letters, *(f"##{x}" for x in letters)]
    return tokenizer.WordPieceTokenizer.from_vocabulary(tokens, lowercase=True)


def _read_tokenizer(folder: Path) -> None:
    _use_tokenizer(tokenizer_loading.load(folder))


def _use_tokenizer(loaded: tokenizer.Tokenizer) -> None:
    text = "The river [MASK] bank 今天 é\u0301 ##x"
    loaded.encode(["", text])
    loaded.decode(loaded.encode_with_masks(text))
    loaded.encode_with_offsets(text)
    _ = loaded.fingerprint, loaded.id_to_token(0), loaded.to_json()


def _read_config(folder: Path) -> None:
    (path,) = folder.iterdir()
    values = json_files.read_json(path, "fetch it again")
    config = config_json.read_config(values, str(path))
    config_json.read_task(values, config, str(path))
    if path.name == "config.json":
        config_json.check_tokenizer(folder, wordpiece(), config, values)


def _read_tensors(folder: Path) -> None:
    for read in huggingface.open_weights(folder).values():
        read()


def _read_bundle(folder: Path) -> None:
    for read in tensor_bundle.open_bundle(google._find_prefix(folder)).values():
        read()


def _read_store(folder: Path) -> None:
    corpus = store.open_store(folder)
    corpus.verify()
    data = DataConfig(max_length=32, batch_size=4)
    stage = Stage(max_length=32, batch_size=4, end=4)
    TrainBatches(corpus, [stage], data, seed=0)[3]


def _resume_store(folder: Path) -> None:
    data = DataConfig(source=str(folder / "text.txt"), eval_fraction=0.4)
    with console.quiet():
        prepare.prepare(data, wordpiece(), 0, folder / "store").verify()


def _resume_run(config: bert_jax.TrainConfig, text: str, folder: Path) -> None:
    """Read what a workdir says of its run, as a command that resumes it does."""
    workdir = workdirs.read(folder, bert_jax.TrainConfig)
    workdirs.check(workdir, config)
    workdirs.resume_settings(config, workdir)
    workdirs.check_text(workdir, text)
    with console.quiet():
        Writer(folder, 3).close()


def _load(folder: Path) -> None:
    bert_jax.load(folder)


def _contents(folder: Path, *names: str) -> dict[str, bytes]:
    """Return the files of a folder by their paths in it; all of them where none is named."""
    paths = [folder / name for name in names] or folder.rglob("*")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.is_file()}


def _unsealed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a store without their checksums, which would refuse each change."""
    unsealed = dict(files)
    for name in files:
        if name.endswith("progress.json"):
            content = json.loads(files[name])
            content.pop("checksums", None)
            unsealed[name] = _seal_record(json.dumps(content).encode())
    return unsealed


def readers(pretrained: Path, finetuned: Path, unfinished: Path) -> dict[str, Reader]:
    """Return every reader by name.

    The samples are a workdir of pretraining with its store, one of fine-tuning, and a folder with
    a text and a store that is not complete.
    """
    text = _TEXT.encode()
    found = {
        "text": Reader({"a.txt": text}, _read_text),
        "text .gz": Reader({"a.txt.gz": gzip.compress(text)}, _read_text),
        "text .xz": Reader({"a.txt.xz": lzma.compress(text)}, _read_text),
        "text .jsonl": Reader({"a.jsonl": _JSONL.encode() * 3}, _read_text),
        "text .csv": Reader({"a.csv": _CSV.encode() * 3}, _read_text),
    }
    for name, (task, _, content) in _TASKS.items():
        data = gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
        suffix = name[1:] if name[1] == "." else f" {name}"
        found[f"{task.kind} {suffix}"] = Reader({name: data}, _read_task)
    roberta, bert = GOLDEN / "roberta", GOLDEN / "bert"
    kinds = {
        "tokenizer.json": _contents(pretrained / "tokenizer"),
        "vocab.txt": _contents(bert, "vocab.txt"),
        "vocab.json, merges.txt": _contents(roberta, "vocab.json", "merges.txt"),
        "SentencePiece .model": _contents(unfinished / "sentencepiece", "a.model"),
    }
    rules = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
    rules |= {"add_prefix_space": True, "unk_token": "[UNK]", "model_max_length": 512}
    rules["added_tokens_decoder"] = {"0": {"content": "[PAD]", "special": True, "lstrip": False}}
    kinds["tokenizer_config.json"] = {
        **kinds["vocab.txt"],
        "tokenizer_config.json": json.dumps(rules).encode(),
        "added_tokens.json": b'{"[NEW]": 21, "<x>": 22}',
    }
    for name, files in kinds.items():
        extra = ("tokenizer_config.json", "added_tokens.json")
        changed = extra if extra[0] in files else tuple(files)
        found[name] = Reader(files, _read_tokenizer, changed)
    foreign = {**json.loads((bert / "config.json").read_text()), "num_labels": 2}
    foreign |= {
        "architectures": ["BertForSequenceClassification"],
        "tokenizer_pieces": wordpiece().vocab_size,
    }
    foreign["vocab_size"] = wordpiece().vocab_size
    foreign |= {"id2label": {"0": "a", "1": "b"}, "problem_type": "single_label_classification"}
    foreign["bert_jax_task"] = dataclasses.asdict(TaskConfig(labels=("a", "b")))
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    weights = _contents(bert, "model.safetensors")
    sharded = {**weights, "model.safetensors.index.json": json.dumps(index).encode()}
    bundle = ("bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001")
    google_files = ("bert_config.json", "vocab.txt", *bundle)
    resumed = _contents(pretrained, "config.json", "metrics.jsonl", "text.sha256")
    config = settings.from_dict(bert_jax.TrainConfig, json.loads(resumed["config.json"]), "")
    resume_run = partial(_resume_run, config, resumed["text.sha256"].decode().strip())
    best = _contents(finetuned / "best")
    best.pop("checksums.json", None)
    complete, partial_store = _contents(pretrained / "store"), _contents(unfinished / "store")
    resumable = _contents(unfinished, "text.txt")
    resumable |= {f"store/{name}": data for name, data in partial_store.items()}
    return found | {
        "config.json": Reader({"config.json": json.dumps(foreign).encode()}, _read_config),
        "bert_config.json": Reader(_contents(GOLDEN / "google", "bert_config.json"), _read_config),
        ".safetensors": Reader(weights, _read_tensors),
        ".safetensors, sharded": Reader(sharded, _read_tensors),
        "TensorFlow bundle": Reader(_contents(GOLDEN / "google", *bundle), _read_bundle),
        "Hugging Face directory": Reader(
            _contents(bert, "config.json", "vocab.txt", *weights), _load
        ),
        "Google directory": Reader(_contents(GOLDEN / "google", *google_files), _load),
        "store": Reader(complete, _read_store),
        "unfinished store": Reader(resumable, _resume_store, writes=True),
        "unfinished store without checksums": Reader(
            _unsealed(resumable), _resume_store, writes=True
        ),
        "workdir": Reader(resumed, resume_run, writes=True),
        "checkpoint, its JSON": Reader(best, _load, ("config/metadata", "tokenizer/metadata")),
        "checkpoint": Reader(best, _load),
    }


def check(samples: Sequence[Path], scratch: Path) -> None:
    """Give every reader its valid files, and print how long that takes."""
    for name, reader in readers(*samples).items():
        fuzzer = Fuzzer(name, reader, scratch / "x", 0, None)
        reader.read(fuzzer.folder)  # once, untimed
        started = time.monotonic()
        reader.read(fuzzer.folder)
        print(f"{name}: {1000 * (time.monotonic() - started):.1f} ms", flush=True)
        fuzzer.restore()


# --- The loop ------------------------------------------------------------------------------------


class Lines:
    """Notes whether new lines of the package were reached; each line costs time only once."""

    def __init__(self):
        self.has_new = False
        self._monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12
        if self._monitoring:
            tool, events = self._monitoring.PROFILER_ID, self._monitoring.events
            self._monitoring.use_tool_id(tool, "fuzzing")
            self._monitoring.register_callback(tool, events.LINE, self._note)
            self._monitoring.set_events(tool, events.LINE)

    def _note(self, code: Any, _: int) -> Any:
        self.has_new |= code.co_filename.startswith(PACKAGE)
        return self._monitoring.DISABLE


class Fuzzer:
    """Mutated inputs for one reader, in `folder`."""

    def __init__(self, name: str, reader: Reader, folder: Path, seed: int, lines: Lines | None):
        self.name, self.folder = name, folder
        self._reader, self._draw, self._lines = reader, random.Random(f"{seed} {name}"), lines
        self._seals = {n: seal(n, reader.files[n]) for n in reader.changed or reader.files}
        self._corpus = {n: [reader.files[n]] for n in self._seals}
        self._inner = {n: [sealed[0]] for n, sealed in self._seals.items() if sealed}
        self.restore()

    def restore(self) -> None:
        """Make the folder valid."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name, data in self._reader.files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(data)

    def step(self) -> tuple[bool, Mapping[str, str]]:
        """Read one input; return whether it was refused, and the fault by its key, if any.

        The input of a fault is left in the folder.
        """
        draw = self._draw
        name = draw.choice(list(self._seals))
        sealed = self._seals[name]
        is_inner = sealed is not None and draw.random() < 0.7
        corpus = self._inner[name] if is_inner else self._corpus[name]
        base = corpus[0] if draw.random() < 0.3 else draw.choice(corpus)
        data = mutate(base, draw, corpus)
        (self.folder / name).write_bytes(sealed[1](data) if sealed and is_inner else data)
        if self._lines:
            self._lines.has_new = False
        refused, fault = outcome(lambda: self._reader.read(self.folder), self.name)
        if self._lines and self._lines.has_new and len(corpus) < _CORPUS:
            corpus.append(data)
        if self._reader.writes and not fault:
            self.restore()
        elif not fault:
            (self.folder / name).write_bytes(self._reader.files[name])
        return refused, fault


def outcome(
    read: Callable[[], Any], name: str, refusal: type[CommandError] = UserError
) -> tuple[bool, Mapping[str, str]]:
    """Return whether a call was refused, and its fault: the traceback by a key of one line."""
    try:
        read()
    except refusal as error:
        if len(str(error).splitlines()) == 1:
            return True, {}
        return True, {f"{name}: an error of several lines: {_place(error)}": repr(error)}
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        text = "".join(traceback.format_exception(error))
        return False, {f"{name}: {type(error).__name__} {_place(error)}": text}
    return False, {}


def _place(error: BaseException) -> str:
    """Return the last line of the package in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(PACKAGE)]
    where = own[-1] if own else frames[-1]
    return f"{Path(where.filename).name}:{where.lineno} {where.name}"


def save_fault(output: Path, key: str, text: str, folder: Path) -> bool:
    """Keep a fault with its input, unless there is one of its key; return whether it is new."""
    path = output / hashlib.sha256(key.encode()).hexdigest()[:10]
    with contextlib.suppress(FileExistsError):
        path.mkdir(parents=True)
        shutil.copytree(folder, path / "input", dirs_exist_ok=True)
        (path / "fault.txt").write_text(f"{key}\n\n{text}\n", errors="backslashreplace")
        return True
    return False


def work(
    number: int, samples: Sequence[Path], output: Path, counts: Any, clock: Any, seed: int
) -> None:
    """Fuzz all readers in turns; end when `clock` of this worker is negative.

    `counts` has for each reader its inputs, refusals, faults and the longest time in microseconds.
    `clock` is the time at which the current input started, and the number of its reader.
    """
    scratch = Path(f"/dev/shm/fuzzing-{os.getpid()}")
    crash = (output / f"crash-{number}.txt").open("w")
    faulthandler.enable(crash)
    lines = Lines()
    fuzzers = [
        Fuzzer(name, reader, scratch / str(i) / "x", seed, lines)
        for i, (name, reader) in enumerate(readers(*samples).items())
    ]
    _limit_memory()
    times = dict.fromkeys(range(len(fuzzers)), 0.0)
    while True:
        i = min(times, key=times.__getitem__)
        fuzzer, turn_start, before = fuzzers[i], time.monotonic(), counts[4 * i]
        while (now := time.monotonic()) - turn_start < 0.25:
            if clock[0] < 0:
                shutil.rmtree(scratch, ignore_errors=True)
                return
            clock[0], clock[1] = now, i
            counts[4 * i] += 1
            refused, fault = fuzzer.step()
            counts[4 * i + 1] += refused
            counts[4 * i + 3] = max(counts[4 * i + 3], int(1e6 * (time.monotonic() - now)))
            for key, text in fault.items():
                counts[4 * i + 2] += 1
                save_fault(output, key, text, fuzzer.folder)
                fuzzer.restore()
        turn = time.monotonic() - turn_start
        # Most of the inputs are for those that read many a second.
        times[i] += turn * (4 if turn / (counts[4 * i] - before) > 0.01 else 1)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # RLIMIT_AS counts unused arenas too
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
