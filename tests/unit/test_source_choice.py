"""The choice of sources by tokens per unit time, in simulated time over texts whose easy and hard stretches are known."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from treeserve_core.preset import Preset
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.choice import SourceChooser
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.presets import DEPTHS, PRESETS, WIDTHS, TextKind
from treeserve_speculator.sequence import UNPRICED, CommittedTokens, DraftPrices, DraftSequence, TreeShape
from treeserve_speculator.source_times import SourceTimes

PRICES = DraftPrices(token_us=3400.0, node=0.04)
ROUND_TRIP_S = 0.0005
BUDGET = 12
LIMITS = TreeLimits(BUDGET, 16)

# How often each source has the next token, in four kinds of stretches.
EASY = {"copy": 0.1, "model": 0.8}
HARD = {"copy": 0.05, "model": 0.1}
COPIED = {"copy": 0.9, "model": 0.5}
MIDDLING = {"copy": 0.3, "model": 0.5}


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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


class Guesser:
    """Proposes a chain that is right as far as it knows the text, for a price in simulated time."""

    wants_top_tokens = False

    def __init__(
        self, name: str, texts: Mapping[int, Text], clock: Clock, depth: int, ms: float, level_ms: float
    ) -> None:
        self.name = name
        self.asked: Counter[int] = Counter()
        self._texts, self._clock = texts, clock
        self._depth, self._s, self._level_s = depth, ms / 1e3, level_ms / 1e3

    def open(self, state: DraftSequence) -> None:
        pass

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        pass

    def close(self, state: DraftSequence) -> None:
        pass

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        text, start = self._texts[state.handle], len(state.tokens) - state.prompt_len
        shape = state.shapes.get(self.name, TreeShape(self._depth, max(WIDTHS)))
        token_ids, log_probs, mass, right = [state.tokens[-1]], [0.0], 1.0, True
        while len(token_ids) <= min(self._depth, shape.depth, budget) and (mass >= shape.least_mass or mass == 1.0):
            at = start + len(token_ids) - 1
            right = right and text.knows(self.name, at)
            chance = text.chance(self.name, at)
            token_ids.append(text.output[at] if right else 60_000 + at)
            log_probs.append(math.log(chance))
            mass *= chance
        self._clock.now += self._s + self._level_s * (len(token_ids) - 1)
        self.asked[len(token_ids) - 1] += 1
        return TokenTree.chain(token_ids, log_probs)


@dataclass
class Simulation:
    """Generates texts with a drafter, one step after the other.

    Attributes:
        model_ms, level_ms: what the model costs for a tree, and for each of its levels.
        model_depth: levels it grows by itself; 0 leaves the model out.
        prices: as the drafter is told; without them it spares nothing.
    """

    texts: Sequence[Text]
    model_ms: float = 0.1
    level_ms: float = 0.35
    model_depth: int = 8
    prices: DraftPrices = PRICES
    together: int = 1
    preset: Preset = Preset.NONE
    model: Guesser = field(init=False)
    drafter: Drafter = field(init=False)

    def __post_init__(self) -> None:
        self._clock = Clock()
        self._texts: dict[int, Text] = dict(enumerate(self.texts, start=1))
        copy = Guesser("copy", self._texts, self._clock, 6, 0.02, 0.0)
        self.model = Guesser("model", self._texts, self._clock, self.model_depth, self.model_ms, self.level_ms)
        self.drafter = Drafter(
            [copy, self.model] if self.model_depth else [copy],
            vocab_size=100_000,
            eos_token_ids=frozenset(),
            limits=LIMITS,
            metrics=SpeculatorMetrics(CollectorRegistry()),
            clock_s=self._clock,
        )

    def seconds(self) -> float:
        """Simulated time for all texts, `together` at once."""
        waiting = [self._sequence(handle) for handle in self._texts]
        running: list[DraftSequence] = []
        total = 0.0
        while waiting or running:
            while waiting and len(running) < self.together:
                running.append(waiting.pop(0))
                self.drafter.open(running[-1])
            began = self._clock.now
            proposals = self.drafter.draft(running, LIMITS, self.prices)
            total += ROUND_TRIP_S + self._clock.now - began
            for sequence, proposal in zip(list(running), proposals, strict=True):
                total += self._step(sequence, proposal.tree)
                if len(sequence.tokens) == sequence.prompt_len + len(self._texts[sequence.handle].output):
                    self.drafter.close(sequence)
                    running.remove(sequence)
        return total

    def _sequence(self, handle: int) -> DraftSequence:
        prompt = self._texts[handle].prompt
        return DraftSequence(handle, list(prompt), len(prompt), SamplingParams(), BUDGET, preset=self.preset)

    def _step(self, sequence: DraftSequence, tree: TokenTree) -> float:
        """Verify what pays of a tree, and commit. The step's share of time."""
        least = math.log(PRICES.node)
        tree = tree.subtree(node for path, node in tree.ranking if path > least)
        ahead = self._texts[sequence.handle].output[len(sequence.tokens) - sequence.prompt_len :]
        node, count = 0, 0
        for count, token_id in enumerate(ahead, start=1):
            child = tree.child(node, token_id)
            if child is None:
                break
            node = child
        committed = CommittedTokens(sequence.handle, len(sequence.tokens), tuple(ahead[:count]), BUDGET)
        self.drafter.commit(sequence, committed)
        return PRICES.token_us / 1e6 * (1.0 + PRICES.node * (len(tree) - 1))


