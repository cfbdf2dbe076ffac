"""How a client and its router prove to each other who they are."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import grpc

_File = str | PathLike[str] | None


@dataclass(frozen=True)
class TLS:
    """TLS with a router. Files are PEM, and read when a client is built.

    Attributes:
        ca_file: CAs that the router's certificate must come from; None for those that gRPC trusts by itself.
        cert_file, key_file: the client's own certificate and its key, for a router that demands one; both or none.
        server_name: name that the router's certificate must carry; empty for the host of its address, "localhost" for
            a Unix socket.

    Raises:
        ValueError: if one of cert_file and key_file is missing.
    """

    ca_file: _File = None
    cert_file: _File = None
    key_file: _File = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")

    def credentials(self) -> grpc.ChannelCredentials:
        """What channels take. Raises OSError for a file that cannot be read."""
        return grpc.ssl_channel_credentials(_content(self.ca_file), _content(self.key_file), _content(self.cert_file))

    def options(self, address: str) -> tuple[tuple[str, str], ...]:
        """The options of a channel to an address."""
        name = self.server_name or ("localhost" if address.startswith("unix:") else "")
        return (("grpc.ssl_target_name_override", name),) if name else ()


def _content(file: _File) -> bytes | None:
    return None if file is None else Path(file).read_bytes()
