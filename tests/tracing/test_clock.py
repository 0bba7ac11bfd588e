"""Messages are matched without guessing, and from them two clocks are compared."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tracing.runs import Run, made

from amusd.tracing.messages import Flow, compare_clocks, estimate_offset, match_messages
from amusd.tracing.timeline import Timeline

delays = st.lists(st.integers(0, 10**9), min_size=1, max_size=10)


def messages(delays_ns: list[int], offset_ns: int) -> list[Flow]:
    """One message a millisecond, to a receiver whose clock is `offset_ns` ahead."""
    flows = []
    for number, delay_ns in enumerate(delays_ns):
        sent = number * 1_000_000
        received = sent + delay_ns + offset_ns
        fields = {"message": "verdict", "start": number}
        flows.append(Flow(made("send", sent, sent, **fields), made("receive", received, received, **fields)))
    return flows


@given(offset=st.integers(-(10**15), 10**15), there=delays, back=delays)
def test_a_planted_offset_is_found_within_the_stated_uncertainty(
    offset: int, there: list[int], back: list[int]
) -> None:
    clock = estimate_offset(messages(there, offset), messages(back, -offset))
    assert clock.uncertainty_ns is not None
    assert abs(clock.offset_ns - offset) <= clock.uncertainty_ns
    assert clock.uncertainty_ns <= (min(there) + min(back)) / 2 + 1
    assert "two hosts" in str(clock)


@given(offset=st.integers(-(10**15), 10**15), delay=st.integers(0, 10**9))
def test_with_equal_delays_both_ways_the_offset_is_exact(offset: int, delay: int) -> None:
    assert estimate_offset(messages([delay], offset), messages([delay], -offset)).offset_ns == offset


def test_without_messages_both_ways_nothing_is_claimed() -> None:
    clock = estimate_offset(messages([5], 0), [])
    assert (clock.offset_ns, clock.uncertainty_ns) == (0, None)
    assert "could not be compared" in str(clock)


def test_workers_of_one_host_share_a_clock(real_run: Run) -> None:
    clock = real_run.timeline.clock
    assert (clock.same_host, clock.offset_ns, clock.uncertainty_ns) == (True, 0, 0)


def test_a_draft_of_another_host_is_moved_onto_the_targets_clock(real_run: Run) -> None:
    offset = 123_456_789_000
    elsewhere = [
        replace(event, start_ns=event.start_ns + offset, end_ns=event.end_ns + offset) for event in real_run.draft
    ]
    elsewhere[0] = replace(elsewhere[0], host="another", pid=1)
    moved = Timeline.of(real_run.target, elsewhere)
    assert moved.clock.uncertainty_ns is not None
    assert abs(moved.clock.offset_ns - offset) <= moved.clock.uncertainty_ns < 5_000_000
    for before, after in zip(real_run.draft, moved.draft, strict=True):
        assert abs(after.start_ns - before.start_ns) <= moved.clock.uncertainty_ns
    assert all(flow.sent.start_ns <= flow.received.start_ns for flow in (*moved.to_draft, *moved.to_target))


def test_a_host_that_was_not_recorded_is_not_taken_for_the_same(real_run: Run) -> None:
    assert not compare_clocks(real_run.target[1:], real_run.draft[1:], [], []).same_host


def test_every_message_of_a_run_is_matched_in_order(real_run: Run) -> None:
    timeline = real_run.timeline
    for flows, sender, receiver in (
        (timeline.to_draft, real_run.target, real_run.draft),
        (timeline.to_target, real_run.draft, real_run.target),
    ):
        assert len(flows) == sum(event.name == "receive" for event in receiver)
        assert [flow.sent for flow in flows] == [event for event in sender if event.name == "send"][: len(flows)]
        for flow in flows:
            assert flow.sent.start_ns <= flow.received.start_ns
            assert flow.sent.message == flow.received.message
    assert {flow.message for flow in timeline.to_draft} >= {"open", "verdict", "close"}
    assert {flow.message for flow in timeline.to_target} == {"candidate", "progress"}


def test_what_the_receiver_alone_has_recorded_hides_nothing_behind_it() -> None:
    sent = [
        made("send", n, n, 1, message="candidate", start=n) for n in (0, 2, 3)
    ]  # a killed sender wrote no event of 1
    received = [made("receive", 10 + n, 10 + n, 1, message="candidate", start=n) for n in range(4)]
    assert match_messages(sent, received) == [
        Flow(*pair) for pair in zip(sent, (received[0], *received[2:]), strict=True)
    ]


@given(data=st.data(), num_sent=st.integers(0, 12))
def test_lost_messages_do_not_shift_the_others(data: st.DataObject, num_sent: int) -> None:
    sent = [made("send", n, n, 1, message="candidate", start=n) for n in range(num_sent)]
    arrived = [event for event in sent if data.draw(st.booleans())]
    received = [made("receive", e.start_ns + 50, e.end_ns + 50, 1, **e.fields, reception="taken") for e in arrived]
    assert [flow.sent for flow in match_messages(sent, received)] == arrived
