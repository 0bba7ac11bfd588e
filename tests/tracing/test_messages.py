"""Messages are matched without guessing, and times of two hosts are not compared."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tracing.runs import Run, made

from amusd.tracing.messages import match_messages
from amusd.tracing.timeline import Timeline


def test_a_draft_of_another_host_is_left_out(real_run: Run) -> None:
    worker, *rest = real_run.draft
    apart = Timeline.of(real_run.target, [replace(worker, host="another"), *rest])
    assert (apart.draft, apart.to_draft, apart.to_target) == ((), (), ())


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
    assert {flow.sent.message for flow in timeline.to_draft} >= {"open", "verdict", "close"}
    assert {flow.sent.message for flow in timeline.to_target} == {"candidate", "progress"}


@given(data=st.data(), num_sent=st.integers(0, 12))
def test_lost_messages_do_not_shift_the_others(data: st.DataObject, num_sent: int) -> None:
    sent = [made("send", n, n, 1, message="candidate", start=n) for n in range(num_sent)]
    arrived = [event for event in sent if data.draw(st.booleans())]
    received = [made("receive", e.start_ns + 50, e.end_ns + 50, 1, **e.fields, reception="taken") for e in arrived]
    assert [flow.sent for flow in match_messages(sent, received)] == arrived
