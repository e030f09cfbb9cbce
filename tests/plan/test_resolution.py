"""From configuration to plan: which layer wins, which profile matches, and what every mistake says."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.patching import PatchManager, VLLMPatch, wrap
from vllm_graft.patching import manager as manager_module
from vllm_graft.plan import Plan, PlanRequest, resolve
from vllm_graft.plan.resolution import matches, model_names
from vllm_graft.testing.packages import lay_out


def write(text: str) -> None:
    Path("graft.toml").write_text(text, encoding="utf-8")


def plan_for(model: str = "org/Model-8B", **kwargs: object) -> Plan:
    return resolve(PlanRequest(model, **kwargs))  # type: ignore[arg-type]


def names(plan: Plan) -> list[str]:
    return [item.name for item in plan]


def test_without_configuration_nothing_is_planned():
    """No file and no variable: an empty plan, which is false."""
    assert not plan_for()


def test_defaults_hold_for_every_model():
    """[defaults] names items; the plan says where each came from."""
    write('[defaults]\npatches = ["stat-logger-guard"]\nstats = ["request-log"]\n')
    plan = plan_for()
    assert names(plan) == ["stat-logger-guard", "request-log"]
    assert plan.items[0].origin == "graft.toml:2"
    assert plan.items[0].roles == ("frontend",)
    assert plan.items[1].options == {"path": "requests-{pid}.jsonl", "queue": 10_000}


def test_graft_config_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """GRAFT_CONFIG wins over the working directory."""
    write('[defaults]\nstats = ["request-log"]\n')
    other = tmp_path / "other.toml"
    other.write_text('[defaults]\npatches = ["stat-logger-guard"]\n', encoding="utf-8")
    monkeypatch.setenv("GRAFT_CONFIG", str(other))
    assert names(plan_for()) == ["stat-logger-guard"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[defaults]\n[defaults.options.dry]\nwindow = 3\n", r"graft.toml:2: .* Next: write \[options.NAME\] for them"),
        ('[defaults]\nsamplers = ["dry"]\nsamplers = ["xtc"]\n', "graft.toml:3: is not valid TOML"),
    ],
)
def test_mistakes_whose_line_toml_does_not_say(text: str, said: str):
    """A table in the wrong place, a key that is given twice."""
    write(text)
    with pytest.raises(ConfigError, match=said):
        plan_for()


@pytest.mark.parametrize(("sampler", "key"), [("dry", "dry_multiplier"), ("no-repeat-ngram", "ngram_size")])
def test_a_key_of_a_planned_sampler_is_no_other_key(sampler: str, key: str):
    """A request could not say which is meant, and the sampler would take it without a word."""
    write(f'[defaults]\nsamplers = ["{sampler}"]\nother_keys = ["tenant", "{key}"]\n')
    with pytest.raises(ConfigError, match=f"graft.toml:3: `other_keys` names '{key}', which is a key of the planned"):
        plan_for()


def test_names_of_other_keys_add_up_as_other_lists_do():
    """Those of the defaults, then those of every profile that matches."""
    write(
        '[defaults]\nsamplers = ["dry"]\nother_keys = ["a"]\n'
        '[[profile]]\nmodel = "*"\nother_keys = ["b", "a"]\n[[profile]]\nmodel = "*8B"\nother_keys = ["c"]\n'
    )
    plan = plan_for()
    assert plan.other_keys == ("a", "b", "c")
    assert plan.origins["other_keys"] == "graft.toml:3, graft.toml:6, graft.toml:9"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to("/no/such/volume/graft.toml"), "graft.toml: is a link to nothing"),
        (lambda path: path.symlink_to("long" * 100), "graft.toml: is a link to nothing"),
        (lambda path: path.mkdir(), "graft.toml: is not a regular file"),
        (lambda path: os.mkfifo(path), "graft.toml: is not a regular file"),
    ],
)
def test_a_file_that_is_there_and_none_is_an_error(make: Callable[[Path], None], said: str):
    """A volume that is not mounted must not give a server without its plan."""
    make(Path("graft.toml"))
    with pytest.raises(ConfigError, match=said):
        plan_for()


def test_a_profile_adds_its_lists_and_replaces_single_values(offered: Path):
    """Lists of matching profiles add to the defaults; settings replace them."""
    write(
        '[defaults]\nstats = ["request-log"]\non_failure = "stop"\n'
        '[[profile]]\nmodel = "*8b*"\nstats = ["my-sink", "request-log"]\non_failure = "warn"\n'
        '[[profile]]\nmodel = "*70B*"\nstats = ["other-sink"]\n'
    )
    plan = plan_for()
    assert names(plan) == ["request-log", "my-sink"]
    assert plan.on_failure == "warn"
    assert plan.origins["on_failure"] == "graft.toml:7"


def test_the_environment_replaces_the_patches(monkeypatch: pytest.MonkeyPatch, offered: Path):
    """VLLM_CUSTOM_PATCHES is stronger than the file, forgives blanks, and empty means none."""
    write('[defaults]\npatches = ["stat-logger-guard"]\n')
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", " engine-patch ,, ")
    assert names(plan_for()) == ["engine-patch"]
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "")
    assert names(plan_for()) == []


def test_additional_config_is_the_strongest(monkeypatch: pytest.MonkeyPatch, offered: Path):
    """--additional-config replaces each key it gives, and adds options."""
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "stat-logger-guard")
    write('[defaults]\nstats = ["request-log"]\n[options.my-sink]\ncount = 4\n')
    given = {"graft": {"patches": ["engine-patch"], "options": {"my-sink": {"path": "y"}}, "stats": ["my-sink"]}}
    plan = plan_for(additional_config=given)
    assert names(plan) == ["engine-patch", "my-sink"]
    assert plan.items[1].options == {"path": "y", "count": 4, "ratio": 0.5, "loud": False, "tags": ["a"]}
    assert plan.items[1].origin == "--additional-config graft.stats"


def test_a_star_means_every_registered_item_of_the_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """'*' under patches takes the patches and leaves the sinks."""
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "*")
    assert names(plan_for()) == ["async-history", "cpu-seeds", "lora-path-guard", "stat-logger-guard"]


def test_items_of_a_patch_run_where_the_patch_says(offered: Path):
    """A patch's processes become the roles that need it."""
    write('[defaults]\npatches = ["engine-patch"]\n')
    assert plan_for().items[0].roles == ("engine",)


