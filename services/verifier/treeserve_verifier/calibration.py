"""Learns how far the drafters' probabilities hold: accepted over expected nodes, for each sequence and for all."""

from __future__ import annotations

import math

from treeserve_core.outcome import VerifyOutcome
from treeserve_core.tree import TokenTree
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.step_plan import PlannedSequence

_VERIFIED_SMOOTHING = 0.3
_CALIBRATION_SMOOTHING = 0.15
_PRIOR_SMOOTHING = 0.02
_FORGIVENESS = 0.01


class Calibrator:
    """Keeps `calibration` and `verified` of sequences; a fresh one starts with what all others taught.

    Runs of steps (`decode_run`) learn the same in kernels/cpu/decode_run.cpp.

    Attributes:
        prior: smoothed over all sequences.
    """

    def __init__(self) -> None:
        self.prior = 1.0

    def begin(self, sequence: Sequence) -> None:
        """A fresh sequence."""
        sequence.calibration = self.prior

    def learn(self, planned: PlannedSequence, outcome: VerifyOutcome) -> None:
        """A step verified what was planned for a sequence. What was expected counts with the present calibration."""
        sequence, drafted = planned.sequence, len(planned.tree) - 1 if planned.tree is not None else 0
        if drafted or planned.untried is not None:
            sequence.verified += _VERIFIED_SMOOTHING * (drafted - sequence.verified)
        expected, accepted = planned.expected, len(outcome.accepted_nodes)
        if expected == 0.0:
            # Nothing was tried. Of a tree that was there the emitted token judges the first level; else forgive slowly.
            if planned.untried is None:
                sequence.calibration += _FORGIVENESS * (1.0 - sequence.calibration)
                return
            expected = sequence.calibration * _first_level(planned.untried)
            accepted = int(planned.untried.child(0, outcome.token_ids[0]) is not None)
        ratio = min((accepted + 0.5) / (expected + 0.5), 2.0)  # the halves keep small trees from swinging it
        sequence.calibration *= 1.0 + _CALIBRATION_SMOOTHING * (ratio - 1.0)
        self.prior += _PRIOR_SMOOTHING * (sequence.calibration - self.prior)


def _first_level(tree: TokenTree) -> float:
    """Probability that one of the root's children comes true, as the drafters see it."""
    return sum(math.exp(tree.path_log_probs[child]) for child in tree.children[0])
