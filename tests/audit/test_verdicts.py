"""What became of a name from one release to another, read from sources and from a catalogue alike."""

from __future__ import annotations

import pytest

from vllm_graft.audit.model import Use, Verdict
from vllm_graft.audit.verdicts import ReleasePair, normalize, signature_change


@pytest.fixture(params=["source", "catalogue"])
def became(request, make, held):
    """became(old, new, name, way) -> the verdict; old and new are texts of vllm.m, or modules by name."""

    def judge(old, new, name="f", way="replace") -> Verdict:
        texts = [text if isinstance(text, dict) else {"m": text} for text in (old, new)]
        pair = held(request.param, make("1.0", **texts[0]), make("2.0", **texts[1]))
        use = Use(way, "vllm.m", name, "p.py", 1, passed_on=True)
        return ReleasePair.of(*pair, [use]).judge(use)

    return judge


def test_code_that_differs_in_comments_annotations_and_docstring_is_the_same(became):
    assert (
        became("def f(a):\n    return a", "def f(a: int) -> int:\n    '''Doc.'''\n    # why\n    return a").state
        == "same"
    )


def test_other_code_under_the_same_signature_is_a_changed_body(became):
    assert became("def f(a):\n    return a", "def f(a):\n    return a + 1").state == "body"


def test_a_new_parameter_with_a_default_extends_the_signature(became):
    found = became("def f(a): ...", "def f(a, b=1): ...")
    assert (found.state, found.detail) == ("extended", "'b' is new")


def test_a_new_parameter_without_a_default_breaks_it(became):
    assert became("def f(a): ...", "def f(a, b): ...").state == "broken"


def test_a_name_that_is_nowhere_is_gone(became):
    assert became("def f(): ...", "x = 1").state == "gone"


def test_a_method_whose_class_is_gone_says_so(became):
    found = became("class C:\n    def go(self): ...", "x = 1", "C.go")
    assert found.state == "gone"
    assert "vllm.m:C" in found.detail


def test_a_function_in_another_module_has_moved_there(became):
    found = became({"m": "def f(): ..."}, {"m": "", "n": "def f(): ..."})
    assert (found.state, found.now) == ("moved", "vllm.n:f")


def test_a_method_moves_with_its_class(became):
    text = "class C:\n    def go(self): ..."
    assert became({"m": text}, {"m": "", "n": text}, "C.go").now == "vllm.n:C.go"


def test_a_namesake_that_was_there_before_is_no_move(became):
    assert became({"m": "def f(): ...", "n": "def f(): ..."}, {"m": "", "n": "def f(): ..."}).state == "gone"


def test_a_name_that_is_imported_where_it_was_is_still_there(became):
    found = became({"m": "def f(): ..."}, {"m": "from vllm.n import f", "n": "def f(): ..."})
    assert (found.state, found.now) == ("same", "vllm.n:f")


def test_a_class_that_became_a_function_is_another_kind(became):
    found = became("class f: ...", "def f(): ...")
    assert (found.state, found.detail) == ("kind", "a class is a function now")


def test_a_method_that_a_base_defines_now_is_inherited(became):
    old = "class B:\n    def go(self): ...\nclass C(B):\n    def go(self): ..."
    found = became(old, "class B:\n    def go(self): ...\nclass C(B):\n    pass", "C.go")
    assert (found.state, found.now) == ("inherited", "vllm.m:B.go")


def test_a_base_in_another_module_is_followed(became):
    base = "class B:\n    def go(self): ..."
    old = {"m": "from vllm.n import B\nclass C(B):\n    def go(self): ...", "n": base}
    assert became(old, {"m": "import vllm.n as o\nclass C(o.B): ...", "n": base}, "C.go").now == "vllm.n:B.go"


def test_a_function_that_nothing_mentions_any_more_is_uncalled(became):
    assert became("def f(): ...\ndef g():\n    f()", "def f(): ...\ndef g(): ...").state == "uncalled"


def test_a_function_that_nothing_ever_mentioned_is_not_called_uncalled(became):
    assert became("def f(): ...", "def f(): ...").state == "same"


