"""A copied function carried to another release: small ones, and a copy of the real ``Scheduler.schedule``."""

import ast
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vllm_graft.audit.copies import nearest_release
from vllm_graft.audit.rebase import new_names, rebase
from vllm_graft.errors import ConfigError
from vllm_graft.sources import Installed, Tree
from vllm_graft.sources.finder import find

ROOT = Path(__file__).parents[2]

BASE = '''\
    def take(self, wanted: int, spare: int = 0) -> list[int]:
        """Some of what there is."""
        taken = []
        while self.waiting and wanted > 0:
            # The oldest first.
            one = self.waiting.pop(0)
            if one < spare:
                continue

            taken.append(one)
            wanted -= 1
        self.taken += len(taken)
        return taken
'''
NEW = BASE.replace("# The oldest first.", "# The oldest first, as they came.").replace(
    "        return taken\n", "        self.seen.update(taken)\n        return taken\n"
)


class TestText:
    def test_both_sides_changes(self):
        """The copy's are kept, upstream's come along, comments and all."""
        copy = BASE.replace("if one < spare:", "if one <= spare:")
        done = rebase(copy, BASE, NEW)
        assert done.text == NEW.replace("if one < spare:", "if one <= spare:")
        assert (done.form, done.conflicts, done.ours, done.theirs, done.alike) == ("text", (), 1, 2, 0)

    def test_a_conflict(self):
        """Its markers stand at the left margin, under the names that were given."""
        copy = BASE.replace("return taken", "return sorted(taken)")
        done = rebase(copy, BASE, NEW, names=("mine", "old", "new"))
        assert done.text.splitlines()[-9:] == [
            "        self.taken += len(taken)",
            "<<<<<<< mine",
            "        return sorted(taken)",
            "||||||| old",
            "        return taken",
            "=======",
            "        self.seen.update(taken)",
            "        return taken",
            ">>>>>>> new",
        ]
        assert done.conflicts == (13,)
        assert done.text.splitlines()[12] == "<<<<<<< mine"

    def test_its_own_decorators_name_docstring_and_depth(self):
        """They stay, and none of them is a conflict, even where upstream changed its own."""
        copy = textwrap.dedent(BASE).replace("def take(", "def take_fairly(")
        copy = copy.replace('    """Some of what there is."""\n', "    '''Ours.\n\n    In two lines.\n    '''\n\n")
        copy = '@replace(\n    vllm=">=0.1",\n)\n# Ours.\n@log\n' + copy
        new = NEW.replace("Some of", "Some, not all, of").replace("spare: int = 0", "spare: int = 1")
        done = rebase(copy, BASE, new)
        assert done.conflicts == ()
        assert done.text == copy.replace("spare: int = 0", "spare: int = 1").replace(
            "first.", "first, as they came."
        ).replace("    return taken\n", "    self.seen.update(taken)\n    return taken\n")

    def test_upstreams_docstring_and_decorators(self):
        """Where the copy has the same ones, upstream's changes to them come along."""
        base = "    @staticmethod\n" + BASE
        new = "    @staticmethod\n    @cache\n" + BASE.replace("Some of", "All of")
        done = rebase("    @replace\n" + base, base, new)
        assert done.text == "    @replace\n" + new

    def test_a_docstring_that_was_left_out(self):
        """It does not come back."""
        copy = BASE.replace('        """Some of what there is."""\n', "")
        done = rebase(copy, BASE, NEW.replace("Some of", "All of"))
        assert done.text == NEW.replace('        """Some of what there is."""\n', "")

    def test_strings_of_several_lines(self):
        """What is inside one is never indented anew."""
        base = 'def f():\n    x = """\none\n  two\n"""\n    return x\n'
        copy = textwrap.indent("@replace\n" + base, "    ").replace("    one\n      two\n    ", "one\n  two\n")
        done = rebase(copy, base, base.replace("return x", "return x.strip()"))
        assert done.text == copy.replace("return x", "return x.strip()")

    def test_one_line(self):
        """There is no place for a docstring, and none is needed."""
        assert rebase("def g(): return 1\n", "def f(): return 1\n", "def f(): return 2\n").text == "def g(): return 2\n"

    def test_a_last_line_without_an_end(self):
        """The result has one."""
        assert rebase("def f():\n    return 1", "def f():\n    return 1", "def f():\n    return 2").text.endswith("2\n")

    def test_what_is_no_function(self):
        """Each is refused by the name that it was given."""
        both = "@property\ndef x(self): ...\n@x.setter\ndef x(self, y): ...\n"
        for text in ("x = 1\n", both, "def f(:\n", ""):
            with pytest.raises(ConfigError, match="upstream now: it is not"):
                rebase(BASE, BASE, text)


