"""The modules of boot: none imports another in a circle, not even inside a function."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import vllm_graft.boot

PACKAGE = "vllm_graft.boot"
FOLDER = Path(vllm_graft.boot.__file__).parent


def imports(path: Path, *, late: bool) -> set[str]:
    """Return the modules of boot that one imports; ``late`` ones are imported inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and (id(node) not in top) == late:
            if node.module.startswith(f"{PACKAGE}."):
                found.add(node.module.removeprefix(f"{PACKAGE}."))
            elif node.module == PACKAGE:
                found |= {alias.name for alias in node.names if (FOLDER / f"{alias.name}.py").is_file()}
    return found


MODULES = {path.stem: path for path in FOLDER.glob("*.py")}


def test_no_module_imports_another_in_a_circle():
    graph = {name: imports(path, late=False) for name, path in MODULES.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("process") < order.index("proof") < order.index("doors")


def test_no_module_but_the_entry_point_imports_another_late():
    """vLLM imports the package for its platform plugin, while vLLM itself is being imported: that must stay cheap."""
    late = {name: found for name, path in MODULES.items() if (found := imports(path, late=True))}
    assert late == {"__init__": {"doors"}}
