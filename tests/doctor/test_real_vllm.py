"""What the rules claim, held against the real vLLM: it does so, and the doctor says so; mended, neither does.

vLLM's own loaders run in a child that has imported it, on distributions that are laid out. Where a device, Triton, the
Rust front end or CUDA would be needed and is not there, the docstring says what stands in for it.
"""

from __future__ import annotations

import shutil
import sys

import pytest

from vllm_graft.doctor.imports import examine_imports
from vllm_graft.testing.packages import lay_out
from vllm_graft.versions import vllm_version

GENERAL, PLATFORM, ENDPOINT = "vllm.general_plugins", "vllm.platform_plugins", "vllm.endpoint_plugins"
STATS, IO, PROCESSORS = "vllm.stat_logger_plugins", "vllm.io_processor_plugins", "vllm.logits_processors"
RELEASE = tuple(int(part) for part in (vllm_version() or "0").partition("+")[0].split(".")[:2])

SOUND = "def register(): ...\n"
LOAD_GENERAL = "from vllm.plugins import load_general_plugins\nload_general_plugins()\n"
ENDPOINTS = "from vllm.plugins import load_endpoint_plugins\nanswer = len(load_endpoint_plugins(('generate',)))\n"
CHOOSE_PLATFORM = "from vllm import platforms\nanswer = platforms.resolve_current_platform_cls_qualname()\n"
CPU = "vllm.platforms.cpu.CpuPlatform"
V1_PROCESSOR = """
from vllm.v1.sample.logits_processor import LogitsProcessor
class Processor(LogitsProcessor):
    def __init__(self, *given): ...
    def is_argmax_invariant(self): return True
    def apply(self, logits): return logits
    def update_state(self, update): ...
"""
BUILD_PROCESSORS = """
from types import SimpleNamespace
import torch
from vllm.v1.sample.logits_processor import build_logitsprocs
config = SimpleNamespace(speculative_config=SPECULATIVE, scheduler_config=SimpleNamespace(max_num_seqs=4))
built = build_logitsprocs(config, torch.device("cpu"), False, False, NAMED)
answer = sorted(type(each).__name__ for each in built.all)
"""


@pytest.fixture
def lay(site):
    """Lays out a package with one plugin, "mine"."""

    def one(text: str, group: str = GENERAL, target: str = "register") -> None:
        # Compiled files are told apart by second and size, which two texts may share.
        shutil.rmtree(site.folder / "__pycache__", ignore_errors=True)
        site.package("mine-package", {group: {"mine": f"mine_plugin:{target}"}}, {"mine_plugin": text})

    return one


def build(named: list[str] = [], *, speculative: bool = False) -> str:  # noqa: B006
    return BUILD_PROCESSORS.replace("SPECULATIVE", str(speculative or None)).replace("NAMED", repr(named))


class TestTheList:
    def test_d001_a_name_that_nothing_registers_is_not_mentioned(self, beside, lay, site):
        lay(SOUND)
        site.environ["VLLM_PLUGINS"] = "mine,absent"
        loaded = beside.plugins()
        assert (loaded.value, loaded.log) == (["mine"], [])
        assert [finding.subject for finding in site.found("D001")] == ["plugin 'absent'"]

    def test_d002_a_blank_loses_the_plugin_and_the_value_in_the_finding_brings_it_back(self, beside, site):
        site.package("p", {GENERAL: {"good": "p_module:register", "other": "p_module:register"}}, {"p_module": SOUND})
        site.environ["VLLM_PLUGINS"] = "good, other"
        loaded = beside.plugins()
        assert (loaded.value, loaded.log) == (["good"], [])
        (finding,) = site.found("D002")
        assert finding.subject == "plugin 'other'"
        site.environ["VLLM_PLUGINS"] = finding.fix.removeprefix("write VLLM_PLUGINS=")
        assert beside.plugins().value == ["good", "other"]
        assert site.found("D002") == []

    def test_d005_one_name_switches_everything_else_off_without_a_word(self, beside, lay, site):
        lay(SOUND)
        site.path += sys.path
        everything = set(beside.plugins().value)
        assert {"mine", "graft", "lora_filesystem_resolver", "lora_hf_hub_resolver"} <= everything
        site.environ["VLLM_PLUGINS"] = "mine"
        loaded = beside.plugins()
        assert (loaded.value, loaded.log) == (["mine"], [])
        told = " ".join(f"{finding.subject} {finding.what}" for finding in site.found("D005"))
        assert all(name in told for name in everything - {"mine"})

    def test_d006_processors_load_whatever_it_says(self, beside, lay, site):
        lay(V1_PROCESSOR, PROCESSORS, "Processor")
        site.environ["VLLM_PLUGINS"] = ""
        assert "Processor" in beside.vllm(build()).value
        (finding,) = site.found("D006")
        assert "loads it anyway" in finding.what

    def test_d006_endpoints_load_only_where_it_names_them(self, beside, lay, site):
        text = "class Routes:\n    name, required_tasks = 'mine', None\n    def __getattr__(self, name): return print\n"
        lay(text, ENDPOINT, "Routes")
        assert beside.vllm(ENDPOINTS).value == 0
        (finding,) = site.found("D006")
        site.environ["VLLM_PLUGINS"] = finding.fix.removeprefix("set VLLM_PLUGINS=").partition(",")[0]
        assert beside.vllm(ENDPOINTS).value == 1
        assert site.found("D006") == []


