"""D030: a logits processor whose methods vLLM cannot call."""

import pytest

BASE = "from vllm.v1.sample.logits_processor import LogitsProcessor\n"
SOUND = """
class Mine(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory): ...
    def is_argmax_invariant(self): return False
    def update_state(self, batch_update): ...
    def apply(self, logits): return logits
"""


@pytest.fixture
def found(site):
    """Lay a processor out and say what the rule finds."""

    site.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

    def findings(text, head=BASE):
        site.package("mine", {"vllm.logits_processors": {"mine": "graft_doctor_processor:Mine"}},
                     {"graft_doctor_processor": head + text})  # fmt: skip
        return site.found("D030")

    return findings


def without(name):
    return "\n".join(line for line in SOUND.splitlines() if f"def {name}(" not in line)


@pytest.mark.parametrize(
    "text",
    [
        SOUND,
        SOUND.replace("vllm_config, device, is_pin_memory", "*given"),
        SOUND.replace("is_pin_memory", "is_pin_memory, extra=None"),
        SOUND.replace("return logits", "raise NotImplementedError"),
        # What reading does not see to the end is let be.
        f"import functools\n@functools.cache\n{without('apply').lstrip()}",
        without("apply").replace("(LogitsProcessor)", "(LogitsProcessor, helper())"),
        "class Own(LogitsProcessor):\n    def apply(self, logits): return logits\n"
        + without("apply").replace("(LogitsProcessor)", "(Own)"),
        # A method need not be a def in the class itself.
        without("is_argmax_invariant") + "\n    is_argmax_invariant = lambda self: False\n",
        without("apply") + "\n    if True:\n        def apply(self, logits): return logits\n",
        # In a diamond the interface comes last, however near it is on one side.
        "class Base(LogitsProcessor): ...\n"
        "class Deep(LogitsProcessor):\n    def apply(self, logits): return logits\n"
        "class Mixin(Deep): ...\n" + without("apply").replace("(LogitsProcessor)", "(Base, Mixin)"),
    ],
)
def test_sound_and_uncertain_processors_are_let_be(found, text):
    assert found(text) == []


@pytest.mark.parametrize("name", ["__init__", "is_argmax_invariant", "update_state", "apply"])
def test_a_method_that_is_missing(found, name):
    (finding,) = found(without(name))
    assert (finding.level, finding.subject, finding.fix) == ("error", "logits processor 'mine'", f"define {name}")
    assert f"it does not define {name}" in finding.what
    assert "the engine stops at its start with a TypeError" in finding.what


def test_call_in_the_place_of_apply_is_named(found):
    (finding,) = found(SOUND.replace("def apply", "def __call__"))
    assert "does not define apply" in finding.what
    assert "vLLM calls apply, never __call__" in finding.what


def test_a_class_that_does_not_derive_fails_by_what_it_lacks(found):
    plain = SOUND.replace("(LogitsProcessor)", "")
    (finding,) = found(plain, head="")
    assert "has no validate_params; every request fails with an AttributeError" in finding.what
    (finding,) = found(plain.replace("def is_argmax_invariant", "def other"), head="")
    assert "validate_params" in finding.what
    assert "the engine stops at its start with an AttributeError" in finding.what


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (SOUND.replace("vllm_config, device, is_pin_memory", "config"), "__init__"),
        (SOUND.replace("is_pin_memory", "is_pin_memory, *, name"), "__init__"),
        (SOUND.replace("apply(self, logits)", "apply(self, logits, request)"), "apply"),
        (SOUND.replace("update_state(self, batch_update)", "update_state(self)"), "update_state"),
    ],
)
def test_a_method_that_does_not_take_what_vllm_passes(found, text, method):
    (finding,) = found(text)
    assert f"{method} cannot be called with" in finding.what
    assert finding.fix.startswith(f"write def {method}(self, ")


def test_apply_that_returns_nothing(found):
    for body in ("logits.div_(2)", "return", "return None", "(lambda: (yield))"):
        (finding,) = found(SOUND.replace("return logits", body))
        assert "apply returns nothing" in finding.what


