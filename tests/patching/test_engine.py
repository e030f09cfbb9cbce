"""Applying and reverting as a whole, the report, lateness, forks, and the default engine."""

import itertools
import linecache
import os
import sys
from pathlib import Path

import pytest

from vllm_graft.errors import ConflictError, DeclarationError, TargetError
from vllm_graft.patching import Engine, HookState, VLLMPatch, add, default_engine, replace, set_default_engine, wrap
from vllm_graft.patching import engine as engine_module


class Target:
    def f(self):
        return "f"

    def g(self):
        return "g"

    def h(self):
        return "h"


class Good(VLLMPatch[Target], name="good"):
    def f(self):
        return self._original_f() + "!"

    @add
    def extra(self):
        return "extra"


def contents():
    return dict(vars(Target))


def test_a_failing_hook_leaves_everything(engine):
    """If the third hook of the second patch fails, no attribute of any patch is changed."""

    class Bad(VLLMPatch[Target], name="bad"):
        def g(self):
            return "bad"

        @wrap
        def h(self, call):
            return call()

        @replace
        def gone(self): ...

    before = contents()
    with pytest.raises(TargetError, match=r"no 'gone' to replace"):
        engine.apply([Good, Bad])
    assert contents() == before
    states = {(s.patch, s.attribute): (s.state, s.reason) for s in engine.report()}
    assert states["bad", "g"][0] == states["bad", "gone"][0] == "refused"
    assert "there is no 'gone' to replace" in states["bad", "gone"][1]
    assert states["good", "f"] == ("refused", "it was to be applied together with 'bad'")
    engine.apply([Good])
    assert Target().f() == "f!"
    assert [s.state for s in engine.report() if s.patch == "good"] == ["applied", "applied"]


def test_a_target_that_will_not_be_set(engine):
    """An error of Python's own in the midst of changing is undone too, existing layers included."""

    class Meta(type):
        def __setattr__(cls, name, value):
            if name == "third" and "_original" not in name:
                raise TypeError("third is fixed")
            super().__setattr__(name, value)

    class Fixed(metaclass=Meta):
        def first(self):
            return 1

        def second(self):
            return 2

        def third(self):
            return 3

    class Early(VLLMPatch[Fixed]):
        def first(self, call):
            return call() * 10

    class P(VLLMPatch[Fixed]):
        def first(self):
            return self._original_first() + 1

        def second(self):
            return self._original_second() + 1

        def third(self):
            return self._original_third() + 1

    engine.apply([Early])
    before = dict(vars(Fixed))
    with pytest.raises(TargetError, match=r"Fixed.third: Python would not set it: third is fixed"):
        engine.apply([P])
    assert dict(vars(Fixed)) == before
    assert (Fixed().first(), engine.verify()) == (10, [])
    assert [s.state for s in engine.report()] == ["applied", "refused", "refused", "refused"]


def test_revert_is_exact(engine):
    """The same objects are back, and what was not there is gone, private names included."""
    before = contents()
    engine.apply([Good])
    assert contents() != before
    engine.revert(Good)
    after = contents()
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    engine.revert(Good)
    assert {s.state for s in engine.report()} == {"reverted"}


def test_reverting_all_takes_back_what_can_be():
    """One target that a stranger holds does not keep the others patched; the error is raised at the end."""

    class Local:
        def f(self):
            return 1

    class P(VLLMPatch[Local], name="p"):
        def f(self, call):
            return call() + 1

    own = Engine()
    own.apply([Good, P])
    Local.f = lambda self: 0
    with pytest.raises(ConflictError, match=r"Local\.f was set to .* by other code"):
        own.revert_all()
    assert Target().f() == "f"


def test_applying_again_changes_nothing(engine):
    """vLLM calls its plugins more than once; the second time is no second layer."""
    engine.apply([Good, Good])
    placed = contents()
    states = engine.apply([Good])
    assert contents() == placed
    assert [s.state for s in states] == ["applied", "applied"]
    assert Target().f() == "f!"


def test_two_patches_of_one_name(engine):
    class Other(VLLMPatch[Target], name="good"): ...

    with pytest.raises(
        ConflictError, match=r"another patch has the same name: .*Good\. Next: give one of them another"
    ):
        engine.apply([Good, Other])
    engine.apply([Good])
    with pytest.raises(ConflictError, match=r"same name"):
        engine.apply([Other])
    assert Target().f() == "f!"
    assert {s.state for s in engine.report()} == {"applied"}


def test_only_declared_patches(engine):
    with pytest.raises(DeclarationError, match=r"'Target' is not a declared patch"):
        engine.apply([Target])
    with pytest.raises(DeclarationError):
        engine.revert(Target)


