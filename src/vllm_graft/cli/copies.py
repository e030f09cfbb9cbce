"""The copies of upstream's functions that a command line names: where each stands, and how another takes its place."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_graft.audit.merge import lines
from vllm_graft.cli.patches import lock_file, patches
from vllm_graft.errors import ConfigError, nearest
from vllm_graft.files import replace_file
from vllm_graft.patching.declaration import Patch
from vllm_graft.patching.functions import functions_in, innermost
from vllm_graft.patching.hooks import Hook
from vllm_graft.patching.lock import Lock, hook_name
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import bindings
from vllm_graft.versions import includes


@dataclass(frozen=True, slots=True)
class Copy:
    """A function that was copied.

    owner:             the patch, or the words that named it
    path, line:        its file, and the line that its decorators begin at
    text:              its source
    module, qualname:  upstream's function that it is a copy of
    reviewed:          the releases that the patch's lock has for it
    addition:          whether the patch may also mean a function that upstream does not have
    """

    owner: str
    path: Path
    line: int
    text: str
    module: str
    qualname: str
    reviewed: tuple[str, ...] = ()
    addition: bool = False

    @property
    def upstream(self) -> str:
        """Module and qualified name of upstream's function."""
        return f"{self.module}:{self.qualname}"

    def write_replacement(self, text: str, line: int) -> int:
        """Write a text in its place, which by now begins at ``line``; by how many lines the rest of the file moves."""
        whole, encoding = read(self.path)
        end = "\r\n" if "\r\n" in self.text else "\n"
        found, new, old = lines(whole), lines(text.replace("\n", end)), lines(self.text)
        place = slice(line - 1, line - 1 + len(old))
        if found[place] != old:
            raise ConfigError("the file has changed meanwhile", where=f"{self.path}:{line}", fix="run it again")
        found[place] = new
        replace_file(self.path, "".join(found).encode(encoding))
        return len(new) - len(old)


def names_a_file(text: str) -> bool:
    """Return whether a word means a function in a file, and not a patch."""
    return text.endswith(".py") or text.rpartition(":")[0].endswith(".py")


def in_file(text: str, upstream: str) -> Copy:
    """Return the function that ``path/to/file.py:Class.method`` means, as a copy of ``module:qualname``.

    Without ``upstream`` it is a copy of what it overrides or is put in the place of.
    """
    name, _, qualname = (f"{text}:" if text.endswith(".py") else text).rpartition(":")
    if not qualname:
        raise ConfigError("no function in it is named", where=name, fix=f"name one: {name}:Class.method")
    source, body = _parsed(Path(name))
    nodes: list[ast.AST] = []
    for part in qualname.split("."):
        nodes = bindings(body).get(part, [])
        last = nodes[-1] if nodes else None
        body = last.body if isinstance(last, ast.ClassDef | Function) else []
    if len(nodes) != 1 or not isinstance(nodes[0], Function):
        what = "is defined several times" if len(nodes) > 1 else "is not a function" if nodes else "is not there"
        raise ConfigError(f"{qualname} {what}", where=name, fix="name one function or method of this file")
    fix = "give --upstream vllm.module:Class.method"
    if not upstream:
        from vllm_graft.audit.uses import read as read_uses

        # The class around a function, or the name that it replaces, tells what it is a copy of.
        uses = [
            use for use in read_uses(Path(name)).uses if use.way in ("override", "replace") and use.body is not None
        ]
        found = sorted({use.name for use in uses if use.body is not None and use.body.lineno == nodes[0].lineno})
        if len(found) != 1:
            what = f"it may be a copy of {' or of '.join(found)}" if found else "nothing says what it is a copy of"
            why = "" if found else ": it overrides no method of a class that this file imports from vLLM"
            raise ConfigError(f"{what}{why}", where=text, fix=fix)
        upstream = found[0]
    module, _, theirs = upstream.partition(":")
    if not module or not theirs:
        raise ConfigError(f"{upstream!r} does not part the module from the name", where=text, fix=fix)
    return _copy(text, Path(name), source, nodes[0], module, theirs)


def in_patch(name: str, attribute: str, releases: Sequence[str]) -> list[Copy]:
    """Return the functions with which a registered patch replaces upstream's, in the order of its files.

    Of several bodies of one function the one for the first of these releases decides.
    """
    (patch,) = patches([name])
    target = patch.declaration.target
    reviewed = Lock.read(lock_file(patch)).patches.get(patch.declaration.name, {})
    copies = []
    for hook in _hooks(patch, attribute, releases):
        code = innermost(functions_in(hook.value)[0]).__code__
        path = Path(code.co_filename)
        source, body = _parsed(path)
        inside = [each for statement in body for each in ast.walk(statement) if isinstance(each, Function)]
        node = next((each for each in inside if _first_line(each) == code.co_firstlineno), None)
        if node is None:
            where, fix = f"{path}:{code.co_firstlineno}", "write it with def, in the patch's own file"
            raise ConfigError(f"{hook.attribute!r} is not written there as a function", where=where, fix=fix)
        made = _copy(name, path, source, node, target.module, target.inside(hook.attribute))
        seen = tuple(reviewed.get(hook_name(patch.declaration, hook.attribute), ()))
        copies.append(replace(made, reviewed=seen, addition=hook.kind == "auto"))
    return sorted(copies, key=lambda copy: (copy.path, copy.line))


def _hooks(patch: Patch, attribute: str, releases: Sequence[str]) -> list[Hook]:
    """Return the hooks that may be copies."""
    offered: dict[str, list[Hook]] = {}
    for hook in patch.declaration.hooks:
        if hook.kind in ("replace", "auto") and len(functions_in(hook.value)) == 1:
            offered.setdefault(hook.attribute, []).append(hook)
    if not offered or (attribute and attribute not in offered):
        hint = nearest(attribute, offered) if attribute and offered else ""
        what = f"it does not replace {attribute!r}{hint}" if attribute else "it replaces no function"
        fix = "name a function that it replaces: a wrap holds no copy of upstream's"
        raise ConfigError(what, where=patch.declaration.where, fix=fix)
    chosen = []
    for name, bodies in offered.items():
        if attribute not in ("", name):
            continue
        fitting = [[body for body in bodies if includes(body.vllm, release)] for release in releases]
        found = bodies if len(bodies) == 1 else next((each for each in fitting if len(each) == 1), None)
        if found is None:
            what = f"there are several bodies of {name!r}, and none is for {' or '.join(releases)}"
            fix = "say with --from which release the one you mean is for"
            raise ConfigError(what, where=patch.declaration.where, fix=fix)
        chosen += found
    return chosen


def _copy(owner: str, path: Path, source: str, node: Function, module: str, qualname: str) -> Copy:
    first = _first_line(node)
    return Copy(owner, path, first, "".join(lines(source)[first - 1 : node.end_lineno]), module, qualname)


def _first_line(node: Function) -> int:
    """Return the line at which a function begins, its decorators included."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def read(path: Path) -> tuple[str, str]:
    """Return the text of a Python file with the line ends it has, and its encoding."""
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"it cannot be read: {error}", where=str(path), fix="name a Python file") from error


def _parsed(path: Path) -> tuple[str, list[ast.stmt]]:
    text = read(path)[0]
    try:
        return text, ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        fix = "repair it: conflict markers may be left in it"
        raise ConfigError(f"it is no Python: {error}", where=str(path), fix=fix) from error
