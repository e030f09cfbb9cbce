"""Functions behind functools.cache and lru_cache: replaced, wrapped, reverted, and still cached."""

import functools
import sys
from pathlib import Path

import pytest

from vllm_graft.errors import TargetError
from vllm_graft.patching import VLLMPatch, replace, wrap
from vllm_graft.testing import zygote

SOURCE = """
    import functools

    @functools.cache
    def single():
        return object()

    @functools.lru_cache(maxsize=2, typed=True)
    def sized(x, y=1):
        return ("upstream", x, y)

    class Platform:
        @functools.lru_cache
        def method(self, x):
            return ("method", x)

        @classmethod
        @functools.lru_cache(maxsize=8)
        def capability(cls, device=0):
            return ("capability", cls.__name__, device)

        @staticmethod
        @functools.cache
        def static(x):
            return ("static", x)

        @functools.cache
        @staticmethod
        def compiled(x):
            return ("compiled", x)

        @property
        @functools.cache
        def prop(self):
            return "prop"

    class Cuda(Platform): ...
"""


def test_a_wrap_goes_beneath_the_cache(engine, make):
    """It runs once for each set of arguments, those that upstream had cached before included."""
    module = make(SOURCE)
    before = module.sized
    assert module.sized(1) == ("upstream", 1, 1)

    class P(VLLMPatch[module], name="p"):
        @wrap
        def sized(call, x, y=1):
            return ("patched", *call(x, y))

    (state,) = engine.apply([P])
    assert "behind functools.cache" in state.reason
    assert "started empty" in state.reason
    assert [module.sized(1), module.sized(1), module.sized(2)] == [("patched", "upstream", n, 1) for n in (1, 1, 2)]
    assert [hook.hits for hook in engine.report()] == [2]
    assert module.sized.cache_info() == functools._CacheInfo(1, 2, 2, 2)
    assert module.sized.cache_parameters() == {"maxsize": 2, "typed": True}
    assert module.sized.__wrapped__(7) == ("patched", "upstream", 7, 1)
    module.sized.cache_clear()
    assert module.sized.cache_info().currsize == 0
    engine.revert(P)
    assert module.sized is before
    assert module.sized.cache_info().hits == 0
    assert module.sized(1) == ("upstream", 1, 1)
    assert module.sized.cache_info().hits == 1


def test_a_replacement_is_cached_too(engine, make):
    """The same object comes back each time, the first call's among them."""
    module = make(SOURCE)
    upstream = module.single()

    class P(VLLMPatch[module], name="p"):
        @replace
        def single():
            return ["ours"]

    engine.apply([P])
    first = module.single()
    assert first == ["ours"]
    assert module.single() is first
    engine.recount()
    assert module.single() is first, "a forked child keeps what its parent cached"
    engine.revert(P)
    assert module.single() is upstream


def test_copies_in_other_modules_follow(engine, make):
    module = make(SOURCE)
    importer = make(f"from {module.__name__} import single, sized as renamed")
    before = vars(importer)["renamed"]

    class P(VLLMPatch[module], name="p"):
        @replace
        def sized(*args, **kwargs):
            return ("ours",)

    class Q(VLLMPatch[module], name="q"):
        def sized(call, *args, **kwargs):
            return (*call(*args, **kwargs), "!")

    engine.apply([P, Q])
    assert importer.renamed is module.sized
    assert importer.renamed(3) == ("ours", "!")
    engine.revert(P)
    assert importer.renamed is module.sized
    assert importer.renamed(3) == ("upstream", 3, 1, "!")
    engine.revert(Q)
    assert importer.renamed is before is module.sized


def test_methods_of_every_form(engine, make):
    """Methods, classmethods, staticmethods on either side of the cache, and properties."""
    module = make(SOURCE)
    kind = module.Platform
    raw = dict(vars(kind))

    class P(VLLMPatch[kind], name="p"):
        def method(self, x):
            return ("patched", *self._original_method(x))

        @classmethod
        def capability(cls, call, device=0):
            return ("patched", *call(device))

        @staticmethod
        def static(call, x):
            return ("patched", *call(x))

        @staticmethod
        @replace
        def compiled(x):
            return ("patched", x)

        @property
        def prop(self):
            return "patched " + self._original_prop

    engine.apply([P])
    one = kind()
    for _ in range(2):
        assert one.method(1) == ("patched", "method", 1)
        assert (one.capability(), kind.capability(0)) == (("patched", "capability", "Platform", 0),) * 2
        assert module.Cuda.capability() == ("patched", "capability", "Cuda", 0)
        assert (one.static(2), kind.static(2)) == (("patched", "static", 2),) * 2
        assert kind.compiled(3) == ("patched", 3)
        assert one.prop == "patched prop"
    assert kind.method.cache_info().hits == 1
    assert kind.compiled.cache_info().hits == 1
    assert kind.capability.cache_info().misses == 3
    engine.revert(P)
    assert {name: value for name, value in vars(kind).items() if name in raw} == raw


def test_a_cache_that_is_inherited(engine, make):
    """One cache serves all subclasses, so it is patched where it is defined."""
    module = make(SOURCE)

    class P(VLLMPatch[module.Cuda], name="p"):
        @wrap
        def method(self, call, x):
            return call(x)

    with pytest.raises(TargetError, match=r"Cuda inherits it.*Next: patch the class that defines it"):
        engine.apply([P])


def test_a_cache_around_no_python_function(engine, make):
    module = make("import functools, math\nroot = functools.cache(math.sqrt)")

    class P(VLLMPatch[module], name="p"):
        @replace
        def root(x): ...

    with pytest.raises(TargetError, match=r"'root' is behind functools.cache, but what it wraps is not a Python"):
        engine.apply([P])


REAL = """
from vllm_graft.patching import Engine, VLLMPatch, wrap

class P(VLLMPatch["vllm.config.vllm"], name="p"):
    @wrap
    def get_cached_compilation_config(call):
        return ["patched", call()]

engine = Engine()
engine.apply([P])
import vllm.config
from vllm.config import VllmConfig, get_cached_compilation_config, set_current_vllm_config

config = VllmConfig()
with set_current_vllm_config(config):
    first = get_cached_compilation_config()
    assert first == ["patched", config.compilation_config] and get_cached_compilation_config() is first
# vLLM clears the cache on its way in and out, through the name of its own module.
assert get_cached_compilation_config.cache_info().currsize == 0
with set_current_vllm_config(config):
    assert get_cached_compilation_config() is not first
print("HITS", engine.report()[0].hits)
engine.revert(P)
assert vllm.config.get_cached_compilation_config is vllm.config.vllm.get_cached_compilation_config
with set_current_vllm_config(config):
    assert vllm.config.get_cached_compilation_config() is config.compilation_config
"""


@pytest.mark.engine
def test_a_cached_function_of_the_installed_vllm(tmp_path: Path):
    """With vLLM's own calls of ``cache_clear``, and the copy that ``vllm.config`` makes."""
    done = zygote.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "HITS 2" in done.stdout
