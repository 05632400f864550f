"""Reading text: every form of it, and every way in which it can be broken."""

import bz2
import gzip
import json
import lzma
import os
import tarfile
import textwrap
import tracemalloc

import pytest
from helpers import refused, write_file

from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text import files, mixture, prepare, records, sources
from bert_jax.text.sentences import MAX_SENTENCE_CHARACTERS
from bert_jax.text.sources import open_source

LINES = "One sentence here.\nAnother one there.\n\nA second document.\nIt ends.\n"
DOCUMENTS = [["One sentence here.", "Another one there."], ["A second document.", "It ends."]]


def read(path, **changes) -> list[list[str]]:
    return list(open_source(str(path), DataConfig(**changes)).documents())


def test_plain_and_compressed_files_and_globs(tmp_path):
    windows = b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode()  # with a byte order mark
    write_file(tmp_path / "d.txt", windows)
    for name in ("a.txt", "b.txt.gz", "c.txt.xz", "e[1].txt"):  # a name that exists is no pattern
        write_file(tmp_path / name, LINES)
        assert read(tmp_path / name) == DOCUMENTS
    assert read(tmp_path / "d.txt") == DOCUMENTS
    assert read(tmp_path / "*.txt*") == DOCUMENTS * 5
    assert read(f"{tmp_path}/a.txt, {tmp_path}/b.txt.gz") == DOCUMENTS * 2


def test_byte_order_marks_of_joined_files_are_removed(tmp_path):
    marked = "\ufeff" + LINES
    assert read(write_file(tmp_path / "a.txt", f"{marked}\n{marked}")) == DOCUMENTS * 2


def test_sequences_of_fasta_are_documents(tmp_path):
    text = "\n;a remark\n>first >one\r\nMKV\r\nL AA\n\n>empty\n>second\n;here\nGG*\n"
    path = write_file(tmp_path / "a.faa", text)
    assert read(path) == read(path, sentences="documents") == [["MKVLAA"], ["GG*"]]
    assert open_source(str(path), DataConfig()).form == "one document a sequence"
    plain = write_file(tmp_path / "a.txt", text)
    assert open_source(str(plain), DataConfig(sentences="lines")).identity() != (
        open_source(str(path), DataConfig(sentences="lines")).identity()
    )
    assert [record.fields["text"] for record in records.fasta_sequences(path)] == ["MKVLAA", "GG*"]
    with refused("b.fasta:1 is of no sequence; begin each with a line '>'"):
        read(write_file(tmp_path / "b.fasta", "MKV\n>first\n"))
    with refused("a.faa:3 has no column 'seq'; set data.text_field to one of text"):
        read(path, text_field="seq")


def test_a_chromosome_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_DOCUMENT_CHARACTERS", 5)
    path = write_file(tmp_path / "a.fa", ">long\n" + "ACG\n" * 5 + ">short\nT\n")
    assert read(path) == [["ACGACG"], ["ACGACG"], ["ACG"], ["T"]]


def test_lines_of_a_record_are_sentences_where_that_is_asked_for(tmp_path):
    """As in a script without full stops."""
    path = write_file(tmp_path / "a.jsonl", json.dumps({"text": "ทุกคน \nเกิด. มา\n\n"}))
    assert read(path) == [["ทุกคน เกิด.", "มา"]]
    assert read(path, sentences="lines") == [["ทุกคน", "เกิด. มา"]]
    split, lines = (open_source(str(path), DataConfig(sentences=s)) for s in ("auto", "lines"))
    assert split.identity() != lines.identity()
    assert (split.form, lines.form) == ("split into sentences", "one sentence a line")


def test_the_form_of_several_kinds_of_files_is_that_of_each(tmp_path):
    text = write_file(tmp_path / "a.txt", "One line\nanother\n\nand one\n")
    rows = write_file(tmp_path / "a.jsonl", json.dumps({"text": "One. Two."}))
    fasta = write_file(tmp_path / "a.fa", ">one\nACGT\n")

    def form(*paths: str, sentences: str = "auto") -> str:
        return open_source(",".join(paths), DataConfig(sentences=sentences)).form

    split, line = "split into sentences", "one sentence a line"
    assert form(text, rows) == f"plain text: {line}; records: {split}"
    assert form(text, rows, sentences="documents") == (
        f"plain text: one document a line; records: {split}"
    )
    assert form(rows, fasta) == f"records: {split}; FASTA: one document a sequence"
    assert form(text, rows, sentences="lines") == line
    assert form(text, rows, sentences="split") == split


