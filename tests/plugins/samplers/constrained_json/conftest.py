"""The sampler over the vocabulary of the embedded model, and requests that write documents on random logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from vllm_graft.contracts import Params, ServedModel  # noqa: E402
from vllm_graft.launcher.models import embedded_model  # noqa: E402
from vllm_graft.plugins.samplers.constrained_json import ConstrainedJSONSampler  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads wait for one another where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(embedded_model())


@pytest.fixture(scope="session")
def model(tokenizer):
    """A vocabulary of some tokens more than the tokenizer has, as padded models have."""
    cpu = torch.device("cpu")
    return ServedModel("m", len(tokenizer) + 64, 8, cpu, (tokenizer.eos_token_id,), load_tokenizer=lambda: tokenizer)


@pytest.fixture(scope="session")
def sampler(model):
    sampler = ConstrainedJSONSampler()
    sampler.setup(model)
    return sampler


@dataclass
class Writer:
    """One request: its parameters and what it generated."""

    params: Params
    noise: object
    generated: list[int] = field(default_factory=list)

    def logits(self):
        return self.noise[(self.params.seed or 0) % 5 + len(self.generated) % 11]

    @property
    def done(self) -> bool:
        return len(self.generated) == self.params.max_tokens or self.generated[-1:] == [2]


@pytest.fixture(scope="session")
def noise(model, sampler):
    """Random logits in which what makes documents is likely, and what ends them less so."""
    torch.manual_seed(0)
    likely = torch.zeros(model.vocabulary)
    likely[[token for token, text in sampler._texts.items() if set(text) & set(b'{[",:\\0123.e')]] = 6.0
    likely[[token for token, text in sampler._texts.items() if set(text) & set(b"}]")]] = 1.0
    return torch.randn(16, model.vocabulary) * 3 + likely


@pytest.fixture
def request_of(noise):
    """Makes a request."""

    def make(*, depth: int = 8, root: str = "object", max_tokens: int | None = 60, seed=1, **sampling) -> Writer:
        values = {"json_sampler": True, "json_max_depth": depth, "json_root": root}
        params = Params(values, seed=seed, max_tokens=max_tokens, **sampling)
        writer = Writer(params, noise)
        params.generated_so_far = lambda: writer.generated
        return writer

    return make


@pytest.fixture
def write(sampler, tokenizer):
    """Lets requests write in one batch until all are done, and returns the text of each."""

    def run(*writers: Writer, forget: bool = False) -> list[str]:
        while going := [writer for writer in writers if not writer.done]:
            logits = torch.stack([writer.logits() for writer in going])
            picked = sampler.sample(logits, [writer.params for writer in going]).tolist()
            for writer, token in zip(going, picked, strict=True):
                writer.generated.append(token)
                if forget:
                    writer.params.state.clear()
        return [tokenizer.decode(writer.generated, skip_special_tokens=True) for writer in writers]

    return run
