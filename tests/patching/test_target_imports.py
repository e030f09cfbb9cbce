"""Targets that are not imported yet: armed, and patched the moment their module has run its body."""

import importlib
import itertools
import sys
import threading
import zipfile

import pytest

from vllm_graft.errors import ConflictError, PatchError, TargetError
from vllm_graft.patching import Engine, VLLMPatch, wrap

SOURCE = """
    class Target:
        def f(self): return "f"
    def free(): return "free"
"""


def guard(module, name="guard", mark="!"):
    class Guard(VLLMPatch[f"{module}:Target"], name=name):
        @wrap
        def f(self):
            return self._original_f() + mark

    return Guard


def watching():
    return [finder for finder in sys.meta_path if type(finder).__name__ == "ImportWatch"]


def test_armed_then_imported(engine, write):
    """The importer sees the patched module; before, the report says what is awaited."""
    name = write(SOURCE)
    Guard = guard(name)
    (state,) = engine.apply([Guard])
    assert (state.state, state.kind, state.reason) == ("armed", "wrap", f"until {name} is imported")
    assert engine.is_active(Guard)
    assert name not in sys.modules
    module = importlib.import_module(name)
    assert module.Target().f() == "f!"
    assert [(s.state, s.reason, s.hits) for s in engine.report()] == [("applied", "", 1)]


def test_names_taken_by_the_importer_are_patched(engine, write):
    """``from module import function`` after arming takes the patched function."""
    name = write(SOURCE)
    user = write(f"from {name} import free")

    class P(VLLMPatch[name]):
        def free(call):
            return call() + "!"

    engine.apply([P])
    assert importlib.import_module(user).free() == "free!"


def test_modules_inside_packages(engine, write, tmp_path):
    """The exact name counts: importing the package alone patches nothing and is not disturbed."""
    (tmp_path / "made_up_pkg").mkdir()
    (tmp_path / "made_up_pkg" / "__init__.py").write_text("")
    name = write(SOURCE, inside="made_up_pkg")
    engine.apply([guard(name)])
    importlib.import_module("made_up_pkg")
    assert [s.state for s in engine.report()] == ["armed"]
    assert importlib.import_module(name).Target().f() == "f!"
    sys.modules.pop("made_up_pkg")


def test_loader_and_spec_stay_upstreams(engine, write):
    """Nothing of ours stays on the module: its loader is the ordinary one and gives its source."""
    import inspect

    name = write(SOURCE)
    engine.apply([guard(name)])
    module = importlib.import_module(name)
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(module.__loader__)
    assert "class Target" in inspect.getsource(module)


STEPS = itertools.permutations(["apply a", "apply b", "import", "revert a", "revert b"])
ORDERS = [order for order in STEPS if all(order.index(f"apply {x}") < order.index(f"revert {x}") for x in "ab")]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_applying_importing_and_reverting(engine, write, order):
    """Layers lie in the order of application whenever the import comes; after both reverts upstream is back."""
    name = write(SOURCE)
    patches = {"a": guard(name, "a", "a"), "b": guard(name, "b", "b")}
    active = []
    for step in order:
        act, _, which = step.partition(" ")
        if act == "apply":
            engine.apply([patches[which]])
            active.append(which)
        elif act == "revert":
            engine.revert(patches[which])
            active.remove(which)
        else:
            importlib.import_module(name)
        if name in sys.modules:
            assert sys.modules[name].Target().f() == "f" + "".join(active)
    assert not [attribute for attribute in vars(sys.modules[name].Target) if attribute.startswith("_graft")]
    assert watching() == []


def test_the_finder_is_there_only_while_needed(engine, write):
    one, two = write(SOURCE), write(SOURCE)
    first, second = guard(one, "first"), guard(two, "second")
    engine.apply([first, second])
    assert len(watching()) == 1
    engine.revert(first)
    assert len(watching()) == 1
    engine.revert(second)
    assert watching() == []
    assert importlib.import_module(one).Target().f() == "f"


