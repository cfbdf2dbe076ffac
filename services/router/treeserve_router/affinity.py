"""What speaks for running a request on a certain verifier: its session, and the prefixes that verifiers hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from treeserve_core.prefix import PrefixHash, extend_hashes, prefix_hashes
from treeserve_router.admission import RouterRequest
from treeserve_router.prefix_locations import PrefixLocations
from treeserve_router.sessions import SessionKey, Sessions, Turn

# Names of longer texts are worked out in a thread, so that one long prompt does not hold up every stream.
_INLINE_TOKENS = 8192


@dataclass(frozen=True)
class Affinity:
    """Hints for one request. Wrong ones cost time, never a token.

    Attributes:
        preferred_verifier: id of the verifier its session used last; empty for none.
        session_epoch: number of this turn of its session; 0 if nobody counts.
        prefix_tokens: by verifier id, how many tokens from the first on it is believed to hold the KV of.
        names: by block size, the names of the request's prefixes.
    """

    preferred_verifier: str = ""
    session_epoch: int = 0
    prefix_tokens: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[int, Sequence[PrefixHash]] = field(default_factory=dict, repr=False)


class AffinityBook:
    """Looks up where a request's KV may be, and notes where it is in the end.

    A request of nobody known leaves nothing behind and finds nothing.

    Args:
        block_sizes: by verifier id, the block size of each connected verifier that reuses prefixes.
    """

    def __init__(
        self, sessions: Sessions, prefixes: PrefixLocations, block_sizes: Callable[[], Mapping[str, int]]
    ) -> None:
        self._sessions = sessions
        self._prefixes = prefixes
        self._block_sizes = block_sizes

    async def find(self, request: RouterRequest) -> Affinity:
        """The hints for a request whose turn begins now: one round trip to Redis where all blocks have one size."""
        if not request.tenant:
            return Affinity()
        tokens = (*request.prompt_token_ids, *request.generated_token_ids)
        sizes = set(self._block_sizes().values())
        names = {size: await _names(tokens, size, request.tenant) for size in sizes}
        if not request.session_id:
            return Affinity(prefix_tokens=await self._find_prefixes(names), names=names)
        turn, prefix_tokens = await asyncio.gather(
            self._sessions.begin_turn(_session_key(request)), self._find_prefixes(names)
        )
        return Affinity(turn.verifier_id, turn.epoch, prefix_tokens, names)

    def note(self, request: RouterRequest, affinity: Affinity, verifier_id: str, output: Sequence[int]) -> None:
        """A request has ended: this verifier computed its KV. Written in the background.

        Args:
            affinity: what `find` gave.
            verifier_id: the last one that ran it; empty if none did.
            output: all output tokens. Nothing was computed for the last one, and nothing at all if none is new.
        """
        if not request.tenant or not verifier_id or len(output) <= len(request.generated_token_ids):
            return
        tokens = (*request.prompt_token_ids, *output)
        if request.session_id:
            self._sessions.end_turn(_session_key(request), Turn(affinity.session_epoch, verifier_id))
        if block_size := self._block_sizes().get(verifier_id):
            known = affinity.names.get(block_size, ())
            self._prefixes.note(extend_hashes(known, tokens[:-1], block_size, request.tenant), verifier_id)

    async def _find_prefixes(self, names: Mapping[int, Sequence[PrefixHash]]) -> dict[str, int]:
        found = {size: await self._prefixes.find(names[size]) for size in names}  # nearly always one size
        return {verifier_id: blocks * size for size, each in found.items() for verifier_id, blocks in each.items()}


def _session_key(request: RouterRequest) -> SessionKey:
    return SessionKey(request.tenant, request.session_id)


async def _names(tokens: Sequence[int], block_size: int, tenant: str) -> list[PrefixHash]:
    if len(tokens) <= _INLINE_TOKENS:
        return prefix_hashes(tokens, block_size, tenant)
    return await asyncio.to_thread(prefix_hashes, tokens, block_size, tenant)
