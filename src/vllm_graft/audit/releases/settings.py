"""What the user has told pip of indexes, proxy and certificates, read without pip's session."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_graft.errors import ConfigError

_SECTIONS = ("global", "download", ":env:")


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of pip's configuration that a client needs."""

    indexes: tuple[str, ...]
    proxy: str = ""
    cert: str = ""

    @classmethod
    def read(cls) -> Settings:
        """From pip's files, as pip itself lists them, and from the environment, which counts for more."""
        values = {**_from_files(), **_from_environment()}
        if values.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            return cls(())
        main = values.get("index-url") or _default_index()
        return cls((main, *values.get("extra-index-url", "").split()), values.get("proxy", ""), values.get("cert", ""))


def _from_environment() -> dict[str, str]:
    names = ("index-url", "extra-index-url", "no-index", "proxy", "cert")
    found = {name: os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "") for name in names}
    return {name: value for name, value in found.items() if value}


def _from_files() -> Mapping[str, str]:
    """What ``pip config list`` prints; nothing where there is no pip to run."""
    beside = shutil.which("pip")
    for command in ([sys.executable, "-m", "pip"], [beside] if beside else []):
        if not command:
            continue
        try:
            done = subprocess.run([*command, "config", "list"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return _parsed(done.stdout)
    return {}


def _parsed(listed: str) -> dict[str, str]:
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section not in found:
            continue
        try:
            found[section][key] = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            found[section][key] = value
    return {key: value for section in _SECTIONS for key, value in found[section].items()}


def _default_index() -> str:
    """The index that pip asks where nobody named one; only pip knows its address."""
    try:
        return str(importlib.import_module("pip._internal.models.index").PyPI.simple_url)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "no package index is set, and there is no pip to ask for the usual one",
            where="PIP_INDEX_URL",
            fix="set PIP_INDEX_URL to the address of an index, or install pip",
        ) from error
