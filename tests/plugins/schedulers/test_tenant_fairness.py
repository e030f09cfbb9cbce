"""``tenant-fairness`` against a slow and obvious reference, and what it promises: shares by weight, nothing lost."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.contracts import Load, WaitingRequest
from vllm_graft.errors import ConfigError
from vllm_graft.plugins.schedulers.tenant_fairness import TenantFairness


def request(name: object, tenant: str, priority: int = 0, arrival: float = 0.0, prompt: int = 10) -> WaitingRequest:
    return WaitingRequest(str(name), priority, arrival, prompt, 10, {"tenant": tenant} if tenant else {})


class Reference:
    """The same over a plain list: counters are recomputed, and every question looks at every request."""

    def __init__(self, weights: dict[str, float], classes_first: bool) -> None:
        self.weights, self.classes_first = weights, classes_first
        self.waiting: list[tuple[int, WaitingRequest]] = []
        self.served: dict[str, float] = {}
        self.advance: dict[str, int] = {}
        self.floor = 0.0
        self.number = 0

    @staticmethod
    def kind(each: WaitingRequest) -> int:
        return each.priority or 3

    def group(self, each: WaitingRequest) -> int:
        return self.kind(each) if self.classes_first else 0

    @staticmethod
    def tenant(each: WaitingRequest) -> str:
        return str(each.extra.get("tenant", ""))

    def charge(self, each: WaitingRequest, tokens: float) -> None:
        tenant = self.tenant(each)
        self.served[tenant] = self.served.get(tenant, 0.0) + tokens / self.weights.get(tenant, 1.0)

    def push(self, each: WaitingRequest) -> None:
        tenant = self.tenant(each)
        if tenant not in {self.tenant(row) for _, row in self.waiting}:
            beside = [self.served[self.tenant(row)] for _, row in self.waiting if self.group(row) == self.group(each)]
            lift = min(beside) if beside else self.floor
            self.floor = max(self.floor, lift)
            self.served[tenant] = max(self.served.get(tenant, 0.0), lift)
        self.number += 1
        self.waiting.append((self.number, each))

    def choose(self) -> WaitingRequest:
        group = min(self.group(each) for _, each in self.waiting)
        rows = [row for row in self.waiting if self.group(row[1]) == group]
        _, tenant = min((self.served[self.tenant(each)], self.tenant(each)) for _, each in rows)
        own = [row for row in rows if self.tenant(row[1]) == tenant]
        return min(own, key=lambda row: (self.kind(row[1]), row[1].arrival, row[0]))[1]

    def take(self, each: WaitingRequest) -> None:
        self.waiting = [row for row in self.waiting if row[1] is not each]
        if self.tenant(each) not in {self.tenant(row) for _, row in self.waiting}:
            self.floor = max(self.floor, self.served[self.tenant(each)])

    def refund(self, each: WaitingRequest) -> None:
        self.charge(each, -self.advance.pop(each.request_id, 0))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_it_agrees_with_the_reference(data: st.DataObject):
    """Under arrivals, admissions, steps, hand-backs, aborts and ends; weights are powers of two, to be exact."""
    weights, first = {"b": 2.0, "c": 0.5}, data.draw(st.booleans())
    queue = TenantFairness({"weights": ["b=2", "c=0.5"], "classes_first": first})
    reference = Reference(weights, first)
    admitted: list[WaitingRequest] = []
    for number in range(data.draw(st.integers(0, 60))):
        operation = data.draw(st.sampled_from(["push", "push", "pop", "pop", "serve", "back", "remove", "end"]))
        if operation == "push":
            tenant, kind = data.draw(st.sampled_from(["", "a", "b", "c"])), data.draw(st.integers(0, 5))
            each = request(number, tenant, kind, data.draw(st.integers(0, 5)), data.draw(st.integers(1, 40)))
            queue.push(each)
            reference.push(each)
        elif operation == "pop" and reference.waiting:
            expected = reference.choose()
            assert queue.peek() is expected
            assert queue.pop() is expected
            reference.take(expected)
            reference.charge(expected, expected.prompt_tokens)
            reference.advance[expected.request_id] = expected.prompt_tokens
            admitted.append(expected)
        elif operation == "serve" and admitted:
            each, tokens = data.draw(st.sampled_from(admitted)), data.draw(st.integers(1, 30))
            queue.served(each, tokens)
            used = min(tokens, reference.advance.get(each.request_id, 0))
            if each.request_id in reference.advance:
                reference.advance[each.request_id] -= used
            reference.charge(each, tokens - used)
        elif operation == "back" and admitted:
            each = admitted.pop(data.draw(st.integers(0, len(admitted) - 1)))
            queue.put_back(each)
            reference.refund(each)
            reference.push(each)
        elif operation == "end" and admitted:
            each = admitted.pop(data.draw(st.integers(0, len(admitted) - 1)))
            queue.ended(each)
            reference.refund(each)
        elif operation == "remove" and reference.waiting:
            _, each = data.draw(st.sampled_from(reference.waiting))
            queue.remove(each)
            reference.take(each)
    left = []
    while reference.waiting:
        left.append(reference.choose())
        assert queue.pop() is left[-1]
        reference.take(left[-1])
        reference.charge(left[-1], left[-1].prompt_tokens)
    assert len({each.request_id for each in left}) == len(left)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=40, max_size=40), st.sampled_from([1, 3, 8]))
def test_two_that_always_wait_are_served_by_their_weights(sizes: list[int], weight: int):
    """At any moment the two accounts differ by no more than the largest request."""
    queue = TenantFairness({"weights": [f"big={weight}"]})
    for number, size in enumerate(sizes):
        queue.push(request(f"b{number}", "big", prompt=size))
        queue.push(request(f"s{number}", "small", prompt=size))
    accounts = {"big": 0.0, "small": 0.0}
    waiting = {"big": len(sizes), "small": len(sizes)}
    while all(waiting.values()):
        popped = queue.pop()
        queue.served(popped, popped.prompt_tokens)
        tenant = str(popped.extra["tenant"])
        waiting[tenant] -= 1
        accounts[tenant] += popped.prompt_tokens / (weight if tenant == "big" else 1)
        assert abs(accounts["big"] - accounts["small"]) <= max(sizes)


def test_a_tenant_that_was_away_has_saved_up_nothing():
    """It begins where the least served of those that wait is."""
    queue = TenantFairness()
    for number in range(10):
        queue.push(request(f"a{number}", "a"))
    for _ in range(5):
        queue.pop()
    for number in range(10):
        queue.push(request(f"b{number}", "b"))
    assert [queue.pop().request_id[0] for _ in range(6)] in (["a", "b"] * 3, ["b", "a"] * 3)


def test_names_of_tenants_are_not_kept_for_ever():
    """They are clients' words, and there may be millions."""
    queue = TenantFairness()
    for number in range(20_000):
        queue.push(request(number, f"tenant{number}"))
        popped = queue.pop()
        queue.served(popped, 15)
        queue.ended(popped)
    assert len(queue._counters.served) <= 1100
    assert not queue._accounts
    assert not queue._waiting


