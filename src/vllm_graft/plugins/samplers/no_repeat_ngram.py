"""``no-repeat-ngram``: forbids the tokens that would complete a sequence that is already in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_graft.contracts import Key, Params, Rows, ServedModel
from vllm_graft.plugins.samplers.matching import MAX_MATCH
from vllm_graft.plugins.samplers.matching.strategy import MatchingStrategy

if TYPE_CHECKING:
    import torch

    from vllm_graft.plugins.samplers.matching.host import Matcher
    from vllm_graft.plugins.samplers.matching.sets import TokenSet


class NoRepeatNgram(MatchingStrategy):
    """No sequence of ``no_repeat_ngram_size`` tokens occurs twice within the window, prompt and answer taken together.

    A size of 1 forbids every token of the window. Tokens of ``no_repeat_ngram_whitelist`` are never forbidden. If
    nothing would stay possible, under a grammar for example, the row stays as it is.

    Option ``window``: how many of the last tokens are looked at.
    """

    item = "no-repeat-ngram"
    keys: ClassVar[tuple[Key, ...]] = (
        Key(
            "no_repeat_ngram_size",
            "int",
            0,
            low=0,
            high=MAX_MATCH,
            aliases=("ngram_size",),
            switch=True,
            help="how many tokens make a sequence; 0 switches it off",
        ),
        Key(
            "no_repeat_ngram_window",
            "int",
            0,
            low=0,
            aliases=("window_size",),
            help="how many of the last tokens count; 0: as many as the server looks at",
        ),
        Key(
            "no_repeat_ngram_whitelist",
            "list[int]",
            [],
            high=1024,
            aliases=("whitelist_token_ids",),
            help="tokens that are never forbidden",
        ),
    )

    def setup(self, model: ServedModel) -> None:
        """Make the tables of all requests."""
        self._needed = model.per_slot(MAX_MATCH + 1, integer=True)
        self._matchers: dict[int, tuple[Matcher, TokenSet]] = {}
        super().setup(model)

    def open(self, slot: int, params: Params) -> bool:
        """Read the request's keys."""
        from vllm_graft.plugins.samplers.matching.host import Matcher
        from vllm_graft.plugins.samplers.matching.sets import TokenSet

        size = int(params.number("no_repeat_ngram_size"))
        self._matchers.pop(slot, None)
        # A sequence of that size is completed if one token less than that has matched.
        self._needed[slot] = size - 1 if size else MAX_MATCH + 1
        if not size:
            return False
        asked = int(params.number("no_repeat_ngram_window"))
        window = min(asked, self.window) if asked else self.window
        ids = params["no_repeat_ngram_whitelist"]
        assert isinstance(ids, list)
        allowed = TokenSet.of(map(int, ids), self._vocabulary)
        self._matchers[slot] = (Matcher(size - 1, window), allowed)
        self._sets.assign(slot, allowed)
        self._windows[slot] = window
        return True

    def _change_from_host(self, logits: torch.Tensor, rows: Rows) -> None:
        from vllm_graft.plugins.samplers.matching.by_torch import ban_each

        bans: dict[int, list[int]] = {}
        for row, slot in rows.pairs:
            matcher, allowed = self._matchers[slot]
            matcher.catch_up(rows.history, slot)
            found = [t for t in matcher.followers() if 0 <= t < self._vocabulary and not allowed.flags[t]]
            if found:
                bans[row] = found
        if bans:
            ban_each(logits, bans)

    def _change_by_torch(self, logits: torch.Tensor, rows: Rows, tokens: torch.Tensor) -> None:
        import torch

        from vllm_graft.plugins.samplers.matching.by_torch import ban, match_lengths

        windows = self._windows.of(rows)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        within = columns >= (tokens.shape[1] - windows)[:, None]
        enough = match_lengths(tokens, windows) >= self._needed.of(rows)[:, None]
        known = (tokens >= 0) & (tokens < self._vocabulary)
        meant = within & enough & known & ~self._sets.contains(rows.slots, tokens)
        ban(logits, rows.rows, torch.where(meant, tokens, -1))

    def _change_by_kernel(self, logits: torch.Tensor, rows: Rows, tokens: torch.Tensor) -> None:
        from vllm_graft.plugins.samplers.matching import kernels

        kernels.ban_repetitions(logits, rows, tokens, **self._tables(), needed=self._needed.all())
