"""D014: logits processors that see -1."""

import pytest


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_an_installed_v1_processor_under_asynchronous_scheduling_sees_placeholders(processors, found_on):
    processors.install(processors.V1)
    (finding,) = found_on("D014", "0.28.0")
    assert (finding.level, finding.subject) == ("warning", "logits processor 'mine'")
    assert "#52461" in finding.what
    assert "async-history" in finding.fix


def test_on_newer_releases_it_takes_the_v1_runner(site, processors, found_on):
    processors.install(processors.BOTH)
    assert found_on("D014", "0.32.0") == []
    site.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    assert len(found_on("D014", "0.32.0")) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-async-scheduling"],
        ["--logits-processors", "other:Processor"],
        ["--runner", "pooling"],
        ["--speculative-config", '{"method": "ngram"}'],
        ["--additional-config", '{"graft": {"patches": ["async-history"]}}'],
    ],
)
def test_arguments_that_make_it_harmless(site, arguments, processors, found_on):
    processors.install(processors.V1)
    site.arguments = arguments
    assert found_on("D014", "0.28.0") == []


def test_cpus_schedule_synchronously(processors, found_on, build_for_cpu):
    processors.install(processors.V1)
    build_for_cpu()
    assert found_on("D014", "0.28.0") == []


def test_a_plan_with_the_patch_cures_it(site, tmp_path, processors, found_on):
    processors.install(processors.V1)
    file = tmp_path / "plan.toml"
    site.environ["GRAFT_CONFIG"] = str(file)
    file.write_text('[defaults]\npatches = ["lora-path-guard"]\n')
    assert len(found_on("D014", "0.28.0")) == 1
    file.write_text('[[profile]]\nmodel = "*"\npatches = ["async-history"]\n')
    assert found_on("D014", "0.28.0") == []
    site.environ["VLLM_CUSTOM_PATCHES"] = "lora-path-guard"
    assert len(found_on("D014", "0.28.0")) == 1
    site.environ["VLLM_CUSTOM_PATCHES"] = "lora-path-guard, async-history"
    assert found_on("D014", "0.28.0") == []


def test_a_plan_that_cannot_be_read_cures_nothing(tmp_path, processors, found_on):
    processors.install(processors.V1)
    (tmp_path / "graft.toml").write_text("patches = [")
    assert len(found_on("D014", "0.28.0")) == 1
