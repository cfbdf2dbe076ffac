"""What commands say on standard error, and how they end when they cannot do as asked."""

from __future__ import annotations

import sys

import typer

from treeserve_client import TreeserveClientError, Unavailable


def tell(message: object) -> None:
    """Print a line."""
    print(f"treeserve: {message}", file=sys.stderr, flush=True)


def failed(message: object, code: int = 1) -> typer.Exit:
    """Print why; what is returned ends the command when it is raised."""
    tell(message)
    return typer.Exit(code)


def failed_call(error: TreeserveClientError, address: str) -> typer.Exit:
    """Likewise, for a call of a router."""
    hint = f" (is `treeserve up` running, and is {address} its gRPC address?)" if isinstance(error, Unavailable) else ""
    return failed(f"{error}{hint}")