PARAGRAPHS = "\n\n".join(" ".join(document) for document in DOCUMENTS)
PROSE = "Prose that was wrapped at a width has lines which end anywhere. Short ones too. " * 20
WRAPPED = "\n\n".join([textwrap.fill(PROSE, 40)] * 2)


@pytest.mark.parametrize(
    ("content", "form", "documents"),
    [
        (PARAGRAPHS, "auto", DOCUMENTS),
        (PARAGRAPHS, "lines", [[" ".join(document)] for document in DOCUMENTS]),
        ("ab\nba\n\nab ba", "documents", [["ab"], ["ba"], ["ab ba"]]),
        ("One sentence\nhere. Another one\nthere.\n", "split", DOCUMENTS[:1]),
        (WRAPPED, "auto", [[*PROSE.strip().replace(". ", ".\n").split("\n")]] * 2),
        # Lines without punctuation, such as proteins: nothing is joined.
        ("MKTAYIAK\nQRQISFVK\n\nMSHFSRQ\n", "auto", [["MKTAYIAK", "QRQISFVK"], ["MSHFSRQ"]]),
    ],
)
def test_paragraphs_are_told_from_lines_and_split(tmp_path, content, form, documents):
    assert read(write_file(tmp_path / "a.txt", content), sentences=form) == documents


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.tsv", "A.CSV.gz"])
def test_records_are_read_by_column(tmp_path, name):
    """Not as prose, in which the other columns would be text too."""
    rows = [{"id": "1", "text": " ".join(document), "label": "x"} for document in DOCUMENTS]
    mark = "," if "CSV" in name else "\t"
    lines = [mark.join(rows[0]), *(mark.join(row.values()) for row in rows)]
    if "jsonl" in name:
        lines = [json.dumps(row) for row in rows]
    path = write_file(tmp_path / name, "\n".join(lines))
    source = open_source(path, DataConfig())
    assert list(source.documents()) == DOCUMENTS
    assert source.form == "split into sentences"
    with refused("has no column 'body'; set data.text_field to one of id, text, label"):
        read(path, text_field="body")


def test_a_line_of_ten_megabytes_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 2_000_000 + "\n" + "x" * 1_000_000)
    document = [s for d in read(tmp_path / "a.txt") for s in d]
    assert max(map(len, document)) <= MAX_SENTENCE_CHARACTERS
    assert sum(s.count("word") for s in document) == 2_000_000
    assert sum(s.count("x") for s in document) == 1_000_000


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl.gz", "a.csv"])
def test_a_line_that_is_too_long_is_refused_before_it_is_read(tmp_path, monkeypatch, name):
    defaults = {**sources.read_lines.__kwdefaults__, "longest": 1 << 20}
    monkeypatch.setattr(sources.read_lines, "__kwdefaults__", defaults)
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


def test_an_xz_of_several_streams(tmp_path):
    """With padding between and after them, as `xz` reads them."""
    streams = [lzma.compress(b"one %d\n\n" % number) for number in range(3)]
    (tmp_path / "a.txt.xz").write_bytes(b"\0\0\0\0".join([*streams, b""]))
    assert read(tmp_path / "a.txt.xz") == [["one 0"], ["one 1"], ["one 2"]]
    large = b"".join(b"word %d\n\n" % (n * n) for n in range(200_000))
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(large) + lzma.compress(large))
    with files.open_file(tmp_path / "b.txt.xz") as raw:
        assert files.OPENERS[".xz"](raw).read() == 2 * large


