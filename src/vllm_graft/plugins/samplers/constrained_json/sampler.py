"""``constrained-json``: picks tokens so that the answer is a JSON document."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, cast

from vllm_graft.contracts import ConfigError, Key, KeyValue, Params, Sampler, ServedModel
from vllm_graft.contracts.kernels import indices
from vllm_graft.plugins.samplers.constrained_json.automaton import END, JsonState, Root, complete, start, step
from vllm_graft.plugins.samplers.constrained_json.masks import Masks
from vllm_graft.plugins.samplers.constrained_json.pick import pick
from vllm_graft.plugins.samplers.constrained_json.vocabulary import token_bytes

if TYPE_CHECKING:
    import torch

_ROOTS: Final = ("object", "any")
_PLACE: Final = "constrained-json"
"""The name under which a request's ``state`` holds its document."""

_log = logging.getLogger("vllm.graft")


@dataclass(slots=True)
class _Document:
    """One request's document so far.

    state: where it stands; None once a token came that cannot be part of it
    read:  how many generated tokens that counts
    seed:  what the request's random numbers are made of
    """

    state: JsonState | None
    read: int
    seed: str


class _Choice(NamedTuple):
    """The choice of one row: its mask, a token on the shortest way to the end, and its random number."""

    mask: torch.Tensor
    way_out: int
    number: float


class ConstrainedJSONSampler(Sampler):
    """Answers that are JSON: only tokens that can continue the document are picked from.

    The model's probabilities decide among them, with the temperature, top_p and top_k of the request; below a
    temperature of 1e-5 the most probable is taken. Special tokens are out, but when the document is complete nothing
    else than the model's end tokens is left.

    When ``max_tokens`` comes near, only tokens remain after which there is room to close what is open. So the answer
    is valid JSON whatever the limit, if a document fits in it at all (``{}``: two tokens), and if nothing else ends it
    before: a stop string, or a limit of the server that ``max_tokens`` does not know.

    Randomness is a hash of the request's seed and the number of tokens generated so far: an answer repeats. A request
    without a seed gets the number of the request in place of one, which all ranks count alike. So after a restart the
    same requests in the same order get the same answers.
    """

    # Each row has a document of its own on the host; and an answer whose rest is not constrained is not a document.
    row_budget_us: ClassVar[float] = 50.0
    keys = (
        Key("json_sampler", "bool", False, switch=True, help="true: the answer is a JSON document"),
        Key("json_max_depth", "int", 8, low=1, high=32, help="how many objects and arrays may be open at a time"),
        Key("json_root", "str", "object", help="what the document is: object, or any (also arrays, strings, numbers)"),
    )

    @classmethod
    def check(cls, params: Mapping[str, KeyValue]) -> None:
        """Refuse a root that is neither of the two."""
        root = params.get("json_root", "object")
        if root not in _ROOTS:
            raise ValueError(f"json_root must be one of {', '.join(_ROOTS)}, but is {root!r}")

    def setup(self, model: ServedModel) -> None:
        """Read the vocabulary and walk it once for what is inside of strings."""
        if not model.eos:
            raise ConfigError(
                f"{model.name} names no token that ends an answer, so constrained-json could not end a document",
                where="the model's configuration",
                fix="set eos_token_id in its generation_config.json, or remove constrained-json from the plan",
            )
        self._eos = frozenset(model.eos)
        # Once per worker; requests then look masks up.
        texts = token_bytes(model.tokenizer)
        self._texts = {token: text for token, text in texts.items() if token not in self._eos}
        self._masks = Masks(self._texts, model.eos, model.vocabulary, model.device)
        self._requests = itertools.count()

    def sample(self, logits: torch.Tensor, params: Sequence[Params]) -> torch.Tensor:
        """Pick the token of each row: one mask over the logits, then a draw from what is left."""
        import torch

        choices = [self._choice(one) for one in params]
        if logits.device.type == "cpu":
            # By numpy, as in `pick`.
            for row, choice in zip(logits.numpy(), choices, strict=True):
                row += choice.mask.numpy()
        else:
            logits.add_(torch.stack([choice.mask for choice in choices]))
        picked = pick(logits, params, [choice.number for choice in choices])
        # If something before this took away all that the document allows, the shortest way to its end is taken.
        nothing_left = logits.gather(1, picked[:, None])[:, 0].isneginf()
        ways_out = indices([choice.way_out for choice in choices], logits.device)
        return torch.where(nothing_left, ways_out, picked)

    def _choice(self, params: Params) -> _Choice:
        document = self._document(params)
        # A random number in [0, 1) that seed and place alone decide, of as many bits as float32 tells apart.
        digest = hashlib.blake2b(f"{document.seed}/{document.read}".encode(), digest_size=4).digest()
        number = (int.from_bytes(digest, "big") >> 9) / (1 << 23)
        if document.state is None:
            return _Choice(self._masks.unconstrained, 0, number)
        allowed = self._masks.allowed(document.state, int(params.number("json_max_depth")))
        budget = None if params.max_tokens is None else params.max_tokens - document.read - 1
        return _Choice(allowed.mask(budget), allowed.way_out, number)

    def _document(self, params: Params) -> _Document:
        """Return the request's document, up to its last token; begun anew if its state was lost."""
        tokens = params.generated
        document = params.state.get(_PLACE)
        if not isinstance(document, _Document) or document.read > len(tokens):
            seed = f"#{next(self._requests)}" if params.seed is None else str(params.seed)
            document = _Document(start(cast(Root, params["json_root"])), 0, seed)
            params.state[_PLACE] = document
        # Usually one; all of them for a request that comes back after a preemption, whose state was dropped.
        depth = int(params.number("json_max_depth"))
        for token in tokens[document.read :]:
            document.read += 1
            state = document.state
            if state is None:
                continue
            if token in self._eos and complete(state):
                document.state = END
                continue
            # A token without text counts as a zero byte, which is never allowed.
            for byte in self._texts.get(token, b"\0"):
                state = state and step(state, byte, depth)
            document.state = state
            if state is None:
                _log.warning(
                    "constrained-json: token %d cannot continue the document, so something else picked it; "
                    "the rest of this answer is not constrained",
                    token,
                )
        return document
