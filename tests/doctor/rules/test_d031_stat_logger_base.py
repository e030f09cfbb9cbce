"""D031: a stat logger that vLLM refuses."""

import pytest

SOUND = """
from vllm.v1.metrics.loggers import StatLoggerBase
class Mine(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0): ...
    def record(self, *args, **kwargs): ...
    def log_engine_initialized(self): ...
"""


@pytest.fixture
def found(site):
    """Lay a stat logger out and say what the rule finds."""

    def findings(text):
        site.package("mine", {"vllm.stat_logger_plugins": {"mine": "graft_doctor_logger:Mine"}},
                     {"graft_doctor_logger": text})  # fmt: skip
        return site.found("D031")

    return findings


@pytest.mark.parametrize("text", [SOUND, "from somewhere import Mine\n", "def Mine(): ...\n"])
def test_sound_ones_and_what_other_rules_speak_of_are_let_be(found, text):
    assert found(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "def _noop(self, *args, **kwargs): ...\n"
        + SOUND.replace("def record(self, *args, **kwargs): ...", "record = _noop"),
        SOUND.replace("class Mine(", "class Deep(")
        + "class Records(Deep): ...\nclass Plain(StatLoggerBase): ...\nclass Mine(Plain, Records): ...\n",
    ],
)
def test_a_method_may_be_assigned_or_come_by_the_mro(found, text):
    assert found(text) == []


def test_an_annotation_defines_nothing(found):
    (finding,) = found(SOUND.replace("def record(self, *args, **kwargs): ...", "record: object"))
    assert "it does not define record" in finding.what


def test_a_class_that_does_not_derive_is_refused(site, found):
    (finding,) = found(SOUND.replace("(StatLoggerBase)", ""))
    assert (finding.level, finding.subject) == ("error", "stat logger 'mine'")
    assert "does not derive from StatLoggerBase" in finding.what
    site.environ["VLLM_PLUGINS"] = "other"
    (finding,) = found(SOUND.replace("(StatLoggerBase)", ""))
    assert finding.level == "warning"


def test_a_method_that_is_missing(found):
    (finding,) = found(SOUND.replace("def record", "def recorded"))
    assert "it does not define record, which vLLM's class leaves abstract" in finding.what


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self, vllm_config, engine_index=0", "self"),
        ("self, vllm_config, engine_index=0", "self, vllm_config"),
        ("self, vllm_config, engine_index=0", "self, vllm_config, engine_index, more"),
        ("self, *args, **kwargs", "self, stats"),
        ("self, *args, **kwargs", "self, scheduler_stats, iteration_stats"),
        ("self, *args, **kwargs", "self, a, b, mm_cache_stats=None, engine_idx=0, *, more"),
    ],
)
def test_a_method_that_does_not_take_what_vllm_passes(found, before, after):
    (finding,) = found(SOUND.replace(before, after))
    assert finding.level == "error"
    assert "does not take what vLLM passes" in finding.what


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self, vllm_config, engine_index=0", "self, *args"),
        ("self, vllm_config, engine_index=0", "self, config, index, more=None"),
        ("self, *args, **kwargs", "self, a, b, mm_cache_stats=None, engine_idx=0"),
        ("self, *args, **kwargs", "self, a, b, **rest"),
        ("self, *args, **kwargs", "self, a, b, *, engine_idx, mm_cache_stats"),
    ],
)
def test_a_method_that_takes_it_in_its_own_way(found, before, after):
    assert found(SOUND.replace(before, after)) == []
