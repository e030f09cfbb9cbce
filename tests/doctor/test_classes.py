"""What an entry point's object is, by reading."""

import pytest

from vllm_graft.doctor.classes import ClassReader
from vllm_graft.doctor.server import V1_PROCESSOR, V2_PROCESSOR

DUAL = """
from vllm.v1.sample.logits_processor import LogitsProcessor as First
try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as Second
except ImportError:
    Second = object

class Base(First): ...
class Dual(Base, Second): ...
"""


@pytest.fixture
def read(site):
    def from_modules(**modules):
        site.package("plug", {}, modules)
        return site.environment().classes

    return from_modules


def test_a_class_is_followed_through_its_package_into_vllm(read):
    reading = read(plug=DUAL)
    thing = reading.look_up("plug:Base")
    assert (thing.kind, thing.complete) == ("class", True)
    assert V1_PROCESSOR in thing.bases
    assert (reading.is_a("plug:Base", V1_PROCESSOR), reading.is_a("plug:Base", V2_PROCESSOR)) == ("yes", "no")


def test_a_base_that_is_imported_where_it_exists_counts(read):
    reading = read(plug=DUAL)
    assert [reading.is_a("plug.Dual", each) for each in (V1_PROCESSOR, V2_PROCESSOR)] == ["yes", "yes"]


def test_without_vllm_the_names_in_the_imports_decide(site):
    site.package("plug", {}, {"plug": DUAL})
    reading = ClassReader(site.path, None)
    assert reading.is_a("plug:Dual", V2_PROCESSOR) == "yes"
    assert reading.is_a("plug:Base", V1_PROCESSOR) == "yes"
    assert reading.is_a("plug:Base", V2_PROCESSOR) == "unknown"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("def thing(): ...", "function"),
        ("async def thing(): ...", "function"),
        ("class thing: ...", "class"),
        ("thing = make()", "value"),
        ("class Other: ...\nthing = Other", "class"),
        ("from elsewhere import thing", "unknown"),
        ("other = 1", "unknown"),
        ("def thing(:", "unknown"),
    ],
)
def test_the_kind_of_an_object(read, text, kind):
    assert read(plug=text).look_up("plug:thing").kind == kind


def test_bases_by_a_module_s_name_by_star_and_nested_are_found(read):
    reading = read(
        plug="import inner\nimport inner as other\nfrom inner import *\n"
        "class A(inner.Base): ...\nclass B(other.Base): ...\nclass C(Base): ...\nclass D(Base.Nested): ...",
        inner="class Base:\n    class Nested: ...",
    )
    assert [reading.is_a(f"plug:{name}", "inner:Base") for name in "ABC"] == ["yes", "yes", "yes"]
    assert reading.is_a("plug:D", "inner:Base.Nested") == "yes"


def test_a_base_in_the_dark_leaves_the_answer_open(read):
    reading = read(plug="from missing import Base\nclass A(Base): ...\nclass B(make()): ...\nclass C(Exception): ...")
    assert [reading.is_a(f"plug:{name}", V1_PROCESSOR) for name in "ABC"] == ["unknown", "unknown", "no"]


def test_classes_in_a_circle_come_to_an_end(read):
    reading = read(plug="from other import B\nclass A(B): ...", other="from plug import A\nclass B(A): ...")
    assert reading.is_a("plug:A", V1_PROCESSOR) == "no"
    loop = read(plug="from other import A", other="from plug import A")
    assert loop.look_up("plug:A").kind == "unknown"


def test_an_entry_point_of_this_interpreter_is_read_too(site):
    import sys

    site.path = sys.path
    entry = next(entry for entry in site.environment().plugins if entry.value == "vllm_graft.boot:register")
    assert site.environment().classes.look_up(entry).kind == "function"