def test_the_hash_follows_behaviour_only(offered: Path):
    """Options change the hash; the model and where a value came from do not."""
    write('[defaults]\nstats = ["my-sink"]\n')
    first = plan_for("a")
    write('\n\n[defaults]\nstats = ["my-sink"]\n')
    assert plan_for("b").hash == first.hash
    write('[defaults]\nstats = ["my-sink"]\n[options.my-sink]\ncount = 9\n')
    assert plan_for("a").hash != first.hash


def test_a_plan_travels_as_json(offered: Path):
    """What is carried is what was resolved."""
    write('[defaults]\nstats = ["my-sink"]\npatches = ["engine-patch"]\nendpoint = false\n')
    plan = plan_for()
    assert Plan.from_json(plan.to_json()) == plan


def test_a_model_has_many_names(tmp_path: Path):
    """A glob is tried on the name as given, the repository behind a cache path, the path, and served names."""
    cached = tmp_path / "hub" / "models--meta-llama--Llama-3-70B" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    found = model_names(str(cached), ["prod"])
    assert "meta-llama/Llama-3-70B" in found
    assert "prod" in found
    assert matches(["META-llama/*"], found)
    assert matches([str(tmp_path / "*")], found)
    assert not matches(["llama"], found)


MISTAKES = {
    "bad toml": ("[defaults\n", "graft.toml:1: is not valid TOML"),
    "deep toml": (f"a = {'[' * 20_000}", "graft.toml: is not valid TOML: maximum recursion depth exceeded"),
    "long number": (f"a = {'1' * 5000}", "graft.toml: is not valid TOML: Exceeds the limit (4300 digits)"),
    "unknown table": ("[default]\n", "graft.toml:1: unknown table 'default' (did you mean 'defaults'?)"),
    "unknown key": (
        '[defaults]\n\npatchs = ["x"]\n',
        "graft.toml:3: unknown key 'patchs' (did you mean 'patches'?). Next: correct the name or remove the line",
    ),
    "unknown key of a profile": (
        '[[profile]]\nmodel = "*"\nstat = ["x"]\n',
        "graft.toml:3: unknown key 'stat' (did you mean 'stats'?)",
    ),
    "unknown item": (
        '[defaults]\npatches = [\n  "stat-loger-guard",\n]\n',
        "graft.toml:3: there is no item 'stat-loger-guard' (did you mean 'stat-logger-guard'?)",
    ),
    "wrong type of a list": (
        '[defaults]\npatches = "a"\n',
        "graft.toml:2: `patches` must be a list of names, but is 'a'",
    ),
    "wrong type in a list": ("[defaults]\npatches = [1]\n", "graft.toml:2: `patches` must be a list of names"),
    "wrong type of a name": ("[defaults]\nscheduler = 1\n", "graft.toml:2: `scheduler` must be one name, but is 1"),
    "wrong on_failure": (
        '[defaults]\non_failure = "ignore"\n',
        'graft.toml:2: `on_failure` must be "stop" or "warn", but is \'ignore\'',
    ),
    "wrong endpoint": ('[defaults]\nendpoint = "no"\n', "graft.toml:2: `endpoint` must be true or false, but is 'no'"),
    "defaults not a table": ("defaults = 1\n", "graft.toml:1: `defaults` must be a table, but is 1"),
    "profile not an array": (
        '[profile]\nmodel = "*"\n',
        "graft.toml:1: profiles are an array of tables. Next: write [[profile]], not [profile]",
    ),
    "profile without a model": ('[[profile]]\nstats = ["my-sink"]\n', "graft.toml:1: a profile needs `model`"),
    "profile with a wrong model": ("[[profile]]\nmodel = 3\n", "graft.toml:2: a profile needs `model`"),
    "item under the wrong point": (
        '[defaults]\nstats = ["stat-logger-guard"]\n',
        "graft.toml:2: 'stat-logger-guard' (vllm_graft.plugins.patches.stat_logger_guard:StatLoggerGuard of "
        "vllm-graft) is not an item of the stats point: it implements none of vllm_graft.contracts:StatSink",
    ),
    "point that is not bound": (
        '[defaults]\nio_processor = "my-sink"\n',
        "graft.toml:2: io-processor items cannot be planned: this version of vllm-graft does not bind that point yet",
    ),
    "star for a point that is not bound": (
        '[defaults]\nlora_resolvers = ["*"]\n',
        "graft.toml:2: lora-resolver items cannot be planned: this version of vllm-graft does not bind that point yet",
    ),
    "star where one name is wanted": (
        '[defaults]\nscheduler = "*"\n',
        "graft.toml:2: '*' names no scheduler: this key takes one name",
    ),
    "unknown option": (
        '[defaults]\nstats = ["my-sink"]\n[options.my-sink]\npaht = "z"\n',
        "graft.toml:4: 'my-sink' has no option 'paht' (did you mean 'path'?)",
    ),
    "wrong type of an option": (
        '[defaults]\nstats = ["my-sink"]\n[options.my-sink]\ncount = "many"\n',
        "graft.toml:4: the option 'count' of 'my-sink' must be a whole number, but is 'many'",
    ),
    "true is not a number": (
        '[defaults]\nstats = ["my-sink"]\n[options.my-sink]\ncount = true\n',
        "graft.toml:4: the option 'count' of 'my-sink' must be a whole number, but is True",
    ),
    "option of a strange shape": (
        '[defaults]\nstats = ["my-sink"]\n[options.my-sink]\ncount = [1, 2]\n',
        "graft.toml:4: `count` must be a string, number, true/false or list of strings, or a table of these",
    ),
    "a table for an option that is none": (
        '[defaults]\nstats = ["my-sink"]\n[options.my-sink]\ncount = {a = 1}\n',
        "graft.toml:4: the option 'count' of 'my-sink' must be a whole number, but is {'a': 1}",
    ),
    "a table of tables": (
        "[options.my-sink]\ncount = {a = {b = 1}}\n",
        "graft.toml:2: `count` must be a string, number, true/false or list of strings, or a table of these",
    ),
    "another unknown_keys": (
        '[defaults]\nunknown_keys = "ignore"\n',
        'graft.toml:2: `unknown_keys` must be "refuse-similar" or "refuse" or "pass", but is \'ignore\'',
    ),
    "another other_keys": (
        '[defaults]\nother_keys = "tenant"\n',
        "graft.toml:2: `other_keys` must be a list of names, but is 'tenant'",
    ),
    "a sampler's on_error that is none": (
        '[defaults]\nsamplers = ["dry"]\n[options.dry]\non_error = "ignore"\n',
        "graft.toml:4: the option 'on_error' of 'dry' must be \"quarantine\" or \"request\", but is 'ignore'",
    ),
    "a budget that is no time": (
        '[defaults]\nsamplers = ["dry"]\n[options.dry]\nbudget_us = -1\n',
        "graft.toml:4: the option 'budget_us' of 'dry' must be a time in microseconds",
    ),
    "defaults that are no keys": (
        '[defaults]\nsamplers = ["dry"]\n[options.dry]\ndefaults = {dry_multiplyer = 0.8}\n',
        "graft.toml:4: the option 'defaults' of 'dry' cannot be what requests carry: 'dry_multiplyer' is not one of "
        "its keys (did you mean 'dry_multiplier'?)",
    ),
    "defaults that no request could carry": (
        '[defaults]\nsamplers = ["dry"]\n[options.dry]\ndefaults = {dry_multiplier = -0.8}\n',
        "the option 'defaults' of 'dry' cannot be what requests carry: dry_multiplier must be a number, with a value "
        "of at least 0, but is -0.8",
    ),
    "every request of a sampler with keys": (
        '[defaults]\nsamplers = ["dry"]\n[options.dry]\nevery_request = true\n',
        "graft.toml:4: the option 'every_request' of 'dry' is for samplers without keys",
    ),
    "a class that lacks a method": (
        '[defaults]\nsamplers = ["stepless"]\n',
        "the sampler 'stepless' (graft_offered:Stepless of graft-offered) has no method step(logits, rows), which "
        "every SamplingStrategy must have. Next: implement step(logits, rows); or remove 'stepless' from the plan "
        "(graft.toml:2)",
    ),
    "a sink that lacks its method": (
        '[defaults]\nstats = ["deaf"]\n',
        "the stats 'deaf' (graft_offered:Deaf of graft-offered) has no method finished(requests, batch)",
    ),
    "a queue that lacks a method": (
        '[defaults]\nscheduler = "endless"\n',
        "the scheduler 'endless' (graft_offered:Endless of graft-offered) has no method remove(request)",
    ),
    "a sampler that nobody can ask for": (
        '[defaults]\nsamplers = ["keyless"]\n',
        "declares no keys, so no request could ask for it. Next: add keys = (Key(...),), or set every_request = true",
    ),
    "two samplers with one key": (
        '[defaults]\nsamplers = ["dry", "dry-too"]\n',
        "graft.toml:2: the samplers 'dry' (vllm_graft.plugins.samplers.dry:Dry) and 'dry-too' (graft_offered:DryToo) "
        "both take the key 'dry_base'",
    ),
    "options of an unknown item": (
        "[options.my-snik]\ncount = 1\n",
        "graft.toml:2: options are given for 'my-snik', but there is no such item (did you mean 'my-sink'?)",
    ),
    "options not a table": ("options = 3\n", "graft.toml:1: `options` must be a table, but is 3"),
    "class that is no class": (
        '[defaults]\nstats = ["not-a-class"]\n',
        "the item 'not-a-class' of graft-offered must be a class, but graft_offered:NOT_A_CLASS is int",
    ),
    "class that is gone": (
        '[defaults]\nstats = ["gone"]\n',
        "the item 'gone' of graft-offered cannot be imported from graft_offered:Gone: AttributeError",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_in_the_file_says_where_and_what_next(mistake: str, offered: Path):
    """File, line, what is wrong, the nearest valid name, the next step."""
    text, expected = MISTAKES[mistake]
    write(text)
    with pytest.raises(ConfigError) as caught:
        plan_for()
    assert expected in str(caught.value)
    assert "Next: " in str(caught.value)


def test_a_mistake_in_a_class_names_its_file_and_line(offered: Path):
    """Where its author mends it."""
    write('[defaults]\nsamplers = ["stepless"]\n')
    with pytest.raises(ConfigError) as caught:
        plan_for()
    file, _, line = caught.value.where.rpartition(":")
    assert Path(file).name == "graft_offered.py"
    assert (offered / "graft_offered.py").read_text().splitlines()[int(line) - 1].startswith("class Stepless")


def test_what_requests_carry_by_default_is_an_option(offered: Path):
    """A table of keys; the file and --additional-config say it alike, and it travels with the plan."""
    write('[defaults]\nsamplers = ["dry"]\n[options.dry]\ndefaults = {dry_multiplier = 0.8, dry_range = 64}\n')
    plan = plan_for()
    assert plan.items[0].options["defaults"] == {"dry_multiplier": 0.8, "dry_range": 64}
    assert Plan.from_json(plan.to_json()) == plan
    given = {"graft": {"options": {"dry": {"defaults": {"dry_multiplier": 0.5, "dry_sequence_breakers": ["x"]}}}}}
    other = plan_for(additional_config=given)
    assert other.items[0].options["defaults"] == {"dry_multiplier": 0.5, "dry_sequence_breakers": ["x"]}
    assert other.hash != plan.hash
    write('[defaults]\nsamplers = ["keyless"]\n[options.keyless]\nevery_request = true\n')
    assert names(plan_for()) == ["keyless"]
    mixed = Plan((replace(plan.items[0], options={"defaults": {"any": [0.5, "x"]}}),))
    assert Plan.from_json(mixed.to_json()) == mixed


def test_a_model_may_have_defaults_of_its_own():
    """A profile's table replaces that of all models."""
    write(
        '[defaults]\nsamplers = ["dry"]\n[options.dry]\ndefaults = {dry_multiplier = 0.8}\n'
        '[[profile]]\nmodel = "*70B*"\n[profile.options.dry]\ndefaults = {dry_multiplier = 0.5, dry_base = 2}\n'
    )
    assert plan_for().items[0].options["defaults"] == {"dry_multiplier": 0.8}
    large = plan_for("org/Model-70B")
    assert large.items[0].options["defaults"] == {"dry_multiplier": 0.5, "dry_base": 2}
    assert (plan_for().origins, large.origins) == (
        {"options.dry.defaults": "graft.toml:4"},
        {"options.dry.defaults": "graft.toml:8"},
    )


def test_what_becomes_of_unknown_keys_is_a_setting():
    """Of the defaults or a profile; it changes behaviour, and so the hash."""
    write('[defaults]\nsamplers = ["dry"]\n')
    usual = plan_for()
    assert (usual.unknown_keys, usual.other_keys) == ("refuse-similar", ())
    write(
        '[defaults]\nsamplers = ["dry"]\nother_keys = ["tenant"]\n[[profile]]\nmodel = "*8B"\nunknown_keys = "refuse"\n'
    )
    plan = plan_for()
    assert (plan.unknown_keys, plan.other_keys) == ("refuse", ("tenant",))
    assert plan.origins["unknown_keys"] == "graft.toml:6"
    assert Plan.from_json(plan.to_json()) == plan
    assert len({usual.hash, plan.hash, plan_for("org/Model-7B").hash}) == 3


def test_profiles_that_disagree_are_refused_naming_both(offered: Path):
    """Two matching profiles with different single values: neither may win silently."""
    write('[[profile]]\nmodel = "*8B*"\non_failure = "warn"\n[[profile]]\nmodel = "org/*"\non_failure = "stop"\n')
    with pytest.raises(
        ConfigError, match=r"disagree on `on_failure`: 'warn' at graft.toml:3 and 'stop' at graft.toml:6"
    ):
        plan_for()
    assert not plan_for("other/Model-8B").items


def test_a_named_file_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """GRAFT_CONFIG must point at something."""
    monkeypatch.setenv("GRAFT_CONFIG", "/nowhere/graft.toml")
    with pytest.raises(ConfigError, match=r"GRAFT_CONFIG: there is no file /nowhere/graft.toml"):
        plan_for()


def test_an_unknown_patch_of_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch):
    """The place of a mistake can be a variable."""
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "stat-logger-gard")
    with pytest.raises(
        ConfigError, match=r"VLLM_CUSTOM_PATCHES: there is no item .* \(did you mean 'stat-logger-guard'"
    ):
        plan_for()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"graft": 3}, "--additional-config graft: `graft` must be a table, but is 3"),
        ({"graft": {"patchez": []}}, "--additional-config graft.patchez: unknown key 'patchez'"),
        (
            {"graft": {"options": {"my-sink": {"count": [{}]}}}},
            "--additional-config graft.options.my-sink.count: `count`",
        ),
    ],
)
def test_mistakes_in_additional_config_name_the_argument(given: object, expected: str):
    """The same checks as in the file."""
    with pytest.raises(ConfigError) as caught:
        plan_for(additional_config=given)
    assert expected in str(caught.value)


