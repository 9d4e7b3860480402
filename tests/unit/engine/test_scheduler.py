"""Laws of the scheduler, one situation each. Random schedules are in tests/property."""

import pytest
from engine_harness import END_ID, MS, Engine, make_limits, planned_ids, text_alone

from tailrace.cost.step_time import StepCoefficients, StepTimeModel
from tailrace.engine.scheduler import EngineConfig, Scheduler
from tailrace.engine.sequence import SequenceState
from tailrace.engine.step import StepCut, StepDone, StepFailed, StepPlan
from tailrace.errors import ConfigError, ContextExceeded, InvalidRequest, KvExhausted, Overloaded
from tailrace.executor.modeled import Fault
from tailrace.request import FinishReason, RequestId, SamplingParams, SequenceId


def greedy(max_tokens: int = 4, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)  # type: ignore[arg-type]


class TestRefusals:
    def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(self) -> None:
        engine = Engine(limits=make_limits(context=16))
        with pytest.raises(ContextExceeded, match=r"16 tokens .* holds 16"):
            engine.submit(range(1, 17))
        assert not engine.scheduler.has_work

    def test_a_sequence_that_never_fits_the_pool_is_refused(self) -> None:
        engine = Engine(limits=make_limits(num_blocks=4))
        with pytest.raises(KvExhausted, match="5 KV blocks and the pool has 4"):
            engine.submit(range(1, 15), max_tokens=4)
        engine.submit(range(1, 15), max_tokens=3)  # 16 tokens are computed, the 17th is only drawn
        engine.run()

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(InvalidRequest):
            Engine().submit([])

    def test_beyond_the_bound_of_waiting_work_a_submit_is_refused(self) -> None:
        engine = Engine(EngineConfig(sequences_max=1, waiting_max=2))
        engine.submit([1, 2])
        engine.step()
        engine.submit([1, 2])
        engine.submit([1, 2])
        with pytest.raises(Overloaded):
            engine.submit([1, 2])
        engine.run()

    def test_a_budget_below_the_number_of_sequences_is_a_configuration_error(self) -> None:
        with pytest.raises(ConfigError, match="token_budget"):
            Scheduler(EngineConfig(sequences_max=8, token_budget=4), make_limits(), frozenset(), StepTimeModel())


