"""The built-in corpus: English that every Python carries, so that a first run needs no download."""

import ast
import sysconfig
from pathlib import Path
from pydoc_data import topics

# Tests and installed packages are not the library; `turtledemo` and `idlelib` may be absent.
_LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "turtledemo", "lib2to3", "pydoc_data"}


def documents() -> list[str]:
    """Returns the language reference by topic, and the docstrings of each module as one text.

    The modules are parsed, not imported. A docstring that has been seen before is left out, so that
    none that a class inherits by copying stands on both sides of a held-out split.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            docstrings = [text for text in _docstrings(path) if text not in seen]
            seen.update(docstrings)
            if docstrings:
                texts.append("\n\n".join(docstrings))
    return texts


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # a template, or code for another Python
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # walk is breadth first
    return [text for text in map(ast.get_docstring, nodes) if text]