class TestMetadata:
    def test_d003_a_stale_copy_hides_the_plugin(self, beside, lay, site, tmp_path):
        lay(SOUND)
        assert "mine" in beside.plugins().value
        stale = tmp_path / "sources" / "mine_package.egg-info"
        stale.mkdir(parents=True)
        (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mine-package\nVersion: 1.0\n")
        site.path.insert(0, str(stale.parent))
        loaded = beside.plugins()
        assert "mine" not in loaded.value
        assert loaded.log == []
        (finding,) = site.found("D003")
        assert "mine of vllm.general_plugins" in finding.what

    @pytest.mark.parametrize("turned", [False, True])
    def test_d004_the_last_of_a_name_is_kept(self, beside, site, tmp_path, turned):
        for name in ("first", "second"):
            entries = {GENERAL: {"same": f"{name}_module:register"}}
            lay_out(tmp_path / name, f"{name}-package", entries, {f"{name}_module": SOUND})
        site.path = [str(tmp_path / name) for name in (("second", "first") if turned else ("first", "second"))]
        kept = beside.vllm(
            f"from vllm.plugins import load_plugins_by_group as load\nanswer = load({GENERAL!r})['same'].__module__"
        )
        assert kept.log == []
        (finding,) = site.found("D004")
        assert f"which is that of {kept.value.removesuffix('_module')}-package" in finding.what

    def test_d007_an_object_that_is_not_there_costs_a_line_in_the_log(self, beside, lay, site):
        lay("def other(): ...\n")
        loaded = beside.plugins()
        assert "mine" not in loaded.value
        assert [line.partition(" (")[0] for line in loaded.log] == ["ERROR Failed to load plugin mine"]
        (finding,) = site.found("D007")
        assert "continues without it" in finding.what
        lay("def other(): ...\n", PROCESSORS, "Processor")
        assert beside.vllm(build()).error.startswith("RuntimeError: Failed to load LogitsProcessor plugin")
        (finding,) = site.found("D007")
        assert "refuses to start" in finding.what

    def test_d011_a_misspelt_group_is_never_asked_for(self, beside, lay, site):
        lay(SOUND, "vllm.general_plugin")
        loaded = beside.plugins()
        assert "mine" not in loaded.value
        assert loaded.log == []
        (finding,) = site.found("D011")
        lay(SOUND, finding.what.partition("did you mean '")[2].partition("'")[0])
        assert "mine" in beside.plugins().value
        assert site.found("D011") == []

    def test_d028_what_a_package_requires_is_not_asked(self, beside, lay, site):
        lay(SOUND)
        with (site.folder / "mine_package-1.0.dist-info" / "METADATA").open("a") as file:
            file.write("Requires-Dist: vllm==0.1\n")
        loaded = beside.plugins()
        assert "mine" in loaded.value
        assert loaded.log == []
        (finding,) = site.found("D028")
        assert "it requires vllm==0.1" in finding.what


class TestImports:
    def test_d008_a_slow_import_is_not_timed(self, beside, lay, site):
        lay(f"import time\ntime.sleep(1.1)\n{SOUND}")
        assert beside.plugins().log == []
        (finding,) = examine_imports(site.environment())
        assert finding.code == "D008"

    def test_d009_a_platform_that_raises_leaves_the_server_on_the_cpu(self, beside, lay, site):
        lay("def register():\n    raise OSError('libacme.so.2')\n", PLATFORM)
        chosen = beside.vllm(CHOOSE_PLATFORM)
        assert (chosen.value, chosen.error) == (CPU, "")
        assert not any("libacme" in line or "ERROR" in line or "WARNING" in line for line in chosen.log)
        (finding,) = examine_imports(site.environment())
        assert (finding.code, finding.level) == ("D009", "error")
        lay("def register():\n    return 'mine_plugin.Platform'\n", PLATFORM)
        assert beside.vllm(CHOOSE_PLATFORM).value == "mine_plugin.Platform"
        assert examine_imports(site.environment()) == []

    def test_d010_an_import_that_raises_is_passed_over_and_one_that_leaves_takes_vllm_along(self, beside, lay, site):
        lay("import there_is_no_such_module\n")
        loaded = beside.plugins()
        assert "mine" not in loaded.value
        assert "there_is_no_such_module" in loaded.log[0]
        (finding,) = examine_imports(site.environment())
        assert finding.code == "D010"
        lay("raise SystemExit(3)\n")
        assert beside.plugins().error == "SystemExit: 3"
        (finding,) = examine_imports(site.environment())
        assert "raises SystemExit: 3" in finding.what

    def test_d029_a_function_that_raises_stops_engine_and_command_line(self, beside, lay, site):
        lay("def register():\n    raise RuntimeError('no licence')\n")
        site.environ["VLLM_PLUGINS"] = "mine"
        parse = "from vllm.engine.arg_utils import AsyncEngineArgs\nAsyncEngineArgs.add_cli_args(None)\n"
        assert beside.vllm(LOAD_GENERAL).error == "RuntimeError: no licence"
        assert beside.vllm(parse).error == "RuntimeError: no licence"
        (finding,) = examine_imports(site.environment())
        assert finding.code == "D029"


IO_PROCESSOR = """
import inspect
from vllm.plugins.io_processors import get_io_processor
given = {"vllm_config": None, "renderer": None, "plugin_from_init": "mine"}
known = inspect.signature(get_io_processor).parameters
get_io_processor(**{name: value for name, value in given.items() if name in known})
"""
PLATFORM_OBJECT = "from vllm.utils.import_utils import resolve_obj_by_qualname\nresolve_obj_by_qualname(answer)\n"


class TestKinds:
    @pytest.mark.parametrize(
        ("group", "text", "code", "error"),
        [
            (GENERAL, "def register(config): ...", LOAD_GENERAL, "TypeError"),
            (
                STATS,
                SOUND,
                "from vllm.v1.metrics import loggers\nloggers.load_stat_logger_plugin_factories()",
                "TypeError",
            ),
            (PROCESSORS, "register = 'text'", build(), "TypeError"),
            (PLATFORM, "class register: ...", CHOOSE_PLATFORM + PLATFORM_OBJECT, "AttributeError"),
            (IO, "class register: ...", IO_PROCESSOR, "AttributeError"),
        ],
    )
    def test_d012_the_wrong_kind_stops_the_start(self, beside, lay, site, group, text, code, error):
        lay(text, group)
        site.environ["VLLM_PLUGINS"] = "mine"
        site.arguments = ["--io-processor-plugin", "mine"]
        assert beside.vllm(code).error.startswith(error)
        (finding,) = site.found("D012")
        assert (finding.level, finding.subject) == ("error", "plugin 'mine' of mine-package")

    def test_d012_or_is_passed_over(self, beside, lay, site):
        site.environ["VLLM_PLUGINS"] = "mine"
        lay("register = 'text'", ENDPOINT)
        served = beside.vllm(ENDPOINTS)
        assert (served.value, served.error) == (0, "")
        assert len(site.found("D012")) == 1
        lay("register = 'text'", PLATFORM)
        assert beside.vllm(CHOOSE_PLATFORM).value == CPU
        assert len(site.found("D012")) == 1
        lay("ran = []\nasync def register():\n    ran.append(1)\n")
        called = beside.vllm(f"{LOAD_GENERAL}import mine_plugin\nanswer = mine_plugin.ran")
        assert (called.value, called.error) == ([], "")
        assert len(site.found("D012")) == 1


BATCH = """
import inspect, torch
from mine_plugin import Processor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

def history(**more):
    made = {
        "max_num_reqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64, "device": torch.device("cpu"),
        "vocab_size": 100, "block_sizes": [16], "kernel_block_sizes": [16], "max_num_blocks_per_req": [4],
        "pin_memory": False, "logitsprocs": LogitsProcessors([Processor()]), **more,
    }
    known = inspect.signature(InputBatch).parameters
    batch = InputBatch(**{name: value for name, value in made.items() if name in known})
    request = CachedRequestState("r", [1, 2], [], SamplingParams(max_tokens=9), None, ([0],), 0, [])
    batch.add_request(request)
    batch.refresh_metadata()
    ready = type("Ready", (), {"synchronize": lambda self: None})()
    for token in (41, 42):
        request.output_token_ids.append(-1)
        batch.prev_req_id_to_index = {"r": 0}
        batch.set_async_sampled_token_ids(torch.tensor([[token]]), ready)
        batch.refresh_metadata()
        batch.update_async_output_token_ids()
    return request.output_token_ids

answer = [history(), history(logitsprocs_need_output_token_ids=True)]
"""


class TestProcessors:
    def test_d013_the_runner_refuses_or_is_chosen_by_what_is_installed(self, beside, lay, site):
        """Triton is not there: the loader of the V2 runner is called by itself, and before 0.31 the list of reasons
        that makes vLLM fall back; the doctor looks at the package alone, as if on a device.
        """
        lay(V1_PROCESSOR, PROCESSORS, "Processor")
        (finding,) = site.found("D013")
        if RELEASE >= (0, 31):
            code = (
                "from vllm.v1.worker.gpu.sample.logits_processor import loader\nloader._load_v2_logitsprocs_plugins()"
            )
            assert "V1-interface plugins are not supported" in beside.vllm(code).error
            assert (finding.level, "refuses to start" in finding.what) == ("error", True)
        else:
            code = (
                "from unittest.mock import MagicMock\nfrom vllm.config import ParallelConfig, VllmConfig\n"
                "config = MagicMock(speculative_config=None, parallel_config=ParallelConfig())\n"
                "config.model_config.logits_processors = None\n"
                "answer = VllmConfig._get_v2_model_runner_unsupported_features(config)"
            )
            assert "custom logits processors" in beside.vllm(code).value
            assert (finding.level, "runs every model on the V1 runner" in finding.what) == ("warning", True)

    def test_d014_an_installed_one_sees_placeholders(self, beside, lay, site):
        """The model runner needs a device: its real batch is played by hand, once as for installed processors and once
        as for those that are named.
        """
        lay(V1_PROCESSOR, PROCESSORS, "Processor")
        installed, named = beside.vllm(BATCH).value
        assert (installed, named) == ([-1, -1], [41, 42])
        site.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        (finding,) = site.found("D014")
        assert "it sees -1" in finding.what
        site.arguments = ["--logits-processors", "mine_plugin:Processor"]
        assert site.found("D014") == []

    def test_d015_speculative_decoding_drops_what_is_installed_and_refuses_what_is_named(self, beside, lay, site):
        lay(V1_PROCESSOR, PROCESSORS, "Processor")
        site.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        assert "Processor" in beside.vllm(build()).value
        assert site.found("D015") == []
        site.arguments = ["--speculative-config", '{"method": "suffix"}']
        dropped = beside.vllm(build(speculative=True))
        assert "Processor" not in dropped.value
        assert not any("mine" in line for line in dropped.log)
        (finding,) = site.found("D015")
        assert "silently does not load it" in finding.what
        assert beside.vllm(build(["mine_plugin:Processor"], speculative=True)).error.startswith("ValueError")
        site.arguments += ["--logits-processors", "mine_plugin:Processor"]
        assert {finding.level for finding in site.found("D015")} == {"error", "warning"}


SCHEDULER_CLASS = """
from unittest.mock import MagicMock
from vllm.config import SchedulerConfig
config = MagicMock(scheduler_cls="mine_scheduler.NAME", async_scheduling=True)
answer = SchedulerConfig.get_scheduler_cls(config).__name__
"""


STEP = """
import torch
logits = torch.zeros(1, 4)
for each in built.all:
    if type(each).__name__ == "Processor":
        each.update_state(None)
        answer = type(each.apply(logits)).__name__
"""
VALIDATE = """
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import cached_load_custom_logitsprocs, validate_logits_processors_parameters
cached_load_custom_logitsprocs.cache_clear()
validate_logits_processors_parameters(None, SamplingParams())
"""
STAT_LOGGER = """
from vllm.v1.metrics.loggers import StatLoggerBase
class Mine(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0): ...
    def record(self, *args, **kwargs): ...
    def log_engine_initialized(self): ...
"""
LOAD_STATS = """
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
answer = [factory(None, 0).__class__.__name__ for factory in load_stat_logger_plugin_factories()]
"""


class TestMistakes:
    """The common mistakes of plugin authors: vLLM fails as the finding says, and is content with what it asks for."""

    @pytest.fixture
    def processor(self, beside, lay, site):
        """Lays out a processor; what vLLM makes of it, and what the doctor says."""
        site.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

        def outcome(text: str) -> tuple[str, list[str]]:
            lay(text, PROCESSORS, "Processor")
            errors = [beside.vllm(build() + STEP).error, beside.vllm(VALIDATE).error]
            return "; ".join(filter(None, errors)), [finding.what for finding in site.found("D030")]

        return outcome

    def test_d030_a_sound_processor_is_built_and_called(self, processor):
        assert processor(V1_PROCESSOR) == ("", [])

    @pytest.mark.parametrize("name", ["is_argmax_invariant", "update_state", "apply", "__init__"])
    def test_d030_a_processor_without_a_method_is_never_made(self, processor, name):
        lines = [line for line in V1_PROCESSOR.splitlines() if f"def {name}(" not in line]
        error, (what,) = processor("\n".join(lines))
        assert error.startswith("TypeError: Can't instantiate abstract class Processor")
        assert name in error
        assert f"does not define {name}" in what

    def test_d030_call_is_not_apply(self, processor):
        error, (what,) = processor(V1_PROCESSOR.replace("def apply", "def __call__"))
        assert "apply" in error
        assert "never __call__" in what

    def test_d030_a_constructor_of_its_own_making(self, processor):
        error, (what,) = processor(V1_PROCESSOR.replace("*given", "name"))
        assert error.startswith("TypeError: Processor.__init__() takes 2 positional arguments but 4 were given")
        assert "__init__ cannot be called with (vllm_config, device, is_pin_memory)" in what

    def test_d030_a_class_that_does_not_derive_fails_requests(self, processor):
        error, (what,) = processor(V1_PROCESSOR.replace("(LogitsProcessor)", ""))
        assert error == "AttributeError: type object 'Processor' has no attribute 'validate_params'"
        assert "every request fails with an AttributeError" in what

    def test_d030_logits_that_are_not_returned_are_none(self, beside, lay, site):
        site.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        lay(V1_PROCESSOR.replace("return logits", "logits.div_(2)"), PROCESSORS, "Processor")
        assert beside.vllm(build() + STEP).value == "NoneType"
        (finding,) = site.found("D030")
        assert "apply returns nothing" in finding.what

    def test_d031_a_stat_logger_is_refused_or_cannot_be_made(self, beside, lay, site):
        lay(STAT_LOGGER, STATS, "Mine")
        assert (beside.vllm(LOAD_STATS).value, site.found("D031")) == (["Mine"], [])
        for text, error in (
            (STAT_LOGGER.replace("(StatLoggerBase)", ""), "must be a subclass of StatLoggerBase"),
            (STAT_LOGGER.replace("def record", "def recorded"), "Can't instantiate abstract class Mine"),
        ):
            lay(text, STATS, "Mine")
            failed = beside.vllm(LOAD_STATS).error
            assert failed.startswith("TypeError: ")
            assert error in failed
            (finding,) = site.found("D031")
            assert "stops at its start with a TypeError" in finding.what

    def test_d032_a_platform_plugin_is_called_twice(self, beside, lay, site):
        refuses = "done = False\ndef register():\n    global done\n    assert not done\n    done = True\n"
        lay(f"{refuses}    return 'mine_plugin.Platform'\nclass Platform: ...\n", PLATFORM)
        assert beside.vllm(CHOOSE_PLATFORM).error == "AssertionError: "
        (finding,) = site.found("D032")
        assert finding.level == "error"
        (finding,) = examine_imports(site.environment())
        assert (finding.code, finding.level) == ("D032", "error")

    def test_d033_a_platform_class_that_is_not_there(self, beside, lay, site):
        lay("def register():\n    return 'mine_plugin.Platform'\n", PLATFORM)
        chosen = beside.vllm(CHOOSE_PLATFORM + PLATFORM_OBJECT)
        assert chosen.error == "AttributeError: module 'mine_plugin' has no attribute 'Platform'"
        (finding,) = site.found("D033")
        assert (finding.level, "binds no 'Platform'" in finding.what) == ("error", True)

    def test_d034_a_general_plugin_takes_the_process_along(self, beside, lay, site):
        lay("import sys\ndef register():\n    sys.exit('no licence')\n")
        site.environ["VLLM_PLUGINS"] = "mine"
        assert beside.vllm(LOAD_GENERAL).error == "SystemExit: no licence"
        (finding,) = site.found("D034")
        assert finding.level == "error"


class TestEngine:
    def test_d016_either_base_is_taken_with_the_same_words(self, beside, site):
        bases = {"Slow": "scheduler.Scheduler", "Fast": "async_scheduler.AsyncScheduler"}
        text = "from vllm.v1.core.sched import async_scheduler, scheduler\n"
        text += "".join(f"class {name}({base}): ...\n" for name, base in bases.items())
        site.package("mine-package", {}, {"mine_scheduler": text})
        said = {name: beside.vllm(SCHEDULER_CLASS.replace("NAME", name)) for name in bases}
        assert [answer.value for answer in said.values()] == ["Slow", "Fast"]
        assert said["Slow"].log == [line.replace("Fast", "Slow") for line in said["Fast"].log]
        found = {}
        for name in bases:
            site.arguments = ["--scheduler-cls", f"mine_scheduler.{name}"]
            found[name] = len(site.found("D016"))
        assert found == {"Slow": 1, "Fast": 0}

    def test_d017_two_platforms_that_answer_stop_the_start(self, beside, site):
        for name in ("one", "two"):
            entries = {PLATFORM: {name: f"{name}_module:register"}}
            site.package(f"{name}-package", entries, {f"{name}_module": "def register(): return 'a.B'\n"})
        assert beside.vllm(CHOOSE_PLATFORM).error.startswith("RuntimeError: Only one platform plugin can be activated")
        assert len(site.found("D017")) == 1
        site.environ["VLLM_PLUGINS"] = "one"
        assert beside.vllm(CHOOSE_PLATFORM).value == "a.B"
        assert site.found("D017") == []

    def test_d018_an_order_for_the_cpu_asks_no_plugin(self, beside, lay, site):
        lay("def register(): return 'a.B'\n", PLATFORM)
        site.environ["VLLM_TARGET_DEVICE"] = "cpu"
        chosen = beside.vllm(CHOOSE_PLATFORM)
        assert chosen.value == (CPU if RELEASE >= (0, 28) else "a.B")
        assert [finding.level for finding in site.found("D018")] == (["warning"] if RELEASE >= (0, 28) else [])
        del site.environ["VLLM_TARGET_DEVICE"]
        assert beside.vllm(CHOOSE_PLATFORM).value == "a.B"
        assert site.found("D018") == []

    def test_d022_an_unknown_variable_is_a_warning_or_the_end(self, beside, site):
        code = "from vllm import envs\nfrom vllm.platforms import current_platform as platform\n"
        code += "(getattr(envs, 'validate_environ', None) or platform.validate_environ)(HARD)"
        site.environ["VLLM_PLUGIN"] = "mine"
        warned = beside.vllm(code.replace("HARD", "False"))
        assert "WARNING Unknown vLLM environment variable detected: VLLM_PLUGIN" in warned.log
        assert [finding.level for finding in site.found("D022")] == ["warning"]
        refused = beside.vllm(code.replace("HARD", "True"))
        assert refused.error == "ValueError: Unknown vLLM environment variable detected: VLLM_PLUGIN"
        site.arguments = ["--fail-on-environ-validation"]
        assert [finding.level for finding in site.found("D022")] == ["error"]

    def test_d026_the_version_is_the_one_that_vllm_states_itself(self, beside, site):
        assert beside.vllm("import vllm\nanswer = vllm.__version__").value == site.environment().vllm
        assert site.found("D026") == []
