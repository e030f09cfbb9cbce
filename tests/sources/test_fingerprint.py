"""What counts in a fingerprint and what does not."""

import ast
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vllm_graft.sources import Fingerprint
from vllm_graft.sources.fingerprint import parameters, parse_parameter


def fingerprint(text):
    return Fingerprint.of(ast.parse(textwrap.dedent(text)).body)


BEFORE = '''
@decorated
def f(self, a, b=1, *rest, c, d=None, **more):
    """What it does."""
    x = [one for one in a if one]
    return f"{x!r:>{b}} {rest}"
'''


@pytest.mark.parametrize(
    "after",
    [
        BEFORE.replace("What it does.", "What else it does."),
        BEFORE.replace('    """What it does."""\n', ""),
        BEFORE.replace("    x = [", "    # a reason\n\n    x = ["),
        BEFORE.replace("def f(", "def g("),
        BEFORE.replace("a, b=1", "a: int, b: int = 1"),
        BEFORE.replace("**more):", "**more) -> str:"),
        BEFORE.replace("    x = [", "    x: list[int] = ["),
        BEFORE.replace("    x = [", "    y: int\n    x = ["),
        BEFORE.replace("[one for one in a if one]", "[\n        one\n        for one in (a)\n        if one\n    ]"),
        BEFORE.replace('f"{x!r:>{b}} {rest}"', "f'{x!r:>{b}} {rest}'"),
    ],
)
def test_what_does_not_count(after):
    """Comments, docstrings, annotations, line breaks, quotes, and its own name."""
    assert after != BEFORE
    assert fingerprint(after) == fingerprint(BEFORE)


@pytest.mark.parametrize(
    "after",
    [
        BEFORE.replace("@decorated\n", ""),
        BEFORE.replace("@decorated", "@decorated(1)"),
        BEFORE.replace("b=1", "b=2"),
        BEFORE.replace("d=None", "d=0"),
        BEFORE.replace("if one]", "if not one]"),
        BEFORE.replace("!r", "!s"),
        BEFORE.replace(":>", ":<"),
    ],
)
def test_what_counts_as_body(after):
    """Decorators and default values among it."""
    assert after != BEFORE
    assert fingerprint(after).signature == fingerprint(BEFORE).signature
    assert fingerprint(after).body != fingerprint(BEFORE).body


@pytest.mark.parametrize(
    "after",
    [
        BEFORE.replace("a, b=1", "a, b=1, e=2"),
        BEFORE.replace("a, b=1", "b, a=1"),
        BEFORE.replace("b=1", "b"),
        BEFORE.replace("*rest, c", "*, c"),
        BEFORE.replace("a, b=1", "a, /, b=1"),
        BEFORE.replace("d=None", "d"),
        BEFORE.replace(", **more", ""),
        BEFORE.replace("def f", "async def f"),
    ],
)
def test_what_counts_as_signature(after):
    """Names, kinds, whether there is a default, and whether it is awaited."""
    assert after != BEFORE
    assert fingerprint(after).signature != fingerprint(BEFORE).signature


def test_the_same_on_every_python():
    """These were computed on CPython 3.11; the same text must give the same hashes on every other one."""
    assert str(fingerprint(BEFORE)) == "s:39eaf88cf6e5b1a3 b:7b8506e17fe5e7bb"
    text = """
    class A(Base[int], key=1):
        '''Doc.'''
        x: int
        y: int = 2
        def m(self):
            match self.y:
                case {"a": [1, *_], **rest} if rest: return lambda *, z=1: z
                case str() | None: pass
            try:
                with open("f") as a, open("g") as b: yield
            except (ValueError, TypeError) as error: raise error from None
            async def inner(): return [i async for i in x if await i]
            return f"{1:{2}.{3}}" f"" "tail", b"bytes", 1.5e300, 2j, ..., -0.0
    """
    assert str(fingerprint(text)) == "s:d9c4ebfb8e979d27 b:924a7ab8b41d1793"


def pythons():
    """This Python, and every other from 3.10 on that can be found and runs."""
    names = [f"python3.{minor}" for minor in range(10, 20)]
    found = [shutil.which(name) for name in names]
    found += [str(path) for name in names for path in Path.home().glob(f".pyenv/versions/*/bin/{name}")]
    runs = [one for one in found if one and not subprocess.run([one, "-c", ""], capture_output=True).returncode]
    return [sys.executable, *runs]


def test_vllms_core_on_every_python_that_is_here():
    """One hash over every function of vLLM's core."""
    from vllm_graft.sources import fingerprint
    from vllm_graft.versions import vllm_root

    script = """
import ast, hashlib, importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("fingerprint", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["fingerprint"] = module
spec.loader.exec_module(module)
digest, count = hashlib.sha256(), 0
for file in sorted(pathlib.Path(sys.argv[2]).glob("v1/core/**/*.py")):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            digest.update(str(module.Fingerprint.of([node])).encode())
            count += 1
print(count, digest.hexdigest())
"""
    command = ["-c", script, fingerprint.__file__, str(vllm_root())]
    outputs = {subprocess.run([one, *command], capture_output=True, text=True, check=True).stdout for one in pythons()}
    (output,) = outputs
    assert int(output.split()[0]) > 300


def test_text():
    """It can be written down and read back."""
    one = fingerprint(BEFORE)
    assert Fingerprint.parse(str(one)) == one
    with pytest.raises(ValueError, match="'s:12 b:34' is not a fingerprint"):
        Fingerprint.parse("s:12 b:34")


def test_parameters_are_read_back():
    """Each kind of parameter, with and without a default."""
    (function,) = ast.parse("def f(a, b=1, /, c=2, d=2, *rest, e, g=3, **more): ...").body
    tokens = list(parameters(function.args))
    assert [(one.prefix, one.name, one.has_default) for one in map(parse_parameter, tokens)] == [
        ("/", "a", False), ("/", "b", True), ("", "c", True), ("", "d", True), ("*", "rest", False),
        ("kw ", "e", False), ("kw ", "g", True), ("**", "more", False),
    ]  # fmt: skip
    assert [parse_parameter(token).rest for token in tokens] == ["", "", "", "", "*", "", "", "**"]
