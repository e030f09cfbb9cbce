"""Policies that evict blocks one by one: what is gone is gone, and a policy that lies costs itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_graft.contracts import RequestBlocks
from vllm_graft.ledger import Ledger
from vllm_graft.plan import PlanItem
from vllm_graft.testing import Session

POLICIES = """
import json, os
from vllm_graft.contracts import KVPolicy

class EveryOther(KVPolicy):
    '''Keeps the first block and the last four; of the others every second one.'''
    def evict(self, request):
        gone = [block for block in request.evictable[1:-4] if block % 2]
        with open(os.environ["EVICTED"], "a") as file:
            print(json.dumps([request.request_id, request.tokens, gone]), file=file)
        return gone

class InUse(KVPolicy):
    def evict(self, request):
        return [request.held[-1] + 1] if request.tokens > 100 else []

class Foreign(KVPolicy):
    def evict(self, request):
        return ["0"]

class Raises(KVPolicy):
    def evict(self, request):
        raise RuntimeError("on purpose")

class Late(KVPolicy):
    def evict(self, request):
        raise SystemExit(3)
"""
DRAFTS = "speculative_config=dict(method='ngram', num_speculative_tokens=3, prompt_lookup_max=3)"
NAMES = {"every-other": "EveryOther", "in-use": "InUse", "foreign": "Foreign", "raises": "Raises", "exits": "Late"}


@pytest.fixture
def policies(graft: Session) -> Session:
    entries = {name: f"evicting:{kind}" for name, kind in NAMES.items()}
    graft.package("evicting-policies", {"vllm_graft.plugins": entries}, {"evicting": POLICIES})
    graft.env["EVICTED"] = str(graft.folder / "evicted")
    return graft


@pytest.mark.engine
@pytest.mark.compiled
def test_tokens_are_those_of_a_mask_without_the_evicted_blocks(run, policies: Session):
    """Each query sees what was left when its step began; a second request gets no block computed after an eviction."""
    policies.plan('[defaults]\nattention = "every-other"\n')
    found = run(
        policies,
        """
import os
from transformers import AutoModelForCausalLM
llm = engine(max_num_batched_tokens=128)
manager = core(llm).scheduler.kv_cache_manager
(asked,), equal, cached, most = prompts((400,)), [], [], 0
for _ in range(2):
    open(os.environ["EVICTED"], "w").close()
    (answer,), (hit,) = answers(llm, [asked], 100)
    evicted = [json.loads(line) for line in open(os.environ["EVICTED"])]
    ids = torch.tensor([asked + answer])
    size = ids.shape[1]
    seen = torch.tril(torch.ones(size, size, dtype=torch.bool))
    for position in range(hit, size):
        start = position if position >= len(asked) else hit + (position - hit) // 128 * 128
        for _, tokens, gone in evicted:
            for block in gone if tokens <= start else ():
                seen[position, block * 32:(block + 1) * 32] = False
    network = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        chosen = network(ids, attention_mask=mask).logits[0].argmax(-1)[len(asked) - 1:-1].tolist()
        full = network(ids).logits[0].argmax(-1)[len(asked) - 1:-1].tolist()
    equal.append(sum(a == b for a, b in zip(chosen, answer)) / len(answer))
    equal.append(sum(a == b for a, b in zip(full, answer)) / len(answer))
    cached.append(hit)
pool = manager.block_pool
from vllm_graft.ledger import current
print(json.dumps(dict(
    equal=equal, cached=cached, first=next(tokens for _, tokens, gone in evicted if gone),
    left=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), items=current().view().as_dict()["items"],
)))
""",
    )
    masked, full, masked_again, _ = found["equal"]
    assert masked == masked_again == 1.0
    assert full < 1.0
    # The hit ends where the first request had its first eviction.
    assert 0 < found["cached"][1] <= 256
    assert found["left"] == 0
    (item,) = found["items"]
    assert item["state"] == "applied"
    assert item["hooks"]["evict"]["calls"] >= 8
    assert item["figures"]["KV blocks freed"] > 8


@pytest.mark.engine
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("in-use", "which is not among the"),
        ("foreign", "block '0', which is not among the"),
        ("raises", "RuntimeError: on purpose"),
        ("exits", "SystemExit: 3"),
    ],
)
def test_a_policy_that_lies_costs_itself(run, policies: Session, name, reason):
    """It is put aside with the reason; requests keep what they hold and end with the tokens of full attention."""
    policies.plan(f'[defaults]\nattention = "{name}"\n')
    found = run(
        policies,
        """
