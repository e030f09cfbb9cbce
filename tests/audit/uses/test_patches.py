"""Assignments and deletions that change vLLM."""

from textwrap import dedent

import pytest

from vllm_graft.audit.uses import read

SCHEDULE = ("replace", "vllm.a.b:Class.attr")


@pytest.mark.parametrize(
    "text",
    [
        "import vllm.a.b as m\nm.Class.attr = f",
        "import vllm.a.b\nvllm.a.b.Class.attr = f",
        "from vllm.a.b import Class\nClass.attr = f",
        "from vllm.a.b import Class as C\nx = C.attr = f",
        "from vllm.a.b import Class\nx, Class.attr = 1, f",
        "from vllm.a.b import Class\n[Class.attr, *rest] = f",
        "from vllm.a.b import Class\nClass.attr: object = f",
        "from vllm.a.b import Class\nClass.attr += [1]",
        "import vllm.a.b as m\nTarget = m.Class\nTarget.attr = f",
        "import vllm.a.b\nb = vllm.a.b\nb.Class.attr = f",
        "def go():\n    from vllm.a.b import Class\n    Class.attr = f",
        "from importlib import import_module\nm = import_module('vllm.a.b')\nm.Class.attr = f",
        "import importlib\nimportlib.import_module('.b', package='vllm.a').Class.attr = f",
        "import sys\nsys.modules['vllm.a.b'].Class.attr = f",
        "import sys\nsys.modules.get('vllm.a.b').Class.attr = f",
        "import vllm.a.b\n__import__('vllm.a.b').a.b.Class.attr = f",
        "__import__('vllm.a.b', fromlist=['Class']).Class.attr = f",
        "from vllm.a.b import Class\nClass.__dict__['attr'] = f",
        "import vllm.a.b as m\nvars(m.Class)['attr'] = f",
        "from vllm.a.b import Class\nClass.attr.__code__ = f.__code__",
        "from vllm.a.b import Class\nif (C := Class):\n    C.attr = f",
        "import vllm.a.b as m\ngetattr(m, 'Class').attr = f",
        "import vllm.a.b as m\nwith open('x') as n:\n    m.Class.attr = f",
        "NAME = 'vllm.a.' + 'b'\nimport sys\nsys.modules[NAME].Class.attr = f",
        "import wrapt\n@wrapt.when_imported('vllm.a.b')\ndef hook(module):\n    module.Class.attr = f",
    ],
)
def test_ways_to_assign(puts, text):
    """However the class is reached, one use is found, and it has the module that import statements show."""
    assert puts(text) == [SCHEDULE]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import vllm.a.b as m\nm.func = f", "vllm.a.b:func"),
        ("import vllm.a.b as m\nclass Mine(m.Class): ...\nm.Class = Mine", "vllm.a.b:Class"),
        ("import vllm.a.b as m\nm.__dict__['func'] = f", "vllm.a.b:func"),
        ("import sys\nsys.modules['vllm.a'] = other", "vllm.a"),
        ("from vllm.a import b\nb.Class.attr = f", "vllm.a:b.Class.attr"),
        ("from vllm.a import b\nfrom vllm.a.b import Class\nb.Class.attr = f", "vllm.a.b:Class.attr"),
        ("import vllm\nvllm.LLM.generate = f", "vllm:LLM.generate"),
    ],
)
def test_functions_classes_and_modules(puts, text, name):
    """Names in a module and modules themselves are found as well as attributes of classes."""
    assert puts(text) == [("replace", name)]


@pytest.mark.parametrize("text", ["del Class.attr", "delattr(Class, 'attr')", "type.__delattr__(Class, 'attr')"])
def test_deletion(puts, text):
    """A name taken away is a use of its own kind."""
    assert puts(f"from vllm.a.b import Class\n{text}") == [("delete", "vllm.a.b:Class.attr")]