def test_reload(engine, write):
    """A reloaded module is patched again, once, on its new class and its new functions; revert is exact there too."""
    name = write(SOURCE)

    class Free(VLLMPatch[name], name="free"):
        def free(call):
            return call() + "!"

        def added():
            return "added"

    Guard = guard(name)
    engine.apply([Guard, Free])
    module = importlib.import_module(name)
    old = module.Target
    for _ in range(2):
        module = importlib.reload(module)
        assert module.Target is not old
        assert (module.Target().f(), module.free(), module.added()) == ("f!", "free!", "added")
        assert old().f() == "f"
        assert engine.verify() == []
    engine.revert(Guard)
    engine.revert(Free)
    assert (module.Target().f(), module.free(), hasattr(module, "added")) == ("f", "free", False)


def test_imported_anew(engine, write):
    """A module taken out of sys.modules and imported again is another one, and is patched as well."""
    name = write(SOURCE)
    engine.apply([guard(name)])
    old = importlib.import_module(name)
    del sys.modules[name]
    new = importlib.import_module(name)
    assert new is not old
    assert (new.Target().f(), old.Target().f()) == ("f!", "f")


def test_a_body_that_fails_stays_armed(engine, write):
    name = write("raise ValueError('broken')")
    engine.apply([guard(name)])
    with pytest.raises(ValueError, match=r"broken"):
        importlib.import_module(name)
    assert [s.state for s in engine.report()] == ["armed"]


def test_refused_at_import(write):
    """Strict: the import fails, each time, with the patch's error; the callback and the report have it too."""
    name = write("class Other: ...")
    told, changed = [], []
    engine = Engine(on_refused=lambda patch, error: told.append((patch, str(error))))
    engine.on_change = changed.append
    Guard = guard(name)
    engine.apply([Guard])
    for _ in range(2):
        with pytest.raises(TargetError, match=r"patch 'guard' .* there is no 'Target' in"):
            importlib.import_module(name)
        assert name not in sys.modules
    assert [patch for patch, _ in told] == changed == [Guard, Guard]
    (state,) = engine.report()
    assert (state.state, state.reason) == ("refused", told[0][1])
    assert not engine.is_active(Guard)
    engine.revert(Guard)
    importlib.import_module(name)


def test_refused_at_import_and_not_strict(write):
    """Not strict: the import goes on, the other patches are applied, and the report says what is missing."""
    name = write(SOURCE)
    told = []
    engine = Engine(strict=False, on_refused=lambda patch, error: told.append(patch))

    class Bad(VLLMPatch[f"{name}:Target"], name="bad"):
        @wrap
        def gone(self, call):
            return call()

    engine.apply([Bad, guard(name)])
    assert importlib.import_module(name).Target().f() == "f!"
    assert told == [Bad]
    assert [(s.patch, s.state) for s in engine.report()] == [("bad", "refused"), ("guard", "applied")]
    engine.revert_all()


def test_conflicts_show_at_import(engine, write):
    """Two replacements of one armed target: the second is refused when the module comes."""
    name = write(SOURCE)

    def replacing(letter):
        class P(VLLMPatch[f"{name}:Target"], name=letter):
            def f(self):
                return letter

        return P

    engine.apply([replacing("a"), replacing("b")])
    with pytest.raises(ConflictError, match=r"'b'.*which patch 'a'"):
        importlib.import_module(name)
    assert [s.state for s in engine.report()] == ["applied", "refused"]


def test_a_module_that_is_being_imported(engine, write, monkeypatch):
    """A patch applied from within the module's own body waits until the body has ended."""
    name = write("""
        import made_up_bridge
        made_up_bridge.states.extend(made_up_bridge.apply())
        class Target:
            def f(self): return "f"
    """)
    bridge = type(sys)("made_up_bridge")
    bridge.states = []
    Guard, Again = guard(name), guard(name, "again", "?")
    bridge.apply = lambda: [*engine.apply([Guard]), *engine.apply([Again])]
    monkeypatch.setitem(sys.modules, "made_up_bridge", bridge)
    module = importlib.import_module(name)
    assert [s.state for s in bridge.states] == ["armed", "armed"]
    assert module.Target().f() == "f!?"
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert "_graft_ended" not in vars(module.__spec__)


