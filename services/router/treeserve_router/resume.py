"""Takes up a request by its id: what the journal has of it, from where its client is on."""

from __future__ import annotations

from dataclasses import replace

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import InvalidArgumentError, NotFoundError
from treeserve_router.admission import Ask, RouterRequest
from treeserve_router.journal_record import JournalEntry


def take_up(ask: Ask, entry: JournalEntry | None) -> RouterRequest:
    """The request to run for a client that has ask.resume_offset tokens of it.

    What the journal has beyond them goes to the client at once; what it lacks of them is computed again, which gives
    the same tokens under acceptance by replay only.

    Raises:
        NotFoundError: if the journal does not have the request, or too little of it.
        InvalidArgumentError: if the client's tokens are not the request's.
    """
    offset = ask.resume_offset or 0
    if entry is None:
        raise NotFoundError("the request is unknown, has ended, or is not kept in the journal")
    request, output = entry.request, entry.output
    if offset > request.stopping.max_tokens:
        raise InvalidArgumentError("resume.offset", f"more than max_tokens = {request.stopping.max_tokens}")
    if ask.generated_token_ids:
        output = _longer(output, tuple(ask.generated_token_ids))
    if offset > len(output) and request.limits.acceptance.rule is not AcceptanceRule.REPLAY:
        raise NotFoundError("the journal has less of the request than its client, and it cannot be computed again")
    if request.sampling.top_log_probs is not None:
        output = output[:offset]  # the journal has no log-probabilities
    return replace(request, generated_token_ids=output, delivered=offset, deadline=ask.deadline)


def _longer(journal: tuple[int, ...], client: tuple[int, ...]) -> tuple[int, ...]:
    shared = min(len(journal), len(client))
    if journal[:shared] != client[:shared]:
        raise InvalidArgumentError("generated_token_ids", "are not the request's")
    return max(journal, client, key=len)