@pytest.mark.parametrize(
    "text",
    [
        "import vllm_ascend.a as m\nm.Class.attr = f",
        "from vllm.a import Class\nclass Class: ...\nClass.attr = f",
        "from vllm.a import Class\ndef go(Class):\n    Class.attr = f",
        "from vllm.a import Class\ndef go():\n    Class.attr = f\n    Class = 1",
        "def one():\n    from vllm.a import Class\ndef two():\n    Class.attr = f",
        "class Box:\n    from vllm.a import Class\n    def go(self):\n        Class.attr = f",
        "from vllm.a import Class\nthing = Class()\nthing.attr = f",
        "from vllm.a import Class\nself.Class = Class",
        "from vllm.a import Class\n[Class.attr for Class in things]",
        "from vllm.a import table\ntable['key'] = f",
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from vllm.a import Class\nClass.attr = f",
    ],
)
def test_what_is_no_change_of_vllm(puts, text):
    """Names of other packages, names bound anew, other scopes, and objects made of a class."""
    assert puts(text) == []


def test_alternatives_are_all_found_and_guarded(uses):
    """A class imported from one place or another is changed at either, and only one of them need be there."""
    found = uses("""
        try:
            from vllm.new import Class
        except ImportError:
            from vllm.old import Class
        Class.attr = f
    """)
    changes = [(use.name, use.guarded) for use in found if use.changes_vllm]
    assert changes == [("vllm.new:Class.attr", True), ("vllm.old:Class.attr", True)]


def test_global_and_nonlocal_names(puts):
    """A function may bind names of the scopes around it."""
    text = """
        Class = Other = None
        def load():
            global Class
            from vllm.a import Class
        def go():
            Other = None
            def inner():
                nonlocal Other
                from vllm.a import Other
            Other.attr = f
            Class.attr = f
    """
    assert ("replace", "vllm.a:Class.attr") in puts(text)


def test_names_re_exported_by_the_package(puts):
    """A module of the package that hands on a class of vLLM is looked through, also where a file does not name vLLM."""
    assert puts(
        "from .compat import Scheduler\nfrom plug import compat\nScheduler.a = f\ncompat.Scheduler.b = f",
        compat="from vllm.x import Scheduler",
    ) == [("replace", "vllm.x:Scheduler.a"), ("replace", "vllm.x:Scheduler.b")]


def test_changing_a_module_of_the_package(puts):
    """The package's own module is not vLLM's, whatever it holds."""
    assert puts("from plug import compat\ncompat.Scheduler = f", compat="from vllm.x import Scheduler") == []


CALLS = [
    ("def put(cls, name, value):\n    setattr(cls, name, value)", "put(Class, 'f', new)"),
    ("def put(value, *, cls, name='f'):\n    setattr(cls, name, value)", "put(new, cls=Class)"),
    ("def put(cls, value):\n    cls.f = value", "put(Class, new)"),
    ("def put(module, value):\n    module.Class.f = value", "put(m, new)"),
]


