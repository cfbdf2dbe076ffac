"""What kind of work a request may say it is, so that speculators begin with what usually suits that."""

from __future__ import annotations

from enum import StrEnum

from treeserve_core.errors import InvalidArgumentError


class Preset(StrEnum):
    """Kinds of work. A preset is where drafting begins: it costs or saves time, and never changes a token."""

    NONE = ""
    CODE = "code"
    CHAT = "chat"
    SUMMARY = "summary"
    TRANSLATION = "translation"
    CREATIVE = "creative"

    @classmethod
    def of(cls, name: str) -> Preset:
        """The preset as a request names it; empty for none.

        Raises:
            InvalidArgumentError: for an unknown name.
        """
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(preset for preset in cls if preset)
            raise InvalidArgumentError("speculation.preset", f"{name[:20]!r} is unknown; known are {known}") from None
