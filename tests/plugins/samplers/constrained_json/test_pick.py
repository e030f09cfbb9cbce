"""The draw follows the probabilities, and top_k and top_p leave what they should."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from vllm_graft.contracts import Params  # noqa: E402
from vllm_graft.plugins.samplers.constrained_json.pick import pick  # noqa: E402

NUMBERS = [(at + 0.5) / 1000 for at in range(1000)]


def drawn(scores: list[float], width: int, **sampling: float):
    """How often each token comes over evenly spread numbers; the scores lie at the beginning and end of a wide row."""
    half = len(scores) // 2
    row = torch.full((width,), float("-inf"))
    row[:half], row[width - (len(scores) - half) :] = torch.tensor(scores[:half]), torch.tensor(scores[half:])
    params = [Params({}, **sampling)] * len(NUMBERS)
    picked = pick(row.repeat(len(NUMBERS), 1), params, NUMBERS)
    counts = torch.bincount(picked, minlength=width) / len(NUMBERS)
    assert counts[half : width - (len(scores) - half)].sum() == 0
    return torch.cat([counts[:half], counts[width - (len(scores) - half) :]])


SCORES = [1.0, 3.0, 0.5, 2.0, 2.5, -1.0]


@pytest.mark.parametrize("width", [6, 259, 512, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_are_the_probabilities(width, temperature):
    expected = (torch.tensor(SCORES) / temperature).softmax(0)
    assert torch.allclose(drawn(SCORES, width, temperature=temperature), expected, atol=2e-3)


def test_the_most_probable_comes_at_temperature_zero():
    assert drawn(SCORES, 512, temperature=0.0).tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("sampling", "stay"),
    [
        ({"top_k": 2}, [1, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": -1}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.5}, [1, 4]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.999}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3, "top_p": 0.6}, [1, 4]),
    ],
)
def test_top_k_and_top_p_leave_the_most_probable(sampling, stay):
    expected = torch.full((6,), float("-inf"))
    expected[stay] = torch.tensor(SCORES)[stay]
    assert torch.allclose(drawn(SCORES, 512, **sampling), expected.softmax(0), atol=2e-3)


def test_rows_of_all_kinds_go_together():
    torch.manual_seed(0)
    scores = torch.randn(4, 1024) * 4
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.8}, {"top_k": 7, "temperature": 0.4}]
    params = [Params({}, **kind) for kind in kinds]
    together = pick(scores.clone(), params, [0.1, 0.4, 0.6, 0.9]).tolist()
    alone = [pick(scores[at : at + 1].clone(), [params[at]], [[0.1, 0.4, 0.6, 0.9][at]]).item() for at in range(4)]
    assert together == alone
    assert together[0] == scores[0].argmax()


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_a_row_of_which_nothing_is_left_is_no_error(sampling):
    picked = pick(torch.full((1, 300), float("-inf")), [Params({}, **sampling)], [0.5])
    assert 0 <= picked.item() < 300
