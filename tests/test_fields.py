"""The values of a table that a user wrote: what is taken, and what an error says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.fields import Fields, parse_dataclass


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
        with pytest.raises(ConfigError, match=r"file:a: a must be a share, but is 2\. Next: correct the value"):
            fields(a=2).number("a", most=1.0, wanted="a share")

    @pytest.mark.parametrize(("text", "number"), [("3", 3.0), ("1e3", 1000.0)])
    def test_texts_may_be_numbers(self, text, number):
        assert TextFields({"a": text}, "[table]", str).number("a") == number

    @pytest.mark.parametrize("text", ["x", "nan", "inf", ""])
    def test_an_error_shows_the_text(self, text):
        with pytest.raises(ConfigError, match=f"a must be a number, but is '{text}'"):
            TextFields({"a": text}, "[table]", str).number("a")


def test_a_flag_is_true_or_false_or_the_default():
    assert fields(a=True).flag("a") is True
    assert fields().flag("a") is None
    assert fields().flag("a", False) is False
    with pytest.raises(ConfigError, match="a must be true or false, but is 1"):
        fields(a=1).flag("a")


def test_another_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"file:speeed: \[table\] has no key 'speeed' \(did you mean 'speed'\?\)"):
        fields(speeed=1).only(("speed", "device"))


def test_a_value_that_is_no_table():
    with pytest.raises(ConfigError, match=r"file:None: \[table\] must be a table of keys and values, but is 3"):
        Fields(3, "[table]", lambda key: f"file:{key}")


def test_a_choice_and_a_list_of_names():
    assert fields(a="x").choice("a", ("x", "y")) == "x"
    assert fields(a=["x"]).names("a") == ["x"]
    with pytest.raises(ConfigError, match='a must be "x" or "y", but is \'z\''):
        fields(a="z").choice("a", ("x", "y"))
    with pytest.raises(ConfigError, match="a must be a list of names, but is 'x'"):
        fields(a="x").names("a")


@dataclass
class Inner:
    name: str
    kind: Literal["red", "green"] = "red"


@dataclass
class Outer:
    number: int
    share: float
    flag: bool
    limit: float | None
    parts: list[Inner]
    words: tuple[str, ...] = ()
    options: Mapping[str, int] = field(default_factory=dict)


SOUND = {"number": 1, "share": 2, "flag": True, "limit": None, "parts": [{"name": "a", "kind": "green"}]}


class TestParsing:
    def test_a_dataclass_is_made_of_what_json_holds(self):
        """Also of nested ones; keys of a newer writer are left out, and missing ones have their default."""
        found = parse_dataclass(Outer, {**SOUND, "words": ["x"], "options": {"k": 3}, "newer": 1}, "it")
        assert found == Outer(1, 2, True, None, [Inner("a", "green")], ("x",), {"k": 3})
        assert parse_dataclass(Outer, SOUND, "it").words == ()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"number": True}, "'number' is a bool instead of int"),
            ({"number": 1.5}, "'number' is a float instead of int"),
            ({"share": "1"}, "'share' is a str instead of float"),
            ({"flag": 1}, "'flag' is a int instead of bool"),
            ({"limit": "x"}, "'limit' is a str"),
            ({"parts": {}}, "'parts' is a dict instead of list"),
            ({"parts": [1]}, "a value of 'parts' is a int instead of an object"),
            ({"parts": [{}]}, "'name' is missing"),
            ({"parts": [{"name": "a", "kind": "blue"}]}, "'kind' has a value that is not among red, green"),
            ({"options": {"k": None}}, "'options' is null instead of int"),
        ],
    )
    def test_another_type_is_a_value_error_that_names_it(self, change, message):
        with pytest.raises(ValueError, match=message):
            parse_dataclass(Outer, {**SOUND, **change}, "it")

    def test_a_key_may_be_required_although_it_has_a_default(self):
        with pytest.raises(ValueError, match="'words' is missing"):
            parse_dataclass(Outer, SOUND, "it", required=("words",))

    def test_what_is_no_object_is_said_to_be_so(self):
        with pytest.raises(ValueError, match="the record is a list instead of an object"):
            parse_dataclass(Outer, [], "the record")
