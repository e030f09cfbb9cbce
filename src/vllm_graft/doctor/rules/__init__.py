"""The rules, one per file: each names one way in which vLLM loses or breaks plugins, and finds it without a start."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import Protocol, cast

from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, worst_first


class Rule(Protocol):
    """One file of this package."""

    CODE: str
    TITLE: str

    def check(self, env: Environment) -> Iterable[Finding]:
        """Yield what is wrong with an environment."""
        ...


@cache
def rules() -> tuple[Rule, ...]:
    """Load every rule, in the order of its code."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(cast(Rule, importlib.import_module(f"{__name__}.{name}")) for name in names)


def examine(env: Environment) -> list[Finding]:
    """Return what the rules find, worst first."""
    return worst_first(finding for rule in rules() for finding in rule.check(env))