class TestEnds:
    def test_an_end_token_stops_and_is_in_the_last_event(self) -> None:
        engine = Engine(end_ratio=1.0)
        sequence = engine.submit([5, 6], max_tokens=4)
        engine.run()
        assert engine.ending(sequence) == (FinishReason.STOP, None)
        assert engine.events[-1].token_ids == (END_ID,)

    def test_end_tokens_are_masked_until_min_tokens_were_drawn(self) -> None:
        engine = Engine(end_ratio=1.0)
        sequence = engine.submit([5, 6], params=greedy(9, min_tokens=3))
        engine.run()
        assert sequence.num_output_tokens == 4
        assert sequence.output_token_ids[-1] == END_ID

    def test_ignore_eos_runs_to_the_length(self) -> None:
        engine = Engine(end_ratio=1.0)
        sequence = engine.submit([5, 6], params=greedy(5, ignore_eos=True))
        engine.run()
        assert sequence.output_token_ids == [END_ID] * 5
        assert engine.ending(sequence) == (FinishReason.LENGTH, None)

    def test_the_context_ends_a_sequence_before_max_tokens(self) -> None:
        engine = Engine(limits=make_limits(context=10))
        sequence = engine.submit([5, 6], max_tokens=100)
        engine.run()
        assert len(sequence.token_ids) == 10

    def test_a_finish_keeps_what_the_app_asks_and_frees_the_blocks_at_once(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, prefix_caching=False))
        sequence = engine.submit([5, 6], max_tokens=50)
        for _ in range(6):
            engine.step()
        engine.scheduler.finish(sequence.sequence_id, FinishReason.STOP, 2, engine.now_ns)
        assert sequence.num_output_tokens == 2
        assert sequence.state is SequenceState.FINISHED
        assert engine.scheduler.stats().num_blocks_held == 0
        assert engine.scheduler.take_events() == []

    def test_a_late_finish_is_counted_and_changes_nothing(self) -> None:
        engine = Engine()
        sequence = engine.submit([5, 6], max_tokens=3)
        engine.run()
        engine.scheduler.finish(sequence.sequence_id, FinishReason.STOP, 1, engine.now_ns)
        engine.scheduler.finish(SequenceId(77), FinishReason.STOP, 1, engine.now_ns)
        assert engine.scheduler.stats().late_finishes_total == 2
        assert sequence.num_output_tokens == 3

    @pytest.mark.parametrize("how", ["cancel", "finish"])
    def test_what_ends_while_its_step_runs_gets_no_token_of_it(self, how: str) -> None:
        engine = Engine()
        sequence, other = engine.submit([5, 6]), engine.submit([7, 8])
        plan = engine.plan()
        if how == "cancel":
            engine.scheduler.cancel(sequence.request_id, engine.now_ns)
            assert [one.error_label for one in engine.scheduler.take_events()] == ["cancelled"]
        else:
            engine.scheduler.finish(sequence.sequence_id, FinishReason.STOP, 0, engine.now_ns)
        events = engine.commit(plan)
        assert [event.sequence_id for event in events] == [other.sequence_id]
        assert sequence.output_token_ids == []
        engine.run()
        assert other.output_token_ids == text_alone(other, engine.limits)

    def test_a_cancel_ends_all_choices_of_a_request_and_no_other(self) -> None:
        engine = Engine()
        first, second = (engine.submit(range(1, 9), request="r", choice=choice) for choice in range(2))
        other = engine.submit(range(1, 9))
        engine.step()
        engine.scheduler.cancel(RequestId("r"), engine.now_ns)
        assert {event.sequence_id for event in engine.scheduler.take_events()} == {0, 1}
        assert first.state is second.state is SequenceState.CANCELLED
        engine.run()
        assert other.output_token_ids == text_alone(other, engine.limits)

    @pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
    def test_a_deadline_ends_a_sequence_in_the_queue_in_prefill_and_in_decode(self, num_steps: int) -> None:
        """Steps 1 to 3 compute the prompt of 40 in chunks of 16; later ones decode."""
        engine = Engine(EngineConfig(sequences_max=1, token_budget=16))
        sequence = engine.submit(range(1, 41), max_tokens=50, deadline_ns=10**12)
        for _ in range(num_steps):
            engine.step()
        assert engine.scheduler.next_deadline_ns == 10**12
        assert engine.scheduler.plan_step(10**12) is None
        engine.events += engine.scheduler.take_events()
        assert engine.ending(sequence) == (FinishReason.DEADLINE, "deadline_exceeded")
        assert engine.scheduler.stats().num_blocks_held == 0
        assert engine.scheduler.next_deadline_ns is None

    def test_deadlines_of_ended_sequences_do_not_pile_up(self) -> None:
        engine = Engine()
        for _ in range(300):
            sequence = engine.submit([5, 6], deadline_ns=10**12)
            engine.scheduler.cancel(sequence.request_id, engine.now_ns)
        last = engine.submit([5, 6], deadline_ns=10**12)
        assert len(engine.scheduler._deadlines) < 100
        assert engine.scheduler.plan_step(10**12) is None
        engine.events += [one for one in engine.scheduler.take_events() if one.sequence_id == last.sequence_id]
        assert engine.ending(last) == (FinishReason.DEADLINE, "deadline_exceeded")


