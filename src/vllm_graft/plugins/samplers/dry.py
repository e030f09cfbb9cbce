"""``dry``: lowers the tokens that would continue a repetition, the more the longer the repetition is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from vllm_graft.contracts import Key, KeyValue, Params, Rows, ServedModel
from vllm_graft.plugins.samplers.matching import MAX_MATCH
from vllm_graft.plugins.samplers.matching.strategy import MatchingStrategy

if TYPE_CHECKING:
    import torch

    from vllm_graft.plugins.samplers.matching.host import Matcher

_LOG: Final = logging.getLogger("vllm.graft")

GREATEST: Final = 100.0
"""Penalties are no greater than this, which in effect rules a token out: its probability falls to e^-100 of before.
Greater ones would do the same, and pull the spread of the logits along, on which top-n-sigma depends."""
_LARGE: Final = 1e30
_BREAKERS: Final = ("\n", ":", '"', "*")

_LONGEST_BREAKER: Final = 64


class Dry(MatchingStrategy):
    """Penalises a token that would continue a sequence that is already in the text.

    If the last L tokens also precede a token of the window, L >= ``dry_allowed_length``, that token is lowered
    by ``dry_multiplier * dry_base ** (L - dry_allowed_length)``; the longest match counts. A match ends at a breaker:
    a token whose text contains one of ``dry_sequence_breakers``. Matches longer than 128 tokens count as 128.

    Option ``window``: how many of the last tokens are looked at.
    """

    item = "dry"
    keys: ClassVar[tuple[Key, ...]] = (
        Key("dry_multiplier", "float", 0.0, low=0, switch=True, help="how strong; 0 switches it off"),
        Key("dry_base", "float", 1.75, low=1, help="how much stronger with each further token of a repetition"),
        Key("dry_allowed_length", "int", 2, low=1, help="repetitions shorter than this are not penalised"),
        Key("dry_sequence_breakers", "list[str]", list(_BREAKERS), high=64, help="strings at which a repetition ends"),
        Key(
            "dry_penalty_last_n",
            "int",
            -1,
            low=-1,
            aliases=("dry_range",),
            help="how many of the last tokens count; 0 and -1: as many as the server looks at",
        ),
    )

    @classmethod
    def check(cls, params: Mapping[str, KeyValue]) -> None:
        """Refuse strings that are too long to be looked for at once."""
        breakers = params.get("dry_sequence_breakers", [])
        assert isinstance(breakers, list)
        longest = max((len(str(text)) for text in breakers), default=0)
        if longest > _LONGEST_BREAKER:
            raise ValueError(
                f"dry_sequence_breakers must be strings of at most {_LONGEST_BREAKER} characters, but one has {longest}"
            )

    def setup(self, model: ServedModel) -> None:
        """Make the tables of all requests, and decode the vocabulary for sequence breakers."""
        from vllm_graft.plugins.samplers.matching.breakers import Breakers

        self._breaks = model.load_tokenizer is not None
        if not self._breaks:
            _LOG.warning(
                "vllm-graft: dry: %s is served without a tokenizer, so sequence breakers have no effect", model.name
            )
        self._breakers = Breakers(lambda: model.tokenizer, model.vocabulary)
        if self._breaks:
            # The vocabulary is decoded at the first call: now, and not while requests wait.
            self._breakers.tokens(_BREAKERS)
        self._multipliers = model.per_slot(0.0)
        self._bases = model.per_slot(1.0)
        self._allowed = model.per_slot(MAX_MATCH + 1, integer=True)
        self._matchers: dict[int, Matcher] = {}
        self._penalties: dict[int, list[float]] = {}
        super().setup(model)

    def open(self, slot: int, params: Params) -> bool:
        """Read the request's keys."""
        from vllm_graft.plugins.samplers.matching.host import Matcher

        multiplier = min(params.number("dry_multiplier"), GREATEST)
        base = min(params.number("dry_base"), _LARGE)
        allowed = int(params.number("dry_allowed_length"))
        if multiplier == 0 or allowed > MAX_MATCH:
            self._matchers.pop(slot, None)
            self._penalties.pop(slot, None)
            self._multipliers[slot] = 0.0
            return False
        last = int(params.number("dry_penalty_last_n"))
        window = min(last, self.window) if last > 0 else self.window
        texts = params["dry_sequence_breakers"]
        assert isinstance(texts, list)
        breakers = self._breakers.tokens(map(str, texts if self._breaks else ()))
        self._matchers[slot] = Matcher(allowed, window, breakers.flags)
        # By length, once per request: `base ** length` for each match would cost more than finding it.
        penalties = self._penalties[slot] = [0.0] * allowed
        for beyond in range(MAX_MATCH + 1 - allowed):
            try:
                penalties.append(min(multiplier * base**beyond, GREATEST))
            except OverflowError:
                penalties.append(GREATEST)
        self._sets.assign(slot, breakers)
        self._multipliers[slot], self._bases[slot] = multiplier, base
        self._allowed[slot], self._windows[slot] = allowed, window
        return True

    def _change_from_host(self, logits: torch.Tensor, rows: Rows) -> None:
        from vllm_graft.plugins.samplers.matching.by_torch import lower_each

        at_rows, at_tokens, by = [], [], []
        for row, slot in rows.pairs:
            matcher, penalties = self._matchers[slot], self._penalties[slot]
            matcher.catch_up(rows.history, slot)
            for token, length in matcher.followers().items():
                if 0 <= token < self._vocabulary:
                    at_rows.append(row)
                    at_tokens.append(token)
                    by.append(penalties[length])
        if by:
            lower_each(logits, at_rows, at_tokens, by)

    def _change_by_torch(self, logits: torch.Tensor, rows: Rows, tokens: torch.Tensor) -> None:
        import torch

        from vllm_graft.plugins.samplers.matching.by_torch import lower, match_lengths, newest_first

        broken = self._sets.contains(rows.slots, newest_first(tokens))
        lengths = match_lengths(tokens, self._windows.of(rows), broken)
        beyond = (lengths - self._allowed.of(rows)[:, None]).clamp(min=-1)
        growth = torch.pow(self._bases.of(rows)[:, None], beyond.float())
        penalties = (self._multipliers.of(rows)[:, None] * growth).clamp(max=GREATEST)
        meant = (beyond >= 0) & (tokens >= 0) & (tokens < self._vocabulary) & (penalties > 0)
        lower(logits, rows.rows, torch.where(meant, tokens, -1), penalties)

    def _change_by_kernel(self, logits: torch.Tensor, rows: Rows, tokens: torch.Tensor) -> None:
        from vllm_graft.plugins.samplers.matching import kernels

        own = {"multipliers": self._multipliers.all(), "bases": self._bases.all(), "allowed": self._allowed.all()}
        kernels.lower_repetitions(logits, rows, tokens, **self._tables(), **own, greatest=GREATEST)
