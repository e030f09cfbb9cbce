"""Functions without their bodies: what is parsed again is what was there, and little of it is kept."""

from __future__ import annotations

import ast

import pytest

from vllm_graft.audit.uses import locate
from vllm_graft.audit.uses.syntax import Outline, returned_names, whole
from vllm_graft.errors import ConfigError

SOURCES = {
    "plain": "def f(a, *, b=1):\n    return a\n",
    "late": "import os\n\n\n\ndef f():\n    '''Text.'''\n    return os\n",
    "decorated": "import abc\n\n@abc.x\n@abc.wraps(\n    print\n)\ndef f() -> int:\n    return 1\n",
    "coroutine": "async def f():\n    await g()\n    async for x in y:\n        yield x\n",
    "method": "class A:\n    x = 1\n    def f(self):\n        return super().f()\n",
    "in branches": "if a:\n    def f():\n        pass\nelse:\n    def f():\n        return a\n",
    "nested": "class A:\n  class B:\n    def f(self):\n      def g():\n        nonlocal x\n      return g\n",
    "tabs": "class A:\n\tdef f(self):\n\t\tif self:\n\t\t\treturn 1\n",
    "strings": 'class A:\n    def f(self):\n        return """\nfar left\n  def g(): pass\n"""\n    y = 2\n',
    "one line": "def f(): return 1; x = 2\ny = 3\n",
    "form feed": "x = 1\n\x0c\ndef f():\n    return 'a\x0cb'\n",
    "continued": "class A:\n    def f(self):\n        return 1 + \\\n2\n",
    "comments": "class A:\n    def f(self):\n# far left\n        return 1\n",
}


@pytest.fixture
def file(tmp_path):
    def file(text):
        path = tmp_path / "main.py"
        path.write_text(text, encoding="utf-8", newline="")
        (found,) = locate(path).files
        return found

    return file


def functions(tree, kind):
    return sorted((node for node in ast.walk(tree) if isinstance(node, kind)), key=lambda node: node.lineno)


@pytest.mark.parametrize("text", SOURCES.values(), ids=SOURCES)
def test_a_body_is_parsed_again_as_it_was(file, text):
    """With the same lines and columns, wherever the function stands."""
    outlines = functions(file(text).tree, Outline)
    there = functions(ast.parse(text), ast.FunctionDef | ast.AsyncFunctionDef)
    outer = [one for one in there if not any(one is not other and one in ast.walk(other) for other in there)]
    assert outlines
    assert [ast.dump(whole(one), include_attributes=True) for one in outlines] == [
        ast.dump(one, include_attributes=True) for one in outer
    ]


def test_an_outline_has_no_body_of_its_own(file):
    """It is the bodies that a package's trees consist of."""
    (node,) = functions(file("def f(a):\n    return a\n").tree, Outline)
    assert "body" not in node.__dict__
    assert isinstance(node.body[0], ast.Return)
    assert "body" not in node.__dict__


def test_a_tree_is_let_go(file):
    """With all that only definitions need; the parameters stay."""
    source = file("def f(a: int, *b: str) -> int:\n    c = a\n")
    (node,) = functions(source.tree, Outline)
    source.forget_tree()
    assert "tree" not in source.__dict__
    assert (node.returns, [one.annotation for one in (*node.args.args, node.args.vararg)]) == (None, [None, None])
    assert [one.arg for one in node.args.args] == ["a"]


def test_what_functions_set_and_import_is_known_without_their_bodies(file):
    """Of inner functions, too; a counter that goes up is not set."""
    source = file(
        "def f(self):\n"
        "    import a.b\n"
        "    def g():\n        from c import d\n        (self.x, [self.y, *self.z]) = d\n"
        "    self.count += 1\n"
        "    with a as self.w: pass\n"
    )
    assert source.imports == {"a", "a.b", "c"}
    assert source.stored == {"x", "y", "z", "w"}


def test_what_a_function_returns_is_known_without_its_body(file):
    """A call of it asks for that, and would have it parsed again each time; what inner functions return is theirs."""
    source = file("def f(a):\n    def g():\n        return b\n    if a:\n        return g\n    return a.x\n")
    (node,) = functions(source.tree, Outline)
    source.path.unlink()
    assert returned_names(node) == ("g",)


@pytest.mark.parametrize("text", ["def g():\n    return 2\n", "", "import os\ndef f(:\n    return 1\n"])
def test_a_file_that_changes_while_it_is_read_is_an_error(file, text):
    source = file("import os\ndef f():\n    return 1\n")
    node = source.tree.body[1]
    source.path.write_text(text)
    with pytest.raises(ConfigError, match="has changed while it was read"):
        _ = node.body