@pytest.mark.parametrize(("helper", "call"), CALLS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_helper(uses, helper, call, elsewhere):
    """The change stands where the helper is called, whichever file has it."""
    head = "import vllm.a as m\nfrom vllm.a import Class\ndef new(self): ...\n"
    if elsewhere:
        found = uses(f"{head}from .tools import put\n{call}", tools=helper)
    else:
        found = uses(f"{head}{helper}\n{call}")
    (use,) = [use for use in found if use.changes_vllm]
    assert (use.way, use.name, use.body.name, use.file) == ("replace", "vllm.a:Class.f", "new", "plug/main.py")
    assert use.line == 4 + (1 if elsewhere else len(helper.split("\n")))


def test_a_helper_that_wraps(puts):
    """The original that a helper keeps and hands on is seen."""
    text = """
        from vllm.a import Class
        def around(cls, name, make):
            original = getattr(cls, name)
            setattr(cls, name, make(original))
        around(Class, "f", make)
        around(Class, "g", make)
    """
    assert puts(text) == [("wrap", "vllm.a:Class.f"), ("wrap", "vllm.a:Class.g")]


def test_nothing_is_found_twice_or_for_nothing(puts):
    """A helper that changes what is not vLLM's, or nothing, is none."""
    text = """
        from vllm.a import Class
        def put(cls, value):
            cls.f = value
        def look(cls):
            return cls.f
        class Own: ...
        put(Own, 1)
        look(Class)
        put(*things)
    """
    assert puts(text) == []


def test_helpers_that_call_each_other(puts):
    """A circle ends."""
    text = """
        from vllm.a import Class
        def one(cls):
            cls.f = 1
            two(cls)
        def two(cls):
            cls.g = 1
            one(cls)
        one(Class)
    """
    assert sorted(puts(text)) == [("replace", "vllm.a:Class.f"), ("replace", "vllm.a:Class.g")]


def test_a_decorator_of_the_package_that_is_given_the_class(puts):
    text = """
    from vllm.a import C
    def on(cls, name=None):
        def decorate(fn):
            setattr(cls, name or fn.__name__, fn)
            return fn
        return decorate
    @on(C)
    def step(self): ...
    @on(C, "other")
    def mine(self): ...
    """
    assert puts(text) == [("replace", "vllm.a:C.step"), ("replace", "vllm.a:C.other")]


def test_the_names_of_a_class_put_on_another(puts):
    text = """
    from vllm.a import C
    class P:
        target = C
        def step(self): ...
    for name, value in P.__dict__.items():
        if callable(value):
            setattr(P.target, name, value)
    """
    assert ("replace", "vllm.a:C.step") in puts(text)


def test_a_class_that_pkgutil_resolves(puts):
    text = "import pkgutil\npkgutil.resolve_name('vllm.a:C').step = lambda self: None\n"
    assert puts(text) == [("replace", "vllm.a:C.step")]


COPY_HEAD = "import sys\nfrom vllm.v1.request import Request as Original\nclass Mine(Original): ...\n"


@pytest.mark.parametrize(
    "body",
    [
        "if hasattr(module, 'Request') and module.Request == Original:\n        module.Request = Mine",
        "if module.Request is Original:\n        module.Request = Mine",
        "if getattr(module, 'Request', None) is Original:\n        setattr(module, 'Request', Mine)",
    ],
)
def test_a_sweep_over_modules(puts, body):
    """What is put in the place of a copy is put in the place of the name."""
    text = f"{COPY_HEAD}for name, module in sys.modules.items():\n    {body}"
    assert puts(text) == [("replace", "vllm.v1.request:Request")]


@pytest.mark.parametrize(
    "body",
    [
        "if module.Request is Mine:\n        module.Request = Mine",
        "if module.Request is not Original:\n        module.Request = Mine",
        "if module.Request is Original:\n        module.Other = Mine",
        "if module.Request is Original:\n        ...\n    module.Request = Mine",
    ],
)
def test_what_is_no_copy(puts, body):
    """Another thing, another attribute, or no longer behind the comparison."""
    assert puts(f"{COPY_HEAD}for name, module in sys.modules.items():\n    {body}") == []


HEAD = "import vllm.a.b as m\nfrom vllm.a.b import Class\n"


@pytest.mark.parametrize(
    "text",
    [
        "setattr(Class, 'attr', f)",
        "NAME = 'attr'\nsetattr(Class, NAME, f)",
        "type.__setattr__(Class, 'attr', f)",
        "from unittest.mock import patch\nwith patch('vllm.a.b.Class.attr'): ...",
        "from unittest import mock\n@mock.patch('vllm.a.b.Class.attr', new=f)\ndef test(): ...",
        "import unittest.mock\nunittest.mock.patch.object(Class, 'attr', f).start()",
        "from unittest.mock import patch\npatch.multiple('vllm.a.b.Class', attr=f)",
        "def test(mocker):\n    mocker.patch.object(m.Class, 'attr')",
        "def test(monkeypatch):\n    monkeypatch.setattr(Class, 'attr', f)",
        "def test(monkeypatch):\n    monkeypatch.setattr('vllm.a.b.Class.attr', f)",
        "import gorilla\ngorilla.apply(gorilla.Patch(Class, 'attr', f))",
        "import gorilla\n@gorilla.patch(Class)\ndef attr(self): ...",
        "import gorilla\n@gorilla.patch(Class, name='attr')\ndef other(self): ...",
        "import gorilla\n@gorilla.patches(Class)\nclass Mine:\n    def attr(self): ...",
        "import wrapt\ndef w(wrapped, instance, args, kwargs): ...\nwrapt.wrap_function_wrapper(m, 'Class.attr', w)",
    ],
)
def test_one_change(puts, text):
    """Each form gives one use of the attribute."""
    assert puts(HEAD + text) == [("replace", "vllm.a.b:Class.attr")]


@pytest.mark.parametrize(
    "text",
    [
        "for name in ('one', 'two'):\n    setattr(Class, name, f)",
        "NAMES = ['one', 'two']\nfor name in NAMES:\n    setattr(Class, name, f)",
        "for name, value in {'one': f, 'two': g}.items():\n    setattr(Class, name, value)",
        "for name in {'one': f, 'two': g}:\n    setattr(Class, name, f)",
        "for name, value in [('one', f), ('two', g)]:\n    setattr(Class, name, value)",
        "for name, value in zip(('one', 'two'), (f, g)):\n    setattr(Class, name, value)",
        "for end in ('e', 'o'):\n    ...\nfor name in ('one', 'two'):\n    setattr(Class, f'{name}', f)",
    ],
)
def test_loops_over_names(puts, text):
    """A loop over names that are spelled out gives a use for each."""
    assert puts(HEAD + text) == [("replace", "vllm.a.b:Class.one"), ("replace", "vllm.a.b:Class.two")]


def test_loop_over_classes(puts):
    """And so does a loop over the things to be changed."""
    text = "from vllm.a import A, B\nfor cls in (A, B):\n    cls.attr = f"
    assert puts(text) == [("replace", "vllm.a:A.attr"), ("replace", "vllm.a:B.attr")]


def test_each_turn_of_a_loop_has_its_own_value(uses):
    """The function is the one that belongs to the name."""
    found = uses(
        f"{HEAD}def f(self): ...\ndef g(self): ...\nfor n, v in (('f', f), ('g', g)):\n    setattr(Class, n, v)"
    )
    assert [(use.qualname, use.body.name) for use in found if use.changes_vllm] == [("Class.f", "f"), ("Class.g", "g")]


def test_wrapt_around_a_call(puts):
    """A wrapper that calls what it was given wraps; the module may be a string, and deferred."""
    text = """
        import wrapt

        def traced(wrapped, instance, args, kwargs):
            return wrapped(*args, **kwargs)

        wrapt.wrap_function_wrapper("vllm.a.b", "Class.one", traced)
        wrapt.wrap_function_wrapper(module="vllm.a.b?", name="Class.two", wrapper=traced)

        @wrapt.patch_function_wrapper("vllm.a.b", "Class.three")
        def three(func, instance, args, kwargs):
            return func(*args, **kwargs)
    """
    assert puts(text) == [("wrap", f"vllm.a.b:Class.{name}") for name in ("one", "two", "three")]


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("def test(monkeypatch):\n    monkeypatch.setitem(sys.modules, 'vllm.a', fake)", "replace"),
        ("def test(monkeypatch):\n    monkeypatch.delitem(sys.modules, 'vllm.a')", "delete"),
        ("from unittest.mock import patch\npatch.dict('sys.modules', {'vllm.a': fake})", "replace"),
        ("from unittest.mock import patch\npatch.dict(sys.modules, {'vllm.a': fake})", "replace"),
    ],
)
def test_modules_in_tests(puts, text, way):
    """A module put in the place of vLLM's by a test's own means."""
    assert puts(f"import sys\n{text}") == [(way, "vllm.a")]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("vllm.a.b.func", "vllm.a.b:func"),
        ("vllm.a.b._Class.attr", "vllm.a.b:_Class.attr"),
        ("vllm.LLM", "vllm:LLM"),
    ],
)
def test_dotted_names(puts, path, name):
    """A class is told from a module by its capital, and without one the last part is the name."""
    assert puts(f"from unittest.mock import patch\npatch({path!r})") == [("replace", name)]


