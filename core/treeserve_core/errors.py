"""Errors that cross service borders. The wire layer maps each class to one gRPC status code."""

from __future__ import annotations


class TreeserveError(Exception):
    """Base of all errors a caller may see."""


class InvalidArgumentError(TreeserveError):
    """A value outside its stated limits.

    `field` names it the way the public API does, for example ``sampling.top_p``.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class InvalidTreeError(InvalidArgumentError):
    """A token tree that breaks an invariant of `TokenTree`."""

    def __init__(self, reason: str) -> None:
        super().__init__("tree", reason)


class StaleBaseError(TreeserveError):
    """A proposal drawn for a committed length that is gone and cannot be re-rooted."""


class StaleEpochError(TreeserveError):
    """A turn of a session came after a newer one had begun."""


class HandshakeError(TreeserveError):
    """Two peers disagree on protocol, model or tokenizer."""


class NotFoundError(TreeserveError):
    """A named model, sequence or session does not exist."""


class UnauthenticatedError(TreeserveError):
    """Nobody knows who the caller is."""


class PermissionDeniedError(TreeserveError):
    """The caller may not ask for this."""


class OverloadedError(TreeserveError):
    """A queue, pool or quota is full; try again after `retry_after_s` seconds.

    `cause` says what is full in one word, for metrics, for example ``queue_requests`` or ``quota_tokens``.
    """

    def __init__(self, reason: str, retry_after_s: float, cause: str = "busy") -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.cause = cause


class UnavailableError(TreeserveError):
    """No peer can take the work now."""


class HandedBackError(UnavailableError):
    """A peer that is about to go gives its work back: nothing failed, and another peer can go on with it."""