def test_an_empty_patch(engine):
    """The seeds show a patch without a body; it is applied and does nothing."""

    class Nothing(VLLMPatch[Target]):
        pass

    engine.apply([Nothing])
    assert engine.is_active(Nothing)
    engine.revert(Nothing)
    assert not engine.is_active(Nothing)


def test_the_report(engine):
    """One row per hook, in the order of application."""
    target = f"{__name__}:Target"
    assert engine.apply([Good]) == engine.report()
    Target().f()
    assert engine.report() == [
        HookState("good", target, "f", "wrap", "applied", "", 1, 0, "unlocked"),
        HookState("good", target, "extra", "add", "applied", "", 0, 1),
    ]
    assert engine.active() == [Good]


def test_verify_notices_an_exchanged_class(engine, make):
    module = make("class A:\n    def f(self): return 1")

    class P(VLLMPatch[f"{module.__name__}:A"], name="p"):
        def f(self):
            return 2

    engine.apply([P])
    module.A = type("A", (), {})
    assert ["replaced by another object" in str(error) for error in engine.verify()] == [True]


def test_late(engine, make):
    """A function that runs when it is patched is reported as late, with the frame; it is patched all the same."""
    module = make("""
        class Core:
            def __init__(self, apply):
                self.apply = apply
                apply()
            def step(self): return 1
        class Other(Core): ...
        def run(apply): return apply()
    """)

    class P(VLLMPatch[module.Core], name="p"):
        @wrap
        def __init__(self, call, *args, **kwargs):
            call(*args, **kwargs)
            self.seen = True

        @wrap
        def step(self, call):
            return call() + 1

    class Q(VLLMPatch[module], name="q"):
        @wrap
        def run(call, apply):
            return call(apply)

    first = module.Core(lambda: engine.apply([P]))
    late, fine = engine.report()
    assert (late.state, fine.state) == ("late", "applied")
    assert late.reason.startswith(f"Core.__init__ was running when it was patched ({module.__file__}:5)")
    assert not hasattr(first, "seen")
    assert module.Core(lambda: None).seen
    assert first.step() == 2
    module.run(lambda: engine.apply([Q]))
    assert [s.state for s in engine.report() if s.patch == "q"] == ["late"]


def test_late_is_about_the_target_itself(engine, make):
    """A base's function that runs for a sibling does not make a patch of this class late."""
    module = make("""
        class Base:
            def start(self, apply): return apply()
        class A(Base): ...
        class B(Base): ...
    """)

    class P(VLLMPatch[module.A], name="p"):
        @wrap
        def start(self, call, apply):
            return call(apply)

    class Q(VLLMPatch[module.B], name="q"):
        @wrap
        def start(self, call, apply):
            return call(apply)

    module.B().start(lambda: engine.apply([P]))
    module.B().start(lambda: engine.apply([Q]))
    assert [s.state for s in engine.report()] == ["applied", "late"]


def test_layers_of_other_patches_are_not_taken_for_the_target(engine):
    """The functions that stand around upstream's share their code; only what runs for this attribute counts."""

    class Outer(VLLMPatch[Target], name="outer"):
        def g(self, call):
            engine.apply([Good])
            return call()

    engine.apply([Outer])
    Target().g()
    assert [s.state for s in engine.report() if s.patch == "good"] == ["applied", "applied"]


def test_a_forked_child_has_the_patches_and_counts_for_itself(engine):
    """The child runs patched code, can revert it for itself, and proves replacements anew after recount()."""
    engine.apply([Good])
    Target().extra()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            engine.counter.cells = [0] * len(engine.counter.cells)
            engine.recount()
            said = [Target().f(), Target().extra(), Target().extra(), str([s.hits for s in engine.report()])]
            engine.revert(Good)
            said.append(Target().f())
            os.write(writing, "|".join(said).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 1000).decode() == "f!|extra|extra|[1, 1]|f"
    os.close(reading)
    os.close(writing)
    assert Target().f() == "f!"


@pytest.mark.process
def test_a_lock_held_at_a_fork_does_not_hang_the_child(engine):
    """Another thread may be changing targets when the process forks; the child has a lock of its own."""
    import threading

    from vllm_graft.patching.patched_attribute import change_lock

    held, done = threading.Event(), threading.Event()

    def hold():
        with change_lock():
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        try:
            engine.apply([Good])
            os._exit(0 if Target().f() == "f!" else 1)
        finally:
            os._exit(2)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_default_engine(fresh_default):
    """``MyPatch.apply()`` and ``revert()`` go through one engine per process."""
    Good.apply()
    Good.apply()
    assert default_engine() is fresh_default
    assert Target().f() == "f!"
    with pytest.raises(ConflictError, match=r"default engine holds patch 'good'.*before the first patch is applied"):
        set_default_engine(Engine())
    Good.revert()
    assert Target().f() == "f"
    other = Engine()
    set_default_engine(other)
    assert default_engine() is other


