"""Which requests of a step are due tokens, from which position on, and what becomes of drafts."""

import numpy as np
import pytest

from vllm_graft.simulator.batch import RequestTable
from vllm_graft.simulator.outputs import PLACEHOLDER, Drafter, verify_drafts
from vllm_graft.simulator.tokens import HashedTokens, Vocabulary


@pytest.fixture
def table():
    return RequestTable(HashedTokens(0, Vocabulary(1000)))


def due(table, output, given=1):
    """What a step brings, as {request: position of its token, or None}; ``given`` tokens are handed out for each."""
    shares = table.advance(output).shares
    table.settle(
        [share.request_id for share in shares], [[7] * given if share.index is not None else [] for share in shares]
    )
    return {share.request_id: share.index for share in shares}


class TestBatch:
    def test_a_prompt_in_chunks_gets_its_token_with_the_last_one(self, make, table):
        prompt = range(10)
        assert due(table, make.step({"a": 4}, fresh=[make.new(prompt=prompt)])) == {"a": None}
        assert due(table, make.step({"a": 4}, cached=[("a", 4, 0)])) == {"a": None}
        assert due(table, make.step({"a": 2}, cached=[("a", 8, 0)])) == {"a": 0}
        assert due(table, make.step({"a": 1}, cached=[("a", 10, 1)])) == {"a": 1}

    def test_a_cached_prefix_counts_as_computed(self, make, table):
        assert due(table, make.step({"a": 1}, fresh=[make.new(prompt=range(33), computed=32)])) == {"a": 0}

    def test_steps_in_flight_are_counted_under_async_scheduling(self, make, table):
        due(table, make.step({"a": 3}, fresh=[make.new()]))
        steps = [make.step({"a": 1}, cached=[("a", 3 + n, 1 + n)]) for n in range(3)]
        assert [due(table, each) for each in steps] == [{"a": 1}, {"a": 2}, {"a": 3}]

    def test_v1_a_preempted_request_computes_its_output_again_before_the_next_token(self, make, table):
        due(table, make.step({"a": 3}, fresh=[make.new()]), given=5)
        assert due(table, make.step({"a": 4}, cached=[("a", 0, 5)], resumed=["a"])) == {"a": None}
        assert due(table, make.step({"a": 4}, cached=[("a", 4, 5)])) == {"a": 5}

    def test_v2_a_preempted_request_comes_back_as_a_new_one_with_its_output(self, make, table):
        due(table, make.step({"a": 3}, fresh=[make.new(prefill=[5, 6, 7])]), given=2)
        again = make.new(prefill=[5, 6, 7, 101, 102])
        assert due(table, make.step({"a": 4}, fresh=[again])) == {"a": None}
        assert due(table, make.step({"a": 1}, cached=[("a", 4, 2)])) == {"a": 2}

    @pytest.mark.parametrize("shape", ["V1", "V2"])
    def test_output_that_the_scheduler_dropped_is_given_again(self, make, table, shape):
        due(table, make.step({"a": 3}, fresh=[make.new()]), given=4)
        if shape == "V1":
            again = make.step({"a": 5}, cached=[("a", 0, 2)], resumed=["a"])
        else:
            again = make.step({"a": 5}, fresh=[make.new(prefill=[5, 6, 7, 101, 102])])
        assert due(table, again) == {"a": 2}

    def test_output_that_the_scheduler_still_waits_for_is_not_given_again(self, make, table):
        """Three drafts in flight were counted as right, and one was."""
        due(table, make.step({"a": 3}, fresh=[make.new()]), given=2)
        assert due(table, make.step({"a": 7}, cached=[("a", 0, 4)], resumed=["a"])) == {"a": 2}

    def test_a_preemption_changes_no_token(self, make, table):
        plain = table.advance(make.step({"a": 3}, fresh=[make.new()])).shares[0].stream
        again = table.advance(make.step({"a": 5}, fresh=[make.new(prefill=[5, 6, 7, 101, 102])])).shares[0].stream
        assert plain.token(2, None) == again.token(2, None)

    def test_a_finished_request_is_forgotten_even_in_an_empty_step(self, make, table):
        due(table, make.step({"a": 3, "b": 3}, fresh=[make.new("a"), make.new("b")]))
        assert due(table, make.step({}, finished=["a", "never seen"])) == {}
        assert len(table) == 1

    def test_an_id_may_be_used_again_in_the_step_that_ends_it(self, make, table):
        due(table, make.step({"a": 3}, fresh=[make.new("a")]))
        assert due(table, make.step({"a": 4}, fresh=[make.new("a", prompt=range(4))], finished=["a"])) == {"a": 0}

    def test_a_share_says_what_a_model_of_the_device_needs(self, make, table):
        (share,) = table.advance(make.step({"a": 4}, fresh=[make.new(prompt=range(10), computed=2)])).shares
        assert (share.new_tokens, share.context) == (4, 6)

    def test_a_prompt_of_embeddings_has_their_length(self, make, table):
        request = make.new()
        request.prompt_token_ids, request.prompt_embeds = None, np.zeros((6, 8))
        assert due(table, make.step({"a": 6}, fresh=[request])) == {"a": 0}