class TestOrder:
    def test_the_better_class_runs_first_then_the_earlier_arrival(self) -> None:
        engine = Engine(EngineConfig(sequences_max=1))
        for priority in (1, 0, 0, -1):
            engine.submit([5, 6], priority=priority, max_tokens=1)
        engine.run()
        assert [planned_ids(plan)[0] for plan in engine.plans] == [3, 1, 2, 0]

    def test_decode_rows_come_before_prefill_chunks(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, token_budget=16))
        engine.submit([5, 6], max_tokens=20)
        engine.step()
        engine.submit(range(1, 60), max_tokens=2)
        plan = engine.step()
        assert [len(piece.token_ids) for piece in plan.slices] == [1, 15]

    def test_a_small_request_passes_a_large_one_that_does_not_fit(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, prefix_caching=False), make_limits(num_blocks=16))
        engine.submit(range(1, 30), max_tokens=8)
        engine.step()
        engine.submit(range(100, 150), max_tokens=2)
        small = engine.submit(range(200, 204), max_tokens=2)
        assert planned_ids(engine.step()) == [0, small.sequence_id]

    def test_a_large_request_is_overtaken_a_bounded_number_of_times(self) -> None:
        config = EngineConfig(sequences_max=3, prefix_caching=False, overtakes_max=3)
        engine = Engine(config, make_limits(num_blocks=20))
        engine.submit(range(1, 20), max_tokens=3)
        engine.step()
        large = engine.submit(range(100, 165), max_tokens=2)
        for number in range(12):
            engine.submit(range(200 + number, 208 + number), max_tokens=6)
        engine.run()
        first_planned = {}
        for index, plan in enumerate(engine.plans):
            for sequence_id in planned_ids(plan):
                first_planned.setdefault(sequence_id, index)
        before = [number for number in range(2, 14) if first_planned[number] < first_planned[large.sequence_id]]
        assert before == [2, 3, 4]

    def test_static_batching_admits_only_into_an_empty_batch(self) -> None:
        engine = Engine(EngineConfig(sequences_max=2, batching="static", prefix_caching=False))
        for number, max_tokens in enumerate((2, 6, 2)):
            engine.submit([number + 1, 9], max_tokens=max_tokens)
        engine.run()
        third = [index for index, plan in enumerate(engine.plans) if 2 in planned_ids(plan)]
        second = [index for index, plan in enumerate(engine.plans) if 1 in planned_ids(plan)]
        assert min(third) == max(second) + 1

    def test_a_static_batch_is_filled_even_when_its_prompts_take_several_steps(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, token_budget=16, batching="static", prefix_caching=False))
        for number in range(4):
            engine.submit(range(number * 100 + 1, number * 100 + 17), max_tokens=6)
        engine.step()
        assert engine.scheduler.stats().num_running == 4
        engine.run()


class TestChunks:
    def test_an_unfinished_chunk_brings_the_step_to_a_listed_size_and_the_last_is_whole(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, token_budget=32), make_limits(step_sizes=(16, 32)))
        engine.submit([5, 6], max_tokens=30)
        engine.step()
        engine.submit(range(1, 81), max_tokens=2)
        totals = [engine.step().num_tokens for _ in range(4)]
        assert totals == [32, 32, 1 + 80 - 62, 2]

    def test_with_decode_rows_the_chunk_is_sized_to_keep_the_itl_target(self) -> None:
        """10 ms and 1 ms a token: 30 ms leave 20 tokens, so the listed step of 16 is the largest that keeps it."""
        model = StepTimeModel(StepCoefficients(10e6, 1e6, 0, 0, 0, 0, 0))
        engine = Engine(
            EngineConfig(sequences_max=4, itl_target_ms=30.0), make_limits(step_sizes=(8, 16, 32, 64)), step_time=model
        )
        engine.executor._duration_ns = model.predict_ns
        engine.submit(range(1, 60), max_tokens=30)
        assert engine.step().num_tokens == 59, "nobody decodes: no time budget"
        engine.submit(range(100, 200), max_tokens=2)
        assert [engine.step().num_tokens for _ in range(6)] == [16] * 6
        assert engine.scheduler.stats().itl_budget_overruns_total == 0

    def test_a_target_that_decoding_alone_misses_does_not_starve_a_prompt(self) -> None:
        model = StepTimeModel(StepCoefficients(100e6, 1e6, 0, 0, 0, 0, 0))
        engine = Engine(EngineConfig(sequences_max=4, itl_target_ms=1.0), make_limits(), step_time=model)
        engine.submit([5, 6], max_tokens=100)
        engine.step()
        late = engine.submit(range(100, 200), max_tokens=2)
        for _ in range(12):
            engine.step()
        assert late.num_output_tokens > 0

    def test_the_scratch_bound_limits_several_token_slices(self) -> None:
        engine = Engine(EngineConfig(sequences_max=8), make_limits(scratch=128, context=128))
        for number in range(4):
            engine.submit(range(number * 100 + 1, number * 100 + 41), max_tokens=2)
        engine.run()  # the executor asserts the bound
        multi = [sum(len(piece.token_ids) > 1 for piece in plan.slices) for plan in engine.plans]
        assert max(multi) > 1

    def test_prompt_logprobs_are_reported_once_a_row_whatever_the_chunks(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, token_budget=16))
        engine.submit(range(1, 41), max_tokens=2)
        engine.run()
        sequence = engine.submit(range(1, 41), params=greedy(2, num_prompt_logprobs=1))
        engine.run()
        rows = [row for event in engine.events if event.sequence_id == 1 for row in event.prompt_logprobs]
        assert [row.chosen.token_id for row in rows] == list(range(2, 41))
        assert sequence.num_cached_tokens == 0, "its rows had to be computed"

    def test_prompt_logprobs_are_not_repeated_after_a_preemption_in_the_prefill(self) -> None:
        config = EngineConfig(sequences_max=2, token_budget=4, prefix_caching=False)
        engine = Engine(config, make_limits(num_blocks=14, step_sizes=(4,)))
        engine.submit(range(1, 9), max_tokens=30)
        for _ in range(3):
            engine.step()
        engine.submit(range(101, 141), params=greedy(2, num_prompt_logprobs=1))
        engine.run()
        assert engine.scheduler.stats().preemptions_total > 0
        rows = [row for event in engine.events if event.sequence_id == 1 for row in event.prompt_logprobs]
        assert [row.chosen.token_id for row in rows] == list(range(102, 141))