from transformers import AutoModelForCausalLM
llm = engine()
asked = prompts((200, 60))
given, _ = answers(llm, asked, 60)
network = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
equal = []
for prompt, answer in zip(asked, given):
    with torch.no_grad():
        chosen = network(torch.tensor([prompt + answer])).logits[0].argmax(-1)[len(prompt) - 1:-1].tolist()
    equal.append(chosen == answer)
from vllm_graft.ledger import current
print(json.dumps(dict(equal=equal, items=current().view().as_dict()["items"])))
""",
    )
    assert found["equal"] == [True, True]
    (item,) = found["items"]
    assert item["state"] == "quarantined"
    assert reason in item["reason"]


@pytest.mark.engine
@pytest.mark.compiled
@pytest.mark.parametrize("drafts", ["", DRAFTS], ids=["plain", "drafts"])
def test_no_evicted_block_is_read(soak, policies: Session, drafts: str, no_drafts: str):
    """With random arrivals, aborts and preemptions, and with drafts of which some are rejected."""
    if drafts and no_drafts:
        pytest.skip(no_drafts)
    policies.plan('[defaults]\nattention = "every-other"\n')
    soak(policies, 200, more=drafts)


@pytest.mark.engine
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ("", "the model gives each of its layers a window"),
        ('layer_types=["sliding_attention", "full_attention"]', "the model has 2 groups of layers"),
    ],
)
def test_a_model_with_windows_of_its_own_is_refused(run, policies: Session, layers: str, reason: str):
    """Blocks are evicted for all layers at once, and the policy would never be asked."""
    policies.plan('[defaults]\nattention = "every-other"\n')
    found = run(
        policies,
        f"""
try:
    engine(hf_overrides=dict(sliding_window=100, {layers}))
    said = "started"
except Exception as error:
    said = str(error)
