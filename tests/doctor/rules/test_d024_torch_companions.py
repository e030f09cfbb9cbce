"""D024: companions of torch that do not fit it."""

import pytest


@pytest.fixture
def install(site):
    """Lay out a package with its version, requirements and what its version.py states."""

    def lay_out(name, version, requires=(), stated=""):
        info = site.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        lines += [f"Requires-Dist: {each}" for each in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (site.folder / name).mkdir()
        (site.folder / name / "version.py").write_text(f"__version__ = '{stated or version}'\n")

    return lay_out


def test_a_cuda_build_beside_a_cpu_torch_is_an_error_though_its_metadata_does_not_say_so(site, install):
    install("torch", "2.13.0+cpu")
    install("torchvision", "0.28.0", stated="0.28.0+cu130")
    (finding,) = site.found("D024")
    assert (finding.level, finding.subject) == ("error", "package torchvision")
    assert "CUDA build (0.28.0+cu130) beside a CPU build of torch (2.13.0+cpu)" in finding.what


@pytest.mark.parametrize("name", ["torchaudio", "torchcodec"])
def test_those_that_fewer_models_need_are_warnings(site, install, name):
    install("torch", "2.13.0+cpu")
    install(name, "2.13.0+cu130")
    assert [finding.level for finding in site.found("D024")] == ["warning"]


def test_two_major_releases_of_cuda_do_not_fit(site, install):
    install("torch", "2.13.0", stated="2.13.0+cu128")
    install("torchvision", "0.28.0", stated="0.28.0+cu130")
    (finding,) = site.found("D024")
    assert "another major release of CUDA" in finding.what


def test_a_requirement_that_torch_does_not_meet_is_told(site, install):
    install("torch", "2.11.0+cpu")
    install("torchvision", "0.28.0+cpu", ["torch (==2.13.0)", "numpy"])
    (finding,) = site.found("D024")
    assert "needs torch==2.13.0, but torch is 2.11.0+cpu" in finding.what
    assert finding.level == "warning"


@pytest.mark.parametrize(
    ("torch", "vision"),
    [
        (("2.13.0+cpu",), ("0.28.0+cpu", ["torch==2.13.0"])),
        (("2.13.0+cpu",), ("0.28.0",)),
        (("2.13.0", ["nvidia-cublas-cu12==1"]), ("0.28.0", [], "0.28.0+cu130")),
        (("2.13.0", [], "2.13.0+cu130"), ("0.28.0", ["torch==2.13.0"], "0.28.0+cu132")),
        (("2.13.0+cpu",), ("0.28.0", ["torch==2.11.0; extra == 'old'"])),
        (("2.13.0+cpu",), ("0.28.0", [], "0.27.0+cu130")),
    ],
)
def test_what_fits_or_is_not_certain_is_let_be(site, install, torch, vision):
    install("torch", *torch)
    install("torchvision", *vision)
    assert site.found("D024") == []


def test_without_torch_or_without_companions_there_is_nothing_to_say(site, install):
    install("torchvision", "0.28.0+cu130")
    assert site.found("D024") == []
