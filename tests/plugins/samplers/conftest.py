import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The kernels' child processes import the helpers of this folder too, from beside their script.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", params=["all rows at once", "row by row"])
def both_host_paths(request) -> Iterator[None]:
    """Run a module's tests on each of the two ways in which logits on the host are worked on."""
    from vllm_graft.contracts import kernels

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "row by row":
            patch.setattr(kernels, "_LONG_ROW", 0)
        yield
