"""`treeserve generate`: one generation, streamed or as one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from treeserve_cli.access import DEFAULT_ADDRESS, Address, ApiKey, CaFile, CertFile, KeyFile, access
from treeserve_cli.messages import failed, failed_call, tell
from treeserve_client import AcceptanceRule, Client, Completion, GenerateParams, Preset, Stream, TreeserveClientError


def generate(
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before it; implies --chat.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="At most this many tokens; by default what the context window leaves.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many most probable tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. May be repeated.")] = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Decode plainly.")] = False,
    acceptance: Annotated[
        AcceptanceRule,
        typer.Option(
            help="How drafted tokens are accepted. Only replay gives the tokens of --no-speculation; multi_step keeps "
            "their distribution; typical is LOSSY."
        ),
    ] = "replay",
    typical_epsilon: Annotated[
        float | None, typer.Option(help="Of typical: a token passes above min(epsilon, delta * exp(-entropy)).")
    ] = None,
    typical_delta: Annotated[float | None, typer.Option(help="Of typical; see --typical-epsilon.")] = None,
    preset: Annotated[
        Preset | None, typer.Option(help="What kind of work it is: drafting begins with what usually suits that.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Answer in JSON of the schema in this file.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Answer with what this regular expression matches.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer with this text. May be repeated: one of them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Generate text and stream it to standard output."""
    params: GenerateParams = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
        "speculation": not no_speculation,
        "acceptance": acceptance,
        "typical_epsilon": typical_epsilon,
        "typical_delta": typical_delta,
        "preset": preset,
        "json_schema": None if json_schema is None else _read(json_schema),
        "regex": regex,
        "choice": choice or None,
    }
    if chat or system is not None:
        turns = [("system", system), ("user", prompt)]
        params["messages"] = [{"role": role, "content": text} for role, text in turns if text is not None]
    else:
        params["prompt"] = prompt
    credentials = access(api_key, ca_file, cert_file, key_file)
    try:
        with Client(address, **credentials) as client, client.generate(**params) as stream:
            if as_json:
                for _ in stream:
                    pass
                print(json.dumps(_summary(stream.result)))
            else:
                _print_text(stream)
            if stream.result.speculation.lossy:
                tell(f"LOSSY: accepted by {acceptance}, not the distribution of plain decoding")
    except TreeserveClientError as error:
        raise failed_call(error, address) from None


def _print_text(stream: Stream) -> None:
    """Print the text as it comes; what follows, an error too, begins on a line of its own."""
    printed = False
    try:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            printed = True
    finally:
        if printed:
            print(flush=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise failed(f"{path}: {error}") from None


def _summary(completion: Completion) -> dict[str, Any]:
    usage, speculation, timing = completion.usage, completion.speculation, completion.timing
    return {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "request_id": completion.request_id,
        "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
        "speculation": {
            "steps": speculation.steps,
            "drafted": speculation.drafted,
            "accepted": speculation.accepted,
            "acceptance_length": speculation.acceptance_length,
            "acceptance": speculation.acceptance,
            "lossy": speculation.lossy,
        },
        "timing": {"ttft_ms": timing.ttft_ms, "tpot_ms": timing.tpot_ms, "e2e_ms": timing.e2e_ms},
    }
