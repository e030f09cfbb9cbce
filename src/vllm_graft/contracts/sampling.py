"""The sampling contracts: change the logits of the requests that ask for it, or pick their tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from vllm_graft.contracts.item import Item, OptionValue
from vllm_graft.contracts.request_keys import Key, KeyValue, Params, read_keys, refuse_unsendable
from vllm_graft.contracts.rows import Rows, ServedModel, Statistics
from vllm_graft.errors import OptionError, nearest

if TYPE_CHECKING:
    import torch

Stage = Literal["constrain", "penalty", "truncate", "transform"]

STAGES: Final[tuple[Stage, ...]] = ("constrain", "penalty", "truncate", "transform")
"""The order in which strategies work on a step's logits, after vLLM's own penalties and before its temperature; within
a stage they go in the order of the plan, and samplers that pick tokens come last."""


ON_ERROR: Final = ("quarantine", "request")
"""The cost of a sampler's exception: the sampler, or the request it was raised for."""


class OptInSampler(Item):
    """The base of strategies and samplers, which work only on requests that carry one of their ``keys``.

    ``keys`` declares what a request may carry, in ``vllm_xargs`` or at the top level of its body; see ``Key``. A bad
    value is answered with a 400 that names key, value and what is allowed, before it reaches the engine.
    """

    keys: ClassVar[Sequence[Key | str]] = ()
    options: ClassVar[Mapping[str, OptionValue]] = {
        "on_error": "quarantine",
        "required": False,
        "budget_us": 0,
        "defaults": {},
        "every_request": False,
    }
    """Every sampler has these, whatever options it declares besides: ``on_error`` says what an exception costs,
    ``quarantine`` the sampler or ``request`` the request it was raised for; ``required`` refuses a start at which the
    sampler cannot be used; otherwise it is left out, and its requests are answered with a 400; ``budget_us`` is what a
    step may cost, 0 the point's own budget; ``defaults`` holds values of keys for requests that do not carry them;
    ``every_request`` gives a sampler without keys all requests."""
    window: int = 0
    """The number of a request's last tokens wanted in ``rows.history``; 0: none. May be set in ``__init__``."""
    row_budget_us: ClassVar[float] = 0.0
    """The extra cost of a step for each request that the server runs at a time, if rows are worked on one by one
    on the host; the option ``budget_us`` takes precedence."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass that declares options of its own would lose the common ones.
        cls.options = {**OptInSampler.options, **cls.options}

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse values of the options that every sampler has; an override calls this one too."""
        policy, budget = options["on_error"], options["budget_us"]
        if policy not in ON_ERROR:
            known = " or ".join(f'"{each}"' for each in ON_ERROR)
            raise OptionError(f"must be {known}, but is {policy!r}{nearest(str(policy), ON_ERROR)}", option="on_error")
        if not isinstance(budget, int | float) or not 0 <= budget < math.inf:
            what = f"must be a time in microseconds, 0 for the point's own budget, but is {budget!r}"
            raise OptionError(what, option="budget_us")
        if options["defaults"]:
            try:
                defaults = read_defaults(cls, options)
                cls.check(defaults)
                cls.is_requested(defaults)
            except ValueError as error:
                raise OptionError(f"cannot be what requests carry: {error}", option="defaults") from error
        # With keys there would be two answers to whether a request without them is meant.
        if options["every_request"] and cls.request_keys():
            what = "is for samplers without keys, but this one has keys"
            raise OptionError(what, option="every_request", fix="set `defaults` to what requests ask for")

    @classmethod
    def request_keys(cls) -> tuple[Key, ...]:
        """Return the keys, a bare name as a ``Key`` of any type."""
        return tuple(Key(key) if isinstance(key, str) else key for key in cls.keys)

    @classmethod
    def is_requested(cls, params: Mapping[str, KeyValue]) -> bool:
        """Return whether a request with these keys asks for the sampler; values that mean off do not.

        Override it if comparing switches with their defaults is not enough.
        """
        switches = [key for key in cls.request_keys() if key.switch]
        if not switches:
            return bool(params)
        return any(key.name in params and params[key.name] != key.default for key in switches)

    @classmethod
    def check(cls, params: Mapping[str, KeyValue]) -> None:
        """Validate combinations of keys: raise a ValueError for two values that conflict, for example.

        ``params`` holds the keys that the request carries, already read. Called in the front end.
        """

    def setup(self, model: ServedModel) -> None:
        """Prepare for the model, once and before the first request: the place to make tables."""


