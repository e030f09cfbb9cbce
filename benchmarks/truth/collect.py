"""Every use of vLLM in a package, read from its syntax trees without code of the audit.

A name is followed through imports of the package's own modules and through plain aliases of modules; where a name is
bound to anything else as well, nothing is said of it. What is left is what the source alone makes certain.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

Kind = Literal[
    "import", "read", "call", "construct", "override", "super call", "self call", "self read", "abstract", "field"
]
Function = ast.FunctionDef | ast.AsyncFunctionDef
SKIPPED = {"node_modules", "build", "__pycache__", "venv"}


@dataclass(frozen=True, eq=False)
class Condition:
    """Code that runs only where ``test`` came out as ``branch``."""

    test: ast.expr
    branch: bool
    scope: Scope


@dataclass(frozen=True, eq=False)
class Attempt:
    """Code in a ``try`` or ``suppress``, with the names of the errors that it survives; "*" for all."""

    errors: frozenset[str]


@dataclass(frozen=True, eq=False)
class Fallback:
    """Code in an ``except`` clause: it runs only where the body of the ``try`` fails."""

    body: list[ast.stmt]
    scope: Scope


@dataclass(frozen=True, eq=False)
class Never:
    """Code for type checkers."""


Guard = Condition | Attempt | Fallback | Never
Guards = tuple[Guard, ...]


@dataclass(frozen=True, eq=False)
class Upstream:
    """A name of vLLM: a module as an import statement spells it, and attributes below it."""

    module: str
    path: tuple[str, ...] = ()
    guards: Guards = ()

    @property
    def dotted(self) -> str:
        return ".".join((self.module, *self.path))

    def below(self, *path: str) -> Upstream:
        return Upstream(self.module, (*self.path, *path), self.guards)


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """A name in another module of the package, or that module itself."""

    module: str
    name: str = ""
    guards: Guards = ()


@dataclass(frozen=True, eq=False)
class Instance:
    """A variable whose annotation says what it holds."""

    annotation: ast.expr
    scope: Scope


@dataclass(frozen=True, eq=False)
class Unknown:
    """Anything else."""


Binding = "Upstream | Elsewhere | Instance | Unknown | OwnClass | Function"


@dataclass(eq=False)
class Scope:
    """The names of a module, class or function."""

    kind: Literal["module", "class", "function"]
    module: Module
    parent: Scope | None = None
    names: dict[str, list[object]] = field(default_factory=dict)
    body: Sequence[ast.stmt] = ()

    def lookup(self, name: str) -> list[object]:
        """Return what a name may be bound to; nothing for builtins."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and (scope.kind != "class" or scope is self):
                return scope.names[name]
            scope = scope.parent
        return []


