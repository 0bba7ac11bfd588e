"""Time of a message over each link of this machine, and whether `transport=auto` takes the quickest link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amusd.config import RunConfig
from amusd.console import Console
from amusd.errors import ConfigError, PeerLostError
from amusd.runtime.cores import cores_for
from amusd.transport.factory import ON_ONE_MACHINE, Choice, Link, can_listen_again, typed
from amusd.transport.latency import OneWayTime, measure_one_way
from amusd.types import Role


def measure_links(config: RunConfig, allowed: list[int], console: Console) -> dict[Link, dict[str, Any]]:
    """One-way times over every link that works here; of the others, why they do not."""
    cores = (
        cores_for(Role.TARGET, allowed, config.hardware),
        cores_for(Role.DRAFT, allowed, config.hardware),
    )
    found: dict[Link, dict[str, Any]] = {}
    for name, link in ON_ONE_MACHINE.items():
        console.note(f"messages over {name}")
        try:
            found[name] = _described(measure_one_way(link, num_messages=config.bench.num_messages, cores=cores))
        except (ConfigError, PeerLostError) as error:
            found[name] = {"unavailable": str(error)}
    return found


def recommend(choice: Choice, measured: Mapping[Link, Mapping[str, Any]]) -> dict[str, str | None]:
    """Compare the link that `transport=auto` takes here with the quickest measured one.

    `type_instead`: words that ask for the quickest one (`quickest`; None: no link could be measured), if they differ;
    `text`: all of it in one line.
    """
    medians = {name: link["one_way_us_p50"] for name, link in measured.items() if "unavailable" not in link}
    quickest = min(medians, key=lambda name: (medians[name], name != choice.link), default=None)
    type_instead = None
    text = f"transport=auto takes {choice.link} here ({choice.reason})"
    if quickest is None:
        text += "; no link could be measured"
    elif quickest == choice.link:
        text += f": {medians[quickest]:.1f} us, the quickest measured"
    else:
        type_instead = typed(quickest)
        taken = f"{medians[choice.link]:.1f} us" if choice.link in medians else "it could not be measured"
        text += f": {taken}; {quickest} was quicker, {medians[quickest]:.1f} us: {type_instead}"
        if not can_listen_again(ON_ONE_MACHINE[quickest]):
            text += " (a draft that is lost is not replaced then)"
    return {
        "link": choice.link,
        "reason": choice.reason,
        "quickest": quickest,
        "type_instead": type_instead,
        "text": text,
    }


def _described(time: OneWayTime) -> dict[str, Any]:
    return {
        "one_way_us_p50": time.p50_us,
        "one_way_us_p99": time.p99_us,
        "poll_us": time.poll_us,
        "num_messages": time.num_messages,
    }
