"""Built-in text and labelled examples: the documentation of Python's standard library."""

import ast
import collections
import functools
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data import topics

import numpy as np

from bert_jax.errors import UserError

# Not parts of the library, or absent from some installations.
_EXCLUDED = {"test", "tests", "site-packages", "idlelib", "turtledemo", "lib2to3", "pydoc_data"}

# Source: the chapters of the library reference, without the modules that Python 3.13 removed.
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
_MIN_CHARACTERS = 20  # a shorter docstring, such as "Close the file.", says little of its area
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SENTENCE, _LONG_WORD = re.compile(r".+?(?:[.!?](?= |$)|$)"), re.compile(r"[A-Za-z]{3,}")
_MAX_CHARACTERS = 300  # of a sentence
_MOST, _MADE_UP = 4, 8  # sentences of a docstring, and made-up signatures of a sentence
_EVAL_FRACTION = 0.2  # of the docstrings of each area, at most


def documents() -> list[str]:
    """Return the language reference by topic, and the docstrings of each module as one text."""
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    seen: set[str] = set()  # so that no copy is in both training and held-out text
    for _, docstrings in _library():
        new = [text for text in docstrings if text not in seen]
        seen.update(new)
        if new:
            texts.append("\n\n".join(new))
    return texts


def fingerprint() -> str:
    """Return a hash of everything that `documents` reads, without parsing it."""
    digest = hashlib.sha256(repr(sorted(topics.topics.items())).encode())
    for name, path in _files():
        digest.update(f"\0{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def described(split: str) -> list[tuple[str, str]]:
    """Return what functions and classes do, and their signatures, of a split of the files.

    Held out are the first sentences about what is public. Training has more sentences of each
    docstring and, as the words of a description are often those of the name, sentences with a
    signature that is made up of their words.
    """
    files = [(name, list(_signatures(name, path.read_bytes()))) for name, path in _files()]
    public: dict[tuple[str, str], str] = {}
    for name, definitions in files:
        for signature, sentence in _public(definitions):
            public.setdefault((sentence, signature), name)
    held_out = _held_out(collections.Counter(("", name) for name in public.values()))
    if split == "eval":
        return [pair for pair, name in public.items() if name in held_out]
    pairs, texts = [], [topics.topics[name] for name in sorted(topics.topics)]
    for name, definitions in files:
        for signature, _, docstring in definitions if name not in held_out else ():
            texts.append(docstring)
            pairs += [(sentence, signature) for sentence in _sentences(docstring)[:_MOST]]
    generator = np.random.default_rng(0)
    for sentence in dict.fromkeys(s for text in texts for s in _sentences(text)):
        words = [word.lower() for word in _LONG_WORD.findall(sentence)]
        for _ in range(_MADE_UP if len(words) > _MOST else 0):
            module, *name, first, second = generator.choice(words, 5, replace=False).tolist()
            joined = "_".join(name) if generator.random() < 0.5 else "".join(name).title()
            pairs.append((sentence, f"{module}.{joined}({first}, {second})"))
    return list(dict.fromkeys(pairs))


def functions() -> list[str]:
    """Return each public function and class: its signature, and what it does in a sentence."""
    does: dict[str, str] = {}
    for name, path in _files():
        for signature, sentence in _public(_signatures(name, path.read_bytes())):
            does.setdefault(signature, sentence)
    return [f"{signature}: {sentence}" for signature, sentence in does.items()]


def _public(definitions: Iterable[tuple[str, bool, str]]) -> Iterator[tuple[str, str]]:
    """Yield the signatures of what is public, each with the first sentence about it."""
    for signature, is_public, docstring in definitions:
        if is_public and (found := _sentences(docstring)):
            yield signature, found[0]


def _sentences(text: str) -> list[str]:
    found = (sentence.strip() for sentence in _SENTENCE.findall(" ".join(text.split())))
    return [sentence for sentence in found if _MIN_CHARACTERS <= len(sentence) <= _MAX_CHARACTERS]


def split_of(source: str) -> str | None:
    """Return the split that "builtin@SPLIT" names, "train" by default; None of another source."""
    name, _, split = source.partition("@")
    if name != "builtin":
        return None
    if split not in ("", "train", "eval"):
        raise UserError(f"{source}: no such split; use builtin@train or builtin@eval")
    return split or "train"


def docstring_areas(split: str) -> list[tuple[str, str]]:
    """Return the docstrings of a split of the files, each on one line, with their module's area."""
    first_file: dict[str, str] = {}
    areas: dict[str, set[str]] = {}
    for name, docstrings in _library():
        area = _AREAS.get(name.partition("/")[0].removesuffix(".py"))
        for text in (" ".join(docstring.split()) for docstring in docstrings):
            if area and len(text) >= _MIN_CHARACTERS:
                first_file.setdefault(text, name)
                areas.setdefault(text, set()).add(area)
    examples = [(t, areas[t].pop(), name) for t, name in first_file.items() if len(areas[t]) == 1]
    held_out = _held_out(collections.Counter((area, name) for _, area, name in examples))
    return [(t, area) for t, area, name in examples if (name in held_out) == (split == "eval")]


def _held_out(sizes: collections.Counter[tuple[str, str]]) -> set[str]:
    """Return files with up to a fifth of each area, from the number of examples by area, file."""
    remaining = collections.Counter[str]()
    for (area, _), size in sizes.items():
        remaining[area] += size
    remaining = {area: _EVAL_FRACTION * size for area, size in remaining.items()}
    held_out = set()
    for area, name in sorted(sizes, key=lambda key: hashlib.sha256(key[1].encode()).digest()):
        if sizes[area, name] <= remaining[area]:
            remaining[area] -= sizes[area, name]
            held_out.add(name)
    return held_out


@functools.cache
def _library() -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, tuple(_docstrings(path.read_bytes()))) for name, path in _files())


@functools.cache
def _files() -> tuple[tuple[str, Path], ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    return tuple((n.as_posix(), root / n) for n in names if _EXCLUDED.isdisjoint(n.parts))


def _signatures(file: str, code: bytes) -> Iterator[tuple[str, bool, str]]:
    """Yield the signature of each documented function and class, if it is public, its docstring."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        nodes: list[tuple[str, ast.AST]] = [("", ast.parse(code))]
    except SyntaxError:
        return
    while nodes:
        prefix, parent = nodes.pop(0)
        for node in _statements(parent, into=False):
            if isinstance(node, _DEFINITIONS):
                name, arguments = prefix + node.name, ""
                if isinstance(node, ast.ClassDef):
                    nodes.append((f"{name}.", node))
                else:
                    arguments = f"({ast.unparse(node.args)})"
                if docstring := ast.get_docstring(node):
                    is_public = "_" not in {part[0] for part in name.split(".")}
                    yield f"{module}.{name}{arguments}", is_public, docstring


def _docstrings(code: bytes) -> list[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a template, or code for another Python
        return []
    nodes = [tree, *(node for node in _statements(tree) if isinstance(node, _DEFINITIONS))]
    return [text for text in map(ast.get_docstring, nodes) if text]


def _statements(node: ast.AST, *, into: bool = True) -> Iterator[ast.AST]:
    """Yield the statements of a tree in order, without visiting its many expressions.

    Those of functions and classes below it only if `into`.
    """
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child
            if into or not isinstance(child, _DEFINITIONS):
                yield from _statements(child, into=into)