class TestPreemption:
    def test_the_victim_is_the_lowest_class_then_the_youngest(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, prefix_caching=False), make_limits(num_blocks=15))
        for number, priority in enumerate((0, 1, 0, 0)):
            engine.submit(range(number * 100 + 1, number * 100 + 9), max_tokens=30, priority=priority)
        victims: list[int] = []
        while len(victims) < 2:
            running = {key for key, one in engine.sequences.items() if one.state is SequenceState.RUNNING}
            engine.step()
            victims += [key for key in running if engine.sequences[key].state is SequenceState.WAITING]
        assert victims == [1, 3]

    def test_a_preempted_sequence_keeps_its_output_and_its_text(self) -> None:
        engine = Engine(EngineConfig(sequences_max=2, prefix_caching=False), make_limits(num_blocks=8))
        sequences = [engine.submit(range(number * 100 + 1, number * 100 + 9), max_tokens=20) for number in range(2)]
        engine.run()
        stats = engine.scheduler.stats()
        assert stats.preemptions_total >= 1
        assert stats.recompute_tokens_total > 0
        for sequence in sequences:
            assert sequence.output_token_ids == text_alone(sequence, engine.limits)

    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_concurrent_long_requests_that_exhaust_the_pool_all_finish(self, prefix_caching: bool) -> None:
        limits = make_limits(num_blocks=20, context=80)
        engine = Engine(EngineConfig(sequences_max=6, prefix_caching=prefix_caching), limits)
        sequences = [engine.submit(range(number * 50 + 1, number * 50 + 11), max_tokens=69) for number in range(6)]
        engine.run(steps_max=2000)
        assert engine.scheduler.stats().preemptions_total >= 5
        for sequence in sequences:
            assert sequence.output_token_ids == text_alone(sequence, limits)

    def test_nobody_is_admitted_into_the_block_that_a_running_sequence_needs_next(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, prefix_caching=False), make_limits(num_blocks=5))
        engine.submit(range(1, 9), max_tokens=12)
        engine.step()
        engine.submit(range(101, 113), max_tokens=1)
        engine.run()
        assert engine.scheduler.stats().preemptions_total == 0


