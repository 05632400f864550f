"""The package's own imports: arrows point down, and nothing is imported in a circle."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "bert_jax"

# From the top to the bottom: a module imports from its own room and from the rooms below it.
LAYERS = (
    ("commands",),
    ("__init__",),
    ("runs",),
    ("bert",),
    ("viewer",),
    ("inference",),
    ("planning",),
    ("convert",),
    ("tasks",),
    ("objectives",),
    ("training",),
    ("retrieval",),
    ("batches",),
    ("distributed",),
    ("models",),
    ("text",),
    ("config",),
    ("storage",),
    ("console",),
    ("errors",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports() -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, wherever in the file."""
    paths = {
        ".".join(["bert_jax", *path.relative_to(ROOT).with_suffix("").parts]): path
        for path in ROOT.rglob("*.py")
    }
    found = {}
    for name, path in paths.items():
        wanted = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted |= {m if m in paths else node.module for m in modules}
            elif isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
        known = {m if m in paths else f"{m}.__init__" for m in wanted}
        found[name] = (known & set(paths)) - {name}
    return found


def layer(module: str) -> str:
    return module.split(".")[1]


def libraries(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that statements import, each up to its first dot."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(x.name for x in node.names)]
            found |= {name.partition(".")[0] for name in names}
    return found


def test_imports_point_down():
    wrong = [
        f"{module} imports {imported}"
        for module, modules in imports().items()
        for imported in modules
        if layer(module) != layer(imported) and RANK[layer(module)] >= RANK[layer(imported)]
    ]
    assert not sorted(wrong)


def test_no_module_imports_itself_by_way_of_others():
    graph = imports()
    done, path = set(), []

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for imported in sorted(graph[module]):
            visit(imported)
        done.add(path.pop())

    for module in graph:
        visit(module)


def test_what_takes_a_second_to_import_is_imported_where_it_is_used():
    """So that no command waits for what another one needs."""
    slow = {"sklearn", "matplotlib", "tensorboardX", "huggingface_hub", "tensorflow_datasets"}
    for path in ROOT.rglob("*.py"):
        assert not libraries(ast.parse(path.read_text()).body) & slow, path


@pytest.mark.parametrize(
    ("library", "modules"),
    [
        ("orbax", {"training/checkpoint.py"}),
        ("tensorflow_datasets", {"text/records.py"}),
        ("torch", set()),
        ("transformers", set()),
    ],
)
def test_a_library_that_may_change_is_imported_in_one_module(library, modules):
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if library in libraries(ast.walk(ast.parse(path.read_text())))
    }
    assert found == modules


@pytest.mark.parametrize(
    ("name", "objective"),
    [("roberta", ""), ("modernbert", ""), ("electra", "objectives/replaced_tokens.py")],
)
def test_an_architecture_is_named_in_its_own_files_and_where_it_is_registered(name, objective):
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if name in (getattr(node, "module", None) or "").lower()
        or (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "\n" not in node.value
            and re.search(rf"\b{name}\b", node.value)
        )
    }
    assert found <= {f"models/{name}.py", objective, "config/fields.py", "__init__.py"}
