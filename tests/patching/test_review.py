"""Upstream's code as it was reviewed, and as it is now."""

import importlib
import sys

import pytest

from vllm_graft.errors import ConfigError, DriftError, VersionError
from vllm_graft.patching import lock
from vllm_graft.patching.lock import Lock
from vllm_graft.patching.review import Reviewer, stricter
from vllm_graft.sources import Installed, find

UPSTREAM = """
class Target:
    def f(self, a):
        return a

    def g(self, a):
        return a
"""

PATCHES = """
from vllm_graft.patching import VLLMPatch, add, replace, wrap

class Guard(VLLMPatch["{module}:Target"], name="guard", vllm="{vllm}"{more}):
    @replace
    def f(self, a):
        return "patched"

    @wrap
    def g(self, call, a):
        return [call(a)]

    @add
    def extra(self): ...
"""


@pytest.fixture
def author(write, tmp_path, monkeypatch):
    """A package with a patch and its lock, beside an upstream module; ``upstream`` changes the latter."""

    class Author:
        def __init__(self):
            self.module = write(UPSTREAM)
            self.file = tmp_path / f"{self.module}.py"
            self.package = tmp_path / f"package_{self.module}"
            self.package.mkdir()
            (self.package / "__init__.py").write_text("")
            self.path = self.package / lock.NAME

        def patch(self, more="", vllm=""):
            name = f"{self.package.name}.patches"
            (self.package / "patches.py").write_text(PATCHES.format(module=self.module, more=more, vllm=vllm))
            sys.modules.pop(name, None)
            importlib.invalidate_caches()
            return importlib.import_module(name).Guard

        def lock(self, patch, release="0.32.0"):
            held = Lock.read(self.path)
            for attribute in ("f", "g"):
                found = find(Installed(), self.module, f"Target.{attribute}")
                seen = held.patches.setdefault("guard", {}).setdefault(f"{self.module}:Target.{attribute}", {})
                seen[release] = found.fingerprint
            held.write()

        def upstream(self, old, new):
            text = self.file.read_text()
            assert old in text
            self.file.write_text(text.replace(old, new))
            sys.modules.pop(self.module, None)
            importlib.invalidate_caches()

        @property
        def target(self):
            return importlib.import_module(self.module).Target

    made = Author()
    yield made
    for name in (made.package.name, f"{made.package.name}.patches"):
        sys.modules.pop(name, None)


def standings(engine):
    return {state.attribute: (state.state, state.review) for state in engine.report()}


def test_without_a_lock_nothing_is_read(engine, author):
    """A patch that nobody locked is applied as it always was, and the report says so."""
    engine.apply([author.patch()])
    assert author.target().f(1) == "patched"
    assert standings(engine) == {"f": ("applied", "unlocked"), "g": ("applied", "unlocked"), "extra": ("applied", "")}


def test_as_reviewed(engine, author):
    """Also where comments and annotations have changed, and before the module is imported."""
    patch = author.patch()
    author.lock(patch)
    author.upstream("def f(self, a):", "def f(self, a: int) -> int:  # new")
    states = engine.apply([patch])
    assert [(state.state, state.review) for state in states] == [
        ("armed", "reviewed"),
        ("armed", "reviewed"),
        ("armed", ""),
    ]
    assert author.target().f(1) == "patched"


def test_a_replacement_of_changed_code_is_refused(engine, author):
    """Before the module is imported, naming what to do."""
    patch = author.patch()
    author.lock(patch, "0.31.0")
    author.lock(patch, "0.32.0")
    author.upstream("def f(self, a):\n        return a", "def f(self, a):\n        return a + 1")
    with pytest.raises(DriftError) as caught:
        engine.apply([patch])
    assert caught.value.what == "upstream's 'f' is not what was reviewed (0.31.0, 0.32.0): its body has changed"
    assert "vllm-graft diff guard" in caught.value.fix
    assert "vllm-graft lock guard" in caught.value.fix
    assert author.module not in sys.modules
    assert author.target().f(1) == 2


def test_a_wrap_of_changed_code_warns(engine, author, caplog):
    """It reaches what is beneath, whatever that does now; the report keeps the note."""
    patch = author.patch()
    author.lock(patch)
    author.upstream("def g(self, a):\n        return a", "def g(self, a):\n        return a + 1")
    engine.apply([patch])
    assert author.target().g(1) == [2]
    state = next(state for state in engine.report() if state.attribute == "g")
    assert (state.state, state.review) == ("applied", "drifted")
    assert state.reason == "upstream's 'g' is not what was reviewed (0.32.0): its body has changed"
    assert state.reason in caplog.text


def test_a_wrap_of_another_signature_is_refused(engine, author):
    """Its own parameters were written for the old one."""
    patch = author.patch()
    author.lock(patch)
    author.upstream("def g(self, a)", "def g(self, a, b=None)")
    with pytest.raises(
        DriftError, match=r"upstream's 'g' is not what was reviewed \(0.32.0\): its signature has chang"
    ):
        engine.apply([patch])


