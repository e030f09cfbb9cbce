"""D012: an entry point of the wrong kind."""

import pytest

TEXT = """
import functools
from graft_doctor_other import Held as Imported, helper

class NeedsNothing: ...
class Needs:
    def __init__(self, config, *, device): ...
class Callable:
    def __call__(self): ...
class Decided(type(Needs)): ...
class Text(str):
    def __init__(self, config): ...
class Made:
    def __new__(cls): return print
    def __init__(self, config): ...
@functools.cache
class Decorated:
    def __init__(self, config): ...

def function(): ...
def defaults(one=1, *rest, two=2): ...
def needs(config): ...
async def later(): ...
def waits():
    yield
@functools.cache
def decorated(config): ...

VALUE = "mine.platform.Platform"
TABLE = {"a": 1}
OBJECT = NeedsNothing()
CALLED = Callable()
UNSURE = helper()
ALIAS = function
if VALUE:
    CONDITIONAL = 3
"""
OTHER = "class Held:\n    def __init__(self, config): ...\ndef helper(): ...\n"


def found(site, group, name):
    site.package(
        "mine",
        {group: {"mine": f"graft_doctor_kinds:{name}"}},
        {"graft_doctor_kinds": TEXT, "graft_doctor_other": OTHER},
    )
    return site.found("D012")


@pytest.mark.parametrize("group", ["vllm.stat_logger_plugins", "vllm.logits_processors"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("function", "a function"),
        ("ALIAS", "a function"),
        ("later", "a function"),
        ("OBJECT", "an object, not a class"),
        ("VALUE", "a plain value"),
        ("TABLE", "a plain value"),
    ],
)
def test_where_a_class_is_needed_nothing_else_will_do(site, group, name, kind):
    (finding,) = found(site, group, name)
    assert (finding.level, finding.fix) == ("error", "point the entry point at the class itself")
    assert f"graft_doctor_kinds:{name} is {kind}; {group} takes a class" in finding.what


@pytest.mark.parametrize("group", ["vllm.stat_logger_plugins", "vllm.logits_processors"])
@pytest.mark.parametrize("name", ["Needs", "NeedsNothing", "Imported", "decorated", "UNSURE", "CONDITIONAL", "Decided"])
def test_classes_and_what_is_not_certain_are_let_be_where_a_class_is_needed(site, group, name):
    assert found(site, group, name) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("needs", "a function that needs config"),
        ("Needs", "a class that needs config, device"),
        ("Imported", "a class that needs config"),
        ("VALUE", "a plain value"),
        ("OBJECT", "an object that cannot be called"),
        ("later", "a coroutine function"),
        ("waits", "a generator function"),
    ],
)
@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.endpoint_plugins"])
def test_where_a_call_without_arguments_is_made_it_must_be_possible(site, group, name, kind):
    site.environ["VLLM_PLUGINS"] = "mine"
    (finding,) = found(site, group, name)
    assert finding.level == "error"
    assert f"graft_doctor_kinds:{name} is {kind}; {group} takes a" in finding.what


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.endpoint_plugins"])
@pytest.mark.parametrize(
    "name",
    ["function", "defaults", "ALIAS", "NeedsNothing", "CALLED", "decorated", "Decorated", "UNSURE", "CONDITIONAL"],
)
def test_what_can_be_called_or_is_not_certain_is_let_be(site, group, name):
    assert found(site, group, name) == []


@pytest.mark.parametrize("group", ["vllm.platform_plugins", "vllm.io_processor_plugins"])
def test_a_class_where_its_dotted_name_is_wanted_is_an_error_that_says_what_to_write(site, group):
    (finding,) = found(site, group, "NeedsNothing")
    assert "takes a function that returns the dotted name of a class" in finding.what
    assert "returns 'graft_doctor_kinds.NeedsNothing'" in finding.fix
    assert found(site, group, "function") == []
    assert found(site, group, "Text") == []
    assert found(site, group, "Made") == []


@pytest.mark.parametrize(
    ("group", "variables", "arguments", "level"),
    [
        ("vllm.general_plugins", {}, [], "error"),
        ("vllm.general_plugins", {"VLLM_PLUGINS": "other"}, [], "warning"),
        ("vllm.endpoint_plugins", {}, [], "warning"),
        ("vllm.io_processor_plugins", {}, [], "warning"),
        ("vllm.io_processor_plugins", {}, ["--io-processor-plugin", "mine"], "error"),
        ("vllm.logits_processors", {}, ["--runner", "pooling"], "warning"),
    ],
)
def test_it_is_an_error_where_this_server_would_load_it(site, group, variables, arguments, level):
    site.environ.update(variables)
    site.arguments = arguments
    (finding,) = found(site, group, "VALUE")
    assert finding.level == level


def test_a_module_is_nothing_that_can_be_called(site):
    site.package("mine", {"vllm.general_plugins": {"mine": "graft_doctor_kinds"}}, {"graft_doctor_kinds": ""})
    (finding,) = site.found("D012")
    assert "graft_doctor_kinds is a module" in finding.what
