"""VerifierService: hands each stream to its handler and turns errors into gRPC statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator

from treeserve.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from treeserve_verifier.decode_stream import DecodeHandler
from treeserve_verifier.draft_stream import DraftHandler
from treeserve_wire.server import ServicerContext
from treeserve_wire.status import abort


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """The gRPC face of a verifier. Streams are written explicitly, which the generated stubs do not describe."""

    def __init__(self, decode: DecodeHandler, draft: DraftHandler) -> None:
        self._decode = decode
        self._draft = draft

    async def Decode(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[verifier_pb2.DecodeRequest], context: ServicerContext
    ) -> None:
        """See verifier.proto."""
        try:
            await self._decode.serve(request_iterator, context)
        except Exception as error:
            await abort(context, error)

    async def Draft(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[verifier_pb2.DraftRequest], context: ServicerContext
    ) -> None:
        """See verifier.proto."""
        try:
            await self._draft.serve(request_iterator, context)
        except Exception as error:
            await abort(context, error)