@dataclass(eq=False)
class OwnClass:
    """A class of the package."""

    node: ast.ClassDef
    module: Module
    scope: Scope
    guards: Guards
    inside: Scope | None = None
    derives: bool = False

    @property
    def methods(self) -> dict[str, Function]:
        return {one.name: one for one in statements(self.node.body) if isinstance(one, Function)}

    @cached_property
    def defined(self) -> frozenset[str]:
        """Names in its body, and attributes that its methods store on anything."""
        found = set()
        for node in ast.walk(self.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and called(node) in ("register_buffer", "register_parameter", "setattr"):
                found.update(one.value for one in node.args[:2] if isinstance(one, ast.Constant))
        for node in statements(self.node.body):
            if isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        return frozenset(found)


@dataclass(eq=False)
class Module:
    """One file of the package."""

    path: Path
    shown: str
    name: str
    is_package: bool
    tree: ast.Module
    package: Package
    scope: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.scope = Scope("module", self, body=self.tree.body)


@dataclass(frozen=True)
class Shape:
    """How a call passes its arguments."""

    positional: int
    keywords: tuple[str, ...]
    star: bool = False
    double_star: bool = False


@dataclass(eq=False)
class Use:
    """One use of vLLM.

    refs:    what the name may stand for, one of them in force
    cls:     the class of the package around it, for what goes by ``self`` or ``super()`` and for overrides
    member:  the method or attribute of that class
    """

    kind: Kind
    file: str
    line: int
    end: int
    name: str
    guards: Guards
    refs: tuple[Upstream, ...] = ()
    shape: Shape | None = None
    cls: OwnClass | None = None
    member: str = ""
    function: Function | None = None
    path: tuple[str, ...] = ()
    verdict: str = ""
    why: str = ""

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


class Package:
    """All files of a package, and the names that they bind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, Module] = {}
        self.unparsed: list[str] = []
        self.classes: list[OwnClass] = []
        self.importers: dict[str, list[tuple[str, Guards]]] = {}
        self.puts: dict[tuple[str, str], int] = {}
        self.reads: dict[tuple[str, str], int] = {}
        for path in sorted(_files(folder)):
            self._read(path)
        for module in self.modules.values():
            _Binder(module).block(module.tree.body, module.scope, ())

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        parts = list(path.relative_to(self.folder).with_suffix("").parts)
        parts = parts[1:] if parts[0] == "src" else parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError):
            self.unparsed.append(str(path))
            return
        shown = path.relative_to(self.folder.parent).as_posix()
        self.modules[name] = Module(path, shown, name, is_package, tree, self)

    @cached_property
    def tops(self) -> frozenset[str]:
        """The top-level names of the package."""
        return frozenset(name.partition(".")[0] for name in self.modules)

    @cached_property
    def stored(self) -> frozenset[str]:
        """Every attribute that code of the package stores on anything, by assignment or ``setattr``."""
        found = set()
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                    found.add(node.attr)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                    key = node.args[1] if len(node.args) > 1 else None
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        found.add(key.value)
        return frozenset(found)

    @cached_property
    def loaded(self) -> frozenset[str]:
        """Every attribute that code of the package reads."""
        nodes = (node for module in self.modules.values() for node in ast.walk(module.tree))
        return frozenset(one.attr for one in nodes if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load))

    @cached_property
    def replaced(self) -> frozenset[tuple[str, str]]:
        """Every attribute stored on something other than ``self``, with the last name of what it is stored on."""
        found = set()
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                    root, path = chain(node.value)
                    holder = path[-1] if path else getattr(root, "id", "")
                    if holder != "self":
                        found.add((holder, node.attr))
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                    key = node.args[1] if len(node.args) > 1 else None
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        found.add(("", key.value))
        return frozenset(found)

    def replaces(self, attribute: str) -> bool:
        """Tell whether the package stores an attribute on anything but ``self``."""
        return attribute in self._replaced_names

    @cached_property
    def _replaced_names(self) -> frozenset[str]:
        return frozenset(name for _, name in self.replaced)

    def adds(self, name: str) -> bool:
        """Tell whether the package puts a name on vLLM in a file that does not read vLLM's own of that name before."""
        files = [(file, line) for (put, file), line in self.puts.items() if put == name]
        return any(self.reads.get((name, file), line + 1) > line for file, line in files)

    @cached_property
    def borrowed(self) -> frozenset[tuple[str, str]]:
        """Every method that is taken from a class by its name: ``Target.forward = OwnClass.forward``."""
        names = {one.node.name for one in self.classes}
        nodes = (node for module in self.modules.values() for node in ast.walk(module.tree))
        stores = (node.value for node in nodes if isinstance(node, ast.Assign))
        taken = (one for one in stores if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name))
        return frozenset((one.value.id, one.attr) for one in taken if one.value.id in names)

    def resolve(self, found: Iterable[object], depth: int = 0) -> list[object]:
        """Follow bindings through the package's own modules."""
        done: list[object] = []
        for one in found:
            if not isinstance(one, Elsewhere):
                done.append(one)
                continue
            module = self.modules.get(one.module)
            if not one.name:
                done.append(one if module is not None else Unknown())
            elif module is not None and one.name in module.scope.names and depth < 8:
                inner = self.resolve(module.scope.names[one.name], depth + 1)
                done += [
                    Upstream(ref.module, ref.path, (*ref.guards, *one.guards)) if isinstance(ref, Upstream) else ref
                    for ref in inner
                ]
            elif f"{one.module}.{one.name}" in self.modules:
                done.append(Elsewhere(f"{one.module}.{one.name}", "", one.guards))
            else:
                done.append(Unknown())
        return done

    def expression(self, node: ast.expr, scope: Scope) -> list[object]:
        """Return what a name or a chain of attributes may stand for."""
        root, path = chain(node)
        if not isinstance(root, ast.Name):
            return [Unknown()]
        found = self.resolve(scope.lookup(root.id))
        for position, attribute in enumerate(path):
            step: list[object] = []
            for one in found:
                if isinstance(one, Upstream):
                    step.append(one.below(attribute))
                elif isinstance(one, Elsewhere):
                    step += self.resolve([Elsewhere(one.module, attribute, one.guards)])
                elif isinstance(one, OwnClass) and position == len(path) - 1:
                    step.append(Unknown())
                else:
                    step.append(Unknown())
            found = step
        return found

    def upstream(self, node: ast.expr, scope: Scope) -> tuple[Upstream, ...]:
        """Return the names of vLLM that an expression stands for; none where it may be anything else as well."""
        found = self.expression(node, scope)
        if not found or not all(isinstance(one, Upstream) for one in found):
            return ()
        return tuple(one for one in found if isinstance(one, Upstream))

    def bases(self, cls: OwnClass) -> list[list[object]]:
        """Return what each base of a class may be."""
        nodes = [base.value if isinstance(base, ast.Subscript) else base for base in cls.node.bases]
        return [self.expression(node, cls.scope) for node in nodes]

    def descendants(self, cls: OwnClass) -> list[OwnClass]:
        """Return the classes of the package that derive from one."""
        return self._children.get(id(cls), [])

    @cached_property
    def _children(self) -> dict[int, list[OwnClass]]:
        children: dict[int, list[OwnClass]] = {}
        for one in self.classes:
            left, seen = [one], set()
            while left:
                current = left.pop()
                for base in self.bases(current):
                    for above in base:
                        if isinstance(above, OwnClass) and id(above) not in seen:
                            seen.add(id(above))
                            children.setdefault(id(above), []).append(one)
                            left.append(above)
        return children

    def uses(self) -> list[Use]:
        """Return every use of vLLM that is certain."""
        found: list[Use] = []
        for module in self.modules.values():
            collector = _Collector(module)
            collector.block(module.tree.body, _Context(module.scope))
            found += collector.found
        return found


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_file() and path.suffix == ".py":
            yield path
        elif path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and path.name not in SKIPPED:
            if path.name == "vllm" and (path / "__init__.py").is_file() and not (folder / "__init__.py").is_file():
                continue
            yield from _files(path)


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those nested in them, without the bodies of functions and classes."""
    for node in body:
        yield node
        if isinstance(node, Function | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)
        for case in getattr(node, "cases", []):
            yield from statements(case.body)


def chain(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """Take a chain of attributes apart."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    return node, path[::-1]