def test_the_seeds_example(fresh_default, make, installed):
    """A method without a mark is added to the class, under a minimum version, and works on it."""
    from vllm_graft.patching import min_vllm_version

    installed("0.32.0")
    module = make("""
        from types import SimpleNamespace as Group
        class Scheduler:
            def _schedule(self):
                groups = [Group(name="a"), Group(name="b", priority=3), Group(name="c", priority=1)]
                return Group(scheduled_seq_groups=groups)
    """)

    @min_vllm_version("0.9.1")
    class PrioritySchedulerPatch(VLLMPatch[module.Scheduler]):
        """Adds priority-based scheduling."""

        def schedule_with_priority(self):
            output = self._schedule()
            if hasattr(output, "scheduled_seq_groups"):
                output.scheduled_seq_groups.sort(key=lambda seq: getattr(seq, "priority", 0), reverse=True)
            return output

    PrioritySchedulerPatch.apply()
    groups = module.Scheduler().schedule_with_priority().scheduled_seq_groups
    assert [group.name for group in groups] == ["b", "c", "a"]
    assert [(s.kind, s.state, s.hits) for s in fresh_default.report()] == [("add", "applied", 1)]


def test_no_engine_leaves_a_finder_behind(engine):
    engine.apply([Good])
    engine.revert(Good)
    assert not any(type(finder).__name__ == "ImportWatch" for finder in sys.meta_path)


INTERRUPTED = """
    class First:
        def one(self): return "one"
        def two(self): return "two"

    class Second:
        def three(self): return "three"

    def free(): return "free"
"""


def _interrupt_at(step, act):
    """Raise KeyboardInterrupt at that line of the patching room, once; whether ``act`` came so far."""
    room = str(Path(engine_module.__file__).parent)
    left = step
    raised = False

    def watch(frame, event, arg):
        nonlocal left, raised
        # The search through all modules changes nothing, and has a hundred thousand lines.
        if raised or frame.f_code.co_name == "_find_copies" or not frame.f_code.co_filename.startswith(room):
            return None
        # A ``with`` is traced once more before it calls ``__exit__``, where no signal is ever delivered: an exception
        # there would leave the lock held, and later tests with threads would wait for it.
        statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not statement.startswith("with "):
            left -= 1
            if left < 0:
                raised = True
                raise KeyboardInterrupt
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        act()
    except KeyboardInterrupt:
        if not raised:
            raise
    finally:
        sys.settrace(before)
    return raised


def _everything_on(made, copied):
    """What the names of the made-up module and its copy stand for, raw."""
    owners = (made.First, made.Second, made, copied)
    return [{name: value for name, value in vars(owner).items() if name != "__builtins__"} for owner in owners]


@pytest.mark.slow
def test_an_interruption_leaves_all_or_nothing(make, write):
    """At whatever line of ours KeyboardInterrupt comes, in the middle of an apply or a revert."""
    made = make(INTERRUPTED)
    copied = make(f"from {made.__name__} import free")
    later = write("def waits(): return 'waits'")

    class OnFirst(VLLMPatch[made.First], name="on-first"):
        def one(self):
            return "patched " + self._original_one()

        @replace
        def two(self):
            return "patched two"

    class OnSecond(VLLMPatch[made.Second], name="on-second"):
        @wrap
        def three(self, call):
            return "patched " + call()

    class OnModule(VLLMPatch[made], name="on-module"):
        @wrap
        def free(call):
            return "patched " + call()

    class Waiting(VLLMPatch[later], name="waiting"):
        @wrap
        def waits(call):
            return "patched " + call()

    patches = [OnFirst, OnSecond, OnModule, Waiting]
    untouched = _everything_on(made, copied)
    finders = list(sys.meta_path)
    interrupted = applied = 0
    # All 2,900 lines take half a minute; a prime stride meets every loop of them at another place.
    for step in itertools.count(0, 17):
        engine = Engine()
        if not _interrupt_at(step, lambda engine=engine: engine.apply(patches)):
            break
        interrupted += 1
        if engine.active():
            assert engine.active() == patches
            applied += 1
        else:
            assert _everything_on(made, copied) == untouched
            assert sys.meta_path == finders
            assert engine.report() == []
            engine.apply(patches)
        assert (made.First().one(), made.First().two(), made.Second().three()) == (
            "patched one", "patched two", "patched three",
        )  # fmt: skip
        assert (made.free(), copied.free()) == ("patched free", "patched free")
        if step % 2 == 0:
            _interrupt_at(step, engine.revert_all)
        engine.revert_all()
        assert _everything_on(made, copied) == untouched
        assert sys.meta_path == finders
    assert interrupted > 100
    assert applied < interrupted / 2
    engine.revert_all()
    assert _everything_on(made, copied) == untouched
