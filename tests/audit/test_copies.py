"""Which release a copy was taken from."""

import textwrap

import pytest

from vllm_graft.audit.copies import Origin, nearest_release

FIRST = """
def total(self, items: list[int], limit: int = 3) -> int:
    "All of them."
    count: int = 0
    for item in items:
        if item > limit:
            continue
        count += item
    return count
"""
SECOND = FIRST.replace("continue", "break")
THIRD = SECOND.replace("    return count", "    self.seen = count\n    return count")
RELEASES = {"0.9.0": FIRST, "0.10.0": SECOND, "0.11.0": THIRD}


def test_the_nearest_release():
    """The copy of each is found, with what differs from every other."""
    for release, text in RELEASES.items():
        origin = nearest_release(text, RELEASES)
        assert (origin.release, origin.differing, origin.of_lines, origin.copied) == (
            release,
            0,
            7 + ("seen" in text),
            True,
        )
        assert release not in origin.others
    assert nearest_release(FIRST, RELEASES).others == {"0.10.0": 2, "0.11.0": 3}


def test_what_does_not_count():
    """Decorators, name, docstring, annotations, comments, line breaks and indentation."""
    copy = '''
        @replace(vllm=">=0.1")
        # ours
        def better_total(self, items, limit=3):
            """Ours."""
            count = 0  # none yet
            for item in items:
                if (
                    item > limit
                ):
                    break
                count += item
            return count
    '''
    assert nearest_release(textwrap.indent(textwrap.dedent(copy.lstrip("\n")), "    "), RELEASES) == Origin(
        "0.10.0", 0, 7, {"0.9.0": 2, "0.11.0": 1}, copied=True
    )


def test_ties_go_to_the_newest():
    """Whichever order they come in, and 0.10 is newer than 0.9."""
    releases = {"0.10.0": FIRST, "0.9.0": FIRST, "of no number": FIRST}
    assert nearest_release(FIRST, releases).release == "0.10.0"
    assert nearest_release(FIRST, {"of no number": FIRST, "0.9.0": FIRST}).release == "0.9.0"


def test_a_line_that_two_sides_changed():
    """Equally many lines differ from both releases; a merge takes the older, so as to hide nothing."""
    old = "def f(self, item):\n    self.items.remove(item)\n    self.gone.append(item)\n    self.count -= 1\n"
    new = old.replace("-= 1", "= len(self.items)")
    copy, releases = old.replace("-= 1", "-= self.weight"), {"0.10.0": old, "0.9.0": old, "0.11.0": new}
    assert nearest_release(copy, releases).release == "0.11.0"
    assert nearest_release(copy, releases, prefer_old=True) == Origin(
        "0.9.0", 2, 4, {"0.10.0": 2, "0.11.0": 2}, copied=True, own=1
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "copied"),
    [
        ("return self.size", "return self.size", True),
        ("return self.size", "return 1", False),
        ("x = f()\n    return x", "x = f()\n    return x + 1", False),
        ("x = f()\n    return x", "x = f()\n    log(x)\n    return x", True),
        ("x = f()\n    a()\n    b()\n    c()\n    return x", "x = f()\n    return x", True),
        ("pass", "pass", False),
        (
            "if a:\n        b()\n    else:\n        c()\n    return",
            "if d:\n        e()\n    else:\n        f()\n    return",
            False,
        ),
    ],
)
def test_what_is_a_copy(ours: str, theirs: str, copied: bool):
    """More of both bodies has to be common than differs; neither the signature nor ``else:`` is evidence."""
    assert nearest_release(f"def f(self):\n    {ours}\n", {"1": f"def f(self):\n    {theirs}\n"}).copied is copied


def test_bodies_that_are_empty_without_what_does_not_count():
    """Only a docstring, or only declarations."""
    assert nearest_release('def f():\n    "Nothing."\n', {"1": "def f():\n    x: int\n"}).differing == 0


def test_nothing_to_compare_with():
    """There is no release then."""
    assert nearest_release(FIRST, {}) == Origin("", 0, 7)


def test_properties_and_coroutines():
    """Of a property all its functions count; a coroutine is something else than a function."""
    read = "    @property\n    def x(self):\n        return 1\n"
    both = f"{read}    @x.setter\n    def x(self, value):\n        self.y = value\n"
    assert nearest_release(both, {"1": both, "2": read}) == Origin("1", 0, 5, {"2": 3}, copied=True)
    assert nearest_release("async def f():\n    g()\n", {"1": "def f():\n    g()\n"}).differing == 2
