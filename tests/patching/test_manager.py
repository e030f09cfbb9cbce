"""The seeds' register of patches and the environment variable that picks from it."""

import logging

import pytest

from vllm_graft.errors import ConfigError, ConflictError, DeclarationError, TargetError
from vllm_graft.patching import PatchManager, VLLMPatch, wrap


class Target:
    def f(self):
        return "f"


class One(VLLMPatch[Target]):
    @wrap
    def f(self, call):
        return call() + "1"


class Two(VLLMPatch[Target]):
    @wrap
    def f(self, call):
        return call() + "2"


class Broken(VLLMPatch[Target]):
    @wrap
    def gone(self, call):
        return call()


@pytest.fixture
def manager(engine):
    one = PatchManager(engine)
    one.register("One", One)
    one.register("Two", Two)
    return one


def test_applying_by_name(manager):
    assert manager.apply_patch("One") is True
    assert manager.apply_patch("One") is True
    assert Target().f() == "f1"
    assert manager.applied_patches == ["One"]
    assert (manager.is_applied("One"), manager.is_applied("Two"), manager.is_applied("Three")) == (True, False, False)
    assert manager.available_patches == {"One": One, "Two": Two}


@pytest.mark.parametrize(
    ("value", "result"),
    [(None, "f"), ("", "f"), (" Two , One,", "f21"), ("*", "f12"), ("One,*", "f12"), ("One,One", "f1")],
)
def test_from_the_environment(manager, monkeypatch, caplog, value, result):
    """Commas and whitespace separate; ``*`` is every registered patch; one line says what is active."""
    monkeypatch.delenv("VLLM_CUSTOM_PATCHES", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_CUSTOM_PATCHES", value)
    with caplog.at_level(logging.INFO):
        manager.apply_from_env()
    assert Target().f() == result
    (line,) = caplog.messages
    assert line == f"patches active: {', '.join(manager.applied_patches) or 'none'}"


def test_nothing_is_thrown_away(manager, caplog):
    """An unknown name and a patch that fails are logged and raised."""
    manager.register("Broken", Broken)
    with pytest.raises(ConfigError, match=r"VLLM_CUSTOM_PATCHES: there is no patch 'Tow' \(did you mean 'Two'\?\)"):
        manager.apply_patch("Tow")
    with pytest.raises(TargetError, match=r"no 'gone' to wrap"):
        manager.apply_patch("Broken")
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert manager.applied_patches == []


def test_every_name_that_fails_is_said(manager, monkeypatch):
    """And the patches of the other names are applied."""
    manager.register("Broken", Broken)
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "Broken,Two,Tow")
    with pytest.raises(TargetError, match=r"no 'gone' to wrap.*Also VLLM_CUSTOM_PATCHES: there is no patch 'Tow'"):
        manager.apply_from_env()
    assert manager.applied_patches == ["Two"]


def test_not_strict(manager, caplog):
    """On request the errors are logged only, and the return value says so."""
    manager.strict = False
    manager.register("Broken", Broken)
    assert [manager.apply_patch(name) for name in ("Tow", "Broken", "Two")] == [False, False, True]
    assert len(caplog.records) == 2


def test_registering(manager):
    """The same patch may come again; another under the same name, or no patch at all, is refused."""
    manager.register("One", One)
    with pytest.raises(ConflictError, match=r"name 'One' stands for .*One already"):
        manager.register("One", Two)
    with pytest.raises(DeclarationError, match=r"not a declared patch"):
        manager.register("Three", Target)


def test_the_default_engine_is_used(fresh_default):
    manager = PatchManager()
    manager.register("One", One)
    manager.apply_patch("One")
    assert fresh_default.is_active(One)
    One.revert()
    assert not manager.is_applied("One")
    assert manager.applied_patches == []


def test_is_applied_on_the_class(fresh_default):
    """By the name in its declaration, whoever applied it."""

    class Own:
        def f(self): ...

    class Named(VLLMPatch[Own], name="named"):
        def f(self): ...

    assert not PatchManager.is_applied("named")
    Named.apply()
    assert PatchManager.is_applied("named")
    Named.revert()
    assert not PatchManager.is_applied("named")


@pytest.mark.parametrize(("variables", "level"), [({}, "DEBUG"), ({"VLLM_PLUGINS": "other"}, "WARNING")])
def test_while_vllm_loads_plugins_names_of_others_are_left_alone(manager, monkeypatch, caplog, variables, level):
    """Another plugin may register them yet; elsewhere they are an error. Where no start looks again, they are said."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "One,Theirs")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"there is no patch 'Theirs'"):
        manager.apply_from_env()
    caplog.clear()
    scope = {"__name__": "vllm.plugins", "register": manager.apply_from_env}
    exec("def load_general_plugins():\n    register()", scope)
    with caplog.at_level(logging.DEBUG, logger="vllm.graft"):
        scope["load_general_plugins"]()
    assert manager.applied_patches == ["One"]
    (record,) = [record for record in caplog.records if "Theirs" in record.getMessage()]
    assert (record.levelname, "left to other packages: Theirs" in record.getMessage()) == (level, True)
