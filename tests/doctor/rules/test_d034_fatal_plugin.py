"""D034: a general plugin that ends every process."""

import sys

import pytest


@pytest.fixture
def found(site):
    """Lay a general plugin out and say what the rule finds."""

    site.path += sys.path

    def findings(text):
        site.package("mine", {"vllm.general_plugins": {"mine": "graft_doctor_fatal:register"}},
                     {"graft_doctor_fatal": text})  # fmt: skip
        return site.found("D034")

    return findings


@pytest.mark.parametrize(
    "text",
    [
        "import sys\ndef register():\n    sys.exit(1)\n",
        "import os\ndef register():\n    print(1)\n    os._exit(3)\n",
        "def register():\n    raise RuntimeError('no licence')\n",
        "def register():\n    raise SystemExit\n",
        "import sys\nsys.exit('unsupported')\ndef register(): ...\n",
        "import sys\ndef helper():\n    sys.exit(1)\ndef register():\n    helper()\n",
        "import sys\ndef one():\n    print()\n    two()\ndef two():\n    sys.exit(1)\ndef register():\n    x = one()\n",
        "def helper():\n    raise RuntimeError('no licence')\ndef register():\n    helper()\n",
        "import sys\ndef helper():\n    sys.exit(1)\nhelper()\ndef register(): ...\n",
        # Under other names, and in blocks that change nothing.
        "from os import _exit as leave\ndef register():\n    leave(1)\n",
        "import sys as system\ndef register():\n    return system.exit(1)\n",
        "import sys\ndef register():\n    with open('x') as file:\n        sys.exit(1)\n",
        "from some import timed\nimport sys\ndef register():\n    with timed():\n        sys.exit(1)\n",
        "import threading\nlock = threading.Lock()\ndef register():\n    with lock:\n        import nowhere_at_all\n",
        "import os\nfrom some import Error\ndef register():\n"
        "    try:\n        os._exit(1)\n    except Error:\n        pass\n",
        "def register():\n    try:\n        import nowhere_at_all\n    except OSError:\n        pass\n",
        "import sys\ndef register():\n    try:\n        sys.exit(1)\n    finally:\n        print()\n",
        "import sys\ndef register():\n    try:\n        sys.exit(1)\n    except Exception:\n        pass\n",
        "import os\ndef register():\n    try:\n        os._exit(1)\n    except BaseException:\n        pass\n",
        "import sys\ndef register():\n    if sys.argv:\n        sys.exit(1)\n    else:\n        raise RuntimeError\n",
        "import sys\ndef register():\n    if True:\n        sys.exit(1)\n",
        "def register():\n    assert False\n",
        # An import that fails in the function is not caught; in the module it is.
        "def register():\n    import nowhere_at_all\n",
        "def register():\n    from vllm.v1.request import Gone\n",
        # What a patch takes from vLLM first.
        "def register():\n    from vllm.v1.request import Request\n    old = Request.gone\n    Request.gone = old\n",
        "import vllm.v1.request as r\ndef register():\n    r.Request = r.Requests\n",
        "from vllm.v1 import request\ndef register():\n    print(request.gone.name)\n",
        "import sys\ndef register():\n    try:\n        import nowhere_at_all\n"
        "    except ImportError:\n        sys.exit('install it')\n",
    ],
)
def test_what_always_ends_the_process(found, site, text):
    (finding,) = found(text)
    assert (finding.level, finding.subject) == ("error", "plugin 'mine' of mine")
    assert "every process stops" in finding.what
    site.environ["VLLM_PLUGINS"] = "other"
    assert [each.level for each in found(text)] == ["warning"]


