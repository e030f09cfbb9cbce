"""D035, and what the doctor says of the plan's patches: the verdicts of ``vllm-graft plan``."""

import sys

import pytest

from vllm_graft.doctor import Environment, examine

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
HEAD = "from vllm_graft import VLLMPatch, add, replace, wrap\n"
WRAP = "@wrap\n    def schedule(self, call, *a, **k): return call(*a, **k)"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def offer(site):
    """Lay out patches by name, each a target, keywords of the class and a body, and plan all of them."""

    def made(**patches: tuple[str, str, str]) -> None:
        text = HEAD + "".join(
            f'class {name.title()}(VLLMPatch["{target}"], name="{name}"{more}):\n    {body}\n'
            for name, (target, more, body) in patches.items()
        )
        entries = {name: f"planned_patches:{name.title()}" for name in patches}
        site.package("mine", {"vllm_graft.plugins": entries}, {"planned_patches": text})
        site.environ["VLLM_CUSTOM_PATCHES"] = ",".join(patches)

    return made


@pytest.mark.parametrize(
    ("target", "body", "said"),
    [
        (
            SCHEDULER,
            "@wrap\n    def schedul(self, call, *a, **k): return call(*a, **k)",
            "there is no 'schedul' to wrap",
        ),
        (SCHEDULER, "@add\n    def schedule(self): ...", "it adds 'schedule', but the target already has one"),
        ("vllm.core.scheduler:Scheduler", WRAP, "there is no module 'core' in 'vllm'"),
    ],
)
def test_a_patch_that_a_start_refuses_is_an_error(site, offer, target, body, said):
    offer(mine=(target, "", body))
    (finding,) = examine(site.environment())
    assert (finding.code, finding.level, finding.subject) == ("P003", "error", "patch mine")
    assert finding.what.startswith(said)
    assert finding.where == "VLLM_CUSTOM_PATCHES"
    assert finding.fix


def test_a_patch_that_fits_is_silent_and_imported_nowhere_but_in_the_child(site, offer):
    offer(mine=(SCHEDULER, "", WRAP))
    assert examine(site.environment()) == []
    assert "planned_patches" not in sys.modules


@pytest.mark.parametrize(("setting", "level"), [("", "error"), ('on_failure = "warn"', "warning")])
def test_the_level_follows_on_failure(site, offer, tmp_path, setting, level):
    offer(mine=("vllm.gone:Gone", "", WRAP))
    del site.environ["VLLM_CUSTOM_PATCHES"]
    (tmp_path / "graft.toml").write_text(f'[defaults]\npatches = ["mine"]\n{setting}\n')
    assert [finding.level for finding in site.found("P003")] == [level]


def test_a_patch_for_other_models_is_not_reviewed(site, offer):
    offer(mine=("vllm.gone:Gone", ', models=["*70B*"]', WRAP))
    site.arguments = ["org/model-7B"]
    assert site.found("P003") == []
    site.arguments = ["org/model-70B"]
    assert len(site.found("P003")) == 1


@pytest.mark.parametrize(
    ("second", "levels"),
    [("", ["error"]), (', processes=["worker"]', ["warning"]), (', processes=["frontend"]', [])],
)
def test_patches_that_meet_in_a_process_are_compared(site, offer, second, levels):
    """Engine core and worker are one process or two, as the server is started."""
    body = "@replace\n    def schedule(self, *a, **k): ..."
    offer(one=(SCHEDULER, ', processes=["engine"]', body), two=(SCHEDULER, second, body))
    found = site.found("P003")
    assert [(finding.subject, finding.level) for finding in found] == [("patch two", level) for level in levels]


def test_patches_of_profiles_that_need_not_meet_are_not_compared(site, offer, tmp_path):
    body = "@replace\n    def schedule(self, *a, **k): ..."
    offer(one=(SCHEDULER, "", body), two=(SCHEDULER, "", body))
    del site.environ["VLLM_CUSTOM_PATCHES"]
    profiles = "".join(f'[[profile]]\nmodel = "*{name}*"\npatches = ["{name}"]\n' for name in ("one", "two"))
    (tmp_path / "graft.toml").write_text(profiles)
    assert site.found("P003") == []
    site.arguments = ["one-and-two"]
    assert len(site.found("P003")) == 1


def test_what_only_a_trial_tells_is_tried_unless_a_start_follows(site, offer):
    offer(mine=("vllm.config:CacheConfig", "", "block_size = replace(7)"))
    (finding,) = site.found("P003")
    assert "a field of the dataclass CacheConfig" in finding.what
    started = Environment.gather(path=site.path, variables=site.environ, by_graft=True)
    assert examine(started) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('no licence')", "cannot be imported from broken_patch:Broken: RuntimeError: no licence"),
        ("import sys; sys.exit(4)", "cannot be imported from broken_patch:Broken: SystemExit: 4"),
        ("import os; os._exit(4)", "importing it ends the process with status 4"),
        ("import os; os.kill(os.getpid(), 9)", "importing it is ended by SIGKILL"),
    ],
)
def test_a_patch_that_cannot_be_imported_is_an_error(site, code, said):
    text = f"{code}\nclass Broken: ...\n"
    site.package("bad", {"vllm_graft.plugins": {"broken": "broken_patch:Broken"}}, {"broken_patch": text})
    site.environ["VLLM_CUSTOM_PATCHES"] = "broken"
    (finding,) = site.found("D035")
    assert (finding.level, finding.subject) == ("error", "patch broken")
    assert said in finding.what
    assert finding.fix == "repair or reinstall bad, or remove 'broken' from the plan"


def test_an_import_without_end_is_cut_off(site, monkeypatch):
    monkeypatch.setattr("vllm_graft.doctor.rules.d035_planned_patch._IMPORT_S", 2)
    monkeypatch.setattr("vllm_graft.doctor.rules.d035_planned_patch._TRIAL_S", 0)
    text = "class Broken: ...\nwhile True: pass\n"
    site.package("bad", {"vllm_graft.plugins": {"broken": "broken_patch:Broken"}}, {"broken_patch": text})
    site.environ["VLLM_CUSTOM_PATCHES"] = "broken"
    (finding,) = site.found("D035")
    assert finding.what == "importing it does not come to an end within 2 s"
