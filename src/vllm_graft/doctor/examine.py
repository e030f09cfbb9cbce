"""The rules, asked one after the other."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Protocol, cast

from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding, worst_first


class Rule(Protocol):
    """One file in ``rules/``."""

    CODE: str
    TITLE: str

    def check(self, facts: Facts) -> Iterable[Finding]:
        """What is wrong, if anything."""
        ...


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule, in the order of its code."""
    from vllm_graft.doctor import rules as folder

    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    loaded: list[ModuleType] = [importlib.import_module(f"{folder.__name__}.{name}") for name in names]
    return tuple(cast(Rule, module) for module in loaded)


def examine(facts: Facts) -> list[Finding]:
    """What the cheap rules find, worst first."""
    return worst_first(finding for rule in rules() for finding in rule.check(facts))
