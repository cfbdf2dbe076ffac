"""What each numeric mode costs in quality: perplexity, top-1 agreement and KL divergence against float32.

    make bench-quality

The text is the same everywhere and nothing is downloaded: the help topics of pydoc (technical English), the standard
library's source (code) and the prompts of bench-peers (everyday English).
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import platform
import pydoc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.tasks import load_tasks
from treeserve_engine.batch import SequenceRows
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_engine.interface import Model
from treeserve_engine.loading import load_model
from treeserve_engine.runner import ModelRunner
from treeserve_text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results" / "quality.json"
MODES = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("int8", "float32"),
    ("int8", "bfloat16"),
    ("int8", "int8"),
)
REFERENCE = MODES[0]
_BLOCK_SIZE = 16
_CHUNK = 64
_SEQ_ID = 0


@dataclass
class Score:
    """Sums over the tokens of a domain; KL is of the mode from the reference, in nats."""

    tokens: int = 0
    negative_log_likelihood: float = 0.0
    agreeing: int = 0
    kl: float = 0.0

    def add(
        self, log_probs: npt.NDArray[np.float64], reference: npt.NDArray[np.float64], targets: Sequence[int]
    ) -> None:
        """Count one window: float64[n, vocab] log-probabilities of both, and the tokens that followed."""
        self.tokens += len(targets)
        self.negative_log_likelihood -= float(log_probs[np.arange(len(targets)), targets].sum())
        self.agreeing += int((log_probs.argmax(1) == reference.argmax(1)).sum())
        self.kl += float((np.exp(reference) * (reference - log_probs)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.negative_log_likelihood / self.tokens)


def domains() -> dict[str, str]:
    """Texts by domain, each long enough for the windows asked for."""
    from pydoc_data.topics import topics

    code = "\n".join(inspect.getsource(module) for module in (argparse, json, pydoc))
    prompts = [m["content"] for conversations in load_tasks().values() for c in conversations for m in c]
    return {
        "help": "\n".join(topics[name] for name in sorted(topics)),
        "code": code,
        "prompts": "\n\n".join(prompts),
    }


def windows(tokens: Sequence[int], length: int, count: int) -> Iterator[Sequence[int]]:
    """`count` windows of `length` tokens, spread evenly over the text."""
    step = max(1, (len(tokens) - length) // max(1, count))
    for i in range(count):
        window = tokens[i * step : i * step + length]
        if len(window) == length:
            yield window


def log_probs(model: Model, window: Sequence[int]) -> npt.NDArray[np.float64]:
    """Log-softmax at every position of a window but the last, float64[n - 1, vocab]."""
    runner = ModelRunner(model, -(-len(window) // _BLOCK_SIZE), _BLOCK_SIZE)
    runner.blocks.add(_SEQ_ID)
    parts = []
    for start in range(0, len(window), _CHUNK):
        chunk = window[start : start + _CHUNK]
        runner.blocks.reserve(_SEQ_ID, len(chunk))
        parts += runner.forward([SequenceRows.from_chain(_SEQ_ID, chunk, range(len(chunk)))])
        runner.commit(_SEQ_ID, range(len(chunk)))
    logits = np.concatenate(parts)[:-1].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits


def measure(folder: Path, cache_dir: Path, length: int, count: int) -> dict[str, dict[str, Score]]:
    """Scores by mode and domain."""
    tokenizer = Tokenizer.from_folder(folder)
    threads = os.cpu_count() or 1
    models = {
        mode: load_model(folder, dtype=mode[0], kv_dtype=mode[1], device="cpu", threads=threads, cache_dir=cache_dir)
        for mode in MODES
    }
    scores: dict[str, dict[str, Score]] = {_name(mode): {} for mode in MODES}
    for domain, text in domains().items():
        for window in windows(tokenizer.encode(text), length, count):
            reference = log_probs(models[REFERENCE], window)
            for mode, model in models.items():
                own = reference if mode == REFERENCE else log_probs(model, window)
                scores[_name(mode)].setdefault(domain, Score()).add(own, reference, window[1:])
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return scores


def _name(mode: tuple[str, str]) -> str:
    return mode[0] if mode[0] == mode[1] else f"{mode[0]}, KV {mode[1]}"


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder or .gguf file")
    parser.add_argument("--cache-dir", type=Path, default=Path(os.environ.get("TREESERVE_CACHE", ".cache")))
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=6, help="windows of each domain")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    folder = prepare_checkpoint(args.model, args.cache_dir, lambda message: print(message, file=sys.stderr))
    scores = measure(folder, args.cache_dir, args.length, args.windows)
    base = scores[_name(REFERENCE)]
    print(f"{'mode':<20}{'domain':<10}{'tokens':>7}{'perplexity':>12}{'change':>9}{'top-1':>8}{'KL':>9}")
    for mode, by_domain in scores.items():
        for domain, score in by_domain.items():
            change = score.perplexity / base[domain].perplexity - 1
            print(
                f"{mode:<20}{domain:<10}{score.tokens:>7}{score.perplexity:>12.3f}{change:>9.2%}"
                f"{score.agreeing / score.tokens:>8.2%}{score.kl / score.tokens:>9.5f}"
            )
    report = {
        "command": ["python", "-m", "benchmarks.quality", "--length", str(args.length), "--windows", str(args.windows)],
        "model": args.model.name,
        "machine": {"system": platform.system(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "numpy", "transformers")},
        "modes": {
            mode: {
                domain: asdict(score)
                | {
                    "perplexity": score.perplexity,
                    "perplexity_change": score.perplexity / base[domain].perplexity - 1,
                    "top1_agreement": score.agreeing / score.tokens,
                    "kl_per_token": score.kl / score.tokens,
                }
                for domain, score in by_domain.items()
            }
            for mode, by_domain in scores.items()
        },
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
