"""``sink-window``: its options, and the layers that it gives a window."""

import pytest

from vllm_graft.contracts import LayerView, OptionError, Window
from vllm_graft.contracts.layer_choice import parse_layers
from vllm_graft.plugins.attention.compact_window import CompactWindow
from vllm_graft.plugins.attention.sink_window import SinkWindow


def view(index: int = 0, window: int | None = None) -> LayerView:
    return LayerView(f"model.layers.{index}.self_attn.attn", index, 32, window, 4, 2, 32, 16, 2048)


@pytest.mark.parametrize(
    ("options", "option", "what"),
    [
        ({"sink_tokens": -1}, "sink_tokens", "must be 0 or more tokens, but is -1"),
        ({"sink_tokens": 1.5}, "sink_tokens", "must be 0 or more tokens, but is 1.5"),
        ({"window": 0}, "window", "must be at least one token, but is 0"),
        ({"window": "4k"}, "window", "must be at least one token, but is '4k'"),
        ({"sink_tokens": 300, "window": 256}, "sink_tokens", "more than the window of 256 tokens"),
        ({"layers": "0-"}, "", ""),
        ({"sink_tokens": 256, "window": 256}, "", ""),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], option: str, what: str):
    given = {**SinkWindow.options, **options}
    if not option:
        SinkWindow.check_options(given)  # type: ignore[arg-type]
        return
    with pytest.raises(OptionError, match=what) as caught:
        SinkWindow.check_options(given)  # type: ignore[arg-type]
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("all", [0, 1, 2, 3, 4, 5]),
        (" all ", [0, 1, 2, 3, 4, 5]),
        ("3", [3]),
        ("0-2", [0, 1, 2]),
        ("4-", [4, 5]),
        ("0-1, 1-2,5", [0, 1, 2, 5]),
        ("5-900", [5]),
        ("9", []),
    ],
)
def test_layers_are_numbers_and_ranges(text: str, chosen: list[int]):
    assert [index for index in range(6) if index in parse_layers(text)] == chosen


@pytest.mark.parametrize(
    "text", ["", " ", ",", "1,,2", "-", "-3", "3-1", "1-2-3", "1.5", "one", "all, 3", "0x2", "1;2"]
)
def test_layers_that_cannot_be_read_are_refused(text: str):
    with pytest.raises(OptionError, match="which is neither a layer nor a range of layers") as caught:
        parse_layers(text)
    assert caught.value.option == "layers"
    assert '"0-3, 8, 20-"' in str(caught.value)


def test_a_window_of_the_model_itself_stays_as_it_is():
    """Chosen layers with full attention get the window, the others nothing."""
    policy = SinkWindow({"sink_tokens": 4, "window": 128, "layers": "0-3"})
    answers = [policy.window(view(0)), policy.window(view(1, window=512)), policy.window(view(4))]
    assert answers == [Window(4, 128), Window(0, 512), None]


def test_compact_window_leaves_full_attention_alone():
    assert [CompactWindow().window(each) for each in (view(), view(window=512))] == [None, Window(0, 512)]