class SamplingStrategy(OptInSampler):
    """Changes the logits of the requests that ask for it. Lives in each worker.

    ``open`` takes a request in; ``step`` changes its rows, once per step for the whole batch. ::

        class Flatten(SamplingStrategy):
            keys = (Key("flatten", "float", 1.0, low=0.01, high=1.0, switch=True, help="1 changes nothing"),)
            stage = "transform"

            def setup(self, model):
                self.factors = model.per_slot(1.0)

            def open(self, slot, params):
                self.factors[slot] = params.number("flatten")
                return not params.greedy

            def step(self, logits, rows):
                logits[rows.rows] *= self.factors.of(rows)[:, None]

    A strategy that raises is put aside, or ends the request it raised for: the option ``on_error`` decides. One that
    overruns its half millisecond again and again is put aside too: logits then pass as they are, and ``vllm-graft
    status`` shows it as quarantined.
    """

    stage: ClassVar[Stage] = "transform"
    atomic: ClassVar[bool] = False
    """Promise that ``step`` leaves every logit at -inf that is -inf. Without it each step is compared with the rows as
    they were, so that tokens which a grammar or vLLM has forbidden stay forbidden. Strategies that ship with vllm-graft
    and promise this work on vLLM's logits in place: a step of theirs that raises has changed nothing, too."""

    def open(self, slot: int, params: Params) -> bool:
        """Take in a request under this slot, which another may have had before; return whether to change its logits."""
        raise NotImplementedError(f"{type(self).__name__} must implement open(slot, params)")

    def step(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor | None:
        """Change the logits of ``rows`` in place, or return new ones: ``logits`` is [rows, vocabulary] in float32.

        It is a copy of the rows that are this strategy's, numbered as ``rows.rows`` says, and holds for this
        step only: the next one is given the same memory, so what is kept must be cloned. NaN and +inf are refused. May
        be called more than once for the same position, and must then do the same again.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement step(logits, rows)")

    def sampled(self, tokens: torch.Tensor, rows: Rows) -> None:
        """Take in the tokens that were picked for each row. Optional; a strategy that has it cannot be used with
        speculative decoding, where several tokens are picked at a time."""


class Truncation(SamplingStrategy):
    """Takes away the tokens whose logit is below a limit, one for each row.

    All truncations of a step share one pass that gathers statistics and one that takes away what the strictest says::

        class MinP(Truncation):
            keys = (Key("my_min_p", "float", 0.0, low=0.0, high=1.0, switch=True),)

            def setup(self, model):
                self.log_share = model.per_slot(-math.inf)

            def open(self, slot, params):
                self.log_share[slot] = math.log(params.number("my_min_p"))
                return not params.greedy

            def threshold(self, stats, rows):
                return stats.max + self.log_share.of(rows)

    The most probable token always stays.
    """

    stage: ClassVar[Stage] = "truncate"
    atomic: ClassVar[bool] = True

    def threshold(self, stats: Statistics, rows: Rows) -> torch.Tensor:
        """Return the least logit that stays, for each row; -inf lets all stay."""
        raise NotImplementedError(f"{type(self).__name__} must implement threshold(stats, rows)")

    def step(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor | None:
        """Never called: the binding merges the thresholds of all truncations."""
        raise NotImplementedError("truncations are merged: implement threshold(stats, rows)")


class Sampler(OptInSampler):
    """Picks the tokens of the requests that ask for it: the simplest contract, and the most powerful.

    ``sample`` is given the logits of its rows, after vLLM's penalties and the strategies, before temperature, and the
    request of each; it returns a token id for each. Log-probabilities that a client asked for stay the model's::

        class Coin(Sampler):
            keys = (Key("coin", "bool", False, switch=True, help="one of the two most probable tokens"),)

            def sample(self, logits, params):
                best = logits.topk(2).indices
                side = [hash((p.seed or 0, len(p.generated))) & 1 for p in params]
                return [row[s] for row, s in zip(best.tolist(), side)]

    Not with speculative decoding, where rows are not requests: such a request is answered with a 400.
    """

    syncs_device: ClassVar[bool] = True
    """True if ``sample`` looks at values on the host, and so waits for the device. The wait for the model then happens
    before the call and is not held against the budget; set it to False if ``sample`` only queues work."""

    def sample(self, logits: torch.Tensor, params: Sequence[Params]) -> Sequence[int] | torch.Tensor:
        """Return the token id of each row: ``logits`` is [rows, vocabulary] in float32, a copy."""
        raise NotImplementedError(f"{type(self).__name__} must implement sample(logits, params)")


def read_defaults(kind: type[OptInSampler], options: Mapping[str, OptionValue]) -> dict[str, KeyValue]:
    """Read the option ``defaults``: values for requests without these keys; raise a ValueError for a bad one."""
    table = options.get("defaults", {})
    if not isinstance(table, Mapping):
        raise ValueError(f"it must be a table of keys, but is {table!r}")
    names = [name for key in kind.request_keys() for name in (key.name, *key.aliases)]
    for name in table:
        if name not in names:
            raise ValueError(f"{name!r} is not one of its keys{nearest(name, names)}")
    refuse_unsendable(table)
    return read_keys(kind.request_keys(), table)


SamplerBase = Sampler
"""The name under which the contract was first described."""
