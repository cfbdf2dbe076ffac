"""Where drafting begins for each kind of work, before anything was learnt about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from treeserve_core.preset import Preset
from treeserve_speculator.sequence import DraftSequence

# Levels a model's tree may grow by, and nodes expanded per level: few, so that each is soon known.
DEPTHS = (1, 2, 4, 8)
WIDTHS = (2, 6)

_LONG_PROMPT = 256  # tokens; longer ones mostly hold a text to be worked on


@dataclass(frozen=True)
class DraftPreset:
    """A prior, not a cage: what is learnt soon outweighs it.

    Attributes:
        depth: levels to begin with, one of DEPTHS.
        width: nodes expanded per level to begin with, one of WIDTHS.
        sources: how often a costly source has a token that no cheap one has, by its name without a number.
        other_sources: the same for those not named.
    """

    depth: int
    width: int
    sources: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    other_sources: float = 0.3

    def right(self, source: str) -> float:
        """Prior probability that a source has a token that no cheap one has."""
        return self.sources.get(source.rstrip("0123456789"), self.other_sources)


def _preset(depth: int, width: int, model: float) -> DraftPreset:
    return DraftPreset(depth, width, MappingProxyType({"ssm": model, "head": model}))


PRESETS: Mapping[Preset, DraftPreset] = MappingProxyType(
    {
        Preset.NONE: _preset(2, 6, 0.5),
        Preset.CODE: _preset(4, 2, 0.6),
        Preset.CHAT: _preset(2, 6, 0.5),
        Preset.SUMMARY: _preset(4, 2, 0.55),
        Preset.TRANSLATION: _preset(2, 6, 0.45),
        Preset.CREATIVE: _preset(1, 6, 0.45),
    }
)


@dataclass(frozen=True)
class TextKind:
    """Sequences that are taken to be alike until they show otherwise.

    Attributes:
        preset: as the request says, or a guess by the prompt's length.
        guessed: whether it is a guess.
        sampled: whether tokens are drawn, which are harder to foresee than the most probable ones.
    """

    preset: Preset
    guessed: bool
    sampled: bool

    @classmethod
    def of(cls, sequence: DraftSequence) -> TextKind:
        """The kind of a new sequence."""
        sampled = not sequence.sampling.is_greedy
        if sequence.preset is not Preset.NONE:
            return cls(sequence.preset, False, sampled)
        is_long = sequence.prompt_len > _LONG_PROMPT
        return cls(Preset.SUMMARY if is_long else Preset.CHAT, True, sampled)
