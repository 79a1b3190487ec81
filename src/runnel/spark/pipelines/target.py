"""The target of a query's rows, as on the command line: `topic:NAME`, `topic` or `table:PATH`. Pure."""

from __future__ import annotations

import enum
import re
from typing import Final

import msgspec

from runnel.errors import ClientFault
from runnel.topics.names import check_topic

_RIGHT: Final = "it must be topic:NAME; topic alone, if the rows have a column topic; or table:PATH"


class TargetKind(enum.Enum):
    """What kind of target it is."""

    TOPIC = "topic"
    TABLE = "table"


class QueryTarget(msgspec.Struct, frozen=True):
    """A target. `name` is the topic, None if each row names its own; or the path of the table."""

    kind: TargetKind
    name: str | None

    @classmethod
    def parse(cls, text: str) -> QueryTarget:
        kind, colon, name = text.partition(":")
        if kind == TargetKind.TOPIC.value:
            if not colon:
                return cls(TargetKind.TOPIC, None)
            check_topic(name)
            return cls(TargetKind.TOPIC, name)
        if kind == TargetKind.TABLE.value and name:
            return cls(TargetKind.TABLE, name)
        raise ClientFault(f"into {text!r}: {_RIGHT}")

    @property
    def short_name(self) -> str:
        """The default name of a pipeline into this target."""
        if self.name is None:
            return "sql"
        if self.kind is TargetKind.TOPIC:
            return self.name
        return re.split(r"[/\\]", self.name.rstrip("/\\"))[-1] or "table"
