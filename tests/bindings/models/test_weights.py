"""The names of a checkpoint's weights on their way into a model."""

import pytest

from vllm_graft.bindings.models.weights import WeightReader, reading


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("transformer.layers.0.q", "model.layers.0.q"),
        ("transformer.head.weight", "lm_head.weight"),
        ("optimizer.step", None),
        ("norm.weight", "norm.weight"),
    ],
)
def test_the_longest_beginning_that_fits_is_replaced(name, renamed):
    mapping = {"transformer.": "model.", "transformer.head.": "lm_head.", "optimizer.": None}
    assert WeightReader(mapping).rename(name) == renamed


class Net:
    """A model with two parameters, which loads what it knows."""

    def named_parameters(self):
        return [("a.weight", None), ("b.experts.routed_experts.w13", None)]

    def load_weights(self, weights):
        loaded = set()
        for name, weight in weights:
            if weight is None:
                raise ValueError("no shape")
            loaded.add(name)
        return loaded


class Tensor:
    shape = (2, 3)


def test_what_was_read_last_is_known_until_all_is_read():
    with reading(Net, {"old.": "new."}) as reader, pytest.raises(ValueError, match="no shape"):
        Net().load_weights([("a.weight", Tensor()), ("old.b", None), ("c", Tensor())])
    assert reader.current == "old.b of the shape [], read as new.b"
    with reading(Net, {}) as reader:
        Net().load_weights([("a.weight", Tensor())])
    assert reader.current == ""


def test_parameters_that_nothing_was_read_into_are_known():
    """Experts report their weights without the module that they are in, up to vLLM 0.27; and files may come in turn."""
    with reading(Net, {}) as reader:
        assert reader.missing is None
        Net().load_weights([("a.weight", Tensor())])
        assert reader.missing == {"b.experts.routed_experts.w13"}
        Net().load_weights([("b.experts.w13", Tensor())])
        assert reader.missing == set()


def test_the_class_is_as_it_was_afterwards():
    class Heir(Net):
        pass

    own = Net.__dict__["load_weights"]
    with reading(Net, {}), reading(Heir, {}):
        assert Net.__dict__["load_weights"] is not own
    assert Net.__dict__["load_weights"] is own
    assert "load_weights" not in Heir.__dict__
