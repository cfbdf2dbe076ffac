"""From replies to figures: throughput, latencies and ratios, medians over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.peer import Reply

Table = dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Cell:
    """One system at one batch size in one round."""

    round: int
    system: str
    batch: int
    replies: tuple[Reply, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the time in which at least one request ran, prefill included."""
        return sum(r.num_tokens for r in self.replies) / busy_s(self.replies)

    def tokens_per_s_of(self, task: str) -> float | None:
        """What the throughput would be if all requests were like those of one task; None if there is none.

        `batch` requests run at any time, so by Little's law it is batch * tokens / summed latencies.
        """
        replies = [r for r in self.replies if r.task == task]
        seconds = sum(r.ended - r.began for r in replies)
        return self.batch * sum(r.num_tokens for r in replies) / seconds if replies else None

    @property
    def ttft_ms(self) -> float:
        """Median time to the first token."""
        return 1e3 * statistics.median(r.first_token - r.began for r in self.replies)

    @property
    def tpot_ms(self) -> float:
        """Median over the requests of the mean time of a token after the first."""
        return 1e3 * statistics.median((r.ended - r.first_token) / max(1, r.num_tokens - 1) for r in self.replies)


def busy_s(replies: Iterable[Reply]) -> float:
    """Seconds in which at least one request ran."""
    total, until = 0.0, float("-inf")
    for reply in sorted(replies, key=lambda r: r.began):
        total += max(0.0, reply.ended - max(reply.began, until))
        until = max(until, reply.ended)
    return total


def medians(cells: Sequence[Cell], measure: Callable[[Cell], float]) -> Table:
    """[system][batch]: the median of a figure over the rounds."""
    return {
        system: {
            str(batch): statistics.median(measure(c) for c in cells if (c.system, c.batch) == (system, batch))
            for batch in sorted({c.batch for c in cells if c.system == system})
        }
        for system in dict.fromkeys(c.system for c in cells)
    }


def by_round(cells: Sequence[Cell]) -> dict[str, dict[str, list[float]]]:
    """[system][batch]: throughput of each round, which shows the spread."""
    found: dict[str, dict[str, list[float]]] = {}
    for c in sorted(cells, key=lambda c: c.round):
        found.setdefault(c.system, {}).setdefault(str(c.batch), []).append(c.tokens_per_s)
    return found


def by_task(cells: Sequence[Cell]) -> dict[str, dict[str, dict[str, float]]]:
    """[system][batch][task]: median throughput over the rounds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for system, batch in dict.fromkeys((c.system, c.batch) for c in cells):
        ours = [c for c in cells if (c.system, c.batch) == (system, batch)]
        found.setdefault(system, {})[str(batch)] = {
            task: statistics.median(values)
            for task in _tasks(ours)
            if (values := [v for c in ours if (v := c.tokens_per_s_of(task)) is not None])
        }
    return found


def ratios(cells: Sequence[Cell], system: str, base: str) -> dict[str, dict[str, float]]:
    """[batch][task, or "all"]: throughput of a system over another's in the same round, median over the rounds."""
    pairs = [(c, d) for c in cells for d in cells if (c.system, d.system) == (system, base) and _place(c) == _place(d)]
    found: dict[str, dict[str, float]] = {}
    for batch in sorted({c.batch for c, _ in pairs}):
        ours = [pair for pair in pairs if pair[0].batch == batch]
        row = {"all": statistics.median(c.tokens_per_s / d.tokens_per_s for c, d in ours)}
        for task in _tasks([c for c, _ in ours]):
            values = [(c.tokens_per_s_of(task), d.tokens_per_s_of(task)) for c, d in ours]
            if shares := [a / b for a, b in values if a is not None and b is not None]:
                row[task] = statistics.median(shares)
        found[str(batch)] = row
    return found


def overhead(cells: Sequence[Cell], system: str, base: str) -> float | None:
    """How much longer a request takes than the same request at `base`, run next to it, as a fraction: the median.

    None without such pairs.
    """
    shares = [
        (r.ended - r.began) / (b.ended - b.began) - 1.0
        for c in cells
        for d in cells
        if (c.system, d.system) == (system, base) and _place(c) == _place(d)
        for r, b in zip(c.replies, d.replies, strict=True)
    ]
    return statistics.median(shares) if shares else None


def equal_share(cells: Sequence[Cell], system: str, base: str) -> float | None:
    """Share of requests whose tokens are the same from both systems; None without pairs."""
    same = [
        r.token_ids == b.token_ids
        for c in cells
        for d in cells
        if (c.system, d.system) == (system, base) and _place(c) == _place(d)
        for r, b in zip(c.replies, d.replies, strict=True)
    ]
    return sum(same) / len(same) if same else None


def tokens_per_step(cells: Sequence[Cell], system: str) -> dict[str, dict[str, float]]:
    """[batch][task]: output tokens for each forward pass of a sequence, prefill's first token included."""
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    for c in cells:
        for r in c.replies if c.system == system else ():
            row = counts.setdefault(str(c.batch), {})
            tokens, steps = row.get(r.task, (0, 0))
            row[r.task] = (tokens + r.num_tokens, steps + r.steps)
    return {
        batch: {task: tokens / steps for task, (tokens, steps) in row.items() if steps} for batch, row in counts.items()
    }


def share_past_end(cells: Sequence[Cell], system: str, end_ids: Sequence[int]) -> dict[str, float]:
    """[task]: share of the tokens that come after the model had ended its answer, since all run to full length."""
    past: Mapping[str, list[int]] = {task: [0, 0] for task in _tasks(cells)}
    for r in (r for c in cells if c.system == system for r in c.replies):
        end = next((i for i, token in enumerate(r.token_ids) if token in end_ids), r.num_tokens)
        past[r.task][0] += max(0, r.num_tokens - end - 1)
        past[r.task][1] += r.num_tokens
    return {task: beyond / total for task, (beyond, total) in past.items() if total}


def _tasks(cells: Iterable[Cell]) -> list[str]:
    return list(dict.fromkeys(r.task for c in cells for r in c.replies))


def _place(cell: Cell) -> tuple[int, int]:
    return cell.round, cell.batch