@pytest.mark.parametrize(
    "text",
    [
        "setattr(self, 'attr', f)",
        "setattr(Class(), 'attr', f)",
        "from unittest.mock import patch\npatch('vllm_ascend.x.Class.attr')",
        "from unittest.mock import patch\npatch('os.path.join')",
        "from functools import partial as patch\npatch('vllm.a.b.Class.attr')",
        "def setattr(*args): ...\nsetattr(Class, 'attr', f)",
        "hasattr(Class, 'attr') or getattr(Class, 'attr')",
    ],
)
def test_what_is_no_change(puts, text):
    """Other objects, other packages, and other functions of the same name."""
    assert puts(HEAD + text) == []


def hooks(found):
    return [(use.way, use.name, use.owner) for use in found if use.changes_vllm]


GUARD = """
    from vllm_graft.patching import VLLMPatch, add, min_vllm_version, replace, wrap

    WHY = "the reason"

    @min_vllm_version("0.27")
    class Guard(
        VLLMPatch["vllm.a.b:Class"], name="guard", vllm="<0.33", why=WHY, upstream="a link", remove_when="it is fixed"
    ):
        '''What it does.'''

        __module__ = "elsewhere"
        limit = 3
        size: int = replace(4)
        noted: int

        @wrap
        def one(self, call): ...

        @replace(vllm=">=0.31")
        def two(self): ...

        @add
        def three(self): ...

        def four(self):
            return self._original_four(size=1)

        def five(self, call): ...

        def six(self): ...

        @classmethod
        @wrap
        def seven(cls, call): ...

        def __init__(self): ...
"""


