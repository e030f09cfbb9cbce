"""D033: a plugin that names a class that is not there."""

import pytest

PLATFORM, IO = "vllm.platform_plugins", "vllm.io_processor_plugins"


@pytest.fixture
def found(site):
    """Lay a plugin out that returns something, and say what the rule finds."""

    def findings(returns, group=PLATFORM):
        text = f"def register():\n    {returns}\n\nclass Device: ...\n"
        text += 'DEVICE = "graft_doctor_path.Device"\nDEVISE = "graft_doctor_path.Devise"\nloop = loop\n'
        site.package("mine", {group: {"mine": "graft_doctor_path:register"}}, {"graft_doctor_path": text})
        return site.found("D033")

    return findings


@pytest.mark.parametrize(
    "returns",
    [
        'return "graft_doctor_path.Device"',
        "return None",
        "return compute()",
        'return "vllm.platforms.cpu.CpuPlatform"',
    ],
)
def test_classes_that_are_there_and_what_is_computed(found, site, returns):
    import sys

    site.path += sys.path
    assert found(returns) == []


@pytest.mark.parametrize(
    ("path", "lacking"),
    [
        ("graft_doctor_path.Devise", "binds no 'Devise' (did you mean 'Device'?)"),
        ("graft_doctor_absent.Device", "there is no module 'graft_doctor_absent'"),
        ("Device", "that is not a dotted path"),
    ],
)
def test_a_path_to_nothing(found, path, lacking):
    (finding,) = found(f'return "{path}"')
    assert finding.level == "error"
    assert lacking in finding.what
    assert "vLLM stops in the middle of its import" in finding.what


@pytest.mark.parametrize(
    ("returns", "level"),
    [
        ('return "graft_doctor_path.Devise" if DEVICE else None', "warning"),
        ('return None if DEVICE else "graft_doctor_path.Devise"', "warning"),
        ('return DEVICE or "graft_doctor_path.Devise"', "warning"),
        ("return DEVISE", "error"),
        ('path = "graft_doctor_path.Devise"\n    return path', "error"),
        ('return __name__ + ".Devise"', "error"),
        ('return f"{__name__}.Devise"', "error"),
    ],
)
def test_a_path_that_is_put_together_or_has_a_name(found, returns, level):
    (finding,) = found(returns)
    assert (finding.level, "binds no 'Devise' (did you mean 'Device'?)" in finding.what) == (level, True)


@pytest.mark.parametrize(
    "returns",
    [
        "return DEVICE",
        'return f"{__name__}.Device"',
        'return "graft_doctor_path.Device" if DEVICE else None',
        'path = "graft_doctor_path.Devise"\n    path = "graft_doctor_path.Device"\n    return path',
        'for path in ("graft_doctor_path.Devise",): pass\n    return path',
        'return "graft_doctor_path.%s" % DEVISE',
        'return f"{compute()}.Devise"',
        "return loop",
    ],
)
def test_a_path_that_is_right_or_cannot_be_told(found, returns):
    assert found(returns) == []


def test_a_path_that_depends_and_a_processor_that_is_not_used_are_warnings(found):
    (finding,) = found('if 1: return "graft_doctor_absent.Device"')
    assert finding.level == "warning"
    (finding,) = found('return "graft_doctor_absent.Device"', IO)
    assert (finding.level, "a server that uses it stops" in finding.what) == ("warning", True)


@pytest.mark.parametrize(
    "text",
    [
        "from graft_doctor_paths import WRONG\ndef register():\n    return WRONG\n",
        "import graft_doctor_paths as paths\ndef register():\n    return paths.wrong()\n",
        "def path():\n    return 'graft_doctor_paths.Devise'\ndef register():\n    return path()\n",
        "class Device: ...\ndef register():\n    return Device\n",
        "from graft_doctor_paths import Device\ndef register():\n    return Device\n",
    ],
)
def test_a_path_from_elsewhere_and_a_class_in_its_place(site, text):
    paths = "class Device: ...\nWRONG = 'graft_doctor_paths.Devise'\ndef wrong():\n    return WRONG\n"
    site.package("mine", {PLATFORM: {"mine": "graft_doctor_path:register"}},
                 {"graft_doctor_path": text, "graft_doctor_paths": paths})  # fmt: skip
    (finding,) = site.found("D033")
    assert finding.level == "error"
    right = text.replace("Devise", "Device").replace("return Device\n", "return 'graft_doctor_paths.Device'\n")
    site.package("mine", {PLATFORM: {"mine": "graft_doctor_path:register"}},
                 {"graft_doctor_path": right, "graft_doctor_paths": paths.replace("Devise", "Device")})  # fmt: skip
    assert site.found("D033") == []


@pytest.mark.parametrize(
    ("path", "level", "said"),
    [
        ("graft_doctor_path.Device", "error", "vLLM raises a ValueError: every process stops"),
        ("graft_doctor_path:Devise", "warning", "binds no 'Devise' (did you mean 'Device'?); a server of that model"),
        ("graft_doctor_absent:Device", "warning", "there is no module 'graft_doctor_absent'"),
        ("graft_doctor_path:Device", None, ""),
    ],
)
def test_a_model_that_a_general_plugin_registers(found, path, level, said):
    call = f"from vllm import ModelRegistry\n    ModelRegistry.register_model('Arch', '{path}')"
    findings = found(call, "vllm.general_plugins")
    assert [one.level for one in findings] == ([level] if level else [])
    assert all(said in one.what for one in findings)
    tested = call.replace("    ModelRegistry", "    if ask():\n        ModelRegistry")
    assert [one.level for one in found(tested, "vllm.general_plugins")] == (["warning"] if level else [])
