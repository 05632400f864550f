"""Reading text: every form of it, and every way in which it can be broken."""

import gzip
import json
import lzma
import os
import textwrap
import tracemalloc

import pytest

from bert_jax.commands import process
from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text import file_source
from bert_jax.text.sentences import MAX_SENTENCE_CHARACTERS
from bert_jax.text.sources import open_source

LINES = "One sentence here.\nAnother one there.\n\nA second document.\nIt ends.\n"
DOCUMENTS = [["One sentence here.", "Another one there."], ["A second document.", "It ends."]]


def read(path, **changes) -> list[list[str]]:
    return list(open_source(str(path), DataConfig(**changes)).documents())


def test_plain_and_compressed_files_and_globs(tmp_path):
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(LINES.encode()))
    windows = b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode()  # with a byte order mark
    (tmp_path / "d.txt").write_bytes(windows)
    (tmp_path / "e[1].txt").write_text(LINES)  # a name that exists is no pattern
    for name in ("a.txt", "b.txt.gz", "c.txt.xz", "d.txt", "e[1].txt"):
        assert read(tmp_path / name) == DOCUMENTS
    assert read(tmp_path / "*.txt*") == DOCUMENTS * 5
    assert read(f"{tmp_path}/a.txt, {tmp_path}/b.txt.gz") == DOCUMENTS * 2


def test_paragraphs_are_told_from_lines_and_split(tmp_path):
    paragraphs = "One sentence here. Another one there.\n\nA second document. It ends.\n"
    (tmp_path / "a.txt").write_text(paragraphs)
    assert read(tmp_path / "a.txt") == DOCUMENTS
    assert read(tmp_path / "a.txt", sentences="lines")[0] == [
        "One sentence here. Another one there."
    ]
    (tmp_path / "b.txt").write_text("One sentence\nhere. Another one\nthere.\n")
    assert read(tmp_path / "b.txt", sentences="split") == DOCUMENTS[:1]


def test_wrapped_prose_is_joined(tmp_path):
    words = "Prose that was wrapped at a width has lines which end anywhere. Short ones too. "
    wrapped = textwrap.fill(words * 20, 40)
    (tmp_path / "a.txt").write_text(f"{wrapped}\n\n{wrapped}\n")
    source = open_source(str(tmp_path / "a.txt"), DataConfig())
    assert source.form == "split into sentences"
    first = words.split(". ")[0] + "."
    assert [d[0] for d in source.documents()] == [first, first]


def test_lines_without_punctuation_stay_lines(tmp_path):
    """Such as proteins: nothing is joined."""
    (tmp_path / "a.txt").write_text("MKTAYIAK\nQRQISFVK\n\nMSHFSRQ\n")
    assert read(tmp_path / "a.txt") == [["MKTAYIAK", "QRQISFVK"], ["MSHFSRQ"]]


def test_json_lines(tmp_path):
    records = [{"text": " ".join(d), "id": 1} for d in DOCUMENTS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert read(tmp_path / "a.jsonl") == DOCUMENTS
    assert read(tmp_path / "a.jsonl.gz") == DOCUMENTS
    (tmp_path / "b.jsonl").write_text('{"text": "One \\ud800 two."}\n')  # half a surrogate pair
    assert read(tmp_path / "b.jsonl") == [["One ? two."]]
    with pytest.raises(UserError, match=r"a\.jsonl:1 has no column 'body'; set data\.text_field"):
        read(tmp_path / "a.jsonl", text_field="body")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "A.CSV.gz"])
def test_tables_are_read_by_column(tmp_path, name):
    """Not as prose, in which the other columns would be text too."""
    separator = "\t" if name.endswith("tsv") else ","
    text = '"One sentence here.\nAnother ""one"" there."' if separator == "," else "One. Two."
    rows = [["id", "text", "label"], ["1", text, "x"], ["2", "A second document. It ends.", "y"]]
    content = "".join(separator.join(row) + "\n" for row in rows).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    source = open_source(str(tmp_path / name), DataConfig())
    first = ["One sentence here.", 'Another "one" there.'] if separator == "," else ["One.", "Two."]
    assert list(source.documents()) == [first, ["A second document.", "It ends."]]
    assert source.form == "split into sentences"
    with pytest.raises(UserError, match=r"has no column 'body'; .* one of id, text, label"):
        read(tmp_path / name, text_field="body")


