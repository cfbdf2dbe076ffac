"""Traces that are drawn: Poisson, bursts, days, mixed classes and conversations, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.trace import TraceRequest

Floats = npt.NDArray[np.float64]

_RESOLUTION = 200  # points of the rate's curve in one period
_SPREAD = 0.6  # standard deviation of the log of lengths


class Pattern(StrEnum):
    """How arrivals are spread over time. All have the same mean rate over whole periods."""

    POISSON = "poisson"
    BURSTS = "bursts"
    DIURNAL = "diurnal"


@dataclass(frozen=True)
class Traffic:
    """One kind of request in a mix.

    Attributes:
        share: of all conversations.
        prompt_tokens, output_tokens: medians; lengths are log-normal around them.
        turns: requests of a conversation; above 1 they carry a session.
        kinds: of text, drawn evenly.
    """

    service_class: ServiceClass
    share: float
    prompt_tokens: int
    output_tokens: int
    turns: int = 1
    kinds: tuple[str, ...] = ("chat",)


MIXED = (
    Traffic(ServiceClass.REALTIME, 0.15, 60, 40, kinds=("extraction", "rewrite")),
    Traffic(ServiceClass.INTERACTIVE, 0.35, 150, 80, kinds=("chat", "code")),
    Traffic(ServiceClass.STANDARD, 0.30, 250, 100, kinds=("chat", "summary", "story")),
    Traffic(ServiceClass.BATCH, 0.20, 400, 160, kinds=("summary", "extraction")),
)
CONVERSATIONS = (Traffic(ServiceClass.INTERACTIVE, 1.0, 200, 60, turns=4, kinds=("chat", "code")),)


@dataclass(frozen=True)
class Arrivals:
    """What to draw.

    Attributes:
        count: requests in all; a conversation that begins is finished, so there may be a few more.
        rate_per_s: mean rate of new conversations.
        period_s: of bursts and days.
        peak: rate at the top over the mean one.
        burst_share: share of a period that a burst lasts.
        turn_gap_s: mean pause between the end of an answer and the next turn, as far as the trace can know.
        max_tokens: longest prompt and output together.
        tenants: names, drawn evenly.
    """

    count: int
    rate_per_s: float
    mix: tuple[Traffic, ...] = MIXED
    pattern: Pattern = Pattern.POISSON
    period_s: float = 60.0
    peak: float = 3.0
    burst_share: float = 0.15
    turn_gap_s: float = 10.0
    max_tokens: int = 2048
    tenants: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        if self.count < 1 or not self.rate_per_s > 0 or not self.period_s > 0:
            raise InvalidArgumentError("arrivals", "count, rate and period must be positive")
        if self.pattern is Pattern.BURSTS and not (self.peak >= 1 and self.peak * self.burst_share <= 1):
            raise InvalidArgumentError("peak", "must be at least 1, and at most 1 / burst_share")
        if self.pattern is Pattern.DIURNAL and not 1 <= self.peak <= 2:
            raise InvalidArgumentError("peak", "of a day is between 1 and 2 times its mean")


def draw_trace(arrivals: Arrivals, seed: int) -> list[TraceRequest]:
    """A trace in order of arrival; equal arguments give equal traces."""
    rng = np.random.default_rng(seed)
    shares = np.array([traffic.share for traffic in arrivals.mix])
    turns = float(np.average([traffic.turns for traffic in arrivals.mix], weights=shares))
    times = arrival_times(arrivals, math.ceil(arrivals.count / turns), rng)
    requests: list[TraceRequest] = []
    for number, at_s in enumerate(times.tolist()):
        traffic = arrivals.mix[int(rng.choice(len(shares), p=shares / shares.sum()))]
        requests += _conversation(arrivals, traffic, at_s, f"c{number}", rng)
    return sorted(requests, key=lambda request: request.at_s)


def arrival_times(arrivals: Arrivals, count: int, rng: np.random.Generator) -> Floats:
    """When conversations begin, seconds: a Poisson process whose rate follows the pattern. float64[count]."""
    expected = np.cumsum(rng.exponential(size=count))  # in a clock that runs as fast as requests come
    if arrivals.pattern is Pattern.POISSON:
        return expected / arrivals.rate_per_s
    phase = np.linspace(0.0, 1.0, _RESOLUTION + 1)
    rate = _relative_rate(arrivals, (phase[1:] + phase[:-1]) / 2)
    one_period = np.concatenate([[0.0], np.cumsum(rate) / rate.sum()]) * arrivals.rate_per_s * arrivals.period_s
    periods, rest = np.divmod(expected, one_period[-1])
    return (periods + np.interp(rest, one_period, phase)) * arrivals.period_s


def _relative_rate(arrivals: Arrivals, phase: Floats) -> Floats:
    if arrivals.pattern is Pattern.DIURNAL:
        return 1.0 - (arrivals.peak - 1.0) * np.cos(2 * np.pi * phase)
    quiet = (1.0 - arrivals.peak * arrivals.burst_share) / (1.0 - arrivals.burst_share)
    return np.where(phase >= 1.0 - arrivals.burst_share, arrivals.peak, quiet)


def _conversation(
    arrivals: Arrivals, traffic: Traffic, at_s: float, name: str, rng: np.random.Generator
) -> Sequence[TraceRequest]:
    tenant = arrivals.tenants[int(rng.integers(len(arrivals.tenants)))]
    kind = traffic.kinds[int(rng.integers(len(traffic.kinds)))]
    requests: list[TraceRequest] = []
    history = 0
    for _ in range(traffic.turns):
        prompt = history + _length(traffic.prompt_tokens, rng)
        output = _length(traffic.output_tokens, rng)
        if prompt + output > arrivals.max_tokens:
            if requests:
                break
            prompt = arrivals.max_tokens - min(output, arrivals.max_tokens // 2)
            output = arrivals.max_tokens - prompt
        session = name if traffic.turns > 1 else ""
        requests.append(TraceRequest(at_s, prompt, output, traffic.service_class, tenant, kind, session))
        history = prompt + output
        at_s += float(rng.exponential(arrivals.turn_gap_s))
    return requests


def _length(median: int, rng: np.random.Generator) -> int:
    return max(1, round(median * math.exp(_SPREAD * float(rng.standard_normal()))))