def best_fixed(texts: Sequence[Text], **settings: float) -> float:
    """Time of the best choice that is the same for every tree."""
    return min(
        Simulation(texts, model_depth=depth, prices=UNPRICED, **settings).seconds()  # type: ignore[arg-type]
        for depth in (0, 1, 2, 4, 8)
    )


@pytest.mark.parametrize(
    ("settings", "within"),
    [
        ({"level_ms": 0.2}, 1.0),
        ({"level_ms": 0.35}, 1.0),
        ({"level_ms": 1.2, "model_ms": 0.4}, 1.05),
        ({"level_ms": 0.35, "together": 8}, 1.0),
    ],
)
def test_no_fixed_choice_is_better_on_mixed_text(settings: dict[str, float], within: float) -> None:
    """It adapts within a text, so it does better than any fixed choice, and costs next to nothing where none pays."""
    texts = [Text.mixed(seed) for seed in range(12)]
    chosen = Simulation(texts, **settings).seconds()  # type: ignore[arg-type]
    assert chosen < within * best_fixed(texts, **settings)


@pytest.mark.parametrize("chances", [EASY, HARD, COPIED, MIDDLING], ids=["easy", "hard", "copied", "middling"])
def test_on_text_of_one_kind_it_finds_the_best_fixed_choice(chances: dict[str, float]) -> None:
    texts = [Text(seed, [(240, chances)]) for seed in range(12)]
    assert Simulation(texts).seconds() < 1.05 * best_fixed(texts)


def test_bold_in_easy_text_and_short_in_hard() -> None:
    """Within one request: levels per tree, asked for or not, in the last half of each stretch."""
    simulation = Simulation([Text(3, [(150, HARD), (150, EASY), (150, HARD), (150, EASY)])] * 3)
    levels: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
    commit = simulation.drafter.commit

    def noted(sequence: DraftSequence, committed: CommittedTokens) -> None:
        at = len(sequence.tokens) - sequence.prompt_len
        if at % 150 > 75:
            shape = sequence.shapes.get("model")
            levels[at // 150].append(shape.depth if shape is not None else 0)
        commit(sequence, committed)

    simulation.drafter.commit = noted  # type: ignore[method-assign]
    simulation.seconds()
    hard, easy = levels[0] + levels[2], levels[1] + levels[3]
    assert sum(hard) / len(hard) < 0.5
    assert sum(easy) / len(easy) > 3.0


def test_a_source_that_never_pays_is_hardly_asked_and_one_that_starts_to_is_found_again() -> None:
    texts = [Text(seed, [(300, HARD)]) for seed in range(6)]
    simulation = Simulation(texts, level_ms=1.0)
    simulation.seconds()
    assert simulation.model.asked.total() < 0.05 * 6 * 300
    later = Simulation([*texts, *(Text(10 + seed, [(300, EASY)]) for seed in range(6))], level_ms=0.2)
    in_hard_text = 0
    original = later.model.propose

    def counted(state: DraftSequence, budget: int) -> TokenTree | None:
        nonlocal in_hard_text
        in_hard_text += state.handle <= 6
        return original(state, budget)

    later.model.propose = counted  # type: ignore[method-assign]
    later.seconds()
    assert later.model.asked.total() - in_hard_text > 0.8 * 6 * 300 / 4.0  # some 4 tokens a tree


def test_it_is_deterministic() -> None:
    texts = [Text.mixed(seed) for seed in range(3)]
    first, second = Simulation(texts), Simulation(texts)
    assert first.seconds() == second.seconds() and first.model.asked == second.model.asked


def test_without_prices_nothing_is_spared() -> None:
    simulation = Simulation([Text(1, [(100, HARD)])], prices=UNPRICED, level_ms=100.0)
    simulation.seconds()
    assert set(simulation.model.asked) == {8}


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
    """After some text that goes on for long, creative work is drafted for as deeply as code."""
    texts = [Text(seed, [(240, {"copy": 0.05, "model": 0.9})]) for seed in range(3)]
    simulation = Simulation(texts, preset=Preset.CREATIVE, level_ms=0.2)
    simulation.seconds()
    assert simulation.model.asked[8] > simulation.model.asked.total() / 2


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
        chooser.committed(state, [6, 7, 8, 9, 10, 11, 12])
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
    for _ in range(12):
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