def test_a_module_that_is_being_imported_and_fails(engine, write, monkeypatch):
    """A refusal at the end of the body fails the import as ever; a failing body leaves the patch armed."""
    bridge = type(sys)("made_up_bridge")
    monkeypatch.setitem(sys.modules, "made_up_bridge", bridge)
    name = write("import made_up_bridge; made_up_bridge.apply()")
    Guard = guard(name)
    bridge.apply = lambda: engine.apply([Guard])
    with pytest.raises(PatchError, match=r"no 'Target'"):
        importlib.import_module(name)
    assert name not in sys.modules
    broken = write("import made_up_bridge; made_up_bridge.apply(); raise ValueError('broken')")
    Other = guard(broken, "other")
    bridge.apply = lambda: engine.apply([Other])
    with pytest.raises(ValueError, match=r"broken"):
        importlib.import_module(broken)
    assert [s.state for s in engine.report()] == ["refused", "armed"]


def test_an_import_in_another_thread(engine, write, monkeypatch):
    """A patch that comes while another thread runs the body is applied when that thread is done."""
    bridge = type(sys)("made_up_bridge")
    bridge.begun, bridge.go_on = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "made_up_bridge", bridge)
    name = write("""
        import made_up_bridge
        made_up_bridge.begun.set()
        made_up_bridge.go_on.wait()
        class Target:
            def f(self): return "f"
    """)
    thread = threading.Thread(target=importlib.import_module, args=(name,))
    thread.start()
    bridge.begun.wait()
    assert [s.state for s in engine.apply([guard(name)])] == ["armed"]
    bridge.go_on.set()
    thread.join()
    assert sys.modules[name].Target().f() == "f!"


def test_two_engines_watch_one_module(engine, write):
    other = Engine()
    name = write(SOURCE)
    engine.apply([guard(name, "a", "a")])
    other.apply([guard(name, "b", "b")])
    assert sorted(importlib.import_module(name).Target().f()) == ["a", "b", "f"]
    module = importlib.reload(sys.modules[name])
    assert sorted(module.Target().f()) == ["a", "b", "f"]
    other.revert_all()


def test_modules_in_a_zip_file(engine, tmp_path, monkeypatch):
    """One loader serves all modules of a zip file; only the watched one is patched."""
    with zipfile.ZipFile(tmp_path / "made.zip", "w") as archive:
        source = "import made_up_zip_b\nclass Target:\n    def f(self): return 'f'\n"
        archive.writestr("made_up_zip_a.py", source)
        archive.writestr("made_up_zip_b.py", "class Target:\n    def f(self): return 'f'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "made.zip"))
    engine.apply([guard("made_up_zip_a")])
    module = importlib.import_module("made_up_zip_a")
    assert (module.Target().f(), module.made_up_zip_b.Target().f()) == ("f!", "f")
    del sys.modules["made_up_zip_a"], sys.modules["made_up_zip_b"]


def test_every_patch_that_an_import_refuses_is_named(engine, write):
    """One that does not fit does not keep the others from being looked at; those that fit are applied."""
    name = write("class A:\n    def f(self, x): return x\nclass B:\n    def g(self): return 1\n")

    class Gone(VLLMPatch[f"{name}:A"], name="gone"):
        @wrap
        def h(self, call):
            return call()

    class Narrow(VLLMPatch[f"{name}:A"], name="narrow"):
        @wrap
        def f(self, call):
            return call()

    class Fits(VLLMPatch[f"{name}:B"], name="fits"):
        @wrap
        def g(self, call):
            return call() + 1

    engine.apply([Gone, Narrow, Fits])
    with pytest.raises(TargetError) as caught:
        importlib.import_module(name)
    text = str(caught.value)
    assert text.index("there is no 'h' to wrap") < text.index(". Next: ") < text.index(". Also patch 'narrow'")
    assert "it has no place for 'x'" in text
    assert [(state.patch, state.state) for state in engine.report()] == [
        ("gone", "refused"), ("narrow", "refused"), ("fits", "applied"),
    ]  # fmt: skip
