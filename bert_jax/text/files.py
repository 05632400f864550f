"""Text files and their lines: plain, .gz or .xz; on a disk, at a URL or standard input."""

import contextlib
import functools
import glob
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bert_jax.errors import UserError, refuse
from bert_jax.storage import paths, remote
from bert_jax.text.xz import open_xz

# Longer lines are refused, so that a small .gz of one long line cannot fill the memory.
MAX_LINE_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 22
_CONVERT = "convert it, or fetch it again"
# What is no text, by the bytes at a place of its first line, and what to do about it.
_SIGNATURES = {
    (0, b"\x1f\x8b"): "compressed with gzip; end its name with .gz, or decompress it",
    (0, b"\xfd7zXZ\0"): "compressed with xz; end its name with .xz, or decompress it",
    (0, b"\x28\xb5\x2f\xfd"): "compressed with zstd; decompress it (zstd -d), or recompress as .gz",
    (4, b"1AY&SY"): "compressed with bzip2; decompress it (bunzip2), or recompress as .gz",
    (0, b"PK\3\4"): "a zip archive, as a .docx and an .xlsx are; give the text in it",
    (257, b"ustar"): "a tar archive; unpack it, and give its files",
    (0, b"\xff\xfe"): "in UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    (0, b"\xfe\xff"): "in UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    (0, b"PAR1"): "a Parquet file; end its name with .parquet",
    (0, b"%PDF-"): "a PDF; give its text, such as pdftotext writes",
}
STDIN = "-"  # in place of the path of a file
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": open_xz}  # of compressed files


def file_type(path: str | Path) -> str:
    """Return the suffix of a file, ignoring .gz and .xz: ".tsv" of "a.TSV.gz"."""
    name = Path(paths.file_name(path))
    return suffix(name.stem if suffix(name) in OPENERS else name)


def suffix(path: str | Path) -> str:
    """Return the end of a file's name: ".gz" of "a.TSV.GZ"."""
    return Path(paths.file_name(path)).suffix.lower()


def check_readable(path: str | Path, name: str, remedy: str) -> None:
    """Refuse a path that is no readable file, with what it is instead; `name` is the user's."""
    if fault := _find_fault(path):
        raise UserError(f"{name} {fault}; {remedy}")


def existing(name: str, remedy: str) -> Path:
    """Return the path of a readable file; "~" is the user's home."""
    paths.check_named(name)
    is_remote = paths.is_remote(str(name))
    address = re.sub(":/+", "://", str(name), count=1)  # which a Path has shortened
    refuse(is_remote, f"{address} is not on a disk", fix="download it, and give the file")
    path = Path(os.path.expanduser(name))
    check_readable(path, name, remedy)
    return path


def _find_fault(path: str | Path) -> str:
    """Return why a path is no readable file, such as "does not exist"; "" if it is one."""
    if os.path.isdir(path):
        return "is a folder, not a file"
    if not os.path.exists(path):
        return "is a link to a missing file" if os.path.islink(path) else "does not exist"
    if not os.path.isfile(path):
        return "is no regular file"
    return "" if os.access(path, os.R_OK) else "cannot be read (its permissions)"


def find(patterns: str) -> list[tuple[Path | str, remote.State]]:
    """Return the files of a text that names, globs and URLs name, each once, and their states."""
    expanded: list[tuple[Path | str, remote.State]] = []
    # A name that exists is one, even with a comma in it.
    is_name = os.path.lexists(os.path.expanduser(patterns))
    for pattern in [patterns] if is_name else filter(None, map(str.strip, patterns.split(","))):
        if paths.is_remote(pattern):
            expanded += remote.find(pattern)
            continue
        name = os.path.expanduser(pattern)
        # A name that exists is no pattern, even with brackets in it.
        exists = os.path.lexists(name)
        matches = [name] if exists else sorted(glob.glob(name, recursive=True))
        found = [match for match in matches if exists or not os.path.isdir(match)]
        is_of_folders = matches and not found
        refuse(is_of_folders, f"data source {pattern} names only folders", fix="add '/*.txt'")
        refuse(
            not found and pattern.split("@")[0] == "builtin",
            f"{patterns}: builtin is no file",
            fix="give each text a weight, as in builtin@0.5,notes.txt@0.5",
        )
        for file in found or [name]:
            name = f"data source {file}"
            check_readable(file, name, "give files or a glob 'text/*.txt'")
            expanded.append((Path(file), state(Path(file))))
    if not expanded:
        raise UserError(f"{patterns!r} names no text; give files, a glob, tfds:NAME or builtin")
    # Patterns may overlap, and a file is read once.
    once: dict[Path | str, tuple[Path | str, remote.State]] = {}
    for each in expanded:
        path, _ = each
        once.setdefault(path if isinstance(path, str) else path.resolve(), each)
    return [*once.values()]


def state(path: Path | str) -> remote.State:
    """Return the size of a file or a URL, and what changes with its content."""
    if isinstance(path, str):
        return remote.state(path)
    with open_file(path) as file:
        found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino


