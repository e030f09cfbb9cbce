"""Three-way merges, by their laws and against git's own."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.audit.merge import MergeResult, merge

texts = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "    break\n", "\n"]), max_size=9).map("".join)
ragged = st.builds(str.removesuffix, texts, st.sampled_from(["", "\n"]))


class TestLaws:
    @given(ragged, ragged)
    def test_one_side_only(self, base: str, side: str):
        """What only one side changed is taken as it is."""
        assert merge(base, base, side).text == side
        assert merge(base, side, base).text == side
        assert merge(base, side, base).conflicts == merge(base, base, side).conflicts == ()

    @given(ragged, ragged)
    def test_both_alike(self, base: str, side: str):
        """What both made alike is taken once."""
        merged = merge(base, side, side)
        assert (merged.text, merged.conflicts, merged.ours, merged.theirs) == (side, (), 0, 0)

    @given(texts, texts, texts)
    @settings(max_examples=300)
    def test_symmetric(self, base: str, ours: str, theirs: str):
        """Who is who matters only to the markers."""
        one, other = merge(base, ours, theirs), merge(base, theirs, ours)
        assert (one.ours, one.theirs, one.alike) == (other.theirs, other.ours, other.alike)
        assert len(one.conflicts) == len(other.conflicts)
        if not one.conflicts:
            assert one.text == other.text

    @given(texts, texts, texts)
    @settings(max_examples=300)
    def test_conflicts_hold_all_three(self, base: str, ours: str, theirs: str):
        """Taking one side of every conflict gives a text without markers, and the base's side gives no line twice."""
        merged = merge(base, ours, theirs)
        lines = merged.text.splitlines()
        starts = [number for number, line in enumerate(lines, 1) if line.startswith("<<<<<<<")]
        assert list(merged.conflicts) == starts
        for marker in ("||||||| base", "=======", ">>>>>>> theirs"):
            assert lines.count(marker) == len(starts)


class TestAgainstGit:
    """``git merge-file --diff3`` gives the same text, markers included."""

    BASE = "".join(f"line {number}\n" for number in range(12))

    @pytest.mark.parametrize(
        ("ours", "theirs", "conflicts"),
        [
            ({}, {}, 0),
            ({2: "ours\n"}, {8: "theirs\n"}, 0),
            ({2: "ours\n"}, {2: "theirs\n"}, 1),
            ({2: "both\n"}, {2: "both\n"}, 0),
            ({2: "ours\n"}, {3: "theirs\n"}, 1),
            ({2: "ours\n"}, {4: "theirs\n"}, 0),
            ({2: ""}, {2: "theirs\n"}, 1),
            ({2: ""}, {3: ""}, 1),
            ({2: ""}, {2: ""}, 0),
            ({2: "line 2\nours\n"}, {2: "line 2\ntheirs\n"}, 1),
            ({2: "line 2\nours\n"}, {3: "theirs\n"}, 1),
            ({2: "line 2\nours\n"}, {2: "theirs\n"}, 1),
            ({2: "line 2\nours\n"}, {4: "theirs\n"}, 0),
            ({0: "ours\nline 0\n"}, {11: "line 11\ntheirs\n"}, 0),
            ({2: "ours\n", 4: "ours\n"}, {3: "theirs\n"}, 1),
            ({2: "ours\n", 8: "ours\n"}, {2: "theirs\n", 8: "theirs\n"}, 2),
            (dict.fromkeys(range(12), ""), {5: "theirs\n"}, 1),
            (dict.fromkeys(range(12), ""), {}, 0),
        ],
    )
    def test_changes_of_lines(self, ours: dict[int, str], theirs: dict[int, str], conflicts: int, tmp_path: Path):
        """Changes that overlap or touch are conflicts."""
        sides = [
            "".join(side.get(number, line) for number, line in enumerate(self.BASE.splitlines(keepends=True)))
            for side in (ours, theirs)
        ]
        merged = merge(self.BASE, *sides)
        assert len(merged.conflicts) == conflicts
        assert (merged.text, conflicts) == by_git(tmp_path, self.BASE, *sides)

    def test_an_insertion_that_repeats_what_stands_before(self, tmp_path: Path):
        """It stands after what it repeats, away from a change above; as in a loop with another ``break``."""
        base = "while x:\n    if a:\n        break\n\n    go()\n"
        ours = base.replace("    go()", "    if b:\n        break\n\n    go()")
        theirs = base.replace("if a:", "if a > 1:")
        merged = merge(base, ours, theirs)
        assert merged == MergeResult(
            "while x:\n    if a > 1:\n        break\n\n    if b:\n        break\n\n    go()\n", (), 1, 1
        )
        assert by_git(tmp_path, base, ours, theirs) == (merged.text, 0)

    def test_a_deletion_that_could_be_either(self, tmp_path: Path):
        """Of two equal lines it is the last that goes."""
        base, ours = "a\nx\nx\nb\nc\n", "a\nx\nb\nc\n"
        for theirs in (base.replace("a", "A"), base.replace("b", "B")):
            merged = merge(base, ours, theirs)
            assert (merged.text, len(merged.conflicts)) == by_git(tmp_path, base, ours, theirs)

    def test_texts_without_a_last_line_end(self, tmp_path: Path):
        """A marker stands on a line of its own."""
        merged = merge("a\nb", "a\nours", "a\ntheirs")
        assert (merged.text, 1) == by_git(tmp_path, "a\nb", "a\nours", "a\ntheirs")

    @pytest.mark.parametrize(("between", "conflicts"), [(1, 1), (3, 1), (4, 2)])
    def test_conflicts_that_stand_close(self, between: int, conflicts: int, tmp_path: Path):
        """Git's own style makes one of two with at most three lines between; here that has to be asked for."""
        last = 3 + between
        base = self.BASE
        ours, theirs = (
            base.replace("line 2\n", f"{side}\n").replace(f"line {last}\n", f"{side}\n") for side in ("ours", "theirs")
        )
        assert len(merge(base, ours, theirs).conflicts) == 2
        joined = merge(base, ours, theirs, join=3)
        assert len(joined.conflicts) == conflicts == by_git(tmp_path, base, ours, theirs, style=())[1]
        assert joined.text.count(">>>>>>> theirs") == conflicts

    def test_a_change_of_one_side_between_conflicts_is_taken(self):
        """It is not part of either, and keeps them apart."""
        base = "a\nb\nc\nd\ne\n"
        merged = merge(base, "A\nb\nc!\nd\nE\n", "1\nb\nc\nd\n2\n", join=3)
        assert len(merged.conflicts) == 2
        assert "=======\n1\n>>>>>>> theirs\nb\nc!\nd\n<<<<<<< ours" in merged.text

    def test_names(self):
        """They stand in the markers."""
        merged = merge("a\n", "b\n", "c\n", names=("mine", "vLLM 1", "vLLM 2"))
        assert merged.text == "<<<<<<< mine\nb\n||||||| vLLM 1\na\n=======\nc\n>>>>>>> vLLM 2\n"
        assert merged.conflicts == (1,)


def by_git(folder: Path, base: str, ours: str, theirs: str, style: tuple[str, ...] = ("--diff3",)) -> tuple[str, int]:
    """The text and the number of conflicts by ``git merge-file``."""
    git = shutil.which("git")
    assert git is not None, "this test compares with git: install it"
    for name, text in (("ours", ours), ("base", base), ("theirs", theirs)):
        (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [git, "merge-file", "-p", *style, "ours", "base", "theirs"], cwd=folder, capture_output=True, check=False
    )
    assert done.returncode < 128, done.stderr.decode()
    return done.stdout.decode(), done.returncode