def test_hooks(uses):
    """Marks tell the way; without one a hook that reaches what is beneath wraps, and any other replaces."""
    ways = {use.qualname.removeprefix("Class."): use.way for use in uses(GUARD) if use.changes_vllm}
    assert ways == {
        "limit": "replace",
        "size": "replace",
        "one": "wrap",
        "two": "replace",
        "three": "add",
        "four": "wrap",
        "five": "wrap",
        "six": "replace",
        "seven": "wrap",
        "__init__": "replace",
    }


def test_what_a_patch_says_of_itself(uses):
    """Its keywords are kept, and a hook's own releases beside those of the patch."""
    found = {use.qualname: use for use in uses(GUARD) if use.changes_vllm}
    said = found["Class.one"].patch
    assert (said.name, said.vllm, said.why) == ("guard", "<0.33,>=0.27", "the reason")
    assert (said.upstream, said.remove_when) == ("a link", "it is fixed")
    two = found["Class.two"].patch
    assert (two.vllm, two.releases, two.marked) == ("<0.33,>=0.27", ">=0.31", True)
    assert {use.owner for use in found.values()} == {"guard"}


def test_the_target_counts_as_the_patch_only(uses):
    """A string in brackets is no import."""
    assert {use.way for use in uses(GUARD)} == {"replace", "wrap", "add"}


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("VLLMPatch['vllm.a']", "vllm.a:f"),
        ("VLLMPatch['vllm.a:Outer.Inner']", "vllm.a:Outer.Inner.f"),
        ("VLLMPatch[Class]", "vllm.a:Class.f"),
        ("VLLMPatch[m.Class]", "vllm.a:Class.f"),
        ("VLLMPatch[m]", "vllm.a:f"),
        ("ArcticPatch[Class]", "vllm.a:Class.f"),
        ("patching.SomePatch[Class]", "vllm.a:Class.f"),
    ],
)
def test_targets(uses, base, name):
    """A string, a class or a module, in any base whose name ends in Patch."""
    found = uses(f"import vllm.a as m\nfrom vllm.a import Class\nclass P({base}):\n    def f(self): ...")
    assert hooks(found) == [("replace", name, "P")]


@pytest.mark.parametrize("base", ["VLLMPatch['os.path']", "VLLMPatch[Own]", "Other['vllm.a:Class']", "ArcticPatch"])
def test_what_is_no_patch_of_vllm(uses, base):
    """Other targets, other bases."""
    assert hooks(uses(f"import vllm\nclass Own: ...\nclass P({base}):\n    def f(self): ...")) == []