def open_file(
    path: Path | str, block_bytes: int = _BLOCK_BYTES
) -> contextlib.AbstractContextManager[io.BufferedReader]:
    """Open a file, a URL or standard input for reading; UserError if that fails.

    Of a URL, each request reads `block_bytes`.
    """
    if isinstance(path, str) and paths.is_remote(path):
        return remote.open_file(path, block_bytes)
    try:
        # Not `sys.stdin`, whose lock a thread that waits for a line would hold at exit.
        return open(0, "rb", closefd=False) if path == STDIN else Path(path).open("rb")
    except OSError as error:
        if path == STDIN:
            raise UserError(f"stdin cannot be read ({error.strerror}); give a file") from error
        raise UserError(f"{path} {_find_fault(path) or error.strerror}; restore it") from error


def _ends_in_cr(line: bytes) -> bool:
    """Return whether a file, of which this is all, has several lines and no LF."""
    return b"\r" in line.rstrip(b"\r\n") and not line.endswith(b"\n")


def _refuse_other_formats(path: Path | str, line: bytes) -> None:
    for (place, signature), what in _SIGNATURES.items():
        if line[place:].startswith(signature):
            raise UserError(f"{path} is {what}")


def read_lines(
    path: Path | str,
    start: int = 0,
    end: int | None = None,
    *,
    strip: bool = True,
    longest: int = MAX_LINE_BYTES,
    refuses_cr: bool = True,
) -> Iterator[tuple[str, int]]:
    """Yield each line of a file, and the position in the file on disk after it.

    Args:
      path: a file, a URL or standard input.
      start: the byte where the first line starts; 0 for a compressed file.
      end: lines that start there or later are not read; ignored for a compressed file.
      strip: whether to remove white space at both ends.
      longest: in bytes.
      refuses_cr: whether to refuse a file of one line with a CR in it: of several in old Mac text.

    Raises:
      UserError: a line is too long, is not UTF-8 or has a NUL byte, or the file is damaged.
    """
    with open_file(path) as raw:
        decompress = OPENERS.get(suffix(path))
        end = None if decompress else end
        path = "stdin" if path == STDIN else path
        file: BinaryIO = decompress(raw) if decompress else raw
        if start:
            raw.seek(start)
        lines = iter(functools.partial(file.readline, longest + 1), b"")
        number, position, offset = 0, start, start
        try:
            for number, line in enumerate(lines, start=1):
                if number == 1 and not start:
                    _refuse_other_formats(path, line)
                if refuses_cr and number == 1 and not start and _ends_in_cr(line):
                    raise ValueError(
                        "ends in CR alone, and only LF and CRLF are read; convert the line ends"
                    )
                if len(line) > longest:
                    raise ValueError(f"is longer than {longest >> 20} MiB; break it into lines")
                if b"\0" in line:
                    raise ValueError(f"has a NUL byte, as no text in UTF-8 has; {_CONVERT}")
                text = line.decode()
                position = position if number % 64 or not raw.seekable() else raw.tell()
                text = text.removeprefix("\ufeff")  # of a file that was appended to another
                yield text.strip() if strip else text, position
                offset += len(line)
                if end is not None and offset >= end:
                    return
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x} at {error.start}"
            raise UserError(
                f"{path}: line {line_name(number, start)} is not UTF-8 ({byte}); convert it"
            ) from error
        except ValueError as error:
            raise UserError(f"{path}: line {line_name(number, start)} {error}") from error
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            is_other = isinstance(error, gzip.BadGzipFile) and not number
            raise UserError(
                f"{path} is damaged after line {line_name(number, start)} ({error}); fetch it again"
                f"{', or rename it if it is no .gz' if is_other else ''}"
            ) from error


def line_name(number: int, start: int) -> str:
    """Return the name of a line, in messages, by its number from the byte `start` on."""
    return f"{number} after byte {start}" if start else str(number)


def line_start(path: Path | str, offset: int, blank_within: int) -> int:
    """Return where the first document, or else the first line, at or after a byte starts.

    A document starts after a blank line, which must end at most `blank_within` bytes after
    `offset`. The end of the file counts as a start.
    """
    with open_file(path, 1 << 16) as file:
        file.seek(offset - 1)
        line = file.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{path}: the line at byte {offset} is longer than {MAX_LINE_BYTES >> 20} MiB; "
                "break it into lines"
            )
        start = position = offset - 1 + len(line)
        while position < offset + blank_within:
            line = file.readline(blank_within + 1)
            position += len(line)
            if not line.strip() and position <= offset + blank_within:
                return position
        return start


def marked_line_start(path: Path | str, offset: int, mark: str) -> int:
    """Return where the first line that begins with a mark starts, at or after a byte."""
    with open_file(path) as file:
        file.seek(offset - 1)
        lines = iter(functools.partial(file.readline, MAX_LINE_BYTES), b"")
        position = offset - 1 + len(next(lines, b""))
        for line in lines:
            if line.startswith(mark.encode()):
                break
            position += len(line)
    return position
