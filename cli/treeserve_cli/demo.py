"""`treeserve demo`: stream an answer through the local cluster, then measure it against its own plain decoding."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from treeserve_cli.layout import ClusterConfig
from treeserve_client import Client, Completion
from treeserve_wire.config import option

MAX_TOKENS = 96

# One prompt for each kind of work: what drafts well (copying) and what does not (free prose).
PROMPTS = {
    "explain": "Explain in a few sentences why the sky is blue.",
    "rewrite": (
        "Correct the spelling and repeat the whole text: The libary opens at nine oclock in the morning and closes at "
        "six oclock in the evening. On sundays the libary opens at noon. The libary is closed on holydays."
    ),
    "code": "Write a Python class Stack with the methods push, pop, peek and is_empty.",
    "list": "List the months of the year, each with its number of days.",
}


@dataclass(frozen=True)
class DemoConfig(ClusterConfig):
    """Start a cluster, stream an answer, and measure speculation against plain decoding."""

    grpc_port: int = field(default=0, metadata=option("gRPC port on loopback; 0 picks one"))
    http_port: int = field(default=0, metadata=option("HTTP port on loopback; 0 picks one"))


@dataclass(frozen=True)
class Measurement:
    """One prompt, decoded with speculation and plainly."""

    task: str
    drafted: Completion
    plain: Completion

    @property
    def speed_up(self) -> float:
        """Plain time per output token over the time with speculation."""
        return self.plain.timing.tpot_ms / self.drafted.timing.tpot_ms


def run_demo(client: Client, started_at: float, console: Console) -> bool:
    """Stream one answer, measure all prompts and print a table; returns whether all tokens were the same.

    Args:
        started_at: `time.monotonic()` when the command began.
    """
    _stream_answer(client, started_at, console)
    console.print("\nmeasuring: each prompt once with speculation and once without, greedy", style="dim")
    measurements = [_measure(client, task, first_plain=i % 2 == 1) for i, task in enumerate(PROMPTS)]
    console.print(_table(measurements))
    same = all(m.drafted.token_ids == m.plain.token_ids for m in measurements)
    console.print("tokens with and without speculation: " + ("identical" if same else "DIFFERENT"))
    return same


def _stream_answer(client: Client, started_at: float, console: Console) -> None:
    question = "What is a token tree? Answer in two sentences."
    console.print(f"[bold]{question}[/bold]")
    with client.generate(messages=[{"role": "user", "content": question}], max_tokens=MAX_TOKENS) as stream:
        for i, chunk in enumerate(stream):
            if i == 0:
                waited_s = time.monotonic() - started_at
            console.print(chunk.text, end="", highlight=False, markup=False, soft_wrap=True)
    result = stream.result
    console.print(
        f"\n\nfirst token {waited_s:.1f} s after the command, {result.timing.ttft_ms:.0f} ms after the request; "
        f"{_tokens_per_s(result):.1f} tokens/s, acceptance length {result.speculation.acceptance_length:.2f}",
        highlight=False,
        soft_wrap=True,
    )


def _measure(client: Client, task: str, *, first_plain: bool) -> Measurement:
    # Each prompt is drafted once only: a second time, the drafter would remember the answer.
    messages = [{"role": "user", "content": PROMPTS[task]}]
    runs: dict[bool, Completion] = {}
    for speculation in (not first_plain, first_plain):
        runs[speculation] = client.complete(messages=messages, max_tokens=MAX_TOKENS, speculation=speculation)
    return Measurement(task, runs[True], runs[False])


def _table(measurements: list[Measurement]) -> Table:
    table = Table("task", "tokens", "plain tokens/s", "tokens/s", "acceptance length", "speed-up")
    for m in measurements:
        table.add_row(
            m.task,
            str(len(m.plain.token_ids)),
            f"{_tokens_per_s(m.plain):.1f}",
            f"{_tokens_per_s(m.drafted):.1f}",
            f"{m.drafted.speculation.acceptance_length:.2f}",
            f"{m.speed_up:.2f}x",
        )
    table.add_section()
    steps = sum(m.drafted.speculation.steps for m in measurements)
    accepted = sum(m.drafted.speculation.accepted for m in measurements)
    table.add_row(
        "all",
        str(sum(len(m.plain.token_ids) for m in measurements)),
        f"{statistics.mean(_tokens_per_s(m.plain) for m in measurements):.1f}",
        f"{statistics.mean(_tokens_per_s(m.drafted) for m in measurements):.1f}",
        f"{(accepted + steps) / steps:.2f}",
        f"{statistics.geometric_mean(m.speed_up for m in measurements):.2f}x",
    )
    return table


def _tokens_per_s(completion: Completion) -> float:
    """Decoding speed after the first token."""
    return 1e3 / completion.timing.tpot_ms
