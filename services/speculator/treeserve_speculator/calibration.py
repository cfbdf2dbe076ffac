"""From what draft sources claim to what comes true: logistic models that are fitted as they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Claims beyond are no more telling, and their log-odds would drown the rest.
_LEAST, _MOST = 0.002, 0.995
# A model stops remembering at so many observations: what a source is worth changes with the traffic.
_MEMORY = 200.0
_PRIOR_PRECISION = 3.0
_LEAST_CURVATURE = 0.005
RANK_CLASSES = 3  # first, second, and all other children of a node


def log_odds(log_prob: float) -> float:
    """Log-odds of what is claimed for a node."""
    p = min(max(math.exp(log_prob), _LEAST), _MOST)
    return math.log(p / (1.0 - p))


def probability(log_odds: float) -> float:
    """The inverse of log-odds."""
    return 1.0 / (1.0 + math.exp(-log_odds)) if log_odds > -30.0 else math.exp(log_odds)


class OnlineLogistic:
    """A logistic model: log-odds = weights · features, fitted by one diagonal Newton step per set of observations.

    Attributes:
        weights: at first the prior.
    """

    __slots__ = ("_precisions", "weights")

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = list(weights)
        self._precisions = [_PRIOR_PRECISION] * len(self.weights)

    def learn(self, observations: Sequence[tuple[Mapping[int, float], float, bool]]) -> None:
        """Take in what came true.

        Args:
            observations: features that are not zero, what the model said of them, and whether it came true.
        """
        gradients: dict[int, float] = {}
        curvatures: dict[int, float] = {}
        for features, p, came_true in observations:
            error, curvature = came_true - p, max(p * (1.0 - p), _LEAST_CURVATURE)
            for i, x in features.items():
                gradients[i] = gradients.get(i, 0.0) + error * x
                curvatures[i] = curvatures.get(i, 0.0) + curvature * x * x
        for i, gradient in gradients.items():
            precision = self._precisions[i] = min(self._precisions[i] + curvatures[i], _MEMORY)
            self.weights[i] += gradient / precision