def called(node: ast.Call) -> str:
    """Return the last name of what a call calls."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_test(file: str) -> bool:
    """Tell whether a file is one of a package's tests, which an audit may leave out."""
    *folders, name = file.split("/")
    named = name == "conftest.py" or name.startswith("test_") or name.endswith("_test.py")
    return named or bool({"test", "tests"} & set(folders))


def absolute(node: ast.ImportFrom, module: Module) -> str:
    """Return the module that an import statement names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".") if module.name else []
    kept = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[: max(kept, 0)], *([node.module] if node.module else [])])


def is_upstream(module: str) -> bool:
    """Tell whether a module is vLLM's."""
    return module == "vllm" or module.startswith("vllm.")


def shape_of(node: ast.Call) -> Shape:
    """Return how a call passes its arguments."""
    return Shape(
        positional=sum(not isinstance(one, ast.Starred) for one in node.args),
        keywords=tuple(one.arg for one in node.keywords if one.arg),
        star=any(isinstance(one, ast.Starred) for one in node.args),
        double_star=any(one.arg is None for one in node.keywords),
    )


def errors_of(handlers: Sequence[ast.ExceptHandler]) -> frozenset[str]:
    """Return the errors that a ``try`` survives; a clause that raises again does not count."""
    found: set[str] = set()
    for handler in handlers:
        if any(isinstance(one, ast.Raise) for one in handler.body):
            continue
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        for kind in kinds:
            found.add(
                "*"
                if kind is None
                else chain(kind)[1][-1]
                if isinstance(kind, ast.Attribute)
                else getattr(kind, "id", "")
            )
    return frozenset("*" if one in ("Exception", "BaseException") else one for one in found)