@pytest.mark.parametrize(
    "text",
    [
        "def register(): ...\n",
        "import sys\ndef register():\n    if sys.platform == 'win32':\n        sys.exit(1)\n",
        "import sys\ndef register():\n    if sys.argv:\n        return\n    sys.exit(1)\n",
        "import sys\ndef register():\n    try:\n        sys.exit(1)\n    except SystemExit:\n        pass\n",
        "import sys\ndef register():\n    try:\n        raise KeyError\n    except KeyError:\n        pass\n",
        "import contextlib\ndef register():\n    with contextlib.suppress(Exception):\n        raise KeyError\n",
        "import sys\ndef register():\n    if sys.argv:\n        sys.exit(1)\n    else:\n        print()\n",
        "def register():\n    try:\n        import nowhere_at_all\n    except ImportError:\n        return\n",
        "def register():\n    import json, vllm\n    from vllm.v1.request import Request\n",
        "import sys\ndef helper():\n    sys.exit(1)\ndef register(): ...\n",
        "import sys\ndef helper():\n    if sys.argv: return\n    sys.exit(1)\ndef register():\n    helper()\n",
        "import sys\n@lazy\ndef helper():\n    sys.exit(1)\ndef register():\n    helper()\n",
        "import sys\ndef helper():\n    sys.exit(1)\n    yield\ndef register():\n    helper()\n",
        "import sys\ndef helper():\n    sys.exit(1)\ndef register():\n    if sys.argv: helper()\n",
        "def helper():\n    helper()\ndef register():\n    helper()\n",
        # vLLM catches what the import raises.
        "def helper():\n    raise RuntimeError\nhelper()\ndef register(): ...\n",
        "def register():\n    return 1\n    raise RuntimeError\n",
        "import sys\nif __name__ == '__main__':\n    sys.exit(1)\ndef register(): ...\n",
        # What a context manager, or a handler whose names are not those of Python, swallows is not known.
        "from contextlib import suppress as ignoring\ndef register():\n"
        "    with ignoring(ImportError):\n        import nowhere_at_all\n",
        "def register():\n    from contextlib import suppress as ignoring\n"
        "    with ignoring(SystemExit):\n        raise SystemExit\n",
        "import contextlib\ndef register():\n    cm = contextlib.suppress(ImportError)\n"
        "    with cm:\n        import nowhere_at_all\n",
        "import contextlib, sys\ncm = contextlib.suppress(SystemExit)\ndef register():\n"
        "    with cm:\n        sys.exit(1)\n",
        "from some import quiet\ndef register():\n    with quiet():\n        raise KeyError\n",
        "from some import open\ndef register():\n    with open('x'):\n        import nowhere_at_all\n",
        "ERRORS = (ImportError, OSError)\ndef register():\n"
        "    try:\n        import nowhere_at_all\n    except ERRORS:\n        pass\n",
        "from some import ERRORS\nimport sys\ndef register():\n    try:\n        import nowhere_at_all\n"
        "    except (*ERRORS, OSError):\n        pass\n    except ImportError:\n        sys.exit(1)\n",
        # An attribute that is there, that may be set before, or that is only read if it is there.
        "import vllm, vllm.envs as envs\nfrom vllm import platforms, LLM\nfrom vllm.v1.request import RequestStatus\n"
        "def register():\n    print(vllm.LLM, vllm.v1, envs.VLLM_PORT, platforms.current_platform, LLM.__name__)\n"
        "    return RequestStatus.WAITING, RequestStatus.__members__\n",
        "from vllm.v1.request import Request\ndef register():\n    Request.own = 1\n    print(Request.own)\n",
        "from vllm.v1.request import Request\ndef register():\n"
        "    try:\n        Request.gone\n    except AttributeError:\n        pass\n",
        "from vllm.v1.request import Request\ndef register():\n    later = lambda: Request.gone\n"
        "    if hasattr(Request, 'gone'):\n        Request.gone()\n    return hasattr(Request, 'x') and Request.x\n",
        "try:\n    from vllm.v1.request import Request\nexcept ImportError:\n    Request = None\n"
        "def register():\n    print(Request.gone)\n",
        # An exception of the import is caught and logged by vLLM: D010 with --imports.
        "raise ImportError('libfoo')\ndef register(): ...\n",
    ],
)
def test_conditions_are_let_be(found, text):
    assert found(text) == []


@pytest.mark.parametrize(
    "call",
    [
        "from . import ends\ndef register():\n    ends.now()\n",
        "import graft_fatal.ends as e\ndef register():\n    e.now()\n",
    ],
)
def test_a_function_of_another_module(site, call):
    folder = site.folder / "graft_fatal"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "ends.py").write_text("import sys\ndef now():\n    sys.exit(1)\n")
    (folder / "plugin.py").write_text(call)
    site.package("mine", {"vllm.general_plugins": {"mine": "graft_fatal.plugin:register"}}, {})
    assert len(site.found("D034")) == 1
    (folder / "ends.py").write_text("def now(): ...\n")
    assert site.found("D034") == []


@pytest.mark.parametrize("file", ["__init__", "plugin", "below"])
def test_a_module_that_is_imported_with_the_plugin(site, file):
    folder = site.folder / "graft_fatal"
    folder.mkdir()
    texts = {
        "__init__": "",
        "plugin": "from graft_fatal import below\nfrom .below import x\ndef register(): ...\n",
        "below": "x = 1\n",
    }
    texts[file] = "import sys\nsys.exit(1)\n" + texts[file]
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    site.package("mine", {"vllm.general_plugins": {"mine": "graft_fatal.plugin:register"}}, {})
    assert len(site.found("D034")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import sys\ndef register():\n    sys.path.insert(0, 'vendored')\n    import nowhere_at_all\n",
        "import sys, types\ndef register():\n    sys.modules['nowhere_at_all'] = types.ModuleType('nowhere_at_all')\n"
        "    import nowhere_at_all\n",
    ],
)
def test_an_import_after_a_change_of_where_imports_are_found(found, text):
    assert found(text) == []


@pytest.mark.parametrize("file", ["__init__", "boot"])
def test_such_a_change_in_another_module_of_the_package(site, file):
    folder = site.folder / "graft_fatal"
    folder.mkdir()
    texts = {
        "__init__": "",
        "boot": "",
        "plugin": "def register():\n    from . import boot\n    import nowhere_at_all\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    site.package("mine", {"vllm.general_plugins": {"mine": "graft_fatal.plugin:register"}}, {})
    assert len(site.found("D034")) == 1
    (folder / f"{file}.py").write_text("import sys\nsys.path.insert(0, 'vendored')\n")
    assert site.found("D034") == []
