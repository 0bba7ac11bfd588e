"""Messages are matched without guessing, and times of two hosts are not compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracing.runs import Run, made

from amusd.commands.trace import trace
from amusd.errors import ConfigError
from amusd.simulation.calibration import calibrate
from amusd.tracing.accounting import accounts
from amusd.tracing.messages import Flow, match_messages
from amusd.tracing.timeline import NO_OVERLAP, Timeline


def test_a_draft_of_another_host_has_its_own_account_and_nothing_beside_the_target(
    real_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = [
        replace(event, start_ns=event.start_ns + 10**12, end_ns=event.end_ns + 10**12) for event in real_run.draft
    ]
    elsewhere[0] = replace(elsewhere[0], host="another", pid=1)
    apart, together = Timeline.of(real_run.target, elsewhere), real_run.timeline
    number = real_run.answers[-1].sequence_id
    assert accounts(apart, number) == accounts(together, number)
    assert together.draft_overlap({number}) is not None
    assert apart.draft_overlap({number}) is None
    assert (apart.to_draft, apart.to_target, apart.on_one_clock().draft) == ((), (), ())
    directory = real_run.write(tmp_path)
    lines = (directory / "events" / "draft.jsonl").read_text().splitlines()
    other = json.dumps(json.loads(lines[0]) | {"host": "another"})
    (directory / "events" / "draft.jsonl").write_text("\n".join([other, *lines[1:]]) + "\n")
    assert trace(directory) == 0
    assert NO_OVERLAP in capsys.readouterr().out
    assert {
        event["pid"]
        for event in json.loads((directory / "trace.json").read_text())["traceEvents"]
        if event["ph"] == "X"
    } == {1}
    with pytest.raises(ConfigError, match="its workers ran on two hosts"):
        calibrate(directory, "oracle")


def test_a_host_that_was_not_recorded_is_not_taken_for_the_same(real_run: Run) -> None:
    assert real_run.timeline.has_one_clock
    assert not Timeline.of(real_run.target[1:], real_run.draft[1:]).has_one_clock


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
