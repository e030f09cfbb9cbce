"""Which code provides for the absence of a name."""

import pytest

GUARDED = [
    "try:\n    Class.f = g\nexcept ImportError: ...",
    "try:\n    Class.f = g\nexcept (KeyError, AttributeError) as e:\n    log(e)",
    "try:\n    Class.f = g\nexcept Exception: ...",
    "try:\n    Class.f = g\nexcept:\n    ...",
    "try: ...\nexcept ModuleNotFoundError:\n    Class.f = g",
    "try: ...\nexcept ImportError: ...\nelse:\n    Class.f = g",
    "import contextlib\nwith contextlib.suppress(AttributeError):\n    Class.f = g",
    "if hasattr(Class, 'f'):\n    Class.f = g",
    "if not hasattr(Class, 'f'): ...\nelse:\n    Class.f = g",
    "if getattr(Class, 'f', None) is not None:\n    Class.f = g",
    "from importlib.util import find_spec\nif find_spec('vllm.a'):\n    Class.f = g",
    "if vllm.__version__ == '0.32.0':\n    Class.f = g",
    "if vllm_version_is('0.32.0'):\n    Class.f = g",
    "if VLLM_VERSION >= (0, 32):\n    def go():\n        Class.f = g",
    "def go():\n    if not hasattr(Class, 'f'):\n        return\n    Class.f = g",
    "for x in y:\n    if not hasattr(Class, 'f'):\n        continue\n    Class.f = g",
    "hasattr(Class, 'f') and setattr(Class, 'f', g)",
    "setattr(Class, 'f', g) if hasattr(Class, 'f') else None",
]

BARE = [
    "Class.f = g",
    "try:\n    Class.f = g\nexcept KeyError: ...",
    "try:\n    Class.f = g\nexcept ImportError as e:\n    raise RuntimeError from e",
    "try:\n    Class.f = g\nfinally: ...",
    "try: ...\nexcept ImportError: ...\nfinally:\n    Class.f = g",
    "try:\n    def go():\n        Class.f = g\nexcept ImportError: ...",
    "if enabled:\n    Class.f = g",
    "if VERSION >= (0, 32):\n    Class.f = g",
    "if getattr(config, 'on'):\n    Class.f = g",
    "if hasattr(Class, 'f'):\n    log()\nClass.f = g",
    "def go():\n    if not hasattr(Class, 'f'):\n        raise RuntimeError\n    Class.f = g",
    "import contextlib\nwith contextlib.suppress(KeyError):\n    Class.f = g",
]


@pytest.mark.parametrize(("text", "guarded"), [*((one, True) for one in GUARDED), *((one, False) for one in BARE)])
def test_guards(uses, text, guarded):
    """A try that goes on, a test for the name and a test of the version guard; one that raises again does not."""
    (use,) = [use for use in uses(f"import vllm\nfrom vllm.a import Class\n{text}") if use.changes_vllm]
    assert use.guarded is guarded


def test_an_import_is_guarded_if_it_is_wherever_it_stands(uses):
    """One bare import of a name is enough to need it."""
    both = "try:\n    from vllm.a import x, y\nexcept ImportError: ...\ndef f():\n    from vllm.a import y"
    assert {use.qualname: use.guarded for use in uses(both)} == {"x": True, "y": False}