def test_originals_kept_in_the_body(uses):
    """The older way: the original is an attribute of the body, which goes to the target like the rest."""
    text = """
        from vllm.a import Class
        class P(ArcticPatch[Class]):
            _orig_f = Class.f
            def f(self):
                return self._orig_f()
            def g(self): ...
    """
    found = uses(text)
    assert hooks(found) == [
        ("replace", "vllm.a:Class._orig_f", "P"),
        ("wrap", "vllm.a:Class.f", "P"),
        ("replace", "vllm.a:Class.g", "P"),
    ]
    assert {use.patch for use in found} == {None}


def test_several_bodies(uses):
    """Each body of a hook is a use, with its releases."""
    text = """
        from vllm_graft.patching import VLLMPatch, replace
        class P(VLLMPatch["vllm.a:Class"]):
            @replace(vllm="<0.30")
            def f(self): ...
            @replace(vllm=">=0.30")
            def f(self): ...
    """
    assert [use.patch.releases for use in uses(text)] == ["<0.30", ">=0.30"]


LOCK = '[guard."vllm.a:Class.f"]\n"0.32.0" = "s:0123456789abcdef b:fedcba9876543210"\n'
PATCH = "class P(VLLMPatch['vllm.a:Class'], name='guard'):\n    def f(self): ...\n    def g(self): ..."


@pytest.mark.parametrize("place", ["patches.lock", "inner/patches.lock"])
def test_reviewed(write, place):
    """The lock beside the patch, or in a folder above it in the package, tells what was reviewed of each hook."""
    folder = write(inner____init__="", inner__guard=PATCH)
    (folder / "inner/__init__.py").touch()
    (folder / place).write_text(LOCK)
    f, g = read(folder).uses
    assert f.patch.reviewed == {"0.32.0": "s:0123456789abcdef b:fedcba9876543210"}
    assert g.patch.reviewed == {}


def test_reviewed_beside_a_single_file(tmp_path):
    """A module in no package has a lock of its own name."""
    (tmp_path / "guard.py").write_text(PATCH)
    (tmp_path / "guard.patches.lock").write_text(LOCK)
    assert read(tmp_path / "guard.py").uses[0].patch.reviewed


def test_a_broken_lock(write):
    """It is a finding, and the rest is read."""
    folder = write(PATCH)
    (folder / "patches.lock").write_text("no lock")
    reading = read(folder)
    (finding,) = reading.unread
    assert (finding.code, finding.level, len(reading.uses)) == ("P220", "error", 2)
    assert finding.where.endswith("patches.lock")


BODY_HEAD = "import functools\nfrom vllm.a import Class\nimport vllm.a as m\n"

WRAPS = [
    "orig = Class.f\ndef new(self):\n    return orig(self)\nClass.f = new",
    "orig = Class.f\nClass.f = lambda self: orig(self)",
    "_orig = m.func\ndef new():\n    return _orig()\nm.func = new",
    "def go():\n    orig = Class.f\n    def new(self):\n        return orig(self)\n    Class.f = new",
    "def new(self, _orig=Class.f):\n    return _orig(self)\nClass.f = new",
    "def new(self):\n    return self._orig_f()\nClass._orig_f = Class.f\nClass.f = new",
    "saved = {}\nsaved['f'] = Class.f\ndef new(self):\n    return saved['f'](self)\nClass.f = new",
    "orig = getattr(Class, 'f')\ndef new(self):\n    return orig(self)\nClass.f = new",
    "orig = Class.__dict__['f']\ndef new(cls):\n    return orig.__func__(cls)\nClass.f = classmethod(new)",
    "orig = Class.f\ndef new(self):\n    return orig.__get__(self)()\nClass.f = new",
    "orig = Class.f\nasync def new(self):\n    return await to_thread(orig, self)\nClass.f = new",
    "orig = Class.f\n@functools.wraps(orig)\ndef new(self):\n    return orig(self)\nsetattr(Class, 'f', new)",
    "def traced(f):\n    def inner(self):\n        return f(self)\n    return inner\nClass.f = traced(Class.f)",
    "def new(original, self): ...\nClass.f = functools.partialmethod(new, Class.f)",
    "class Mine:\n    _orig = Class.f\n    def f(self):\n        return Mine._orig(self)\nClass.f = Mine.f",
    "for n in ('f',):\n    def new(self, _o=getattr(Class, n)):\n        return _o(self)\n    setattr(Class, n, new)",
    "from vllm.a import func\ndef new():\n    return func()\nm.func = new",
]