def suppressed(node: ast.With | ast.AsyncWith) -> frozenset[str]:
    """Return the errors that a ``with suppress(...)`` swallows."""
    found: set[str] = set()
    for item in node.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and (chain(call.func)[1] or [getattr(call.func, "id", "")])[-1] == "suppress":
            found.update(
                chain(one)[1][-1] if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in call.args
            )
    return frozenset("*" if one in ("Exception", "BaseException") else one for one in found)


def is_for_type_checkers(test: ast.expr) -> bool:
    """Tell whether a condition is ``TYPE_CHECKING``."""
    root, path = chain(test)
    return (path[-1] if path else getattr(root, "id", "")) == "TYPE_CHECKING"


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Tell whether a block never reaches what follows it."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


class _Blocks:
    """Walks statements with the guards around them; what is done with each is a subclass's."""

    def guarded(self, body: Sequence[ast.stmt], scope: Scope, guards: Guards) -> Iterator[tuple[ast.stmt, Guards]]:
        for node in body:
            yield node, guards
            if isinstance(node, ast.If) and leaves(node.body) and not node.orelse:
                guards = (*guards, Condition(node.test, False, scope))

    def inner(self, node: ast.stmt, scope: Scope, guards: Guards) -> Iterator[tuple[list[ast.stmt], Guards]]:
        """Yield the blocks of a compound statement."""
        if isinstance(node, ast.If):
            never = is_for_type_checkers(node.test)
            yield node.body, (*guards, Never() if never else Condition(node.test, True, scope))
            yield node.orelse, guards if never else (*guards, Condition(node.test, False, scope))
        elif isinstance(node, ast.Try | ast.TryStar):
            yield node.body, (*guards, Attempt(errors_of(node.handlers)))
            yield node.orelse, guards
            for handler in node.handlers:
                yield handler.body, (*guards, Fallback(node.body, scope))
            yield node.finalbody, guards
        elif isinstance(node, ast.With | ast.AsyncWith):
            caught = suppressed(node)
            yield node.body, (*guards, Attempt(caught)) if caught else guards
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            yield node.body, guards
            yield node.orelse, guards
        elif isinstance(node, ast.Match):
            for case in node.cases:
                yield case.body, guards


class _Binder(_Blocks):
    """Fills scopes with the names that statements bind."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def block(self, body: Sequence[ast.stmt], scope: Scope, guards: Guards) -> None:
        for node, around in self.guarded(body, scope, guards):
            self._bind(node, scope, around)
            for block, inside in self.inner(node, scope, around):
                self.block(block, scope, inside)

    def _bind(self, node: ast.stmt, scope: Scope, guards: Guards) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                self._add(scope, alias.asname or top, self._imported(top, "", guards))
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, self.module)
            for alias in node.names:
                if alias.name != "*":
                    self._add(scope, alias.asname or alias.name, self._imported(source, alias.name, guards))
        elif isinstance(node, ast.ClassDef):
            cls = OwnClass(node, self.module, scope, guards, Scope("class", self.module, scope))
            assert cls.inside is not None
            self.module.package.classes.append(cls)
            self._add(scope, node.name, cls)
            self.block(node.body, cls.inside, guards)
        elif isinstance(node, Function):
            self._add(scope, node.name, node)
        else:
            self._assigned(node, scope, guards)

    def _assigned(self, node: ast.stmt, scope: Scope, guards: Guards) -> None:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._add(scope, node.target.id, Instance(node.annotation, scope))
            return
        nothing = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None
        if nothing and guards and isinstance(guards[-1], Fallback | Condition):
            # A placeholder where vLLM is absent.
            return
        if isinstance(node, ast.Global | ast.Nonlocal):
            for name in node.names:
                self._add(scope, name, Unknown())
        for one in _bound(node):
            self._add(scope, one, Unknown())

    def _imported(self, module: str, name: str, guards: Guards) -> object:
        if is_upstream(module):
            return Upstream(module, (name,) if name else (), guards)
        if module.partition(".")[0] in self.module.package.tops:
            return Elsewhere(module, name, guards)
        return Unknown()

    def _add(self, scope: Scope, name: str, binding: object) -> None:
        known = scope.names.setdefault(name, [])
        if isinstance(binding, Upstream) and any(
            isinstance(one, Upstream) and one.dotted == binding.dotted and one.module == binding.module for one in known
        ):
            return
        known.append(binding)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the variables that a statement itself binds."""
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets = [*node.targets]
    elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor):
        targets = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    elif isinstance(node, ast.Try | ast.TryStar):
        yield from (handler.name for handler in node.handlers if handler.name)
    elif isinstance(node, ast.Delete):
        targets = [*node.targets]
    elif isinstance(node, ast.Match):
        targets = [case.pattern for case in node.cases]
    for target in targets:
        for one in ast.walk(target):
            if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
                yield one.id
            elif isinstance(one, ast.MatchAs | ast.MatchStar) and one.name:
                yield one.name