def test_a_name_offered_by_two_packages_is_refused_naming_both(
    offered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM lets the last one win in silence; we do not."""
    from vllm_graft.testing.packages import lay_out

    second = tmp_path / "second"
    lay_out(second, "graft-rival", {"vllm_graft.plugins": {"my-sink": "rival:Sink"}})
    monkeypatch.syspath_prepend(str(second))
    write('[defaults]\nstats = ["my-sink"]\n')
    with pytest.raises(ConfigError, match=r"'my-sink' is offered twice: by .*graft-rival"):
        plan_for()


def test_a_patch_may_be_for_some_models_only(offered: Path, monkeypatch: pytest.MonkeyPatch):
    """It is left out of the plan for others, and the plan says so."""
    import graft_offered

    declaration = graft_offered.EnginePatch.declaration
    monkeypatch.setattr(graft_offered.EnginePatch, "declaration", replace(declaration, models=("*70b*", "org/small")))
    write('[defaults]\npatches = ["engine-patch"]\nstats = ["my-sink"]\n')
    assert names(plan_for("org/Model-70B")) == ["engine-patch", "my-sink"]
    plan = plan_for("org/Model-8B")
    assert names(plan) == ["my-sink"]
    assert plan.left_out == {"engine-patch": "is for the models *70b*, org/small, but this is org/Model-8B"}
    assert Plan.from_json(plan.to_json()) == plan


class TestOptionsOfProfiles:
    """``[profile.options.NAME]``, layered over ``[options.NAME]``."""

    FILE = """
[defaults]
scheduler = "priority-fairness"
[options.priority-fairness]
max_wait_sec = 30
classes = 4
[[profile]]
model = "*8B*"
[profile.options.priority-fairness]
max_wait_sec = 5
[[profile]]
model = ["*70B*", "*8B*"]
on_failure = "warn"
[profile.options.priority-fairness]
urgent_share = 0.8
"""

    def test_they_are_set_one_by_one(self):
        """A profile that does not match sets nothing."""
        write(self.FILE)
        small, large, other = (dict(plan_for(f"org/Model-{size}").items[0].options) for size in ("8B", "70B", "1B"))
        assert [each["max_wait_sec"] for each in (small, large, other)] == [5, 30, 30]
        assert [each["urgent_share"] for each in (small, large, other)] == [0.8, 0.8, 0.9]
        assert {each["classes"] for each in (small, large, other)} == {4}

    @pytest.mark.parametrize(
        ("option", "said"),
        [
            ("max_wait_sec = -3", "the option 'max_wait_sec' of 'priority-fairness' must be above 0 and at most 86400"),
            ("max_wait = 3", "'priority-fairness' has no option 'max_wait' (did you mean 'max_wait_sec'?)"),
            ("classes = 'x'", "the option 'classes' of 'priority-fairness' must be a whole number, but is 'x'"),
        ],
    )
    def test_a_mistake_has_its_line(self, option: str, said: str):
        write(self.FILE + option + "\n")
        with pytest.raises(ConfigError, match=f"^graft.toml:16: {re.escape(said)}"):
            plan_for("org/Model-70B")
        assert plan_for("org/Model-1B")

    def test_two_profiles_that_contradict_one_another(self):
        write(self.FILE + "max_wait_sec = 9\n")
        with pytest.raises(ConfigError, match=r"graft.toml:16: two profiles match .* `options.priority-fair"):
            plan_for("org/Model-8B")

    def test_options_of_nothing(self):
        write('[[profile]]\nmodel = "*"\n[profile.options.request-lag]\nqueue = 3\n')
        with pytest.raises(ConfigError, match=r"graft.toml:4: options are given for 'request-lag', but there is no"):
            plan_for()


@pytest.mark.parametrize(
    ("key", "item", "option", "said"),
    [
        ("scheduler", "priority-fairness", "max_wait_sec = -1", "must be above 0 and at most 86400, but is -1"),
        ("scheduler", "tenant-fairness", "weights = ['acme']", "holds 'acme', which is not a tenant and its weight"),
        ("samplers", "xtc", "on_error = 'requests'", 'must be "quarantine" or "request", but is \'requests\' (did you'),
        (
            "samplers",
            "dry",
            "budget_us = -1",
            "must be a time in microseconds, 0 for the point's own",
        ),
        ("samplers", "dry", "window = 1", "must be at least 2, but is 1"),
        ("samplers", "dry", "window = 99999999999999999999999", "must be at most 2147483647, but is 9999999999"),
        ("stats", "request-log", "queue = 0", "must be at least 1, but is 0"),
        ("stats", "request-log", r'path = "a\u0000b"', "must have no NUL character"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_line(key: str, item: str, option: str, said: str):
    """Before anything is made: by ``plan`` and at the start alike."""
    name = f'"{item}"' if key == "scheduler" else f'["{item}"]'
    write(f"[defaults]\n{key} = {name}\n[options.{item}]\n{option}\n")
    with pytest.raises(ConfigError) as caught:
        plan_for()
    assert f"graft.toml:4: the option {option.split()[0]!r} of {item!r} {said}" in str(caught.value)


class Unprintable(Exception):
    """An exception whose message cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("on purpose")


def test_an_item_that_refuses_its_options_otherwise(offered: Path, monkeypatch: pytest.MonkeyPatch):
    """A ValueError names no option, so all that were given are named; a bug in it is told with its type."""
    write('[defaults]\nstats = ["my-sink"]\n[options.my-sink]\ncount = 5\n')
    kind = plan_for() and importlib.import_module("graft_offered").Sink

    def refuse(options: dict[str, object]) -> None:
        raise ValueError("count and ratio conflict")

    monkeypatch.setattr(kind, "check_options", staticmethod(refuse))
    with pytest.raises(ConfigError, match=r"graft.toml:4: the options of 'my-sink' cannot be used: count and ratio"):
        plan_for()
    monkeypatch.setattr(kind, "check_options", staticmethod(lambda options: options["none"]))
    with pytest.raises(ConfigError, match=r"graft.toml:4: the options of 'my-sink' cannot be used: KeyError: 'none'"):
        plan_for()


@pytest.mark.parametrize(
    ("failure", "said"),
    [(SystemExit(0), "SystemExit: 0"), (Unprintable(), r"Unprintable: \(its message cannot be shown")],
)
def test_an_item_whose_check_fails_in_any_way(
    offered: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, said: str
):
    """``sys.exit(0)`` would end `plan`, and a start, with status 0 and no word."""
    write('[defaults]\nstats = ["my-sink"]\n')
    kind = plan_for() and importlib.import_module("graft_offered").Sink

    def fail(options: dict[str, object]) -> None:
        raise failure

    monkeypatch.setattr(kind, "check_options", staticmethod(fail))
    with pytest.raises(ConfigError, match=rf"graft.toml:2: the options of 'my-sink' cannot be used: {said}"):
        plan_for()


def test_a_level_of_drift_that_is_none_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    """Not months later, with the first patch whose upstream code has changed."""
    write('[defaults]\npatches = ["stat-logger-guard"]\n')
    monkeypatch.setenv("GRAFT_ON_DRIFT", "refuze")
    with pytest.raises(
        ConfigError,
        match=r"GRAFT_ON_DRIFT: must be warn or refuse, but is 'refuze'. Next: set it to warn or refuse, or unset it",
    ):
        plan_for()


def test_a_patch_without_a_hook_is_refused(offered: Path, monkeypatch: pytest.MonkeyPatch):
    """It would be shown as applied in every process, and change nothing."""
    write('[defaults]\npatches = ["stat-logger-guard"]\n')
    plan_for()
    kind = importlib.import_module("vllm_graft.plugins.patches.stat_logger_guard").StatLoggerGuard
    monkeypatch.setattr(kind, "declaration", replace(kind.declaration, hooks=()))
    with pytest.raises(ConfigError, match=r"the patch 'stat-logger-guard' .* changes nothing: it has no hook"):
        plan_for()


def test_a_class_that_cannot_be_looked_at_is_refused(offered: Path, monkeypatch: pytest.MonkeyPatch):
    """A mistake may be in what an author's class does when an attribute is read."""

    class Unshown:
        def __repr__(self) -> str:
            raise RuntimeError("on purpose")

    write('[defaults]\nstats = ["my-sink"]\n')
    plan_for()
    monkeypatch.setattr(importlib.import_module("graft_offered").Sink, "options", {"path": Unshown()})
    with pytest.raises(ConfigError, match=r"'my-sink' .* cannot be examined: RuntimeError: on purpose"):
        plan_for()


def test_a_check_cannot_change_the_plan(offered: Path, monkeypatch: pytest.MonkeyPatch):
    """What it writes into the options it was given would go past the check of their types."""
    write('[defaults]\nstats = ["my-sink"]\n')
    before = plan_for()
    kind = importlib.import_module("graft_offered").Sink

    def write_options(options: dict[str, object]) -> None:
        options |= dict.fromkeys([*options, "more"], "changed")

    monkeypatch.setattr(kind, "check_options", staticmethod(write_options))
    assert plan_for() == before


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (["count"], "has options that are not a table"),
        ({"path": Path("x")}, "has the option 'path' with the default PosixPath\\('x'\\)"),
        ({"path": None}, "has the option 'path' with the default None, which no configuration file can hold"),
        (
            {"tokens": [1, 2]},
            r"has the option 'tokens' with the default \[1, 2\], which no configuration file can hold",
        ),
        ({1: 2}, "has an option named 1"),
    ],
)
def test_options_that_no_file_can_set(offered: Path, monkeypatch: pytest.MonkeyPatch, declared: object, said: str):
    """The class is named with its file and line, and nothing of it is called."""
    write('[defaults]\nstats = ["my-sink"]\n')
    plan_for()
    monkeypatch.setattr(importlib.import_module("graft_offered").Sink, "options", declared)
    with pytest.raises(ConfigError, match=rf"graft_offered.py:\d+: the stats 'my-sink' .* {said}"):
        plan_for()


