"""What a verifier takes to a first token and for each one after it, learned from its reports and from what it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from treeserve_core.sampling import ServiceClass

# What an observation counts after one more.
_FORGETTING = 0.95
# How firmly a verifier's own figures are believed: as much as one observation of this much prefill would weigh.
_TRUST_S = 0.2
# One observation counts for no more than this multiple of what was predicted, and a little: a verifier that was stopped
# for a while is not slow for long.
_MAX_SURPRISE, _SURPRISE_S = 2.0, 0.1
_MIN_SLOWNESS, _MAX_SLOWNESS = 0.25, 8.0
_TPOT_SMOOTHING = 0.1


class Fit(NamedTuple):
    """What first tokens take beyond what a verifier's own figures say.

    Attributes:
        overhead_s: on top of a step and the prefill.
        slowness: of the prefill, as a multiple of what the rate promises.
    """

    overhead_s: float = 0.0
    slowness: float = 1.0


@dataclass(frozen=True)
class Latency:
    """How fast a verifier is at present.

    Attributes:
        step_s: time of one of its steps; 0 if unknown.
        prefill_tokens_per_s: prompt tokens it computes a second; 0 if unknown.
        fits: by service class, the most urgent first.
        tpot_s: time per output token after the first, smoothed over its sequences; None before the first ended.
    """

    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    fits: tuple[Fit, ...] = (Fit(),) * len(ServiceClass)
    tpot_s: float | None = None

    def seconds_per_token(self, service_class: ServiceClass) -> float | None:
        """What prefill takes for a prompt token of this class; None if nothing is known."""
        if self.prefill_tokens_per_s <= 0:
            return None
        return self.fits[service_class - 1].slowness / self.prefill_tokens_per_s

    def ttft_s(self, tokens: int, service_class: ServiceClass) -> float | None:
        """Time to a first token once this many prompt tokens are to be computed; None if nothing is known."""
        per_token_s = self.seconds_per_token(service_class)
        return None if per_token_s is None else self.start_s(service_class) + per_token_s * tokens

    def start_s(self, service_class: ServiceClass) -> float:
        """Time until prefill begins, as far as it is known."""
        return self.step_s + self.fits[service_class - 1].overhead_s

    @property
    def token_s(self) -> float | None:
        """Time per output token after the first; None if nothing is known."""
        return self.tpot_s or self.step_s or None


class LatencyModel:
    """Learns how a verifier's times relate to what it reports.

    A first token takes a step, the prefill of its prompt and of those in front of it, and an overhead. Overhead and
    slowness are fitted to what first tokens took: for each class by itself, because the more urgent overtake the less
    urgent at the verifier.
    """

    def __init__(self) -> None:
        self._step_s = 0.0
        self._rate = 0.0
        self._tpot_s: float | None = None
        self._fits = {service_class: _LeastSquares() for service_class in ServiceClass}

    def reported(self, step_s: float, prefill_tokens_per_s: float) -> None:
        """Take the verifier's own figures; 0 leaves the last one."""
        self._step_s = step_s or self._step_s
        self._rate = prefill_tokens_per_s or self._rate

    def first_token(self, service_class: ServiceClass, tokens: int, took_s: float) -> None:
        """Learn from a first token: so many prompt tokens had to be computed, its own and those in front."""
        predicted_s = self.now().ttft_s(tokens, service_class)
        if predicted_s is not None:
            took_s = min(took_s, _MAX_SURPRISE * predicted_s + _SURPRISE_S)
            self._fits[service_class].add(tokens / self._rate, took_s - self._step_s)

    def ended(self, tokens: int, took_s: float) -> None:
        """Learn from a sequence: so many tokens came in the time after its first ones."""
        if tokens < 1:
            return
        seen = took_s / tokens
        self._tpot_s = seen if self._tpot_s is None else self._tpot_s + _TPOT_SMOOTHING * (seen - self._tpot_s)

    def now(self) -> Latency:
        """What is known at present."""
        return Latency(self._step_s, self._rate, tuple(fit.solve() for fit in self._fits.values()), self._tpot_s)


class _LeastSquares:
    """Overhead a and slowness b that minimise sum w (y - a - b x)^2 + a^2 + trust^2 (b - 1)^2 over observations.

    x is the prefill as the verifier promises it, y what the first token took but for a step, w falls with every later
    observation. The last two terms stand for the verifier's own figures: they keep a few short prompts from saying
    anything about long ones.
    """

    def __init__(self) -> None:
        self._n = 1.0
        self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._n = (self._n - 1) * _FORGETTING + 2
        self._x = self._x * _FORGETTING + x
        self._y = self._y * _FORGETTING + y
        self._xx = self._xx * _FORGETTING + x * x
        self._xy = self._xy * _FORGETTING + x * y

    def solve(self) -> Fit:
        xx, xy = self._xx + _TRUST_S**2, self._xy + _TRUST_S**2
        slowness = (self._n * xy - self._x * self._y) / (self._n * xx - self._x**2)
        slowness = min(max(slowness, _MIN_SLOWNESS), _MAX_SLOWNESS)
        return Fit(max((self._y - slowness * self._x) / self._n, 0.0), slowness)
