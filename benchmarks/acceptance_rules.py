"""How often one of k drafted children is accepted: naive sampling, multi_step and replay with coupled drafting.

The target is a model at each position of a text, at temperature 1; the drafter is the same model with Gaussian noise on
its logits. Prints a table: `python benchmarks/acceptance_rules.py MODEL_FOLDER`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treeserve_core.sampling import SamplingParams
from treeserve_engine import multi_step
from treeserve_engine.batch import SequenceRows
from treeserve_engine.loading import load_model
from treeserve_engine.next_token import next_token, target_distribution
from treeserve_engine.processors import TokenContext
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.sources.growth import best_children, draw_children
from treeserve_text.tokenizer import Tokenizer

TEXT = (
    "The history of the city goes back to the early Middle Ages, when traders from the coast built a small harbour at "
    "the mouth of the river. In the following centuries the town grew quickly, and its merchants became rich by "
    "selling wool, salt and fish to the towns of the north. Today it is known for its university, its museums and a "
    "festival of music that takes place every summer."
)
SEEDS = range(25)
WIDTHS = (1, 2, 3, 5)
NOISES = (0.7, 1.2)
Row = npt.NDArray[np.float32]


def text_logits(folder: Path) -> list[Row]:
    """The model's logits at each position of the text."""
    tokenizer = Tokenizer.from_folder(folder)
    token_ids = tokenizer.encode(TEXT)
    runner = ModelRunner(load_model(folder, dtype="float32", device="cpu", threads=1), num_blocks=16, block_size=16)
    runner.blocks.add(0)
    runner.blocks.reserve(0, len(token_ids))
    (rows,) = runner.forward([SequenceRows.from_chain(0, token_ids, range(len(token_ids)))])
    return [np.array(row[: tokenizer.vocab_size]) for row in rows]


def accepted(target: Row, drafter: Row, position: int, seed: int, width: int) -> npt.NDArray[np.bool_]:
    """Whether each rule accepts one of `width` children: naive, multi_step, replay."""
    params = SamplingParams(temperature=1.0, seed=seed)
    p = target_distribution(target, params, TokenContext())
    draws = draw_children(drafter, params, position, width)
    coins = np.random.default_rng([position, seed]).random(width + 1).tolist()
    says = next_token(target, params, TokenContext(), position)
    coupled, _ = best_children(drafter, params, position, width)
    return np.array(
        [
            multi_step.sample(p, coins[-1]) in draws.token_ids,
            multi_step.choose(p, draws, [], coins) in draws.token_ids,
            says in coupled,
        ]
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Hugging Face folder of the model")
    rows = text_logits(parser.parse_args().folder)
    rng = np.random.default_rng(0)
    print("noise  children  naive  multi_step  replay (coupled)")
    for noise in NOISES:
        drafters = [(row + rng.normal(0, noise, len(row))).astype(np.float32) for row in rows]
        for width in WIDTHS:
            rates = np.mean(
                [
                    accepted(row, drafter, position, seed, width)
                    for position, (row, drafter) in enumerate(zip(rows, drafters, strict=True))
                    for seed in SEEDS
                ],
                axis=0,
            )
            print(f"{noise:5.1f}  {width:8d}  {rates[0]:5.3f}  {rates[1]:10.3f}  {rates[2]:16.3f}")


if __name__ == "__main__":
    main()