def test_callers_that_are_not_there():
    write('[defaults]\ncallers = "nobody.toml"\n')
    with pytest.raises(ConfigError, match=r"graft.toml:2: `callers` names .*/nobody.toml, but there is no such file"):
        plan_for()


class TestPatchesOfGeneralPlugins:
    """Names in ``VLLM_CUSTOM_PATCHES`` that no package offers under our group."""

    PLUGIN = """
import os
class Manager:
    def __init__(self):
        self.available_patches = {"Applied": object, "Swallowed": object}
        self.applied_patches = ["Applied"]
manager = Manager()
"""
    READER = """
'''Applies what VLLM_CUSTOM_PATCHES names. Fairness is what it is about.'''
import os
if 'Mentioned' in os.environ.get('VLLM_CUSTOM_PATCHES', ''):
    pass  # Fairness, too
"""

    @pytest.fixture
    def plugins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """Two packages with general plugins, neither of which is imported."""
        site = tmp_path / "plugins"
        group = "vllm.general_plugins"
        lay_out(site, "acme-plugin", {group: {"acme": "acme_plugin:go"}}, {"acme_plugin": self.PLUGIN})
        lay_out(site, "other-plugin", {group: {"other": "other_plugin:go"}}, {"other_plugin": self.READER})
        monkeypatch.syspath_prepend(str(site))
        yield site
        for name in ("acme_plugin", "other_plugin", "acme_patches"):
            sys.modules.pop(name, None)

    def test_before_they_are_loaded_nobody_can_tell(self, plugins, monkeypatch):
        """The rest of the plan is there, and the name is a warning."""
        monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "Applied,stat-logger-guard")
        plan = resolve(PlanRequest("m"))
        assert [item.name for item in plan] == ["stat-logger-guard"]
        (finding,) = plan.findings
        assert (finding.code, finding.level, finding.subject) == ("P009", "warning", "patch Applied")
        assert "acme of acme-plugin, other of other-plugin" in finding.what

    def test_a_plugin_that_vllm_does_not_load_registers_nothing(self, plugins, monkeypatch):
        monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "Applied")
        monkeypatch.setenv("VLLM_PLUGINS", "graft")
        with pytest.raises(ConfigError, match=r"there is no item 'Applied'.*no general plugin registers it"):
            resolve(PlanRequest("m"))

    @pytest.mark.parametrize(
        ("name", "code", "who"),
        [
            ("Applied", "P007", "acme of acme-plugin (acme_plugin.manager)"),
            ("Swallowed", "P008", "acme of acme-plugin (acme_plugin.manager)"),
            ("Mentioned", "P007", "other of other-plugin (other_plugin)"),
        ],
    )
    def test_a_manager_of_another_kind(self, plugins, monkeypatch, name, code, who):
        """Known by its table, or by a source that reads the variable and mentions the name."""
        for module in ("acme_plugin", "other_plugin"):
            importlib.import_module(module)
        monkeypatch.setenv("VLLM_CUSTOM_PATCHES", name)
        plan = resolve(PlanRequest("m", plugins_loaded=True))
        assert not plan
        (finding,) = plan.findings
        assert (finding.code, finding.subject) == (code, f"patch {name}")
        assert who in finding.what
        assert Plan.from_json(plan.to_json()) == plan

    def test_a_manager_in_a_package_beside_the_plugin(self, plugins, monkeypatch):
        """The entry point is in one package, the manager in another that it imports."""
        (plugins / "acme_patches.py").write_text(self.PLUGIN)
        (plugins / "acme_plugin.py").write_text("def go():\n    from acme_patches import manager\n")
        for module in ("acme_plugin", "other_plugin", "acme_patches"):
            importlib.import_module(module)
        monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "Applied")
        (finding,) = resolve(PlanRequest("m", plugins_loaded=True)).findings
        assert finding.code == "P007"
        assert "acme of acme-plugin (acme_patches.manager)" in finding.what

    @pytest.mark.parametrize("name", ["Nobody", "Fairness"])
    def test_a_name_that_nobody_registers(self, plugins, monkeypatch, name):
        """A word of a docstring or a comment registers nothing."""
        for module in ("acme_plugin", "other_plugin"):
            importlib.import_module(module)
        monkeypatch.setenv("VLLM_CUSTOM_PATCHES", name)
        with pytest.raises(ConfigError, match=rf"no item '{name}'.*no general plugin registers it"):
            resolve(PlanRequest("m", plugins_loaded=True))

    def test_the_file_may_not_name_them(self, plugins):
        """It is ours alone, so a name in it that we do not know is a mistake."""
        importlib.import_module("acme_plugin")
        write('[defaults]\npatches = ["Applied"]\n')
        with pytest.raises(ConfigError, match=r"graft.toml:2: there is no item 'Applied'"):
            resolve(PlanRequest("m", plugins_loaded=True))

    def test_our_own_manager_adds_to_the_catalogue(self, monkeypatch):
        """By the name it was registered under; a second patch of that name is refused."""
        monkeypatch.setattr(manager_module, "_registered", {})
        PatchManager().register("ByHand", ByHand)
        PatchManager().register("ByHand", ByHand)
        monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "ByHand")
        (item,) = resolve(PlanRequest("m", plugins_loaded=True)).items
        assert (item.name, item.target, item.roles) == ("ByHand", f"{__name__}:ByHand", ("engine",))
        PatchManager().register("ByHand", Another)
        with pytest.raises(ConfigError, match=r"'ByHand' is registered twice: as .*ByHand of .* and as .*:Another"):
            resolve(PlanRequest("m", plugins_loaded=True))