@pytest.mark.parametrize(
    "body",
    [
        "if not self.on:\n            return\n        return logits",
        "if self.on:\n            return logits",
        "if self.on:\n            return logits\n        logits.div_(2)",
        "for row in self.rows:\n            if row: return logits",
        "with self.lock:\n            if self.on: return logits",
        "if self.off: raise ValueError\n        logits = logits / 2",
    ],
)
def test_apply_that_returns_nothing_on_some_paths(found, body):
    """Whether a request takes one is not known, so it is a warning."""
    (finding,) = found(
        SOUND.replace("def apply(self, logits): return logits", f"def apply(self, logits):\n        {body}")
    )
    assert (finding.level, "apply returns nothing on some paths (line " in finding.what) == ("warning", True)


@pytest.mark.parametrize(
    "body",
    [
        "if self.on:\n            return logits\n        else:\n            return logits / 2",
        "if self.on: return logits\n        raise ValueError",
        "if self.on: return logits\n        self.fail()",
        "while True:\n            if self.on: return logits",
        "try:\n            return logits\n        except ValueError:\n            return logits",
        "def inner():\n            return\n        return logits",
    ],
)
def test_apply_that_returns_on_every_path_or_may(found, body):
    text = SOUND.replace("def apply(self, logits): return logits", f"def apply(self, logits):\n        {body}")
    assert found(text) == []


@pytest.mark.parametrize("mark", ["torch.no_grad()", "torch.inference_mode()", "override"])
def test_decorators_that_change_nothing_are_looked_through(found, mark):
    head = BASE + "import torch\nfrom typing_extensions import override\n"
    marked = SOUND.replace("    def apply", f"    @{mark}\n    def apply")
    assert found(marked, head) == []
    (finding,) = found(marked.replace("return logits", "logits.div_(2)"), head)
    assert "apply returns nothing" in finding.what
    (finding,) = found(marked.replace("(self, logits)", "(self, logits, request)"), head)
    assert "apply cannot be called with" in finding.what


def test_a_static_method_has_no_self_and_other_decorators_are_let_be(found):
    static = SOUND.replace("    def apply(self, logits)", "    @staticmethod\n    def apply(logits)")
    assert found(static) == []
    (finding,) = found(static.replace("(logits)", "(self, logits)"))
    assert "apply cannot be called with" in finding.what
    other = SOUND.replace("    def apply(self, logits): return logits", "    @timed\n    def apply(self): ...")
    assert found(other, BASE + "from elsewhere import timed\n") == []


def test_pooling_models_and_speculative_decoding_have_no_processors(site, found):
    site.arguments = ["--runner", "pooling"]
    assert found(without("apply")) == []


def test_the_interface_of_the_v2_runner(site, found):
    """Its ``apply`` gets the batch too, and only that one is abstract."""
    site.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    head = "from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor\n"
    assert found("class Mine(LogitsProcessor):\n    def apply(self, logits, ctx): return logits\n", head) == []
    if site.environment().release < (0, 31):
        # The V2 runner takes no processors there, and D013 says so.
        assert site.found("D013")
        return
    (finding,) = found("class Mine(LogitsProcessor):\n    def apply(self, logits): return logits\n", head)
    assert "apply cannot be called with (logits, ctx)" in finding.what
    (finding,) = found("class Mine(LogitsProcessor): ...\n", head)
    assert "it does not define apply" in finding.what


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SOUND.replace("    def is_arg", "    @property\n    def is_arg"), "is a property, but vLLM calls it"),
        (SOUND.replace("def apply", "async def apply"), "is a coroutine function"),
        (SOUND.replace("return logits", "yield logits"), "is a generator"),
        (SOUND + "    def validate_params(self, sampling_params): ...\n", "vLLM calls it on the class"),
    ],
)
def test_a_method_of_another_kind(found, text, said):
    (finding,) = found(text)
    assert said in finding.what


@pytest.mark.parametrize(
    "mark", ["classmethod\n    def validate_params(cls, params)", "staticmethod\n    def validate_params(params)"]
)
def test_parameters_may_be_validated_by_the_class(found, mark):
    assert found(f"{SOUND}    @{mark}: ...\n") == []
