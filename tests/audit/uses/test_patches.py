"""Patch classes: their hooks, what they say of themselves, and what was reviewed."""

import pytest

from vllm_graft.audit.uses import read


def hooks(found):
    return [(use.way, use.name, use.owner) for use in found if use.changes_vllm]


GUARD = """
    from vllm_graft.patching import VLLMPatch, add, min_vllm_version, replace, wrap

    WHY = "the reason"

    @min_vllm_version("0.27")
    class Guard(
        VLLMPatch["vllm.a.b:Class"], name="guard", vllm="<0.33", why=WHY, upstream="a link", remove_when="it is fixed"
    ):
        '''What it does.'''

        __module__ = "elsewhere"
        limit = 3
        size: int = replace(4)
        noted: int

        @wrap
        def one(self, call): ...

        @replace(vllm=">=0.31")
        def two(self): ...

        @add
        def three(self): ...

        def four(self):
            return self._original_four(size=1)

        def five(self, call): ...

        def six(self): ...

        @classmethod
        @wrap
        def seven(cls, call): ...

        def __init__(self): ...
"""


def test_hooks(uses):
    """Marks tell the way; without one a hook that reaches what is beneath wraps, and any other replaces."""
    ways = {use.qualname.removeprefix("Class."): use.way for use in uses(GUARD) if use.changes_vllm}
    assert ways == {
        "limit": "replace",
        "size": "replace",
        "one": "wrap",
        "two": "replace",
        "three": "add",
        "four": "wrap",
        "five": "wrap",
        "six": "replace",
        "seven": "wrap",
        "__init__": "replace",
    }


def test_what_a_patch_says_of_itself(uses):
    """Its keywords are kept, and a hook's own releases beside those of the patch."""
    found = {use.qualname: use for use in uses(GUARD) if use.changes_vllm}
    said = found["Class.one"].patch
    assert (said.name, said.vllm, said.why) == ("guard", "<0.33,>=0.27", "the reason")
    assert (said.upstream, said.remove_when) == ("a link", "it is fixed")
    two = found["Class.two"].patch
    assert (two.vllm, two.releases, two.marked) == ("<0.33,>=0.27", ">=0.31", True)
    assert {use.owner for use in found.values()} == {"guard"}


def test_the_target_counts_as_the_patch_only(uses):
    """A string in brackets is no import."""
    assert {use.way for use in uses(GUARD)} == {"replace", "wrap", "add"}


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("VLLMPatch['vllm.a']", "vllm.a:f"),
        ("VLLMPatch['vllm.a:Outer.Inner']", "vllm.a:Outer.Inner.f"),
        ("VLLMPatch[Class]", "vllm.a:Class.f"),
        ("VLLMPatch[m.Class]", "vllm.a:Class.f"),
        ("VLLMPatch[m]", "vllm.a:f"),
        ("ArcticPatch[Class]", "vllm.a:Class.f"),
        ("patching.SomePatch[Class]", "vllm.a:Class.f"),
    ],
)
def test_targets(uses, base, name):
    """A string, a class or a module, in any base whose name ends in Patch."""
    found = uses(f"import vllm.a as m\nfrom vllm.a import Class\nclass P({base}):\n    def f(self): ...")
    assert hooks(found) == [("replace", name, "P")]


@pytest.mark.parametrize("base", ["VLLMPatch['os.path']", "VLLMPatch[Own]", "Other['vllm.a:Class']", "ArcticPatch"])
def test_what_is_no_patch_of_vllm(uses, base):
    """Other targets, other bases."""
    assert hooks(uses(f"import vllm\nclass Own: ...\nclass P({base}):\n    def f(self): ...")) == []


def test_originals_kept_in_the_body(uses):
    """The older way: the original is an attribute of the body, which goes to the target like the rest."""
    text = """
        from vllm.a import Class
        class P(ArcticPatch[Class]):
            _orig_f = Class.f
            def f(self):
                return self._orig_f()
            def g(self): ...
    """
    found = uses(text)
    assert hooks(found) == [
        ("replace", "vllm.a:Class._orig_f", "P"),
        ("wrap", "vllm.a:Class.f", "P"),
        ("replace", "vllm.a:Class.g", "P"),
    ]
    assert {use.patch for use in found} == {None}


def test_several_bodies(uses):
    """Each body of a hook is a use, with its releases."""
    text = """
        from vllm_graft.patching import VLLMPatch, replace
        class P(VLLMPatch["vllm.a:Class"]):
            @replace(vllm="<0.30")
            def f(self): ...
            @replace(vllm=">=0.30")
            def f(self): ...
    """
    assert [use.patch.releases for use in uses(text)] == ["<0.30", ">=0.30"]


LOCK = '[guard."vllm.a:Class.f"]\n"0.32.0" = "s:0123456789abcdef b:fedcba9876543210"\n'
PATCH = "class P(VLLMPatch['vllm.a:Class'], name='guard'):\n    def f(self): ...\n    def g(self): ..."


@pytest.mark.parametrize("place", ["patches.lock", "inner/patches.lock"])
def test_reviewed(write, place):
    """The lock beside the patch, or in a folder above it in the package, tells what was reviewed of each hook."""
    folder = write(inner____init__="", inner__guard=PATCH)
    (folder / "inner/__init__.py").touch()
    (folder / place).write_text(LOCK)
    f, g = read(folder).uses
    assert f.patch.reviewed == {"0.32.0": "s:0123456789abcdef b:fedcba9876543210"}
    assert g.patch.reviewed == {}


def test_reviewed_beside_a_single_file(tmp_path):
    """A module in no package has a lock of its own name."""
    (tmp_path / "guard.py").write_text(PATCH)
    (tmp_path / "guard.patches.lock").write_text(LOCK)
    assert read(tmp_path / "guard.py").uses[0].patch.reviewed


def test_a_broken_lock(write):
    """It is a finding, and the rest is read."""
    folder = write(PATCH)
    (folder / "patches.lock").write_text("no lock")
    reading = read(folder)
    (finding,) = reading.unread
    assert (finding.code, finding.level, len(reading.uses)) == ("P220", "error", 2)
    assert finding.where.endswith("patches.lock")