@dataclass(frozen=True)
class _Context:
    """Where a walk stands; ``on_class``: ``self_name`` is the class, as in a class method."""

    scope: Scope
    guards: Guards = ()
    cls: OwnClass | None = None
    method: str = ""
    self_name: str = ""
    on_class: bool = False


class _Collector(_Blocks):
    """Collects the uses of one file."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.package = module.package
        self.found: list[Use] = []

    def block(self, body: Sequence[ast.stmt], context: _Context) -> None:
        for node, guards in self.guarded(body, context.scope, context.guards):
            around = replace(context, guards=guards)
            self._statement(node, around)
            for block, inside in self.inner(node, context.scope, guards):
                self.block(block, replace(context, guards=inside))

    def _use(self, kind: Kind, node: ast.AST, name: str, context: _Context, **more: object) -> None:
        line = getattr(node, "lineno", 0)
        end = getattr(node, "end_lineno", line) or line
        self.found.append(Use(kind, self.module.shown, line, end, name, context.guards, **more))  # type: ignore[arg-type]

    def _imports(self, module: str, guards: Guards) -> None:
        """Note who imports a module of the package, and the packages above it; type checkers and tests do not count."""
        if any(isinstance(guard, Never) for guard in guards) or is_test(self.module.shown):
            return
        while module and module.partition(".")[0] in self.package.tops:
            if module in self.package.modules:
                self.package.importers.setdefault(module, []).append((self.module.name, guards))
            module = module.rpartition(".")[0]

    def _statement(self, node: ast.stmt, context: _Context) -> None:
        self._note_puts(node, context)
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._imports(alias.name, context.guards)
                if is_upstream(alias.name):
                    self._use("import", node, alias.name, context, refs=(Upstream(alias.name),))
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, self.module)
            for alias in node.names:
                below = f"{source}.{alias.name}"
                self._imports(below if below in self.package.modules else source, context.guards)
            for alias in node.names if is_upstream(source) else ():
                self._reads(f"{source}.{alias.name}", node.lineno)
                ref = Upstream(source, () if alias.name == "*" else (alias.name,))
                self._use("import", alias, ref.dotted, context, refs=(ref,))
        elif isinstance(node, ast.ClassDef):
            self._class(node, context)
        elif isinstance(node, Function):
            self._function(node, context)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    if isinstance(node, ast.AnnAssign) and child is node.annotation:
                        continue
                    self.expression(child, context)
                elif isinstance(child, ast.withitem):
                    self.expression(child.context_expr, context)

    def _reads(self, name: str, line: int) -> None:
        key = name, self.module.shown
        self.package.reads[key] = min(line, self.package.reads.get(key, line))

    def _note_puts(self, node: ast.stmt, context: _Context) -> None:
        """Note the names that a statement puts on a module or class of vLLM: an assignment, ``setattr``, a patch."""
        owners: list[tuple[ast.expr, Iterable[str]]] = []
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            owners += [(one.value, [one.attr]) for one in targets if isinstance(one, ast.Attribute)]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) == "setattr":
            owner, key = [*node.value.args, None, None][:2]
            if owner is not None and isinstance(key, ast.Constant):
                owners.append((owner, [str(key.value)]))
        elif isinstance(node, ast.ClassDef):
            # A patch class names its target in brackets: ``class MyPatch(Patch[target])``.
            names = [one.name for one in node.body if isinstance(one, Function)]
            names += [name for one in node.body for name in _bound(one)]
            owners += [(base.slice, names) for base in node.bases if isinstance(base, ast.Subscript)]
        for owner, names in owners:
            for ref in self.package.upstream(owner, context.scope):
                for name in names:
                    self.package.puts.setdefault((f"{ref.dotted}.{name}", self.module.shown), node.lineno)

    def _class(self, node: ast.ClassDef, context: _Context) -> None:
        for one in [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]:
            self.expression(one, context)
        cls = self._own.get(node) or self._local(node, context)
        assert cls.inside is not None
        cls.derives = any(isinstance(one, Upstream) for base in self._ancestry(cls) for one in base)
        if cls.derives:
            self._use("abstract", node, node.name, context, cls=cls)
            for name, method in cls.methods.items():
                self._use("override", method, f"{node.name}.{name}", context, cls=cls, member=name, function=method)
        self.block(node.body, _Context(cls.inside, context.guards, cls))

    @cached_property
    def _own(self) -> dict[ast.ClassDef, OwnClass]:
        return {one.node: one for one in self.package.classes if one.module is self.module}

    def _local(self, node: ast.ClassDef, context: _Context) -> OwnClass:
        """Return a class that a function defines."""
        inside = Scope("class", self.module, context.scope)
        _Binder(self.module).block(node.body, inside, context.guards)
        cls = OwnClass(node, self.module, context.scope, context.guards, inside)
        self.package.classes.append(cls)
        self._own[node] = cls
        return cls

    def _ancestry(self, cls: OwnClass, seen: frozenset[int] = frozenset()) -> Iterator[list[object]]:
        for base in self.package.bases(cls):
            yield base
            for one in base:
                if isinstance(one, OwnClass) and id(one) not in seen:
                    yield from self._ancestry(one, seen | {id(cls)})

    def _function(self, node: Function, context: _Context) -> None:
        for one in [*node.decorator_list, *node.args.defaults, *(one for one in node.args.kw_defaults if one)]:
            self.expression(one, context)
        scope = Scope("function", self.module, context.scope, body=node.body)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            bound = Instance(argument.annotation, context.scope) if argument.annotation else Unknown()
            scope.names[argument.arg] = [bound]
        for extra in (node.args.vararg, node.args.kwarg):
            if extra is not None:
                scope.names[extra.arg] = [Unknown()]
        guards = tuple(one for one in context.guards if not isinstance(one, Attempt))
        _Binder(self.module).block(node.body, scope, guards)
        for name in {one.target.id for one in ast.walk(node) if isinstance(one, ast.NamedExpr)}:
            scope.names.setdefault(name, []).append(Unknown())
        if context.scope.kind == "class":
            marks = {getattr(one, "id", "") for one in node.decorator_list}
            positional = [*node.args.posonlyargs, *node.args.args]
            first = positional[0].arg if positional and "staticmethod" not in marks else ""
            if first and len(scope.names[first]) > 1:
                first = ""
            inner = _Context(scope, guards, context.cls, node.name, first, "classmethod" in marks)
        else:
            name = context.self_name if context.self_name not in scope.names else ""
            inner = replace(context, scope=scope, guards=guards, self_name=name)
        self.block(node.body, inner)

    def expression(self, node: ast.AST, context: _Context, call: ast.Call | None = None) -> None:
        """Walk an expression; ``call`` is the call that it is the function of."""
        if isinstance(node, ast.Call):
            self._call(node, context)
        elif isinstance(node, ast.Attribute | ast.Name):
            self._mention(node, context, call)
        elif isinstance(node, ast.BoolOp):
            guards = context.guards
            for value in node.values:
                self.expression(value, replace(context, guards=guards))
                guards = (*guards, Condition(value, isinstance(node.op, ast.And), context.scope))
        elif isinstance(node, ast.IfExp):
            self.expression(node.test, context)
            for value, branch in ((node.body, True), (node.orelse, False)):
                guards = (*context.guards, Condition(node.test, branch, context.scope))
                self.expression(value, replace(context, guards=guards))
        elif isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self._comprehension(node, context)
        else:
            for child in ast.iter_child_nodes(node):
                self.expression(child, context)

    def _comprehension(self, node: ast.AST, context: _Context) -> None:
        scope = Scope("function", self.module, context.scope)
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                scope.names[one.id] = [Unknown()]
            elif isinstance(one, ast.arg):
                scope.names[one.arg] = [Unknown()]
        name = context.self_name if context.self_name not in scope.names else ""
        guards = context.guards
        for one in getattr(node, "generators", []):
            guards = (*guards, *(Condition(test, True, scope) for test in one.ifs))
        inner = replace(context, scope=scope, guards=guards, self_name=name)
        for child in ast.iter_child_nodes(node):
            self.expression(child, inner)

    def _call(self, node: ast.Call, context: _Context) -> None:
        for one in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.expression(one, context)
        root, path = chain(node.func)
        if isinstance(root, ast.Call) and getattr(root.func, "id", "") == "super":
            if (
                len(path) == 1
                and not root.args
                and context.cls is not None
                and context.cls.derives
                and context.self_name
                and not context.on_class
            ):
                name = f"super().{path[0]}"
                self._use("super call", node, name, context, cls=context.cls, member=path[0], shape=shape_of(node))
            return
        self.expression(node.func, context, node)

    def _mention(self, node: ast.Attribute | ast.Name, context: _Context, call: ast.Call | None) -> None:
        root, path = chain(node)
        if not isinstance(root, ast.Name):
            self.expression(root, context)
            return
        if not isinstance(node.ctx, ast.Load):
            path = path[:-1]
        if context.self_name and root.id == context.self_name and context.cls is not None:
            self._of_self(node, path, context, call)
            return
        if call is None and not path:
            return
        found = context.scope.lookup(root.id)
        if len(found) == 1 and isinstance(found[0], Instance):
            self._of_instance(node, found[0], root.id, path, context)
            return
        whole = node if isinstance(node.ctx, ast.Load) else node.value  # type: ignore[union-attr]
        refs = self.package.upstream(whole, context.scope) if isinstance(whole, ast.expr) else ()
        if not refs:
            return
        if isinstance(node.ctx, ast.Load):
            for ref in refs:
                self._reads(ref.dotted, node.lineno)
        shape = shape_of(call) if call is not None else None
        self._use("call" if shape else "read", call or node, refs[0].dotted, context, refs=refs, shape=shape)

    def _of_self(self, node: ast.AST, path: list[str], context: _Context, call: ast.Call | None) -> None:
        assert context.cls is not None
        if not path or not context.cls.derives:
            return
        called = call is not None and len(path) == 1
        if context.on_class:
            # What is called on a class and lacks an object binds otherwise; that the name is there is what counts.
            if called:
                self._use("self read", call or node, f"cls.{path[0]}", context, cls=context.cls, member=path[0])
            return
        kind: Kind = "self call" if called else "self read"
        shape = shape_of(call) if call is not None and called else None
        self._use(kind, call or node, f"self.{path[0]}", context, cls=context.cls, member=path[0], shape=shape)
        if path[0] == "vllm_config" and len(path) > 1:
            ref = Upstream("vllm.config", ("VllmConfig",))
            self._use(
                "field", node, f"self.{'.'.join(path)}", context, cls=context.cls, refs=(ref,), path=tuple(path[1:])
            )

    def _of_instance(self, node: ast.AST, bound: Instance, name: str, path: list[str], context: _Context) -> None:
        annotation = _without_none(bound.annotation)
        refs = self.package.upstream(annotation, bound.scope) if annotation is not None else ()
        if refs and path and refs[0].path and refs[0].path[-1].endswith(("Config", "Args")):
            self._use("field", node, ".".join((name, *path)), context, refs=refs, path=tuple(path))


def _without_none(node: ast.expr) -> ast.expr | None:
    """Return the one class that an annotation names, None aside."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return _without_none(ast.parse(node.value, mode="eval").body)
        except SyntaxError:
            return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = [one for one in (node.left, node.right) if not (isinstance(one, ast.Constant) and one.value is None)]
        return _without_none(sides[0]) if len(sides) == 1 else None
    if isinstance(node, ast.Subscript) and (chain(node.value)[1] or [getattr(node.value, "id", "")])[-1] == "Optional":
        return _without_none(node.slice)
    return node if isinstance(node, ast.Name | ast.Attribute) else None
