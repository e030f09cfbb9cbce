"""The name of a set of patches for compile caches."""

import subprocess
import sys
import textwrap

from vllm_graft.patching import VLLMPatch, patchset_hash, wrap

SOURCE = """
from vllm_graft.patching import VLLMPatch, wrap, patchset_hash

def outer(scale):
    def decorate(function):
        def inner(*args):
            return function(*args) * scale
        return inner
    return decorate

class P(VLLMPatch["a.b:C"], name="p"):
    limits = {"b": (1, 2.5, None), "a": frozenset({"x", "y", "z"})}

    def f(self, x, mode="fast", *, keys=("q",)):
        return x in {"one", "two", "three"} and (lambda: self._original_f(x))()

    @outer(3)
    def g(self): ...

    @property
    def h(self): return 1

print(patchset_hash([P]))
"""


def patch(text, name="p", target="a.b:C"):
    space = {"VLLMPatch": VLLMPatch, "wrap": wrap, "__name__": "made_up"}
    exec(f"class P(VLLMPatch[{target!r}], name={name!r}):\n" + textwrap.indent(textwrap.dedent(text), "    "), space)
    return space["P"]


def test_equal_in_every_process():
    """Neither hash randomisation, addresses nor optimised bytecode in use show in it."""
    runs = {
        subprocess.run(
            [sys.executable, "-c", SOURCE],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert len(runs.pop().strip()) == 16


def test_it_does_not_depend_on_where_or_how_often_it_ran():
    """Line numbers stay out, and code that the interpreter has specialised while running gives the same hash."""
    one = patch("def f(self, x):\n    return x + 1")
    before = patchset_hash([one])
    function = one.declaration.hooks[0].value
    for _ in range(2000):
        function(None, 1)
    assert patchset_hash([one]) == before
    assert patchset_hash([patch("\n\n\ndef f(self, x):\n    return x + 1")]) == before


def test_whatever_changes_behaviour_changes_it():
    """Names, targets, code, constants, defaults, kinds, inner functions, values and the order."""
    variants = [
        patch("def f(self, x): return x + 1"),
        patch("def f(self, x): return x + 2"),
        patch("def f(self, x): return x + 1.0"),
        patch("def f(self, x): return x + True"),
        patch("def f(self, x=1): return x + 1"),
        patch("def g(self, x): return x + 1"),
        patch("def f(self, x): return x.a"),
        patch("def f(self, x): return x.b"),
        patch("def f(self, x): return lambda: 1"),
        patch("def f(self, x): return lambda: 2"),
        patch("@staticmethod\ndef f(self, x): return x + 1"),
        patch("x = 1"),
        patch("x = 2"),
        patch("def f(self, x): return x + 1", name="q"),
        patch("def f(self, x): return x + 1", target="a.b:D"),
    ]
    assert len({patchset_hash([one]) for one in variants}) == len(variants)
    a, b = variants[0], variants[13]
    assert patchset_hash([a, b]) != patchset_hash([b, a])
    assert patchset_hash([]) == patchset_hash([])