class TestOtherFormatting:
    BASE = """\
def pick(self, many):
    # Ours alone.
    if (
        many
        and self.open
    ):
        return None
    elif not many:  # nothing
        raise ValueError(
            'none'
        )
    try:
        # What is left.
        found = (
            self.first(many)
        )
    except KeyError:
        return self.other(many,
                          last=True)
    else:
        return found
"""
    COPY = """\
@replace
def pick(self, many):
    if many and self.open:
        return None
    elif not many:
        raise ValueError("none")
    # Ours.
    self.count(many, of='x')
    try:
        found = self.first(many)
    except KeyError:
        return self.other(
            many,
            last=True,
        )
    else:
        return found
"""

    def test_it_is_laid_out_as_upstream(self):
        """Of a copy that a formatter has been over, only what it says otherwise counts; upstream's comments stay."""
        new = self.BASE.replace("        many\n", "        len(many)\n").replace("last=True", "last=False")
        done = rebase(self.COPY, self.BASE, new)
        assert (done.form, done.conflicts, done.ours, done.theirs) == ("laid out", (), 1, 2)
        own = "    # Ours.\n    self.count(many, of='x')\n    try:\n"
        assert done.text == "@replace\n" + new.replace("    try:\n", own)

    @pytest.mark.parametrize("line", ["        return found\n", "    try:\n"])
    def test_comments_of_its_own_are_never_lost(self, line: str):
        """Before a statement that both have, and behind one."""
        before = f"{' ' * (len(line) - len(line.lstrip()))}# Mine: keep.\n{line}"
        behind = f"{line.rstrip()}  # Mine: keep.\n"
        for own in (before, behind):
            done = rebase(self.COPY.replace(line, own), self.BASE, self.BASE.replace("last=True", "last=False"))
            assert "# Mine: keep." in done.text

    def test_other_steps_of_indentation(self):
        """There nothing can be laid out; all are formatted alike, and the comments of both sides stay."""
        narrow = self.COPY.replace("    ", "  ")
        done = rebase(narrow, self.BASE, self.BASE.replace("last=True", "last=False"))
        assert (done.form, done.conflicts) == ("formatted", ())
        assert '    # Ours.\n    self.count(many, of="x")\n    try:\n' in done.text
        assert "return self.other(many, last=False)\n" in done.text
        assert "# What is left." not in done.text, "the copy had taken it out"

    def test_comments_of_a_copy_that_is_cut_otherwise_stay(self):
        """Its own, and those that it has of upstream; one that upstream adds comes along."""
        copy = self.BASE.replace("    ", "  ").replace("last=True", "last=self.turn")
        new = self.BASE.replace("    else:\n", "    else:\n        # New.\n")
        done = rebase(copy.replace("  try:\n", "  # Ours.\n  try:\n"), self.BASE, new)
        assert (done.form, done.conflicts) == ("formatted", ())
        assert done.text.count("#") == self.BASE.count("#") + 2
        assert "# New." in done.text
        assert "# Ours." in done.text

    def test_a_string_of_several_lines_stays_as_it_is(self):
        """Formatting moves what stands around it."""
        text = 'def f(self):\n    return self.g(\n      """a\n  b\n""", 1)\n'
        copy = text.replace("    return", "  return").replace("1)", "2)")
        done = rebase(copy, text, text.replace("self.g(", "self.h("))
        assert not done.broken
        assert '"""a\n  b\n"""' in done.text

    def test_without_ruff_comments_are_lost(self, monkeypatch):
        """Statements are merged as they are."""
        monkeypatch.setattr("vllm_graft.audit.rebase._ruff", lambda: None)
        narrow = self.COPY.replace("    ", "  ")
        done = rebase(narrow, self.BASE, self.BASE.replace("last=True", "last=False"))
        assert (done.form, done.conflicts) == ("normalised", ())
        assert "    self.count(many, of='x')\n    try:\n" in done.text
        assert "return self.other(many, last=False)\n" in done.text
        assert "#" not in done.text

    def test_text_is_kept_where_it_is_no_worse(self):
        """A conflict in both forms is shown with comments."""
        copy = BASE.replace("one < spare", "one <= spare")
        done = rebase(copy, BASE, NEW.replace("one < spare", "one < 2 * spare"))
        assert (done.form, len(done.conflicts)) == ("text", 1)
        assert "# The oldest first, as they came." in done.text

    def test_its_own_docstring(self):
        """It stays here too."""
        for wide in (4, 2):
            copy = self.COPY.replace("many):\n", "many):\n    'Ours.'\n", 1).replace("    ", " " * wide)
            new = self.BASE.replace("pick(self, many):\n", "pick(self, many):\n    'Upstream.'\n")
            done = rebase(copy, self.BASE, new.replace("last=True", "last=False"))
            assert (done.form, done.conflicts) == ("laid out" if wide == 4 else "formatted", ())
            assert done.text.splitlines()[2].strip() == "'Ours.'"
            assert "Upstream" not in done.text
            assert not done.broken