def test_an_added_name_that_upstream_has_now_has_grown(became):
    assert became("", "def f(): ...", way="add").state == "grown"


def test_an_imported_function_that_is_handed_on_counts_by_its_signature_alone(became):
    assert became("def f(a):\n    return 1", "def f(a, b=2):\n    return 3", way="import").state == "same"
    assert became("def f(a): ...", "def f(b): ...", way="import").state == "broken"


def test_a_name_that_was_in_neither_release_is_absent(became):
    assert became("", "", way="import").state == "absent"


def test_a_name_in_a_module_below_is_found(make, held):
    made = [make(version, m="def f(): ...") for version in ("1.0", "2.0")]
    use = Use("import", "vllm", "m.f", "p.py", 1)
    assert ReleasePair.of(*held("source", *made), [use]).judge(use).state == "same"


def test_names_that_a_lazy_module_declares_for_type_checkers_are_found(became):
    lazy = "import typing\ndef __getattr__(name): ...\nif typing.TYPE_CHECKING:\n    from vllm.n import f\n"
    found = {"m": lazy, "n": "def f(): ..."}
    assert became(found, found).state == "same"


def test_names_that_a_lazy_module_has_tables_of_are_found(became):
    """vLLM's settings are keys, its configurations come from modules that a table names."""
    lazy = (
        "def __getattr__(name): ...\n"
        "settings: dict = {'SIMPLE': lambda: 1}\nplaces = {'C': 'vllm.n'}\n__all__ = ['C', 'late']\n"
    )
    found = {"m": lazy, "n": "class C:\n    def go(self, a): ..."}
    for name in ("SIMPLE", "late", "C"):
        assert became(found, found, name, "import").state == "same"
        assert became(found, {"m": "", "n": ""}, name, "import").state == "gone"
    assert became(found, {**found, "n": "class C:\n    def go(self, b): ..."}, "C.go").state == "broken"
    assert became(found, found, "SIMPLER", "import").state == "absent"
    assert became({"m": "t = {'X': 1}"}, {"m": ""}, "X", "import").state == "absent"


@pytest.mark.parametrize("parameters", ["value", "value=1", "value, other", "self, value", "", "*, value"])
def test_a_release_of_the_catalogue_and_one_that_is_read_are_alike(make, held, parameters):
    """Whatever parameters are called."""
    made = make("1.0", m=f"def f({parameters}): ...\nclass C:\n    @staticmethod\n    def f({parameters}): ...")
    (read,), (listed,) = held("source", made), held("catalogue", made)
    for name in ("f", "C.f"):
        assert read.shape("vllm.m", name) == listed.shape("vllm.m", name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import time", "time.sleep"),
        ("import numpy as np", "np"),
        ("from collections import defaultdict", "defaultdict"),
        ("import torch.nn.functional", "torch.cuda.synchronize"),
    ],
)
@pytest.mark.parametrize("way", ["import", "replace"])
def test_what_a_module_imports_from_other_packages_is_there(became, text, name, way):
    assert became(text, text, name, way).state == "same"
    assert became(text, "", name, way).state == "gone"


def test_what_another_module_of_vllm_imports_from_other_packages_is_there(became):
    found = {"m": "from vllm.n import np", "n": "import numpy as np"}
    assert became(found, found, "np", "import").state == "same"
    found = {"m": "from vllm.n import *", "n": "import numpy as np"}
    assert became(found, found, "np.zeros", "replace").state == "same"


@pytest.mark.parametrize("origin", ["vllm.third_party.fla", "vllm._C"])
def test_what_a_module_imports_from_what_is_not_read_is_there(became, origin):
    found = {"m": f"from {origin} import f"}
    assert became(found, found).state == became(found, found, way="import").state == "same"
    assert became({**found, "third_party.fla": "def f(): ..."}, found).state == "same"


