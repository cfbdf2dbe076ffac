"""The option by which a benchmark hands settings on to `treeserve up`."""

from __future__ import annotations

import argparse


def name_value(text: str) -> str:
    """The text. Raises ArgumentTypeError if it is not NAME=VALUE."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return text


def add_treeserve_set(parser: argparse.ArgumentParser, of: str = "") -> None:
    """Add `--treeserve-set NAME=VALUE`, which may be given several times.

    Args:
        of: what it says of whose settings these are.
    """
    parser.add_argument(
        "--treeserve-set",
        action="append",
        default=[],
        type=name_value,
        metavar="NAME=VALUE",
        help=f"an option of `treeserve up` (sources=ngram,suffix) or a service's setting (verifier.threads=2){of}",
    )