def test_names_that_the_new_code_uses():
    """Those that the module does not have are found; annotations need not be there at run time."""
    module = "import time\nfrom a import b\n\ndef f():\n    pass\n"
    new = "def f(x: Any):\n    y: Other = time.time() + b + len(x)\n    return [gone for z in y if lost(z)] + known()\n"
    assert new_names(new, "def f():\n    known()\n", module) == {"gone", "lost"}
    assert new_names(new, "def f():\n    known()\n", f"from c import *\n{module}") == set()
    assert new_names("<<<<<<< x\n", "def f():\n    known()\n", module) == set()


PLACE = ("vllm.v1.core.sched.scheduler", "Scheduler.schedule")


@pytest.fixture(scope="module")
def upstream() -> dict[str, str]:
    """The real method of two releases."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    import sources

    there = {release: Tree(sources.fetch(release, print)) for release in _to_fetch()}
    found = {release: find(there.get(release, Installed()), *PLACE) for release in ("0.26.0", "0.32.0")}
    return {release: definition.text for release, definition in found.items() if definition is not None}


def _to_fetch() -> list[str]:
    return [release for release in ("0.26.0", "0.32.0") if release != Installed().version]


@pytest.fixture(scope="module")
def edited(upstream: dict[str, str]) -> dict[str, str]:
    """Copies of 0.26.0's method that stop early in the loop over waiting requests, after upstream's test and before."""
    text = upstream["0.26.0"]
    for before, after in (
        ("        self.current_step += 1\n", "        if self.alone:\n            return super().schedule()\n{}"),
        (
            "                assert request_queue is not None\n",
            "                if not request_queue:\n                    break\n",
        ),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after.format(before))
    stop = "                full = self.ranks.any_full()\n                if full:\n                    break\n\n"
    choice = "                request_queue = self._select_waiting_queue_for_scheduling()\n"
    loop = "            while (self.waiting or self.skipped_waiting) and token_budget > 0:\n"
    assert text.count(choice) == text.count(loop) == 1
    return {"after": text.replace(choice, stop + choice), "before": text.replace(loop, loop + stop)}


class TestTheRealScheduler:
    """What vllm-ascend does to it, imitated: 5 lines new and 1 in the place of 2 others, in a method of 300."""

    @pytest.mark.parametrize(("where", "far", "conflicts"), [("after", 260, 1), ("before", 258, 2)])
    def test_a_copy_of_an_older_release(
        self, upstream: dict[str, str], edited: dict[str, str], where: str, far: int, conflicts: int, tmp_path: Path
    ):
        """It is recognised, and rebased with as many conflicts as git's."""
        copy = edited[where]
        origin = nearest_release(copy, upstream)
        assert (origin.release, origin.differing, origin.of_lines, origin.copied) == ("0.26.0", 8, 301, True)
        assert origin.others == {"0.32.0": far}
        done = rebase(copy, upstream["0.26.0"], upstream["0.32.0"])
        assert (done.form, len(done.conflicts)) == ("text", conflicts)
        assert conflicts == conflicts_by_git(tmp_path, upstream["0.26.0"], copy, upstream["0.32.0"])
        assert "            return super().schedule()\n" in done.text

    def test_formatted_otherwise(self, upstream: dict[str, str], edited: dict[str, str]):
        """As ``ast.unparse`` writes it, without comments: there are no more conflicts, and upstream's comments stay."""
        flat = ast.unparse(ast.parse(textwrap.dedent(edited["after"])))
        copy = textwrap.indent(f"@replace\n{flat}\n", "    ")
        assert nearest_release(copy, upstream).differing == 8
        done = rebase(copy, upstream["0.26.0"], upstream["0.32.0"])
        assert (done.form, len(done.conflicts)) == ("laid out", 1)
        assert done.text.startswith("    @replace\n    def schedule(self")
        assert done.text.count("#") > upstream["0.32.0"].count("#") / 2

    @pytest.mark.parametrize("where", ["after", "before"])
    def test_no_more_conflicts_than_by_ruff_and_git(
        self, upstream: dict[str, str], edited: dict[str, str], where: str, tmp_path: Path
    ):
        """A copy with lines of 120 characters and a remark of its own before every fifth statement keeps them all."""
        copy = remarked(formatted(textwrap.dedent(edited[where]), 120))
        remarks = copy.count("# Ours ")
        assert remarks > 20
        done = rebase(copy, upstream["0.26.0"], upstream["0.32.0"])
        texts = [formatted(textwrap.dedent(each), 120) for each in (upstream["0.26.0"], copy, upstream["0.32.0"])]
        assert len(done.conflicts) <= conflicts_by_git(tmp_path, *texts, style=())
        assert {f"# Ours {number}.\n" in done.text for number in range(remarks)} == {True}

    def test_an_exact_copy(self, upstream: dict[str, str]):
        """It becomes the new one, to the letter."""
        done = rebase("    @replace\n" + upstream["0.26.0"], upstream["0.26.0"], upstream["0.32.0"])
        assert done.text == "    @replace\n" + upstream["0.32.0"]
        assert (done.form, done.conflicts, done.broken) == ("text", (), "")


def formatted(text: str, width: int) -> str:
    """The function as ruff formats it."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(width), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def remarked(text: str) -> str:
    """The function with a numbered comment before every fifth of its statements."""
    found = text.splitlines(keepends=True)
    inner = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    lines = {node.lineno for node in inner if not isinstance(node, ast.FunctionDef)}
    starts = sorted(line for line in lines if not found[line - 1].lstrip().startswith("elif"))
    for number, line in enumerate(starts[::5]):
        code = found[line - 1]
        found[line - 1] = f"{' ' * (len(code) - len(code.lstrip()))}# Ours {number}.\n{code}"
    return "".join(found)


def conflicts_by_git(folder: Path, base: str, ours: str, theirs: str, style: tuple[str, ...] = ("--diff3",)) -> int:
    git = shutil.which("git")
    assert git is not None, "this test compares with git: install it"
    for name, text in (("ours", ours), ("base", base), ("theirs", theirs)):
        (folder / name).write_text(text, encoding="utf-8")
    command = [git, "merge-file", "-p", *style, "ours", "base", "theirs"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode
