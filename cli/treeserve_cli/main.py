"""The `treeserve` command: run a cluster on this machine, generate text, list models."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Column, Table

from treeserve_cli import corpus, keys, simulate
from treeserve_cli.access import API_KEY_VARIABLE, ApiKey, CaFile, CertFile, KeyFile, access
from treeserve_cli.cluster import ClusterError, LocalCluster
from treeserve_cli.demo import DemoConfig, run_demo
from treeserve_cli.explain import explanation_table, explanations
from treeserve_cli.layout import ClusterConfig
from treeserve_cli.train import train
from treeserve_client import (
    AcceptanceRule,
    Client,
    Completion,
    GenerateParams,
    Preset,
    Stream,
    TreeserveClientError,
    Unavailable,
)
from treeserve_core.errors import TreeserveError
from treeserve_wire.config import ConfigError, load_config

Config = TypeVar("Config", bound=ClusterConfig)

DEFAULT_ADDRESS = "localhost:50051"
# Not the services' prefix: their variables are inherited by the processes that `up` starts.
_UP_PREFIX = "TREESERVE_UP_"
_LOOK_S = 0.2

app = typer.Typer(
    name="treeserve",
    help="Tree-speculative LLM serving: identical tokens, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(corpus.app, name="corpus")
app.add_typer(simulate.app, name="simulate")
app.add_typer(keys.app, name="keys")

Address = Annotated[str, typer.Option("--address", help="gRPC address of the router, or of several: A,B.")]


def _tell(message: object) -> None:
    print(f"treeserve: {message}", file=sys.stderr, flush=True)


def _fail(message: object, code: int = 1) -> typer.Exit:
    _tell(message)
    return typer.Exit(code)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"treeserve {version('treeserve')}")
        raise typer.Exit


@app.callback()
def _treeserve(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What is said before a command."""


# Options of a cluster are the fields of ClusterConfig, those of a training the fields of TrainConfig; their loader
# parses them and prints their help.
_CONFIGURED_COMMAND: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}


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


def _fail_call(error: TreeserveClientError, address: str) -> typer.Exit:
    hint = f" (is `treeserve up` running, and is {address} its gRPC address?)" if isinstance(error, Unavailable) else ""
    return _fail(f"{error}{hint}")


def _interrupt_on_signals() -> None:
    """Let SIGTERM raise KeyboardInterrupt, and SIGINT too: a shell's background jobs start with it ignored."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)


def _until_interrupted() -> NoReturn:
    """Do nothing until a signal raises KeyboardInterrupt.

    One that another thread took, or that came just before a wait began, ends no wait of this one; so none is long.
    """
    while True:
        time.sleep(_LOOK_S)


@app.command(**_CONFIGURED_COMMAND)
def up(context: typer.Context) -> None:
    """Serve a model on this machine until Ctrl-C; `treeserve up --help` lists the options.

    Prints one line `ready grpc=HOST:PORT http=HOST:PORT` on standard output once it serves.
    """
    config = _cluster_config(ClusterConfig, context.args, "treeserve up")
    _interrupt_on_signals()
    try:
        with LocalCluster(config, report=_tell) as cluster:
            print(f"ready grpc={cluster.grpc_address} http={cluster.http_address}", flush=True)
            _until_interrupted()
    except KeyboardInterrupt:
        return  # a second one, while stopping, ends this process and its children at once
    except (ClusterError, TreeserveError, OSError) as error:
        raise _fail(error) from None


@app.command(**_CONFIGURED_COMMAND)
def demo(context: typer.Context) -> None:
    """Start a cluster, stream an answer, and measure speculation against plain decoding. Options are those of `up`."""
    started_at = time.monotonic()
    config = _cluster_config(DemoConfig, context.args, "treeserve demo")
    _interrupt_on_signals()
    try:
        with LocalCluster(config, report=_tell) as cluster, cluster.client() as client:
            same = run_demo(client, started_at, Console())
    except KeyboardInterrupt:
        return
    except (ClusterError, TreeserveError, TreeserveClientError, OSError) as error:
        raise _fail(error) from None
    if not same:
        raise typer.Exit(1)


app.command(**_CONFIGURED_COMMAND)(train)


def _cluster_config(cls: type[Config], arguments: Sequence[str], prog: str) -> Config:
    try:
        return load_config(cls, arguments, _up_environment(), _UP_PREFIX, prog=prog)
    except ConfigError as error:
        raise _fail(error, code=2) from None


def _up_environment() -> dict[str, str]:
    environ = dict(os.environ)
    if API_KEY_VARIABLE in environ:
        environ.setdefault(f"{_UP_PREFIX}API_KEY", environ[API_KEY_VARIABLE])
    return environ


@app.command()
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
                _tell(f"LOSSY: accepted by {acceptance}, not the distribution of plain decoding")
    except TreeserveClientError as error:
        raise _fail_call(error, address) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _fail(f"{path}: {error}") from None


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


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="As `generate --json`, `Started` or an HTTP answer named it.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each router that knows it.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Tell why a request waited and where it ran. Each router knows its own part: --address takes several."""
    try:
        known = explanations(address, request_id, access(api_key, ca_file, cert_file, key_file), _tell)
    except TreeserveClientError as error:
        raise _fail_call(error, address) from None
    for explanation in known:
        if as_json:
            print(json.dumps(asdict(explanation)))
        else:
            Console().print(explanation_table(explanation))


@app.command()
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
        raise _fail_call(error, address) from None
    table = Table(Column("model", no_wrap=True), "context", "dtype", "verifiers", "speculators", "vocabulary")
    for model in served:
        counts = (model.max_context_tokens, model.dtype, model.verifiers, model.speculators, model.vocab_size)
        table.add_row(model.name, *map(str, counts))
    Console().print(table)
