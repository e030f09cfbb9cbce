"""The values of a table that a user wrote: what is taken, and what an error says."""

import math

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.fields import Fields


def fields(**values: object) -> Fields:
    return Fields(values, "[table]", lambda key: f"file:{key}")


class TextFields(Fields):
    texts = True


class TestNumbers:
    def test_bounds_are_part_of_the_range(self):
        assert fields(a=1).number("a", least=1.0, most=1.0) == 1.0
        assert fields().number("a", 2.5) == 2.5

    @pytest.mark.parametrize("value", ["1", True, math.nan, None, [1]])
    def test_other_kinds_are_refused(self, value):
        with pytest.raises(ConfigError, match="file:"):
            fields(a=value).number("a")

    def test_the_error_has_the_words_given(self):
        with pytest.raises(ConfigError, match=r"file:a: a must be a share, and is 2\. Next: correct the value"):
            fields(a=2).number("a", most=1.0, wanted="a share")

    @pytest.mark.parametrize(("text", "number"), [("3", 3.0), ("1e3", 1000.0)])
    def test_texts_may_be_numbers(self, text, number):
        assert TextFields({"a": text}, "[table]", str).number("a") == number

    @pytest.mark.parametrize("text", ["x", "nan", "inf", ""])
    def test_an_error_shows_the_text(self, text):
        with pytest.raises(ConfigError, match=f"a must be a number, and is '{text}'"):
            TextFields({"a": text}, "[table]", str).number("a")


def test_a_flag_is_true_or_false_or_the_default():
    assert fields(a=True).flag("a") is True
    assert fields().flag("a") is None
    assert fields().flag("a", False) is False
    with pytest.raises(ConfigError, match="a must be true or false, and is 1"):
        fields(a=1).flag("a")


def test_another_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"file:speeed: \[table\] has no key 'speeed' \(did you mean 'speed'\?\)"):
        fields(speeed=1).only(("speed", "device"))


def test_a_value_that_is_no_table():
    with pytest.raises(ConfigError, match=r"file:None: \[table\] must be a table of keys and values, and is 3"):
        Fields(3, "[table]", lambda key: f"file:{key}")