@pytest.mark.parametrize(
    ("sources", "name", "expected"),
    [
        (["xargs", "cache_salt", "lora"], "x", "acme"),
        (["cache_salt", "xargs"], "x", "salt"),
        (["lora"], "x", "adapter"),
        (["request_id"], "cmpl-gold-42-0-88f25b4c", "gold"),
        (["request_id"], "chatcmpl-gold-42", "gold"),
        (["request_id"], "000017", ""),
    ],
)
def test_where_the_tenant_is_read_from(sources: list[str], name: str, expected: str):
    """The first source that has one."""
    queue = TenantFairness({"tenant_from": sources})
    assert queue._tenant(WaitingRequest(name, 0, 0.0, 1, 1, {"tenant": "acme"}, "salt", "adapter")) == expected


def test_classes_first():
    """Shares are then kept inside a class, and no share lifts a request above a better class."""
    queue = TenantFairness({"classes_first": True})
    for number in range(3):
        queue.push(request(f"a{number}", "a", priority=1))
    queue.push(request("b", "b", priority=2))
    assert [queue.pop().request_id for _ in range(4)] == ["a0", "a1", "a2", "b"]


def test_an_urgent_lane_over_all_tenants():
    """A flood does not keep its own requests out for ever."""
    queue = TenantFairness({"max_wait_sec": 10.0})
    queue.clock = lambda: 100.0
    queue.push(request("aged", "flood", arrival=90.0))
    queue._counters.charge("flood", 1e6)
    queue.push(request("fresh", "light", arrival=100.0))
    assert queue.pop().request_id == "aged"
    assert queue.pop().request_id == "fresh"