class TestPrefixes:
    def test_a_second_prompt_takes_the_first_ones_blocks(self) -> None:
        engine = Engine()
        engine.submit(range(1, 21), max_tokens=2)
        engine.run()
        second = engine.submit([*range(1, 19), 77, 78], max_tokens=2)
        plan = engine.step()
        assert plan.slices[0].start == 16
        engine.run()
        assert second.num_cached_tokens == 16
        assert second.output_token_ids == text_alone(second, engine.limits)
        assert engine.scheduler.stats().prefix_hit_tokens_total == 16

    @pytest.mark.parametrize(("prefix_caching", "reports", "asked"), [(True, None, 40), (True, 0, 0), (False, None, 0)])
    def test_only_prompts_that_asked_the_cache_count_as_queries(
        self, prefix_caching: bool, reports: int | None, asked: int
    ) -> None:
        engine = Engine(EngineConfig(prefix_caching=prefix_caching))
        params = SamplingParams(max_tokens=2, num_prompt_logprobs=reports)
        for request in ("a", "b"):
            for choice in range(2):  # the second one forks
                engine.submit(range(1, 21), request=request, choice=choice, params=params)
            engine.run()
        assert engine.scheduler.stats().prefix_query_tokens_total == asked

    def test_the_last_prompt_token_is_always_computed(self) -> None:
        engine = Engine()
        for _ in range(2):
            engine.submit(range(1, 21), max_tokens=2)
            engine.run()
        assert engine.sequences[1].num_cached_tokens == 16  # not 20, although five full blocks are cached

    def test_another_salt_finds_nothing(self) -> None:
        engine = Engine()
        for salt in ("a", "b"):
            engine.submit(range(1, 21), salt=salt)
            engine.run()
        assert engine.scheduler.stats().prefix_hit_tokens_total == 0

    def test_a_follower_waits_for_the_leader_of_its_prefix_and_then_shares_it(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, token_budget=16))
        leader = engine.submit(range(1, 41), max_tokens=2)
        follower = engine.submit([*range(1, 37), 99, 98], max_tokens=2)
        assert [planned_ids(engine.step()) for _ in range(2)] == [[0], [0]]
        assert engine.scheduler.num_waiting == 1
        engine.run()
        assert follower.num_cached_tokens == 36
        assert follower.output_token_ids == text_alone(follower, engine.limits)
        assert leader.output_token_ids == text_alone(leader, engine.limits)

    def test_the_leader_inherits_the_best_class_of_its_followers(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, token_budget=16))
        leader = engine.submit(range(1, 41), priority=5)
        engine.step()
        follower = engine.submit(range(1, 41), priority=1)
        assert leader.rank[0] == 1
        engine.scheduler.cancel(follower.request_id, engine.now_ns)
        assert leader.rank[0] == 5

    @pytest.mark.parametrize("how", ["cancel", "finish", "deadline"])
    def test_followers_are_planned_again_when_their_leader_ends(self, how: str) -> None:
        engine = Engine(EngineConfig(sequences_max=4, token_budget=16))
        leader = engine.submit(range(1, 61), deadline_ns=10**12 if how == "deadline" else None)
        followers = [engine.submit(range(1, 61), max_tokens=2) for _ in range(2)]
        engine.step()
        if how == "cancel":
            engine.scheduler.cancel(leader.request_id, engine.now_ns)
        elif how == "finish":
            engine.scheduler.finish(leader.sequence_id, FinishReason.STOP, 0, engine.now_ns)
        else:
            engine.now_ns = 10**12
        plan = engine.step()
        assert planned_ids(plan) == [followers[0].sequence_id], "one of them leads now"
        assert plan.slices[0].start == 16, "with what the first leader had computed"
        engine.run()
        for follower in followers:
            assert follower.output_token_ids == text_alone(follower, engine.limits)

    def test_a_preempted_choice_takes_its_own_cached_output_before_its_siblings_prompt(self) -> None:
        """Blocks 0 and 1 are the prompt; the second choice computed 12 tokens more, which stay cached when it is
        preempted."""
        engine = Engine(EngineConfig(sequences_max=2), make_limits(num_blocks=40))
        choices = [engine.submit(range(1, 10), request="r", choice=choice, max_tokens=30) for choice in range(2)]
        for _ in range(14):
            engine.step()
        engine.scheduler._residents._preempt(choices[1])
        plan = engine.step()
        assert plan.slices[-1].sequence_id == choices[1].sequence_id
        assert plan.slices[-1].start == 20
        engine.run()
        assert [one.output_token_ids for one in choices] == [text_alone(one, engine.limits) for one in choices]


class TestForks:
    @pytest.mark.parametrize("prefix_caching", [True, False])
    @pytest.mark.parametrize("num_prompt", [1, 8, 9, 22])
    def test_choices_share_the_prompt_and_copy_the_partial_block(self, num_prompt: int, prefix_caching: bool) -> None:
        engine = Engine(EngineConfig(sequences_max=4, prefix_caching=prefix_caching))
        params = SamplingParams(max_tokens=10, seed=4)
        prompt = range(1, num_prompt + 1)
        choices = [engine.submit(prompt, request="r", choice=choice, params=params) for choice in range(3)]
        assert planned_ids(engine.step()) == [0]
        plan = engine.plan()
        assert planned_ids(plan) == [0, 1, 2]
        assert [piece.start for piece in plan.slices[1:]] == [num_prompt - 1] * 2
        assert len(plan.block_copies) == (0 if (num_prompt - 1) % 4 == 0 else 2)
        tables = [list(choice.block_ids) for choice in choices]
        shared = (num_prompt - 1) // 4
        assert tables[0][:shared] == tables[1][:shared] == tables[2][:shared]
        assert len({table[shared] for table in tables}) == 3
        engine.commit(plan)
        engine.run()
        texts = [choice.output_token_ids for choice in choices]
        assert len(set(map(tuple, texts))) > 1
        assert texts == [text_alone(choice, engine.limits) for choice in choices]
        assert engine.scheduler.stats().fork_tokens_total == 2 * (num_prompt - 1)

    def test_a_fork_whose_step_is_cut_copies_again(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4))
        choices = [engine.submit(range(1, 11), request="r", choice=choice, max_tokens=8) for choice in range(2)]
        engine.step()
        plan = engine.plan()
        engine.commit(plan, StepCut())
        again = engine.plan()
        assert again.block_copies == plan.block_copies != ()
        engine.commit(again)
        engine.run()
        for choice in choices:
            assert choice.output_token_ids == text_alone(choice, engine.limits)

    def test_choices_are_planned_normally_when_their_leader_ended_early(self) -> None:
        engine = Engine(EngineConfig(sequences_max=4, token_budget=16, prefix_caching=False))
        leader, second = (engine.submit(range(1, 41), request="r", choice=choice) for choice in range(2))
        engine.step()
        engine.scheduler.finish(leader.sequence_id, FinishReason.STOP, 0, engine.now_ns)
        assert engine.step().slices[0].start == 0
        engine.run()
        assert second.output_token_ids == text_alone(second, engine.limits)


