"""D013: logits processors that the runner does not take."""

from dataclasses import replace

import pytest

from vllm_graft.doctor.rules.d013_processor_interface import check

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"


def test_a_v1_class_stops_the_v2_runner(processors, found_on):
    processors.install(processors.V1)
    (finding,) = found_on("D013", "0.32.0")
    assert (finding.level, finding.subject) == ("error", "logits processor 'mine'")
    assert "of the V1 interface, and the V2 runner of vLLM 0.32.0 refuses to start" in finding.what
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in finding.fix
    assert "uninstall plug" in finding.fix


def test_a_v1_class_that_is_named_stops_it_too(site, processors, found_on):
    site.package("plug", {}, {"plug": processors.V1})
    site.arguments = ["--logits-processors", "plug:Processor", "--port", "1"]
    (finding,) = found_on("D013", "0.32.0")
    assert (finding.subject, finding.where) == ("logits processor plug:Processor", "--logits-processors")


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["MODEL"], "error"),
        (["org/unknown"], "warning"),
        (["org/unknown", "--runner", "generate"], "error"),
        (["--config", "server.yaml"], "warning"),
        (["MODEL", "--enable-dbo"], "warning"),
        (["MODEL", "--speculative-config", '{"method": "eagle", "parallel_drafting": true}'], "warning"),
        (["org/unknown", "--runner", "pooling"], None),
        (["org/unknown", "--convert", "embed"], None),
    ],
)
def test_it_is_an_error_only_where_the_runner_and_the_kind_of_model_are_sure(
    site, processors, found_on, tmp_path, arguments, level
):
    """Pooling models have no logits processors, so for them vLLM loads none."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    processors.install(processors.V1)
    site.arguments = [str(tmp_path) if word == "MODEL" else word for word in arguments]
    assert [finding.level for finding in found_on("D013", "0.32.0")] == ([level] if level else [])


def test_a_language_model_s_class_may_pool_and_another_platform_may_have_a_runner_of_its_own(
    site, processors, found_on, tmp_path
):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "modules.json").write_text("[]")
    processors.install(processors.V1)
    site.arguments = [str(tmp_path)]
    assert [finding.level for finding in found_on("D013", "0.32.0")] == ["warning"]
    site.arguments = []
    site.package("other", {"vllm.platform_plugins": {"other": "nowhere:register"}})
    assert [finding.level for finding in found_on("D013", "0.32.0")] == ["warning"]


@pytest.mark.parametrize("text", ["V2", "BOTH"])
def test_the_v2_runner_takes_what_is_of_its_interface(text, processors, found_on):
    processors.install(getattr(processors, text))
    assert found_on("D013", "0.32.0") == []


def test_what_cannot_be_told_is_not_spoken_of(processors, found_on):
    processors.install("Processor = make()")
    assert found_on("D013", "0.32.0") == []


def test_the_v1_runner_takes_v1_and_both_and_not_v2_alone(site, processors, found_on):
    site.environ[SWITCH] = "0"
    for text in (processors.V1, processors.BOTH):
        processors.install(text)
        assert found_on("D013", "0.32.0") == []
    processors.install(processors.V2)
    (finding,) = found_on("D013", "0.32.0")
    assert finding.level == "error"
    assert "of the V2 interface only" in finding.what


def test_cpu_builds_have_the_v1_runner(processors, found_on, build_for_cpu):
    processors.install(processors.V1)
    build_for_cpu()
    assert found_on("D013", "0.32.0") == []
    assert found_on("D013", "0.28.0") == []


def test_a_torch_without_triton_has_the_v1_runner(site, processors, found_on):
    processors.install(processors.V1)
    site.package("torch", {})
    assert found_on("D013", "0.32.0") == []
    site.package("triton", {})
    assert len(found_on("D013", "0.32.0")) == 1


def test_before_0_31_an_installed_one_costs_everybody_the_v2_runner(processors, found_on):
    processors.install(processors.V1)
    (finding,) = found_on("D013", "0.28.0")
    assert finding.level == "warning"
    assert "vLLM 0.28.0 runs every model on the V1 runner, because it is installed" in finding.what


def test_before_0_31_one_that_is_named_does_as_it_is_told(site, processors, found_on):
    site.arguments = ["--logits-processors=plug:Processor"]
    site.package("plug", {}, {"plug": processors.V1})
    (finding,) = found_on("D013", "0.28.0")
    assert finding.level == "info"


def test_before_0_31_the_v2_runner_is_refused(site, processors, found_on):
    processors.install(processors.V1)
    site.environ[SWITCH] = "1"
    (finding,) = found_on("D013", "0.30.0")
    assert finding.level == "error"
    assert finding.what.startswith("VLLM_USE_V2_MODEL_RUNNER=1 asks for the V2 runner, which refuses to start")
    del site.environ[SWITCH]
    site.arguments = ["--speculative-config.method", "dspark"]
    (finding,) = found_on("D013", "0.30.0")
    assert finding.level == "error"
    assert "dspark" in finding.what


def test_before_0_31_the_v1_runner_by_choice_is_fine(site, processors, found_on):
    processors.install(processors.V1)
    site.environ[SWITCH] = "0"
    assert found_on("D013", "0.28.0") == []


@pytest.mark.parametrize("readable", [True, False])
def test_before_0_31_there_is_no_v2_interface(site, processors, readable):
    processors.install(processors.V2)
    site.environ[SWITCH] = "0"
    env = site.environment()
    env = replace(env, vllm="0.28.0", root=env.root if readable else None)
    (finding,) = check(env)
    assert finding.level == "error"
    assert "which vLLM 0.28.0 does not have" in finding.what


def test_nothing_is_said_without_vllm_or_without_processors(processors, found_on):
    assert found_on("D013", "0.32.0") == []
    processors.install(processors.V1)
    assert found_on("D013", None) == []
