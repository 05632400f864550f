"""Built-in data: English that every Python carries, so that a first run needs no download."""

import ast
import collections
import functools
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from bert_jax.errors import UserError

# Tests and installed packages are not the library; `turtledemo` and `idlelib` may be absent.
_LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "turtledemo", "lib2to3", "pydoc_data"}


# Source: the library reference's table of contents, its smaller chapters joined. Modules that
# Python 3.13 no longer has are left out, so that every version has much the same examples.
_MODULES = {
    "concurrency": "_threading_local asyncio concurrent contextvars multiprocessing queue sched "
    "selectors signal socket ssl subprocess threading",
    "data types": "_collections_abc _pydatetime _strptime _weakrefset bisect calendar collections "
    "copy datetime enum graphlib heapq pprint reprlib types weakref zoneinfo",
    "development": "bdb cProfile doctest ensurepip pdb profile pstats pydoc timeit trace "
    "tracemalloc typing unittest venv zipapp",
    "files": "_compression bz2 compression configparser copyreg csv dbm filecmp fileinput fnmatch "
    "genericpath glob gzip linecache lzma netrc ntpath pathlib pickle plistlib posixpath shelve "
    "shutil sqlite3 stat tarfile tempfile tomllib zipfile",
    "graphics": "colorsys tkinter turtle",
    "internet": "base64 email ftplib html http imaplib ipaddress json mailbox mimetypes poplib "
    "quopri smtplib socketserver urllib uuid webbrowser wsgiref xml xmlrpc",
    "language": "_sitebuiltins abc ast code codeop compileall contextlib dataclasses dis importlib "
    "inspect keyword modulefinder opcode pickletools pkgutil py_compile pyclbr runpy site symtable "
    "sysconfig tabnanny token tokenize traceback warnings zipimport",
    "mathematics": "_pydecimal _pylong decimal fractions functools numbers operator random "
    "statistics",
    "operating system": "_pyio argparse cmd ctypes curses getopt getpass io logging optparse os "
    "platform pty shlex tty",
    "text": "codecs difflib encodings gettext locale re string stringprep textwrap",
}
_AREAS = {module: area for area, modules in _MODULES.items() for module in modules.split()}
_SHORTEST = 20  # characters; a shorter docstring, "Close the file.", tells little of its area
_HELD_OUT = 0.2  # of the docstrings of each area, at most


def documents() -> list[str]:
    """Returns the language reference by topic, and the docstrings of each module as one text.

    The modules are parsed, not imported. A docstring that has been seen before is left out, so that
    none that a class inherits by copying stands on both sides of a held-out split.
    """
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    seen: set[str] = set()
    for _, found in _library():
        docstrings = [text for text in found if text not in seen]
        seen.update(docstrings)
        if docstrings:
            texts.append("\n\n".join(docstrings))
    return texts


def fingerprint() -> str:
    """Returns a hash of all that `documents` is made of, in a small part of its time."""
    digest = hashlib.sha256(repr(sorted(topics.topics.items())).encode())
    for name, path in _files():
        digest.update(f"\0{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def docstring_areas(split: str) -> list[tuple[str, str]]:
    """Returns docstrings of the library, each on one line, with the area that its module is of.

    A file's docstrings are all in one split: with those of one class in both, a classifier that
    remembers names does well. One that stands in files of two areas is left out, and one that
    stands in several files of one area is of the first.

    Args:
      split: "train" or "eval"; the latter has about a fifth of each area.

    Raises:
      UserError: `split` is another word.
    """
    if split not in ("train", "eval"):
        raise UserError(f"builtin@{split}: no such split; give builtin@train or builtin@eval")
    files: dict[str, list[str]] = {}
    areas: dict[str, set[str]] = {}
    for name, docstrings in _library():
        area = _AREAS.get(name.partition("/")[0].removesuffix(".py"))
        for text in (" ".join(docstring.split()) for docstring in docstrings):
            if area and len(text) >= _SHORTEST:
                files.setdefault(text, []).append(name)
                areas.setdefault(text, set()).add(area)
    examples = [(text, areas[text].pop(), files[text][0]) for text in files if len(areas[text]) < 2]
    held_out = _held_out(collections.Counter((area, name) for _, area, name in examples))
    return [
        (text, area) for text, area, name in examples if (name in held_out) == (split == "eval")
    ]


def _held_out(sizes: collections.Counter[tuple[str, str]]) -> set[str]:
    """Returns the files to hold out, of the number of examples by area and file.

    Files are taken in the order of their hashes, but for those that a fifth of the area has no more
    room for: a few have most of their area's docstrings.
    """
    room = collections.Counter[str]()
    for (area, _), size in sizes.items():
        room[area] += size
    room = {area: _HELD_OUT * size for area, size in room.items()}
    held_out = set()
    for area, name in sorted(sizes, key=lambda key: hashlib.sha256(key[1].encode()).digest()):
        if sizes[area, name] <= room[area]:
            room[area] -= sizes[area, name]
            held_out.add(name)
    return held_out


@functools.cache
def _library() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the docstrings of each file, which is named from the library's root."""
    return tuple((name, tuple(_docstrings(path.read_bytes()))) for name, path in _files())


@functools.cache
def _files() -> tuple[tuple[str, Path], ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    kept = (name for name in names if _LEFT_OUT.isdisjoint(name.parts))
    return tuple((name.as_posix(), root / name) for name in kept)


def _docstrings(code: bytes) -> list[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a template, or code for another Python
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in _statements(tree) if isinstance(node, documented))
    return [text for text in map(ast.get_docstring, nodes) if text]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements of a tree in their order; in its many expressions there are none."""
    yield node
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, name, ()):
            yield from _statements(inner)