class TestDraftsInABatch:
    def test_drafts_are_part_of_the_step_and_of_the_context(self, make, table):
        due(table, make.step({"a": 3}, fresh=[make.new()]))
        (share,) = table.advance(make.step({"a": 4}, cached=[("a", 3, 1)], drafts={"a": [9, 8, 7]})).shares
        assert (share.index, share.drafts, share.new_tokens, share.context) == (1, (9, 8, 7), 4, 7)

    def test_the_count_of_what_was_given_out_holds_where_the_scheduler_hopes(self, make, table):
        """Asynchronous scheduling: after a step with three drafts of which none was right it counts four tokens."""
        due(table, make.step({"a": 3}, fresh=[make.new()]))
        drafts = {"a": [PLACEHOLDER] * 3}
        assert due(table, make.step({"a": 4}, cached=[("a", 3, 1)], drafts=drafts)) == {"a": 1}
        assert due(table, make.step({"a": 4}, cached=[("a", 7, 5)], drafts=drafts)) == {"a": 2}

    def test_the_next_drafts_start_after_what_was_given_out(self, make, table):
        step = table.advance(make.step({"a": 3, "b": 2}, fresh=[make.new("a"), make.new("b")]))
        assert [(name, index) for name, _, index in table.upcoming(step)] == [("a", 0)]
        table.settle(["a", "b"], [[7, 7], []])
        assert [(name, index) for name, _, index in table.upcoming(step)] == [("a", 2)]


class TestDrafts:
    def test_as_many_are_right_as_it_is_told(self, make):
        stream = make.stream()
        right = [stream.token(index, None) for index in range(4000)]
        for acceptance in (0.0, 0.3, 1.0):
            drafts = Drafter(3, acceptance, 1000).propose(stream, 0, 4000)
            hits = sum(draft == token for draft, token in zip(drafts, right, strict=True))
            assert hits / 4000 == pytest.approx(acceptance, abs=0.03)
            assert all(0 <= draft < 1000 for draft in drafts)

    def test_a_position_has_the_same_draft_wherever_the_drafting_starts(self, make):
        drafter, stream = Drafter(3, 0.5, 1000), make.stream()
        assert drafter.propose(stream, 5, 3)[1:] == drafter.propose(stream, 6, 2)

    def test_drafts_are_kept_up_to_the_first_wrong_one_and_one_token_follows(self, make):
        stream = make.stream()
        right = [stream.token(index, None) for index in range(10)]
        assert verify_drafts(stream, 4, (), None) == right[4:5]
        assert verify_drafts(stream, 4, right[4:7], None) == right[4:8]
        assert verify_drafts(stream, 4, [right[4], -5, right[6]], None) == right[4:6]

    @pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
    def test_the_output_is_the_same_with_and_without_them(self, make, acceptance):
        stream, drafter = make.stream(), Drafter(3, acceptance, 1000)
        output = []
        while len(output) < 60:
            output += verify_drafts(stream, len(output), drafter.propose(stream, len(output), 3), None)
        assert output == [stream.token(index, None) for index in range(len(output))]

    def test_a_grammar_has_a_row_for_every_draft_and_the_token_after_them(self, make):
        rows = [make.mask(40), make.mask(41), make.mask(42)]
        assert verify_drafts(make.stream(), 0, [40, 41], rows) == [40, 41, 42]
        assert verify_drafts(make.stream(), 0, [40, 99], rows) == [40, 41]
