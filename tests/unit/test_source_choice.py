"""The choice of sources, in simulated time, over texts of which it is known where they are easy and where hard."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from treeserve_core.preset import Preset
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree, merge
from treeserve_speculator.choice import SourceChooser
from treeserve_speculator.presets import DEPTHS, PRESETS, WIDTHS, TextKind
from treeserve_speculator.sequence import DraftPrices, DraftSequence, TreeShape
from treeserve_speculator.source_times import SourceTimes

PRICES = DraftPrices(token_us=3400.0, node=0.04)
ROUND_TRIP_S = 0.0005
COPY_S = 0.00002
BUDGET = 12
_FREE = TreeShape(8, 6)

# How often each source has the next token, in four kinds of stretches.
EASY = {"copy": 0.1, "model": 0.8}
HARD = {"copy": 0.05, "model": 0.1}
COPIED = {"copy": 0.9, "model": 0.5}
MIDDLING = {"copy": 0.3, "model": 0.5}


class Text:
    """A prompt and an output whose stretches are easy or hard for each source."""

    def __init__(self, seed: int, stretches: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        rng = random.Random(seed)
        self.chances = [chances for length, chances in stretches for _ in range(length)]
        self.prompt = [rng.randrange(10, 50_000) for _ in range(20)]
        self.output = [rng.randrange(10, 50_000) for _ in self.chances]
        self._known = [{name: rng.random() < p for name, p in chances.items()} for chances in self.chances]

    @classmethod
    def mixed(cls, seed: int) -> Text:
        """Some stretches of each kind in random order."""
        rng = random.Random(seed)
        kinds = [EASY, HARD, COPIED, MIDDLING]
        return cls(seed, [(rng.randrange(30, 90), rng.choice(kinds)) for _ in range(4)])

    def chance(self, source: str, at: int) -> float:
        return self.chances[min(at, len(self.chances) - 1)][source]

    def knows(self, source: str, at: int) -> bool:
        return at < len(self.output) and self._known[at][source]


@dataclass
class Simulation:
    """Texts generated with two sources, `copy`, which is cheap, and `model`, which grows by levels.

    Attributes:
        model_ms, level_ms: what a tree of the model costs, and each of its levels besides.
        fixed: levels of the model in each tree, 0 for none; without it they are chosen.
        together: sequences generated at once.
        levels: after `seconds`: for each tree the text's handle, where in the output it was drawn, the model's levels.
    """

    texts: Sequence[Text]
    model_ms: float = 0.1
    level_ms: float = 0.35
    fixed: int | None = None
    together: int = 1
    preset: Preset = Preset.NONE
    levels: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_handle = dict(enumerate(self.texts, start=1))
        self._chooser = SourceChooser(["copy", "model"])

    def seconds(self) -> float:
        """Simulated time for all texts."""
        waiting = [self._sequence(handle) for handle in self._by_handle]
        running: list[DraftSequence] = []
        total = 0.0
        while waiting or running:
            while waiting and len(running) < self.together:
                running.append(waiting.pop(0))
            total += ROUND_TRIP_S + self._draft(running)
            for sequence in list(running):
                total += self._step(sequence)
                if len(sequence.tokens) == sequence.prompt_len + len(self._by_handle[sequence.handle].output):
                    self._chooser.close(sequence)
                    running.remove(sequence)
        return total

    def _sequence(self, handle: int) -> DraftSequence:
        prompt = self._by_handle[handle].prompt
        return DraftSequence(handle, list(prompt), len(prompt), SamplingParams(), BUDGET, preset=self.preset)

    def _draft(self, sequences: Sequence[DraftSequence]) -> float:
        """Draw a tree for each sequence, as a drafter does. The time it takes."""
        choosable = self._chooser.begin(len(sequences), PRICES)
        copied = {sequence: self._chain("copy", sequence, _FREE) for sequence in sequences}
        shapes: dict[DraftSequence, TreeShape] = {}
        for sequence in sequences:
            chosen = self._chooser.choose(sequence, [copied[sequence]])
            if self.fixed is not None:
                if self.fixed > 0:
                    shapes[sequence] = TreeShape(self.fixed, 6)
            elif "model" not in choosable:
                shapes[sequence] = _FREE
            elif "model" in chosen:
                shapes[sequence] = chosen["model"]
        drawn = {sequence: self._chain("model", sequence, shape) for sequence, shape in shapes.items()}
        copy_s = COPY_S * len(sequences)
        model_s = sum(self.model_ms + self.level_ms * (len(tree) - 1) for tree in drawn.values()) / 1e3
        if self.fixed is None:
            self._chooser.took("copy", sequences, copy_s)
            self._chooser.took("model", list(drawn), model_s)
        for sequence in sequences:
            at = len(sequence.tokens) - sequence.prompt_len
            self.levels.append((sequence.handle, at, len(drawn[sequence]) - 1 if sequence in drawn else 0))
            trees = [copied[sequence], *([drawn[sequence]] if sequence in drawn else [])]
            sequence.tree = _worth_a_row(merge(trees))
            self._chooser.drafted(sequence)
        return copy_s + model_s

    def _chain(self, source: str, sequence: DraftSequence, shape: TreeShape) -> TokenTree:
        """What a source proposes: right as far as it knows the text."""
        text, start = self._by_handle[sequence.handle], len(sequence.tokens) - sequence.prompt_len
        token_ids, log_probs, mass, right = [sequence.tokens[-1]], [0.0], 1.0, True
        while len(token_ids) <= min(shape.depth, BUDGET) and (mass >= shape.least_mass or mass == 1.0):
            at = start + len(token_ids) - 1
            right = right and text.knows(source, at)
            token_ids.append(text.output[at] if right else 60_000 + 2 * at + (source == "model"))
            log_probs.append(math.log(text.chance(source, at)))
            mass *= text.chance(source, at)
        tree = TokenTree.chain(token_ids, log_probs)
        return replace(tree, source_masks=(0,) + (1 if source == "copy" else 2,) * (len(tree) - 1))

    def _step(self, sequence: DraftSequence) -> float:
        """Verify a sequence's tree, and commit. The step's share of time."""
        tree, node, count = sequence.tree, 0, 0
        assert tree is not None
        ahead = self._by_handle[sequence.handle].output[len(sequence.tokens) - sequence.prompt_len :]
        for token_id in ahead:
            count += 1
            child = tree.child(node, token_id)
            if child is None:
                break
            node = child
        sequence.advance(len(sequence.tokens), ahead[:count], BUDGET)
        self._chooser.lesson(sequence, ahead[:count])()
        return PRICES.token_us / 1e6 * (1.0 + PRICES.node * (len(tree) - 1))


def _worth_a_row(tree: TokenTree) -> TokenTree:
    least = math.log(PRICES.node)
    return tree.subtree(node for path, node in tree.ranking if path > least)


def best_fixed(texts: Sequence[Text], **settings: float) -> float:
    """Time of the best choice that is the same for every tree."""
    return min(Simulation(texts, fixed=levels, **settings).seconds() for levels in (0, *DEPTHS))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"level_ms": 0.2}, 1.0),
        ({"level_ms": 0.35}, 1.0),
        ({"level_ms": 0.35, "together": 8}, 1.0),
        ({"level_ms": 1.2, "model_ms": 0.4}, 1.05),  # no model is best, and has to be found out
    ],
)
def test_no_fixed_choice_is_better_on_mixed_text(settings: dict[str, float], share: float) -> None:
    """It adapts within a text, so it does better than any fixed choice."""
    texts = [Text.mixed(seed) for seed in range(12)]
    assert Simulation(texts, **settings).seconds() < share * best_fixed(texts, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("chances", [EASY, HARD, COPIED, MIDDLING], ids=["easy", "hard", "copied", "middling"])
def test_on_text_of_one_kind_it_comes_close_to_the_best_fixed_choice(chances: dict[str, float]) -> None:
    texts = [Text(seed, [(240, chances)]) for seed in range(16)]
    assert Simulation(texts).seconds() < 1.05 * best_fixed(texts)


def test_bold_in_easy_text_and_short_in_hard() -> None:
    """Within one request: levels per tree in the second half of each stretch."""
    simulation = Simulation(
        [Text(seed, [(150, HARD), (150, EASY), (150, HARD), (150, EASY)]) for seed in range(4)], level_ms=0.8
    )
    simulation.seconds()
    settled = [(at // 150, levels) for _, at, levels in simulation.levels if at % 150 > 75]
    hard = [levels for stretch, levels in settled if stretch % 2 == 0]
    easy = [levels for stretch, levels in settled if stretch % 2 == 1]
    assert sum(hard) / len(hard) < 0.5
    assert sum(easy) / len(easy) > 1.8


def test_a_source_that_does_not_pay_is_hardly_asked_and_found_again_when_it_does() -> None:
    texts = [Text(seed, [(300, HARD if seed < 6 else EASY)]) for seed in range(12)]
    simulation = Simulation(texts, level_ms=0.6)
    simulation.seconds()
    hard = [levels > 0 for handle, _, levels in simulation.levels if handle <= 6]
    easy = [levels > 0 for handle, _, levels in simulation.levels if handle > 6]
    assert sum(hard) / len(hard) < 0.1
    assert sum(easy) / len(easy) > 0.9


def test_it_is_deterministic() -> None:
    texts = [Text.mixed(seed) for seed in range(3)]
    first, second = Simulation(texts), Simulation(texts)
    assert first.seconds() == second.seconds() and first.levels == second.levels


def test_without_prices_nothing_is_spared() -> None:
    chooser = chooser_with_costly_model()
    assert chooser.begin(1, DraftPrices()) == frozenset()
    assert chooser.choose(sequence(), []) == {}


def chooser_with_costly_model(prices: DraftPrices = PRICES) -> SourceChooser:
    """A chooser that has timed its sources: a cheap one and a model that takes 0.4 ms a level."""
    chooser = SourceChooser(["copy", "ssm"])
    chooser.begin(1, prices)
    for _ in range(4):
        chooser.took("copy", [sequence()], 0.00002)
        chooser.took("ssm", [sequence()], 0.0032)
    return chooser


def sequence(preset: Preset = Preset.NONE, prompt_len: int = 3, temperature: float = 0.0) -> DraftSequence:
    return DraftSequence(
        1, [5] * prompt_len, prompt_len, SamplingParams(temperature=temperature), BUDGET, preset=preset
    )


def test_sources_are_cheap_until_they_are_measured_and_only_costly_ones_are_chosen() -> None:
    assert SourceChooser(["copy", "ssm"]).begin(1, PRICES) == frozenset()
    chooser = chooser_with_costly_model()
    assert chooser.begin(1, PRICES) == {"ssm"} and chooser.chooses("ssm") and not chooser.chooses("copy")
    # Beside a token that takes half a second the model costs next to nothing.
    assert chooser.begin(1, DraftPrices(500_000.0, 0.04)) == frozenset()


def test_a_preset_is_where_drafting_begins() -> None:
    shapes = {}
    for preset in Preset:
        chooser = chooser_with_costly_model()
        chooser.begin(1, PRICES)
        shapes[preset] = chooser.choose(sequence(preset), [])["ssm"]
    assert shapes[Preset.CODE].depth > shapes[Preset.CREATIVE].depth
    assert shapes[Preset.CODE].width < shapes[Preset.CREATIVE].width
    assert shapes[Preset.SUMMARY].depth > shapes[Preset.TRANSLATION].depth


def test_a_preset_is_no_cage() -> None:
    """Text that goes on for long is drafted for deeply, whatever the request says it is."""
    texts = [Text(seed, [(240, {"copy": 0.05, "model": 0.95})]) for seed in range(3)]
    simulation = Simulation(texts, preset=Preset.CREATIVE, level_ms=0.2)
    simulation.seconds()
    last = [levels for handle, _, levels in simulation.levels if handle == 3]
    assert sum(last) / len(last) > 4.0


def test_a_source_that_failed_is_not_chosen() -> None:
    chooser = chooser_with_costly_model()
    chooser.begin(1, PRICES)
    state = sequence(Preset.CODE)
    state.disabled.add("ssm")
    assert chooser.choose(state, []) == {}


def test_a_tree_that_the_cheap_sources_are_sure_of_needs_no_model() -> None:
    chooser = chooser_with_costly_model()
    chooser.begin(1, PRICES)
    sure = TokenTree.chain([5, 6, 7, 8, 9, 10, 11], [0.0] + [math.log(0.9)] * 6)
    unsure = TokenTree.chain([5, 6], [0.0, math.log(0.1)])
    assert "ssm" in chooser.choose(sequence(), [unsure])
    for _ in range(40):  # what they are sure of comes true
        state = sequence()
        chooser.choose(state, [sure])
        state.tree = TokenTree(sure.token_ids, sure.parents, sure.log_probs, (0, *[1] * 6))
        chooser.lesson(state, [6, 7, 8, 9, 10, 11, 12])()
        chooser.close(state)
    assert chooser.choose(sequence(), [sure]) == {}
    assert "ssm" in chooser.choose(sequence(), [unsure])


def test_kinds_of_text() -> None:
    assert TextKind.of(sequence(Preset.CODE)) == TextKind(Preset.CODE, False, False)
    assert TextKind.of(sequence(prompt_len=900, temperature=1.0)) == TextKind(Preset.SUMMARY, True, True)
    assert TextKind.of(sequence()) == TextKind(Preset.CHAT, True, False)
    assert set(PRESETS) == set(Preset)
    for preset in PRESETS.values():
        assert preset.depth in DEPTHS and preset.width in WIDTHS
        assert preset.right("ssm3") == preset.right("ssm") > preset.right("your_function")


def test_times_forget_the_reading_of_a_prompt_and_are_guessed_where_nothing_was_measured() -> None:
    times = SourceTimes()
    assert times.seconds(1, 1) == [0.0] * len(DEPTHS)
    times.observe(1, 1, 1, 0.1)
    for _ in range(30):
        times.observe(1, 1, 1, 0.002)
    assert times.seconds(1, 1) == pytest.approx([0.001, 0.002, 0.004, 0.008], rel=0.05)
    assert times.seconds(0, 1)[1] < times.seconds(1, 1)[1]
    assert times.seconds(1, 8) == times.seconds(1, 1)
    times.observe(1, 3, 8, 0.003)
    assert times.seconds(1, 8)[3] == 0.003 and times.seconds(1, 1)[3] > 0.005
    times.observe(1, 1, 1, 60.0)  # one stall
    assert times.seconds(1, 1)[1] < 0.003


def test_a_decision_takes_microseconds() -> None:
    chooser = chooser_with_costly_model()
    chooser.begin(1, PRICES)
    state = sequence()
    tree = TokenTree.chain(list(range(5, 14)), [0.0] + [-0.7] * 8)
    fastest = math.inf
    for _ in range(200):
        began = time.perf_counter()
        chooser.choose(state, [tree])
        fastest = min(fastest, time.perf_counter() - began)
    assert fastest < 100e-6  # some 20 on the machine of the README; others may be slower
