"""What became of a name from one release to another, read from sources and from a catalogue alike."""

from __future__ import annotations

import pytest

from vllm_graft.audit.judging import Pair, signature_change
from vllm_graft.audit.model import Use, Verdict


@pytest.fixture(params=["source", "catalogue"])
def became(request, make, held):
    """became(old, new, name, way) -> the verdict; old and new are texts of vllm.m, or modules by name."""

    def judge(old, new, name="f", way="replace") -> Verdict:
        texts = [text if isinstance(text, dict) else {"m": text} for text in (old, new)]
        pair = held(request.param, make("1.0", **texts[0]), make("2.0", **texts[1]))
        use = Use(way, "vllm.m", name, "p.py", 1)
        return Pair.of(*pair, [use]).judge(use)

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


def test_an_imported_function_counts_by_its_signature_alone(became):
    assert became("def f(a):\n    return 1", "def f(a, b=2):\n    return 3", way="import").state == "same"
    assert became("def f(a): ...", "def f(b): ...", way="import").state == "broken"


def test_a_name_that_was_in_neither_release_is_absent(became):
    assert became("", "", way="import").state == "absent"


def test_a_name_in_a_module_below_is_found(make, held):
    made = [make(version, m="def f(): ...") for version in ("1.0", "2.0")]
    use = Use("import", "vllm", "m.f", "p.py", 1)
    assert Pair.of(*held("source", *made), [use]).judge(use).state == "same"


def test_names_that_a_lazy_module_declares_for_type_checkers_are_found(became):
    lazy = "import typing\ndef __getattr__(name): ...\nif typing.TYPE_CHECKING:\n    from vllm.n import f\n"
    found = {"m": lazy, "n": "def f(): ..."}
    assert became(found, found).state == "same"


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
        ("a b", "b a", "broken", "its parameters stand in another order"),
        ("a", "/a", "broken", "'a' is passed otherwise"),
    ],
)
def test_signature_changes_in_words(old, new, state, words):
    assert signature_change(old.split(), new.split()) == (state, words)
