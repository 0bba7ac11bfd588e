"""Message <-> body: the fields of each message in their order.

First the fixed part of every field, then the tails of the fields that have one (`fields.py`), both in the order below.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from amusd.errors import WireError
from amusd.protocol.fields import (
    COUNT,
    DISTRIBUTION,
    FLAG,
    HASH,
    IDS,
    NAMES,
    REASON,
    ROLE,
    ROWS,
    TEXT,
    FieldType,
)
from amusd.protocol.messages import (
    Candidate,
    Close,
    Failed,
    Hello,
    Message,
    Open,
    Progress,
    Shutdown,
    Verdict,
)


class Layout:
    """The body of one message. Field types are sorted out once, so that a message costs a few microseconds."""

    def __init__(self, kind: int, message_type: type[Message], /, **fields: FieldType) -> None:
        self.kind = kind
        self.message_type = message_type
        self.field_names = tuple(fields)
        self._body = struct.Struct("<" + "".join(field.format for field in fields.values()))
        # attrgetter gives a tuple for two names or more, which every message but Shutdown has
        self._values: Callable[[Message], tuple[Any, ...]] = attrgetter(*fields) if fields else lambda _: ()
        self._counts = tuple(index for index, field in enumerate(fields.values()) if field is COUNT)
        self._packed = tuple((index, field.pack) for index, field in enumerate(fields.values()) if field.pack)
        self._unpacked = tuple((index, field.unpack) for index, field in enumerate(fields.values()) if field.unpack)

    def pack(self, message: Message) -> bytes:
        """The body. Raises ValueError."""
        values = list(self._values(message))
        tails = [b""]
        try:
            for index, pack in self._packed:
                values[index], tail = pack(values[index])
                tails.append(tail)
            for index in self._counts:
                if values[index] < 0:
                    raise ValueError(f"{self.field_names[index]}={values[index]} is negative")
            tails[0] = self._body.pack(*values)
        except (struct.error, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.message_type.__name__} does not fit a frame: {error}") from error
        return b"".join(tails)

    def unpack(self, frame: bytes, start: int) -> Message:
        """The message whose body lies behind `start` and ends with the frame. Raises WireError."""
        end = start + self._body.size
        if end > len(frame):
            raise WireError(f"{self.message_type.__name__} needs {end} bytes, the frame has {len(frame)}")
        values = list(self._body.unpack_from(frame, start))
        for index in self._counts:
            if values[index] < 0:
                raise WireError(f"{self.message_type.__name__}.{self.field_names[index]} is negative")
        for index, unpack in self._unpacked:
            values[index], end = unpack(values[index], frame, end)
        if end != len(frame):
            raise WireError(f"{len(frame) - end} bytes behind the end of {self.message_type.__name__}")
        return self.message_type(*values)


LAYOUTS = (
    Layout(
        1,
        Hello,
        protocol_version=COUNT,
        role=ROLE,
        incarnation=COUNT,
        vocab_size=COUNT,
        tokenizer_hash=TEXT,
        drafters=NAMES,
        tree_drafters=NAMES,
    ),
    Layout(
        2,
        Open,
        sequence_id=COUNT,
        incarnation=COUNT,
        token_ids=IDS,
        max_length=COUNT,
        drafter=TEXT,
        max_lookahead=COUNT,
        tokens_per_message=COUNT,
        reference=IDS,
        distribution=DISTRIBUTION,
        fan_out=COUNT,
        rows_per_step=COUNT,
    ),
    Layout(
        3,
        Candidate,
        sequence_id=COUNT,
        incarnation=COUNT,
        base=COUNT,
        root=COUNT,
        prefix_hash=HASH,
        first=COUNT,
        parents=IDS,
        token_ids=IDS,
        weights=IDS,
        more=FLAG,
        draft_probs=ROWS,
    ),
    Layout(
        4,
        Verdict,
        sequence_id=COUNT,
        incarnation=COUNT,
        epoch=COUNT,
        start=COUNT,
        token_ids=IDS,
        num_accepted=COUNT,
    ),
    Layout(5, Close, sequence_id=COUNT, reason=REASON),
    Layout(
        6,
        Progress,
        role=ROLE,
        sequence_id=COUNT,
        num_steps=COUNT,
        num_drafted=COUNT,
        num_rollbacks=COUNT,
        num_stale=COUNT,
        busy_ns=COUNT,
        wait_ns=COUNT,
        open_ns=COUNT,
    ),
    Layout(7, Failed, role=ROLE, kind=TEXT, text=TEXT),
    Layout(8, Shutdown),
)