@pytest.mark.parametrize("how", ["from vllm import n", "import vllm.n as n", "from vllm.o import n"])
def test_a_module_that_a_module_imports_is_there_with_its_names(became, how):
    found = {"m": how, "n": "class C:\n    def go(self, a): ...", "o": "from vllm import n"}
    changed = {**found, "n": "class C:\n    def go(self, b): ..."}
    assert became(found, changed, "n", "import").state == "same"
    assert became(found, changed, "n").state == "same"
    assert became(found, changed, "n.C.go").state == "broken"
    assert became(found, changed, "n.D", "import").state == "absent"
    assert became(found, {**found, "m": ""}, "n").state == "gone"


def test_what_another_package_defines_now_can_still_be_imported_and_is_no_longer_to_be_patched(became):
    old, new = "class C:\n    def go(self): ...", "from elsewhere import C"
    assert became(old, new, "C", "import").state == "same"
    found = became(old, new, "C.go")
    assert (found.state, found.detail) == ("kind", "a function is a name of another package now")


def test_of_several_imports_the_one_that_vllm_has_is_found(became):
    tried = "try:\n    from fast import f\nexcept ImportError:\n    from vllm.n import f"
    found = became({"m": tried, "n": "def f(a): ..."}, {"m": tried, "n": "def f(b): ..."})
    assert found.state == "broken"


def test_an_attribute_of_an_object_is_there_while_the_object_is(became):
    text = "from vllm.n import make\nlogger = make()"
    assert became(text, text, "logger.info").state == "same"
    assert became(text, "", "logger.info").state == "gone"
    assert became("def f(a): ...", "def f(b): ...", "f.cache").state == "same"


@pytest.mark.parametrize("name", ["_C", "_moe_C", "_C_stable_libtorch", "cumem_allocator", "third_party.pynvml"])
@pytest.mark.parametrize("way", ["source", "catalogue"])
def test_what_is_compiled_or_of_others_is_not_judged(make, held, way, name):
    """They are in the wheels, and not among what is read."""
    releases = held(way, make("1.0"), make("2.0"))
    above, _, last = f"vllm.{name}".rpartition(".")
    for use in (Use("import", f"vllm.{name}", "", "p.py", 1), Use("import", above, last, "p.py", 1)):
        assert ReleasePair.of(*releases, [use]).judge(use).state == ""


def test_a_name_in_a_text_is_parted_where_the_module_ends(make, held):
    """``mock.patch("vllm.m.platform.is_cuda")`` does not say that the platform is an object."""
    releases = held("source", *(make(version, m="platform = 1") for version in ("1.0", "2.0")))
    use = Use("replace", "vllm.m.platform", "is_cuda", "p.py", 1)
    assert ReleasePair.of(*releases, [use]).judge(use).state == "same"
    assert normalize(use, releases).name == "vllm.m:platform.is_cuda"
    nowhere = Use("replace", "vllm.n.platform", "is_cuda", "p.py", 1)
    assert normalize(nowhere, releases).name == "vllm.n.platform:is_cuda"


def test_a_module_that_is_imported_by_name_is_part_of_the_module(make, held):
    releases = held("source", *(make(version, m="class C: ...") for version in ("1.0", "2.0")))
    for given, name in {"m.C.go": "vllm.m:C.go", "m": "vllm.m", "m.Nope": "vllm.m:Nope", "x": "vllm:x"}.items():
        assert normalize(Use("import", "vllm", given, "p.py", 1), releases).name == name


@pytest.mark.parametrize(
    ("old", "new", "state", "words"),
    [
        ("a", "a b=", "extended", "'b' is new"),
        ("a", "a *args", "extended", "'*args' is new"),
        ("a c", "a b= c", "extended", "'b' is new"),
        ("a", "a b", "broken", "'b' is new"),
        ("a b", "a", "broken", "'b' is gone"),
        ("a", "a=", "broken", "'a' has a default now"),
        ("a=", "a", "broken", "'a' has no default now"),
        ("a b", "b a", "broken", "its parameters are in a different order"),
        ("a", "/a", "broken", "'a' is now passed differently"),
    ],
)
def test_signature_changes_in_words(old, new, state, words):
    assert signature_change(old.split(), new.split()) == (state, words)
