"""The calls of vLLM's own methods: read from sources, and kept in a file beside the catalogue."""

from __future__ import annotations

import ast
import lzma

from vllm_graft.audit.model import Arguments
from vllm_graft.audit.releases.catalogue import CallList
from vllm_graft.audit.releases.outline import CallSite, call_sites, methods

TEXT = """
class Engine:
    def run(self, other):
        self.step(1, wait=2)
        other.step(*self.batches)
        super().step(3)
        def inner():
            self.stop()
    @staticmethod
    def make(self):
        self.step()
    class Inner:
        def go(this):
            this.step(4, 5)
drive.step(1, wait=2)
step(6)
"""


def found() -> set[tuple[str, CallSite]]:
    return set(call_sites(ast.parse(TEXT), "vllm.m"))


def test_calls_are_read_with_the_class_whose_object_they_are_made_on():
    assert found() == {
        ("step", CallSite(Arguments(1, ("wait",)), "vllm.m:Engine")),
        ("step", CallSite(Arguments(1, ("wait",)))),
        ("step", CallSite(Arguments(0))),
        ("step", CallSite(Arguments(2), "vllm.m:Engine.Inner")),
        ("stop", CallSite(Arguments(0), "vllm.m:Engine")),
    }


def test_methods_are_those_of_classes():
    assert set(methods(ast.parse(TEXT))) == {"run", "make", "go"}


def test_a_list_is_read_as_it_was_written(tmp_path):
    calls = CallList()
    calls.add("0.1.0", found(), ["step", "stop"])
    calls.add("0.2.0", [("step", CallSite(Arguments(7)))], ["step"])
    calls.write(tmp_path / "calls.xz")
    again = CallList.read(tmp_path / "calls.xz")
    assert again == calls
    assert again.of("step", "0.2.0") == [CallSite(Arguments(7))]
    assert len(again.of("step", "0.1.0")) == 4
    assert again.of("step", "0.3.0") == again.of("other", "0.1.0") == []


def test_only_calls_of_methods_that_the_release_defines_are_kept():
    calls = CallList()
    calls.add("0.1.0", found(), ["stop", "__init__"])
    assert set(calls.calls) == {"stop"}


def test_a_file_that_is_not_there_or_of_another_form_holds_no_calls(tmp_path):
    path = tmp_path / "calls.xz"
    assert CallList.read(path) == CallList()
    for data in (b"no archive", lzma.compress(b"calls 9 0.1.0\nstep 1")):
        path.write_bytes(data)
        assert CallList.read(path) == CallList()