def test_a_hook_that_the_lock_does_not_know(engine, author):
    """Written after the last review: as strict as for changed code."""
    patch = author.patch()
    author.lock(patch)
    held = Lock.read(author.path)
    del held.patches["guard"][f"{author.module}:Target.f"]
    held.write()
    with pytest.raises(DriftError, match=r"'f' is not in patches.lock: what it stands on was never reviewed"):
        engine.apply([patch])


@pytest.mark.parametrize(("on_drift", "note"), [("warn", "its body has changed"), ("ignore", "")])
def test_on_drift_may_be_laxer(engine, author, on_drift, note):
    """The author decides, and the report still says drifted."""
    patch = author.patch(f', on_drift="{on_drift}"')
    author.lock(patch)
    author.upstream("def f(self, a):\n        return a", "def f(self, a):\n        return a + 1")
    engine.apply([patch])
    assert author.target().f(1) == "patched"
    state = engine.report()[0]
    assert (state.state, state.review) == ("applied", "drifted")
    assert note in state.reason
    assert bool(state.reason) == bool(note)


def test_on_drift_may_be_stricter(engine, author):
    """For a wrap too."""
    patch = author.patch(', on_drift="refuse"')
    author.lock(patch)
    author.upstream("def g(self, a):\n        return a", "def g(self, a):\n        return a + 1")
    with pytest.raises(DriftError):
        engine.apply([patch])


def test_the_environment_only_makes_it_stricter(monkeypatch):
    """Whoever runs a server may ask for more care than the author, never for less."""
    monkeypatch.setenv("GRAFT_ON_DRIFT", "warn")
    assert [stricter(level) for level in ("ignore", "warn", "refuse")] == ["warn", "warn", "refuse"]
    monkeypatch.setenv("GRAFT_ON_DRIFT", "refuse")
    assert [stricter(level) for level in ("ignore", "warn", "refuse")] == ["refuse", "refuse", "refuse"]
    for bad in ("ignore", "yes"):
        monkeypatch.setenv("GRAFT_ON_DRIFT", bad)
        with pytest.raises(ConfigError, match=rf"GRAFT_ON_DRIFT: must be warn or refuse, but is '{bad}'. Next: set it"):
            stricter("warn")


def test_a_development_build_is_judged_by_its_code(engine, author, installed):
    """It counts as each release whose reviewed code is the same."""
    patch = author.patch(vllm=">=0.31,<0.33")
    author.lock(patch, "0.30.0")
    installed("0.1.dev1+gabc")
    with pytest.raises(VersionError, match=r"0.1.dev1\+gabc is a development build, whose code was not review"):
        engine.apply([patch])
    author.lock(patch, "0.31.0")
    engine.apply([patch])
    assert author.target().f(1) == "patched"
    engine.revert(patch)
    author.upstream("def f(self, a):\n        return a", "def f(self, a):\n        return a + 1")
    with pytest.raises(VersionError):
        engine.apply([patch])


def test_a_broken_lock(author):
    """It names the file and the way out."""
    author.path.write_text('[guard."m:C.f"]\n"0.32.0" = "nonsense"\n')
    with pytest.raises(
        ConfigError, match=r"patches.lock: it is not a list of fingerprints: 'nonsense'.*Next: restore it"
    ):
        Reviewer().review(author.patch())


@pytest.mark.parametrize("text", [f"a = {'[' * 100_000}", f"{'a.' * 5_000}b = 1", f"a = {'{b = ' * 50_000}"])
def test_a_lock_that_is_nested_too_deeply(author, text):
    """It is an error as any other lock that is none."""
    author.path.write_text(text)
    with pytest.raises(ConfigError, match=r"patches.lock: it is not a list of fingerprints: .*Next: restore it"):
        Reviewer().review(author.patch())


def test_the_file_is_written_in_order(author):
    """Releases by number, so that a new one is one new line."""
    patch = author.patch()
    for release in ("0.32.0", "0.9.1", "0.31.0"):
        author.lock(patch, release)
    text = author.path.read_text()
    assert text.startswith("# Upstream code that a person has read")
    assert text.index('"0.9.1"') < text.index('"0.31.0"') < text.index('"0.32.0"')
    assert Lock.read(author.path).patches["guard"].keys() == {f"{author.module}:Target.{name}" for name in "fg"}


def test_where_the_file_lies(author, write):
    """Beside the module, or in a folder above it within the package; a lone module has a file of its own."""
    patch = author.patch()
    assert lock.file_of(patch) == author.package / "patches.lock"
    deep = author.package / "deep"
    deep.mkdir()
    (deep / "__init__.py").write_text((author.package / "patches.py").read_text())
    importlib.invalidate_caches()
    inner = importlib.import_module(f"{author.package.name}.deep").Guard
    assert lock.file_of(inner) == deep / "patches.lock"
    author.lock(patch)
    assert lock.file_of(inner) == author.package / "patches.lock"
    sys.modules.pop(f"{author.package.name}.deep")
    name = write((author.package / "patches.py").read_text())
    alone = importlib.import_module(name).Guard
    assert lock.file_of(alone) == author.package.parent / f"{name}.patches.lock"