print(json.dumps(dict(said=said)))
""",
    )
    assert "attention 'every-other'" in found["said"]
    assert reason in found["said"]


def test_what_may_be_evicted_is_checked():
    """Indices of evictable blocks alone, each once."""
    validate = pytest.importorskip("vllm_graft.bindings.attention.eviction").validate
    evictable = {0, 1, 2}
    assert validate([2, 0, 2], evictable, "a") == [0, 2]
    assert validate((), evictable, "a") == []
    found = validate(np.array([2, 1]), evictable, "a")
    assert [type(index) for index in found] == [int, int], "what argsort() answers is taken, as plain numbers"
    for wrong in ([5], [7], [-1], ["1"], [True], [1.0], [None], [[1]]):
        with pytest.raises(ValueError, match="which is not among the 3 evictable ones of a"):
            validate(wrong, evictable, "a")
    for wrong in (None, 3, "1", iter([1])):
        with pytest.raises(TypeError, match="must return a collection of block indices, but returned"):
            validate(wrong, evictable, "a")


def widen(request: RequestBlocks) -> list[int]:
    """Change a request from within ``evict``, to evict a block in use."""
    object.__setattr__(request, "evictable", [*request.evictable, 5])
    return [5]


def test_a_policy_that_changes_its_request_may_evict_no_more_than_before(monkeypatch):
    layers = pytest.importorskip("vllm_graft.bindings.attention.layers")
    item = PlanItem("attention", "p", "m:P", "pkg", ("engine",))
    ledger = Ledger()
    ledger.set_item("attention", "p", "applied")
    monkeypatch.setattr(layers, "current", lambda: ledger)
    guarded = layers._guarded_evict(item, SimpleNamespace(evict=widen))
    request = RequestBlocks("a", 100, 16, held=(0, 1, 2, 5), evictable=(0, 1, 2), prompt=50, keys={})
    assert guarded(request) is None
    assert "block 5, which is not among the 3 evictable ones of a" in guarded.aside


def test_a_layer_that_follows_no_evictions_gets_no_block_of_those_that_do():
    """Under a lenient plan a layer may be refused; in one group with the others it would read what is gone."""
    torch = pytest.importorskip("torch")
    spec = pytest.importorskip("vllm.v1.kv_cache_interface").FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform

    evicting = pytest.importorskip("vllm_graft.bindings.attention.eviction").EvictingSpec.of(spec)
    assert is_kv_cache_spec_uniform({"a": evicting, "b": evicting})
    assert not is_kv_cache_spec_uniform({"a": evicting, "b": spec})
    assert type(evicting.merge([evicting, evicting])) is type(evicting)


def test_a_kernel_with_blocks_of_its_own_is_refused():
    """It numbers the parts of a block, so that only the first part of the null block would be 0."""
    torch = pytest.importorskip("torch")
    spec = pytest.importorskip("vllm.v1.kv_cache_interface").FullAttentionSpec(
        block_size=256, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    evicting = pytest.importorskip("vllm_graft.bindings.attention.eviction").EvictingSpec.of(spec)
    assert evicting.copy_with_new_block_size(256) == evicting
    with pytest.raises(ValueError, match="reads blocks of 128 tokens, but blocks of 256 are evicted"):
        evicting.copy_with_new_block_size(128)


def schedule(notes: dict[str, list[int]], new: tuple[str, ...] = (), resumed: tuple[str, ...] = ()) -> SimpleNamespace:
    """A step's schedule as far as a worker looks for evictions."""
    return SimpleNamespace(
        graft_evicted=notes,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


STEP = schedule({"a": [1, 2], "b": [0], "waits": [1], "new": [0], "back": [0], "gone": [3]}, ("new",), ("back",))
"""``waits`` has no row in this step; ``new`` and ``back`` come with their whole tables."""


def test_the_v1_runner_writes_the_null_block_over_what_is_gone():
    """In the tables of the step and in what is remembered of a request that is not in it."""
    eviction = pytest.importorskip("vllm_graft.bindings.attention.eviction")
    table = np.arange(1, 17).reshape(4, 4)
    names = ("a", "b", "waits", "new", "back")
    requests = {name: SimpleNamespace(block_ids=([5, 6, 7, 8],)) for name in names}
    rows = {"a": 2, "b": 0, "new": 1, "back": 3}
    tables = SimpleNamespace(block_tables=[SimpleNamespace(block_table=SimpleNamespace(np=table))])
    batch = SimpleNamespace(req_id_to_index=rows, block_table=tables)
    eviction.apply_evictions_v1(SimpleNamespace(requests=requests, input_batch=batch), STEP)
    assert table.tolist() == [[0, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 12], [13, 14, 15, 16]]
    found = [requests[name].block_ids[0] for name in names]
    assert found == [[5, 0, 0, 8], [0, 6, 7, 8], [5, 0, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]


def test_the_v2_runner_writes_the_null_block_over_what_is_gone():
    eviction = pytest.importorskip("vllm_graft.bindings.attention.eviction")
    written: list[tuple[int, int, list[int]]] = []
    table = SimpleNamespace(stage_write=lambda row, start, values: written.append((row, start, values)))
    states = SimpleNamespace(req_id_to_index={"a": 2, "b": 0, "waits": 4, "new": 1, "back": 3})
    eviction.apply_evictions_v2(
        SimpleNamespace(req_states=states, block_tables=SimpleNamespace(block_tables=[table])), STEP
    )
    assert written == [(2, 1, [0]), (2, 2, [0]), (0, 0, [0]), (4, 1, [0])]


def test_keys_are_copied_once_for_a_request():
    """The policy is asked with every block, in the scheduler's loop, and the list of a client may be long."""
    kind = pytest.importorskip("vllm_graft.bindings.attention.eviction").EvictingManager
    manager = kind.__new__(kind)
    manager._keys = {}
    extra = {"kv_keep": 0.5, "ids": [1, 2]}
    request = SimpleNamespace(request_id="a", sampling_params=SimpleNamespace(extra_args=extra))
    first = manager._keys_of(request)
    first["kv_keep"] = 0
    first["ids"].append(3)
    assert extra == {"kv_keep": 0.5, "ids": [1, 2]}
    second = manager._keys_of(request)
    assert second["kv_keep"] == 0.5
    assert second["ids"] is first["ids"], "not copied again"
    request.sampling_params.extra_args = {"kv_keep": 0.25}
    assert manager._keys_of(request) == {"kv_keep": 0.25}
    request.sampling_params = None
    assert manager._keys_of(request) == {}
