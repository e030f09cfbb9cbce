"""The room's public names, and what it costs to import them."""

import subprocess
import sys

import vllm_graft.patching as patching


def test_every_public_name_is_there():
    """``__all__`` names exactly what can be imported, and nothing is missing."""
    assert patching.__all__ == sorted(patching.__all__)
    assert all(getattr(patching, name) is not None for name in patching.__all__)
    assert set(patching.__all__) == set(patching._HOMES)
    assert dir(patching) == patching.__all__


def test_an_unknown_name_is_an_attribute_error():
    """The lazy loading of names does not swallow a misspelt one."""
    assert not hasattr(patching, "VLLMPach")


def test_importing_is_light():
    """The package costs next to nothing; declaring and applying pull in neither vllm, torch nor packaging."""
    code = """
import sys
before = set(sys.modules)
import vllm_graft.patching
loaded = set(sys.modules) - before
early = {"inspect", "dataclasses", "logging"} & set(sys.modules)
from vllm_graft.patching import *
class Target:
    def f(self): return 1
class P(VLLMPatch[Target]):
    @wrap
    def f(self, call): return call() + 1
Engine().apply([P])
assert Target().f() == 2
print(len(loaded), early, sorted({"vllm", "torch", "packaging"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    count, rest = done.stdout.split(" ", 1)
    assert rest.strip() == "set() []"
    assert int(count) <= 4, "the package, its parent, the lazy loader, and what that needs"