TAR = tarfile.TarInfo("a.txt").tobuf()
PACKED = gzip.compress(b"".join(b"word %d\n" % (n * n) for n in range(1000)), mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\nbad \xff\xfe\n", r"a\.txt: line 2 is not UTF-8 \(byte 0xff at 4\)"),
        ("a.txt.gz", PACKED[:-20], "is damaged"),
        ("a.txt.gz", PACKED[:10] + b"\xff" * 9 + PACKED[19:], "is damaged"),
        ("b.txt.gz", b"not gzip", "is damaged"),
        ("a.txt.xz", lzma.compress(b"text\n" * 10_000)[:-20], "is damaged"),
        ("a.txt.xz", lzma.compress(b"text\n") + b"junk", "is damaged"),
        ("a.txt.xz", lzma.compress(b"text\n") + lzma.compress(b"text\n")[:-9], "is damaged"),
        ("c.jsonl", b'{"text": 3}\n', r"c\.jsonl:1 has no text in 'text'"),
        ("b.txt", b"good\nb\0ad\n", r"b\.txt: line 2 has a NUL byte"),
        ("b.txt", b"one\rtwo\r", r"b\.txt: line 1 ends in CR alone"),
        ("b.txt", "text".encode("utf-16"), r"b\.txt is in UTF-16; convert it"),
        ("b.txt", PACKED, "is compressed with gzip; end its name with .gz, or decompress it"),
        ("b.txt.bz2", bz2.compress(b"text\n"), r"is compressed with bzip2; decompress it"),
        ("b.jsonl.zst", b"\x28\xb5\x2f\xfd\0\0", r"b\.jsonl\.zst is compressed with zstd"),
        (
            "b.tar.gz",
            gzip.compress(TAR, mtime=0),
            "is a tar archive; unpack it, and give its files",
        ),
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
        (" , ", "names no text"),
        ("builtin,a.txt", "builtin is no file; give each text a weight, as in builtin@0.5"),
        ("fold*", r"data source fold\* names only folders; add '/\*\.txt'"),
    ],
)
def test_paths_that_are_no_files_are_refused_by_their_names(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("folder")
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


def test_a_file_of_several_patterns_is_read_once(tmp_path):
    for name in ("a.txt", "b.txt"):
        write_file(tmp_path / name, LINES)
    (tmp_path / "c.txt").symlink_to(tmp_path / "a.txt")
    assert read(f"{tmp_path}/b.txt,{tmp_path}/*.txt") == DOCUMENTS * 2


def test_a_name_that_exists_may_have_a_comma(tmp_path):
    assert read(write_file(tmp_path / "a,b.txt", LINES)) == DOCUMENTS


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.jsonl.GZ"])
def test_json_lines_have_several_names(name, tmp_path):
    content = b'{"text": "A river runs."}\n'
    write_file(tmp_path / name, gzip.compress(content) if name.endswith("GZ") else content)
    assert read(tmp_path / name) == [["A river runs."]]
    write_file(tmp_path / "null.jsonl", '{"text": null}\n')
    with refused("null.jsonl:1 is null in 'text'; remove the record"):
        read(tmp_path / "null.jsonl")


def test_lines_of_json_do_not_say_how_plain_text_is_split(tmp_path):
    plain = "no points at all\nanother line\n"
    write_file(tmp_path / "z.txt", plain)
    write_file(tmp_path / "a.jsonl", json.dumps({"text": PROSE}) + "\n")
    alone = read(tmp_path / "z.txt")
    assert read(f"{tmp_path}/a.jsonl,{tmp_path}/z.txt")[1:] == alone


def test_texts_of_one_file_are_refused(tmp_path):
    """What one holds out, another would be trained on."""
    (tmp_path / "a.txt").write_text("A bank.\n")
    (tmp_path / "b.txt").write_text("A river.\n")
    data = DataConfig(source=f"{tmp_path}/*.txt", eval_source=f"{tmp_path}/b.txt")
    with refused("b.txt is a part of", "what is held out would be trained on; name each text once"):
        prepare.open_sources(data)
    with refused("b.txt is a part of"):
        source = f"{tmp_path}/*.txt@0.5,{tmp_path}/b.txt@0.5"
        mixture.check_sources(DataConfig(source=source), mixture.find(source))
    with refused("the documentation of Python's standard library is a part of"):
        prepare.open_sources(DataConfig(source="builtin", eval_source="builtin"))


def test_identity_follows_the_settings(tmp_path):
    write_file(tmp_path / "a.jsonl", '{"text": "a. b.", "body": "c. d."}\n')
    write_file(tmp_path / "a.txt", "a. b.\nc. d.\n")

    def identity(name, **fields):
        return open_source(str(tmp_path / name), DataConfig(**fields)).identity()

    assert identity("a.jsonl") != identity("a.jsonl", text_field="body")
    forms = [identity("a.txt", sentences=form) for form in ("lines", "split", "documents")]
    assert all(one != other for i, one in enumerate(forms) for other in forms[:i])