class ByHand(VLLMPatch["json.decoder:JSONDecoder"], processes={"engine"}):
    @wrap
    def decode(self, call, *args, **kwargs):
        return call(*args, **kwargs)


class Another(VLLMPatch["json.decoder:JSONDecoder"]):
    @wrap
    def decode(self, call, *args, **kwargs):
        return call(*args, **kwargs)


def test_a_kernel_is_needed_by_workers_alone_and_its_mistakes_are_refused(tmp_path: Path, monkeypatch):
    """A policy frees blocks in engine core too; a kernel has no part there."""
    text = (
        "from vllm_graft.contracts import AttentionKernel, KVPolicy\n"
        "class Keeps(KVPolicy):\n"
        "    def window(self, layer): ...\n"
        "class Computes(AttentionKernel):\n"
        "    def forward(self, query, key, value, kv_cache, batch): ...\n"
        "class Vague(Computes):\n"
        "    block_multiple = 0\n"
    )
    entries = {"keeps": "acme_layers:Keeps", "computes": "acme_layers:Computes", "vague": "acme_layers:Vague"}
    lay_out(tmp_path / "layers", "acme-layers", {"vllm_graft.plugins": entries}, {"acme_layers": text})
    monkeypatch.syspath_prepend(str(tmp_path / "layers"))
    for name, roles in (("keeps", ("engine", "worker")), ("computes", ("worker",))):
        write(f'[defaults]\nattention = "{name}"\n')
        assert plan_for().items[0].roles == roles
    write('[defaults]\nattention = "vague"\n')
    with pytest.raises(ConfigError, match=r"acme_layers.py:6: .+ has the block multiple 0\. Next: make it a whole"):
        plan_for()
