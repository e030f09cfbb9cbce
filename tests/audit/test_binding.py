"""Arguments fit a signature exactly where Python itself would bind them."""

from __future__ import annotations

import ast
import inspect
import itertools

import pytest

from vllm_graft.audit.binding import misfit
from vllm_graft.audit.model import Arguments
from vllm_graft.sources.fingerprint import signature

SIGNATURES = [
    "", "a", "a, b", "a, b=1", "a=1, b=2", "a, /, b", "a, /", "a=1, /", "*args", "a, *args", "*, k", "a, *, k=1",
    "a, *args, k", "**kwargs", "a, **kwargs", "a, /, **kwargs", "*args, **kwargs", "a, b=1, *args, k, m=2, **rest",
]  # fmt: skip
NAMES = ("a", "b", "k", "z")


def tokens(parameters: str) -> tuple[str, ...]:
    return signature(ast.parse(f"def f({parameters}): ...").body)[1:]


@pytest.mark.parametrize("parameters", SIGNATURES)
def test_a_call_fits_where_python_binds_it(parameters):
    space: dict[str, object] = {}
    exec(f"def f({parameters}): ...", space)
    bound = inspect.signature(space["f"])
    for count in range(4):
        for size in range(4):
            for names in itertools.combinations(NAMES, size):
                try:
                    bound.bind(*range(count), **dict.fromkeys(names))
                    fits = True
                except TypeError:
                    fits = False
                said = misfit(Arguments(count, names), tokens(parameters))
                assert (said == "") is fits, f"f({count} arguments, {names}) of f({parameters}): {said!r}"


@pytest.mark.parametrize(
    ("call", "parameters", "said"),
    [
        ("f(*x)", "a, b", ""),
        ("f(*x)", "a, *, k", "it needs 'k'"),
        ("f(**x)", "a, *, k", ""),
        ("f(1, 2, *x)", "a", "it takes 1 argument by position, 2 are given"),
        ("f(z=1, **x)", "a", "it takes no 'z'"),
        ("f(*x, a=1)", "a, b", ""),
        ("f(1, a=2)", "a", "'a' is given by position and by keyword"),
        ("f()", "a, b, c", "it needs 'a', 'b' and 'c'"),
        ("f(1)", "", "it takes no arguments by position, 1 is given"),
    ],
)
def test_what_is_unpacked_may_hold_anything(call, parameters, said):
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert misfit(Arguments.of(node), tokens(parameters)) == said