class TestFaults:
    def test_a_cut_step_leaves_everything_as_it_was(self) -> None:
        engine = Engine()
        sequence = engine.submit(range(1, 11), max_tokens=5)
        engine.step()
        before = (list(sequence.token_ids), sequence.num_computed)
        plan = engine.plan()
        engine.executor.execute(plan)
        assert engine.commit(plan, StepCut()) == []
        assert (sequence.token_ids, sequence.num_computed) == before
        engine.run()
        assert sequence.output_token_ids == text_alone(sequence, engine.limits)

    def test_the_culprit_of_a_failed_step_is_found_one_by_one_and_the_others_go_on(self) -> None:
        def faults(_: StepPlan) -> Fault:
            return Fault(failing=frozenset({SequenceId(1)}), message="boom")

        engine = Engine(faults=faults)
        sequences = [engine.submit(range(number * 9 + 1, number * 9 + 8), max_tokens=5) for number in range(3)]
        engine.run()
        assert [planned_ids(plan) for plan in engine.plans[:5]] == [[0, 1, 2], [0], [1], [2], [0, 2]]
        assert engine.ending(sequences[1]) == (FinishReason.ERROR, "engine_failed")
        assert sequences[1].state is SequenceState.FAILED
        for sequence in (sequences[0], sequences[2]):
            assert sequence.output_token_ids == text_alone(sequence, engine.limits)

    def test_an_engine_that_always_fails_ends_every_sequence_once(self) -> None:
        engine = Engine(faults=lambda _: Fault(failing=frozenset(), message="broken"))
        sequences = [engine.submit([number + 1, 5]) for number in range(3)]
        engine.run()
        assert [engine.ending(sequence) for sequence in sequences] == [(FinishReason.ERROR, "engine_failed")] * 3

    def test_one_failure_that_does_not_come_back_ends_nobody(self) -> None:
        engine = Engine()
        sequences = [engine.submit([number + 1, 5]) for number in range(3)]
        engine.commit(engine.plan(), StepFailed("once"))
        engine.run()
        assert [engine.ending(sequence)[0] for sequence in sequences] == [FinishReason.LENGTH] * 3


def test_events_carry_the_cached_tokens_with_the_first_token_only() -> None:
    engine = Engine()
    engine.submit(range(1, 11), max_tokens=3)
    engine.run()
    assert [event.num_cached_tokens for event in engine.events] == [0, None, None]


def test_the_step_time_model_learns_from_the_executor() -> None:
    engine = Engine()
    engine.submit(range(1, 11), max_tokens=60)
    engine.executor._duration_ns = lambda _: 50 * MS
    engine.run()
    plan_features = engine.scheduler.step_features
    assert plan_features is not None
    assert abs(engine.scheduler.step_time.predict_ns(plan_features) - 50 * MS) < 5 * MS


def test_a_plan_of_another_step_is_not_committed() -> None:
    engine = Engine()
    engine.submit([1, 2])
    plan = engine.plan()
    with pytest.raises(AssertionError, match="in flight"):
        engine.scheduler.commit_step(StepPlan(step_id=plan.step_id, slices=plan.slices), StepDone(outcomes=()), 0)
    with pytest.raises(AssertionError, match="not committed"):
        engine.scheduler.plan_step(0)
