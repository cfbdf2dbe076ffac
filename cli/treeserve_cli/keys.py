"""`treeserve keys`: make API keys."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from treeserve_router.auth import ApiKey, check_tenant, digest_of, file_line, new_key

app = typer.Typer(help="API keys of routers (api_keys_file).", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """API keys of routers (api_keys_file)."""


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose it is: requests with it are this tenant's.")],
    trusted: Annotated[
        bool,
        typer.Option("--trusted", help="It may name other tenants, and ask for more urgent classes: for a gateway."),
    ] = False,
    name: Annotated[str, typer.Option(help="What logs call it; by default eight digits of its digest.")] = "",
) -> None:
    """Print a fresh key, and under it the line for the routers' file; the key itself is stored nowhere."""
    try:
        check_tenant(tenant)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tenant") from None
    key = new_key()
    digest = digest_of(key)
    print(key)
    print(file_line(ApiKey(digest, tenant, trusted, name or digest[:8])), flush=True)
    print("treeserve: the first line is the key, shown only now; the second one belongs in the file", file=sys.stderr)
