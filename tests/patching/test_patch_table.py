"""Functions that other modules copied before they were patched."""

import importlib

from vllm_graft.patching import VLLMPatch, replace, wrap


def patch_of(name):
    class Louder(VLLMPatch[name], name="louder"):
        @wrap
        def speak(call, word):
            return call(word).upper()

    return Louder


SPEAKER = """
def speak(word):
    return word
"""


def test_a_copy_made_before_follows(engine, make):
    """Both under the same name and under another, and back to the very same object."""
    module = make(SPEAKER)
    user = make(f"from {module.__name__} import speak, speak as say\ndef use(): return speak('a') + say('b')")
    before = module.speak
    louder = patch_of(module.__name__)
    engine.apply([louder])
    assert user.use() == "AB"
    assert user.speak is user.say is module.speak
    engine.revert(louder)
    assert user.use() == "ab"
    assert user.speak is user.say is module.speak is before


def test_a_copy_made_after_follows_a_revert(engine, make):
    """A module imported while the patch stands copies the patched function, and must not keep it."""
    module = make(SPEAKER)
    before = module.speak
    louder = patch_of(module.__name__)
    engine.apply([louder])
    user = make(f"from {module.__name__} import speak")
    assert user.speak("a") == "A"
    engine.revert(louder)
    assert user.speak is before


def test_a_replacement_whose_probe_stepped_aside(engine, make):
    """The counting function and the plain one are both known as copies of the original."""
    module = make(SPEAKER)
    before = module.speak
    early = make(f"from {module.__name__} import speak")

    class Other(VLLMPatch[module.__name__], name="other"):
        @replace
        def speak(word):
            return "other"

    engine.apply([Other])
    late = make(f"from {module.__name__} import speak")
    assert (early.speak("a"), module.speak("a"), late.speak("a")) == ("other", "other", "other")
    later = make(f"from {module.__name__} import speak")
    assert later.speak("a") == "other"
    assert engine.report()[0].hits == 1
    engine.revert(Other)
    assert early.speak is late.speak is later.speak is module.speak is before


def test_two_layers_and_the_lower_one_taken_out(engine, make):
    """Copies always hold what stands on the target."""
    module = make(SPEAKER)
    user = make(f"from {module.__name__} import speak")

    class Twice(VLLMPatch[module.__name__], name="twice"):
        @wrap
        def speak(call, word):
            return call(word) * 2

    louder = patch_of(module.__name__)
    engine.apply([louder, Twice])
    assert user.speak("a") == "AA"
    engine.revert(louder)
    assert user.speak("a") == "aa"
    assert user.speak is module.speak


def test_a_copy_taken_in_a_circle(engine, write):
    """A module that is imported by the target's own body copies nothing yet patched, and follows once it is."""
    target = write("import sys\ndef speak(word):\n    return word\nimport importlib; importlib.import_module(OTHER)\n")
    other = write(f"from {target} import speak\n")
    louder = patch_of(target)
    path = importlib.util.find_spec(target).origin
    with open(path) as file:
        text = file.read().replace("OTHER", repr(other))
    with open(path, "w") as file:
        file.write(text)
    engine.apply([louder])
    importlib.import_module(target)
    assert importlib.import_module(other).speak("a") == "A"


def test_what_others_put_there_is_left_alone(engine, make):
    """Only the object itself is a copy; a function of the same name is not."""
    module = make(SPEAKER)
    user = make("def speak(word):\n    return 'mine'")
    engine.apply([patch_of(module.__name__)])
    assert user.speak("a") == "mine"


def test_the_patchs_own_package_keeps_the_original(engine, make):
    """An author who imports the original wants to call it."""
    module = make(SPEAKER)
    globals()["kept"] = module.speak
    try:
        engine.apply([patch_of(module.__name__)])
        assert kept("a") == "a"  # noqa: F821 - made above
    finally:
        del globals()["kept"]
