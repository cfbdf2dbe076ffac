"""`treeserve corpus`: files for the retrieval source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treeserve_cli.layout import ClusterConfig
from treeserve_cli.messages import failed, tell
from treeserve_cli.output_file import check_writable
from treeserve_core.errors import TreeserveError

app = typer.Typer(help="Texts to draft from.", no_args_is_help=True)


@app.callback()
def _corpus() -> None:
    """Texts to draft from."""


@app.command()
def build(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Texts, source code, .jsonl files (every string of a record), folders of them."),
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    model: Annotated[
        Path | None, typer.Option(help="The target: a Hugging Face folder or .gguf file; without it the default model.")
    ] = None,
) -> None:
    """Index texts, so that the corpus source can draft from them: `treeserve up --settings speculator.corpus=FILE`."""
    from treeserve_engine.checkpoint import prepare_checkpoint
    from treeserve_text.tokenizer import Tokenizer
    from treeserve_training.corpus import build_corpus

    config = ClusterConfig(model=model)
    try:
        check_writable(out)
        folder = prepare_checkpoint(config.model_source, config.cache_dir, tell)
        summary = build_corpus(inputs, Tokenizer.from_folder(folder), out, tell)
    except (TreeserveError, OSError) as error:
        raise failed(error) from None
    if summary.skipped:
        tell(f"skipped {len(summary.skipped)} files that are not UTF-8, {summary.skipped[0]} the first")
    size_mb = out.stat().st_size / 1e6
    print(f"{out}: {summary.documents} texts, {summary.tokens} tokens, {size_mb:.1f} MB")