def test_unknown_tenants_are_refused_where_only_known_ones_are_served():
    queue = TenantFairness({"weights": ["acme=2"], "known_only": True})
    assert queue.admit(request("1", "acme"), Load()) is None
    refusal = queue.admit(request("2", "nobody"), Load())
    assert refusal is not None
    assert refusal.reason == "the tenant 'nobody' is not known here"
    assert TenantFairness().admit(request("3", "nobody"), Load()) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"weights": ["acme"]},
            "option weights of tenant-fairness: holds 'acme', which is not a tenant and",
        ),
        ({"weights": ["acme=0"]}, "'acme=0', which is not a tenant"),
        ({"weights": ["acme=nan"]}, "'acme=nan', which is not a tenant"),
        ({"weights": ["a=1", "a=2"]}, "gives the tenant 'a' two weights"),
        ({"tenant_from": ["header"]}, "names 'header', which a tenant cannot be read from"),
        ({"tenant_from": []}, "names no source of tenants"),
        ({"max_wait_sec": -1.0}, "option max_wait_sec of tenant-fairness: must be at least 0"),
    ],
)
def test_absurd_options_are_refused_by_name(options: dict[str, list[str]], text: str):
    with pytest.raises(ConfigError) as caught:
        TenantFairness(options)  # type: ignore[arg-type]
    assert text in str(caught.value)


class Counted(float):
    """A number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float.__lt__(self, other)


@pytest.mark.parametrize("waiting", [1000, 50_000])
def test_an_operation_costs_the_logarithm(waiting: int, monkeypatch: pytest.MonkeyPatch):
    """Counted in comparisons of arrivals and of entries; with many tenants and many requests of each."""
    queue = TenantFairness()
    each_has = max(1, int(math.sqrt(waiting)))
    requests = [
        request(number, f"t{number // each_has}", 1, Counted(number * 7919 % 1000)) for number in range(waiting)
    ]
    for each in requests:
        queue.push(each)
    entered = 0
    heap = queue._groups[0]
    enter = heap._enter

    def counted(tenant: str) -> None:
        nonlocal entered
        entered += 1
        enter(tenant)

    monkeypatch.setattr(heap, "_enter", counted)
    Counted.compared = 0
    rounds = 200
    for number in range(rounds):
        queue.peek()
        popped = queue.pop()
        queue.served(popped, 12)
        queue.put_back(popped)
        queue.remove(requests[-1 - number])
        queue.push(requests[-1 - number])
    assert Counted.compared / rounds <= 20 * math.log2(waiting)
    assert entered / rounds <= 4


def test_a_cache_salt_shows_as_a_hash():
    """It is a secret, and status and metrics are read by others; a tenant by any other name shows as that."""
    queue = TenantFairness({"tenant_from": ["xargs", "cache_salt"]})
    salted = [WaitingRequest("r", 0, 0.0, 1, 1, cache_salt=salt) for salt in ("secret", "secret", "s" * 200, "\ud800")]
    names = [queue.labels(each)["tenant"] for each in salted]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert all(name.startswith("salt-") and "secret" not in name for name in names)
    named = WaitingRequest("r", 1, 0.0, 1, 1, {"tenant": "acme"}, cache_salt="secret")
    assert queue.labels(named) == {"class": "1", "tenant": "acme"}
    assert queue.labels(WaitingRequest("r", 0, 0.0, 1, 1)) == {"class": "3", "tenant": ""}


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


NO_NAMES: dict[str, Callable[[], object]] = {
    "a deep list": lambda: nested(100_000),
    "a deep object": lambda: {"a": nested(100_000)},
    "a list": lambda: ["a"],
    "an object": dict,
    "null": lambda: None,
    "a huge integer": lambda: 10**5000,
    "a huge negative integer": lambda: -(10**5000),
}


@pytest.mark.parametrize("kind", NO_NAMES)
def test_what_is_no_name_is_no_tenant(kind: str):
    """One request with nonsense for a tenant must not have the scheduler put aside for everybody."""
    queue, value = TenantFairness({}), NO_NAMES[kind]()
    odd = WaitingRequest("a", 0, 0.0, 10, 10, {"tenant": value})
    assert queue.labels(odd)["tenant"] == ""
    assert queue.admit(odd, Load()) is None
    queue.push(odd)
    assert queue.pop() is odd
    adapted = WaitingRequest("b", 0, 0.0, 10, 10, {"tenant": value}, lora="adapter")
    assert queue.labels(adapted)["tenant"] == "adapter"


@pytest.mark.parametrize(("value", "name"), [("acme", "acme"), (7, "7"), (1.5, "1.5"), ("x" * 500, "x" * 128)])
def test_text_and_numbers_are_names(value: object, name: str):
    """As clients write them."""
    assert TenantFairness({}).labels(WaitingRequest("a", 0, 0.0, 10, 10, {"tenant": value}))["tenant"] == name
