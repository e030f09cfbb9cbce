"""D032: a plugin that refuses a second call."""

import pytest

REFUSES = """
_done = False
def register():
    global _done
    if _done:
        raise RuntimeError("twice")
    _done = True
"""


@pytest.fixture
def found(site):
    """Lay a plugin out and say what the rule finds."""

    def findings(text, group="vllm.general_plugins"):
        site.package("mine", {group: {"mine": "graft_doctor_twice:register"}}, {"graft_doctor_twice": text})
        return site.found("D032")

    return findings


def flag(before, test, sets):
    body = f"    global _done\n    if {test}:\n        print()\n        raise E\n    {sets}\n"
    return f"import os\n{before}\ndef register():\n{body}"


FLAGS = [
    flag("_done = False", "_done is True", "_done = True"),
    flag("_done: bool = False", "_done", "_done = True"),
    flag("_done = None", "_done is not None", "_done = object()"),
    flag("_fresh = True", "not _fresh", "_fresh = False").replace("global _done", "global _fresh"),
    flag("_done = 0", "_done > 0", "_done += 1"),
    flag("_done = 0", "_done", "_done = _done or 1\n    _done = 1"),
    flag("_state = {'done': False}", "_state['done']", "_state['done'] = True"),
    flag("_state = {}", "'mine' in _state", "_state['mine'] = 1"),
    flag("_seen = []", "_seen", "_seen.append(1)"),
    flag("_seen = set()", "'mine' in _seen", "_seen.add('mine')"),
    flag("_seen = []", "len(_seen) > 0", "_seen.append(os)"),
    flag("class Flag: done = False\nFlag.done = False", "Flag.done", "Flag.done = True"),
    flag("", "getattr(register, 'done', False)", "register.done = True"),
    flag("", "hasattr(register, 'done')", "register.done = True"),
    flag("", "os.environ.get('MINE')", "os.environ['MINE'] = '1'"),
    flag("", "os.getenv('MINE', '') == '1'", "os.environ['MINE'] = '1'"),
    flag("", "'MINE' in os.environ", "os.environ['MINE'] = '1'"),
    "seen = {}\ndef put(key, value):\n    if key in seen: raise E\n    seen[key] = value\n"
    "def register():\n    put('a', 1)\n",
    # An argument that has the name of the parameter.
    "seen = {}\ndef put(name):\n    if name in seen: raise E\n    seen[name] = 1\n"
    "def register():\n    name = 'a'\n    put(name)\n",
    flag("class Flag: ...", "hasattr(Flag, 'done')", "Flag.done = True"),
    "done = False\ndef fail(): raise E\ndef register():\n    global done\n    if done: fail()\n    done = True\n",
    "done = False\ndef register():\n    global done\n    try:\n        if done: raise E\n"
    "    finally:\n        print()\n    done = True\n",
    flag("_done = False", "_done and True", "_done = True").replace("    if ", "    with open('x') as f:\n      if "),
]


@pytest.mark.parametrize("text", FLAGS)
def test_other_flags_that_raise(found, text):
    (finding,) = found(text)
    assert "raises when it is called a second time" in finding.what


@pytest.mark.parametrize(
    "text",
    [
        *(text.replace("raise E", "return") for text in FLAGS),
        flag("_done = False", "_done and os.environ.get('STRICT')", "_done = True"),
        flag("_done = False", "_done", "_done = os.environ.get('X')"),
        flag("_seen = []", "_seen", "_seen.append(1)\n    _seen.clear()"),
        flag("_seen = []", "'mine' in _seen", "_seen.append(os.name)"),
        flag("_done = False", "_done", "_done = True").replace("global _done\n", "global _done\n    _done = False\n"),
        flag("_done = False", "_done", "_done = True\n    reset(locals())\n    _done = bool(os.name)"),
        flag("_done = False", "_done", "if os.environ: return\n    _done = True"),
        "@once\n" + flag("_done = False", "_done", "_done = True").partition("def ")[1],
    ],
)
def test_flags_that_raise_nothing_for_sure(found, text):
    assert found(text) == []


def test_an_exit_counts_as_raising(found):
    assert len(found(REFUSES.replace('raise RuntimeError("twice")', "sys.exit(1)"))) == 1


@pytest.mark.parametrize(
    "text", [REFUSES, REFUSES.replace('if _done:\n        raise RuntimeError("twice")', "assert not _done")]
)
def test_a_flag_that_raises(found, text):
    (finding,) = found(text)
    assert (finding.level, finding.subject) == ("warning", "plugin 'mine' of mine")
    assert "raises when it is called a second time" in finding.what
    (finding,) = found(text, "vllm.platform_plugins")
    assert finding.level == "error"


@pytest.mark.parametrize(
    "text",
    [
        REFUSES.replace('raise RuntimeError("twice")', "return"),
        REFUSES.replace("    _done = True\n", "    _done = False\n"),
        REFUSES.replace("    global _done\n", ""),
        "def register(): ...\n",
    ],
)
def test_others_are_let_be(found, text):
    assert found(text) == []


@pytest.mark.parametrize("test", ["not hasattr(M, 'forward')", "getattr(M, 'forward', None) is None"])
@pytest.mark.parametrize(
    "model",
    [
        "class M(Base): ...",
        "class M(metaclass=Meta): ...",
        "@made\nclass M: ...",
        "class M:\n    def forward(self): ...",
        "class M:\n    if True:\n        forward = 1",
        "@made\ndef M(): ...",
    ],
)
def test_an_attribute_that_a_class_may_have_from_elsewhere_is_no_flag(found, model, test):
    """The first call sets a flag, and the second asks for an attribute that the class does have, or may."""
    text = f"{model}\n_done = False\ndef register():\n    global _done\n    if _done:\n"
    text += f"        if {test}:\n            raise E\n    _done = True\n"
    assert found(text) == []
