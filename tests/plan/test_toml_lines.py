"""Where a value stands in a TOML text."""

from vllm_graft.plan.toml_lines import TomlLines

TEXT = """\
# a comment
[defaults]
patches = [
    "one",
    "two",   # twice the fun
]
on_failure = "warn"

[[profile]]
model = "*70B*"

[[profile]]
model = '*8B*'
"patches" = ["three"]

[options.some-item]
"""


def test_keys_of_tables_are_found():
    """A key is at its own line."""
    lines = TomlLines(TEXT)
    assert lines.of(("defaults", "on_failure")) == 7
    assert lines.of(("options", "some-item")) == 16


def test_an_element_of_a_list_over_several_lines_is_found():
    """A name in a list has its own line."""
    assert TomlLines(TEXT).of(("defaults", "patches"), "two") == 5


def test_arrays_of_tables_are_told_apart():
    """The second profile is not the first."""
    lines = TomlLines(TEXT)
    assert lines.of(("profile", 0, "model")) == 10
    assert lines.of(("profile", 1, "model")) == 13
    assert lines.of(("profile", 1, "patches"), "three") == 14


def test_an_unknown_key_falls_back_to_its_parent():
    """Better the table's line than none."""
    assert TomlLines(TEXT).of(("options", "some-item", "inline")) == 16
    assert TomlLines(TEXT).of(("nowhere",)) == 1


def test_a_name_in_a_comment_is_not_meant():
    """It stands there for a person."""
    text = 'names = [\n    "one",  # not "two"\n    "two",\n]\n'
    assert TomlLines(text).of(("names",), "two") == 3


def test_a_table_without_a_header_of_its_own_begins_with_its_first_part():
    """[a.b.c] is all that there is of a.b."""
    text = "[other]\n[defaults]\n[defaults.options.dry]\nx = 1\n"
    assert TomlLines(text).of(("defaults", "options")) == 3


def test_an_array_of_tables_inside_another():
    """A mistake, which has its own line all the same."""
    text = '[[profile]]\nmodel = "a"\n[[profile]]\nmodel = "b"\n[[profile.options.dry]]\nx = 1\n'
    assert TomlLines(text).of(("profile", 1, "options", "dry")) == 5