def test_a_line_of_ten_megabytes_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 2_000_000 + "\n" + "x" * 1_000_000)
    document = [s for d in read(tmp_path / "a.txt") for s in d]
    assert max(map(len, document)) <= MAX_SENTENCE_CHARACTERS
    assert sum(s.count("word") for s in document) == 2_000_000
    assert sum(s.count("x") for s in document) == 1_000_000


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl.gz", "a.csv"])
def test_a_line_that_is_too_long_is_refused_before_it_is_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(
        file_source.read_lines, "__kwdefaults__", {"strip": True, "longest": 1 << 20}
    )
    content = b"x" * (1 << 24)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=f"{name}: line 1 is longer than 1 MiB"):
            read(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


def test_long_lines_make_short_documents(tmp_path):
    """Otherwise a thousand of them are in memory at once."""
    (tmp_path / "a.txt").write_text(("word " * 1_000_000 + "\n") * 4)
    assert [len(d) for d in open_source(str(tmp_path / "a.txt"), DataConfig()).texts()] == [3, 1]


def test_a_file_without_blank_lines_is_cut_into_documents(tmp_path):
    (tmp_path / "a.txt").write_text("A line.\n" * 2500)
    assert [len(d) for d in read(tmp_path / "a.txt")] == [1000, 1000, 500]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\nbad \xff\xfe\n", r"a\.txt: line 2 is not UTF-8 \(byte 0xff at 4\)"),
        ("a.txt.gz", gzip.compress(b"text\n" * 10_000, mtime=0)[:-20], "is damaged"),
        ("b.txt.gz", b"not gzip", "is damaged"),
        ("a.txt.xz", lzma.compress(b"text\n" * 10_000)[:-20], "is damaged"),
        ("a.jsonl", b'{"text": "a."}\n{"text": \n', r"a\.jsonl:2 is not JSON"),
        ("b.jsonl", b"[1, 2]\n", r"b\.jsonl:1 is no JSON object"),
        ("c.jsonl", b'{"text": 3}\n', r"c\.jsonl:1 has no text in 'text'"),
        ("d.jsonl", b'{"text": ' + b"[" * 100_000, r"d\.jsonl:1 is not JSON"),
        ("b.txt", b"good\nb\0ad\n", r"b\.txt: line 2 has a NUL byte"),
        ("a.csv", b'text\n"One.\n', r"a\.csv:2: unexpected end of data"),
        ("b.csv", b"text\nOne, two.\n", "2: 2 fields where the header has 1"),
        ("c.csv", b"text,text\na,b\n", "1: two columns are named 'text'"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no.txt", "does not exist"),
        ("*.txt", "does not exist"),
        (".", "is a folder"),
        ("pipe", "is no regular file"),
        ("pi*", "is no regular file"),
        ("/dev/null", "is no regular file"),
        ("loop", "is a link to a missing file"),
        ("link", "is a link to a missing file"),
        ("x" * 5000, "does not exist"),
        ("a\0b", "does not exist"),
        (" , ", "is empty"),
    ],
)
def test_paths_that_are_no_files_are_refused_by_their_names(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "link").symlink_to(tmp_path / "no.txt")
    with pytest.raises(UserError, match=message):
        read(source)


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path):
    """Otherwise a store holds other text than it says."""
    path = tmp_path / "a.txt"
    for change, message in (
        (lambda: path.write_text(LINES * 2), "was changed while it was read"),
        (path.unlink, "does not exist; restore it"),
    ):
        path.write_text(LINES)
        source = open_source(str(path), DataConfig())
        documents = source.documents()
        next(documents)
        change()
        with pytest.raises(UserError, match=message):
            list(documents)
        with pytest.raises(UserError, match=message):
            source.identity()


def test_identity_follows_the_text(tmp_path):
    def identity():
        return open_source(str(tmp_path / "*.txt"), DataConfig()).identity()

    (tmp_path / "a.txt").write_text(LINES)
    first = identity()
    (tmp_path / "a.txt").touch()
    assert identity() == first
    (tmp_path / "a.txt").write_text(LINES.replace("One", "Own"))
    assert identity() != first


def test_tfds_without_tensorflow(tmp_path, monkeypatch):
    """A dataset prepared on the spot, as array records, and read without TensorFlow."""
    import sys

    package = tmp_path / "code" / "spot_text"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "spot_text_dataset_builder.py").write_text(BUILDER)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    from spot_text.spot_text_dataset_builder import SpotText

    SpotText(data_dir=str(tmp_path / "data"), file_format="array_record").download_and_prepare()
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "data"))
    documents = read("tfds:spot_text")  # TFDS has shuffled it
    numbers = [[f"Number {i}.", "Yes."] for i in range(1, 10)]
    assert sorted(documents) == [["Fiancé.", "Second."], *numbers]
    assert read("tfds:spot_text:1.0.0@train[1:3]") == documents[1:3]
    assert "tensorflow" not in sys.modules
    for source, changes, message in (
        ("tfds:spot_text", {"text_field": "body"}, "no column 'body'; set data.text_field"),
        ("tfds:spot_text@test", {}, "cannot be read from .*data .*; check its name and its split"),
        ("tfds:zzz", {}, "cannot be read from .*zzz.*; check its name .*; --data-dir or TFDS"),
    ):
        with pytest.raises(UserError, match=message):
            read(source, **changes)


def test_tfds_that_cannot_be_prepared(tmp_path, monkeypatch):
    """The line has the folder that was searched, the call that prepares it, and the flag."""
    import tensorflow_datasets as tfds

    def fail(self, **options):
        raise ConnectionError("no network\nat all")

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "unused"))
    process.use_data_dir(None)
    process.use_data_dir(str(tmp_path))
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    # An older dataset, which TFDS knows once its group is imported, and a newer one.
    for name in ("glue/sst2", "imdb_reviews"):
        call = rf"tfds\.builder\('{name}', data_dir=DIR, file_format='array_record'\)"
        message = rf"cannot be read from {tmp_path} \(no network\); .* {call}\.download_and_prep"
        with pytest.raises(UserError, match=message) as error:
            read(f"tfds:{name}")
        assert "--data-dir or TFDS_DATA_DIR names another folder" in str(error.value)


BUILDER = """
import tensorflow_datasets as tfds

class SpotText(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"text": "Fiancé. Second."}
        for i in range(1, 10):
            yield i, {"text": f"Number {i}. Yes."}
"""
