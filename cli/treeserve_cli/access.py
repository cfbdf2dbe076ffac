"""The options by which a command gets in at a router: its address, an API key and TLS files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict

import typer

from treeserve_client import TLS

DEFAULT_ADDRESS = "localhost:50051"
API_KEY_VARIABLE = "TREESERVE_API_KEY"


def _file(flag: str, variable: str, text: str) -> object:
    return typer.Option(flag, envvar=variable, help=text, exists=True, dir_okay=False, readable=True)


Address = Annotated[str, typer.Option("--address", help="gRPC address of the router, or of several: A,B.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar=API_KEY_VARIABLE, help="For a router that wants one.")]
CaFile = Annotated[
    Path | None,
    _file("--ca-file", "TREESERVE_CA_FILE", "Speak TLS with a router whose certificate comes from a CA in this file."),
]
CertFile = Annotated[
    Path | None, _file("--cert-file", "TREESERVE_CERT_FILE", "For a router that wants one: your certificate, PEM.")
]
KeyFile = Annotated[Path | None, _file("--key-file", "TREESERVE_KEY_FILE", "Its private key.")]


class Access(TypedDict, total=False):
    """What `Client` takes of it, beside the address."""

    api_key: str
    tls: TLS


def access(api_key: str | None, ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> Access:
    """What was given. Raises typer.BadParameter for a certificate without its key, or the other way round."""
    given: Access = {"api_key": api_key} if api_key else {}
    if ca_file or cert_file or key_file:
        try:
            given["tls"] = TLS(ca_file, cert_file, key_file)
        except ValueError as error:
            raise typer.BadParameter(f"--cert-file, --key-file: {error}") from None
    return given