REPLACES = [
    "def new(self): ...\nClass.f = new",
    "orig = Class.f\ndef new(self): ...\nClass.f = new",
    "orig = Class.g\ndef new(self):\n    return orig(self)\nClass.f = new",
    "orig = Class.f\n@functools.wraps(orig)\ndef new(self): ...\nClass.f = new",
    "orig = Class.f\ndef new(self):\n    orig = print\n    return orig(self)\nClass.f = new",
    "class Mine(m.Class):\n    def __init__(self):\n        super().__init__()\nm.Class = Mine",
    "Class.f = 3",
    "Class.f = imported_from_nowhere",
]


@pytest.mark.parametrize("text", WRAPS)
def test_a_call_of_what_was_there_wraps(uses, text):
    """However the original was kept, a function that calls it, or hands it on, wraps."""
    found = [use for use in uses(BODY_HEAD + text) if use.changes_vllm and "_orig" not in use.qualname]
    assert [use.way for use in found] == ["wrap"]


@pytest.mark.parametrize("text", REPLACES)
def test_everything_else_replaces(puts, text):
    """Keeping the original, or taking over its name, is no call."""
    assert [way for way, _ in puts(BODY_HEAD + text)] == ["replace"]


def change(found):
    (use,) = [use for use in found if use.changes_vllm]
    return use


def test_the_text_has_the_decorators(uses):
    """The source of a function is its lines, decorators included."""
    text = dedent("""
        from vllm.a import Class
        @first
        @second(1)
        def new(self):
            return 1  # why
        Class.f = new
    """)
    use = change(uses(text))
    assert use.source == "@first\n@second(1)\ndef new(self):\n    return 1  # why\n"
    assert (use.body.name, use.file, use.line) == ("new", "plug/main.py", 7 - 1)


def test_a_lambda(uses):
    """A nameless function is a body too."""
    use = change(uses("from vllm.a import Class\nClass.f = lambda self: 1"))
    assert (use.source, use.body.args.args[0].arg) == ("lambda self: 1", "self")


@pytest.mark.parametrize(
    "text",
    [
        "from .impl import new\nClass.f = new",
        "from plug.impl import new as other\nClass.f = other",
        "from . import impl\nClass.f = impl.new",
        "import plug.impl\nClass.f = plug.impl.new",
        "from .impl import Mine\nClass.f = Mine.new",
        "from .impl import make\nClass.f = make()",
        "from .impl import new\nClass.f = staticmethod(new)",
    ],
)
def test_a_function_of_another_file(uses, text):
    """A function imported from the package itself is found, and its text is that of its file."""
    impl = """
        def new(self):
            return "other file"
        class Mine:
            def new(self):
                return "other file"
        def make():
            def new(self):
                return "other file"
            return new
    """
    use = change(uses(f"from vllm.a import Class\n{text}", impl=impl))
    assert use.body.name == "new"
    assert "other file" in use.source
    assert use.file == "plug/main.py"


def test_a_class_in_the_place_of_a_class(uses):
    """A swapped class has its text and no body."""
    use = change(uses("import vllm.a as m\nclass Mine(m.Class):\n    x = 1\nm.Class = Mine\n"))
    assert (use.way, use.body, use.source) == ("replace", None, "class Mine(m.Class):\n    x = 1\n")


def test_owners(uses):
    """A use belongs to the class or function around it."""
    text = """
        from vllm.a import Class
        Class.a = 1
        def go():
            Class.b = 1
        class Box:
            def method(self):
                Class.c = 1
    """
    assert [use.owner for use in uses(text) if use.changes_vllm] == ["", "go", "Box.method"]
