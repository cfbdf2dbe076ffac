"""`treeserve models`: what can be served now, as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table

from treeserve_cli.access import DEFAULT_ADDRESS, Address, ApiKey, CaFile, CertFile, KeyFile, access
from treeserve_cli.messages import failed_call
from treeserve_client import Client, TreeserveClientError


def models(
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """List the models that can be served now."""
    try:
        with Client(address, **access(api_key, ca_file, cert_file, key_file)) as client:
            served = client.list_models()
    except TreeserveClientError as error:
        raise failed_call(error, address) from None
    table = Table(Column("model", no_wrap=True), "context", "dtype", "verifiers", "speculators", "vocabulary")
    for model in served:
        counts = (model.max_context_tokens, model.dtype, model.verifiers, model.speculators, model.vocab_size)
        table.add_row(model.name, *map(str, counts))
    Console().print(table)
