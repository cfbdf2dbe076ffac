"""Acceptance: walk a token tree along the tokens that the sampler chooses under the request's acceptance rule.

Replay, the default, asks for the tokens of plain decoding: the tree decides how far they get in a step, never which
they are. The other rules are a request's explicit choice: `multi_step` keeps the distribution but not the tokens,
`typical` is lossy. At temperature 0 all of them are replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.noise import UniformStream, uniforms
from treeserve_core.outcome import FinishReason, PositionLogProbs, VerifyOutcome
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine import multi_step, typical
from treeserve_engine.constraint import Constraint, choices
from treeserve_engine.next_token import next_token, position_log_probs, target_distribution
from treeserve_engine.noisy_argmax import DoubleArray
from treeserve_engine.processors import BoolArray, FloatArray, TokenContext


@dataclass(frozen=True)
class SamplerState:
    """What a sequence's next tokens depend on besides their logits.

    Attributes:
        params: how to choose.
        context: the tokens so far.
        position: of the next token.
        blocked_ids: ids that must not be chosen before position `unblocked_from`.
    """

    params: SamplingParams
    context: TokenContext
    position: int
    blocked_ids: tuple[int, ...]
    unblocked_from: int

    @property
    def edits(self) -> bool:
        """Whether a logit may change before the choice."""
        return self.params.is_penalised or bool(self.params.logit_bias) or self.position < self.unblocked_from

    @property
    def is_filtered(self) -> bool:
        """Whether not every token may be drawn."""
        p = self.params
        return not p.is_greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)


class SequenceSampler:
    """Chooses one sequence's tokens and knows where they end. It holds the tokens' counts and the place in the grammar,
    not the tokens.

    Attributes:
        output_len: tokens generated so far.
        finish_reason: set once the generation has ended.
    """

    def __init__(
        self,
        params: SamplingParams,
        stopping: StoppingCriteria,
        prompt_token_ids: Sequence[int],
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        generated_token_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """Take over a sequence at its beginning, or after the tokens it generated elsewhere.

        Args:
            prompt_token_ids: at least one.
            vocab_size: ids the tokenizer knows; logits beyond are padding.
            generated_token_ids: output so far, for replay; counted like freshly generated tokens.
            constraint: what its grammar allows at the beginning of the output; from now on its own.

        Raises:
            InvalidArgumentError: if an id does not fit the vocabulary or the grammar, the prompt is empty, or nothing
                may be generated before `min_tokens`.
        """
        params.check_vocab(vocab_size)
        stopping.check_vocab(vocab_size)
        if not prompt_token_ids:
            raise InvalidArgumentError("prompt", "is empty")
        self._params = params
        self._vocab_size = vocab_size
        self._prompt_len = len(prompt_token_ids)
        self._max_tokens = stopping.max_tokens
        self._min_tokens = stopping.min_tokens
        self._eos_ids = () if stopping.ignore_eos else tuple(eos_token_ids)
        self._end_ids = tuple(sorted({*stopping.stop_token_ids, *self._eos_ids}))
        self._constraint = constraint
        if self._min_tokens > 0 and len(self._end_ids) >= vocab_size:
            raise InvalidArgumentError("stopping.min_tokens", "every token ends the generation")
        self._context = TokenContext(prompt_token_ids)
        self._last_token_id = prompt_token_ids[-1]
        self.output_len = 0
        self.finish_reason: FinishReason | None = None
        for token_id in generated_token_ids:
            self.append(token_id)

    @property
    def last_token_id(self) -> int:
        """The last committed token: the root of the next tree."""
        return self._last_token_id

    @property
    def wants_log_probs(self) -> bool:
        """Whether the request asked for log-probabilities."""
        return self._params.top_log_probs is not None

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are chosen by argmax."""
        return self._params.is_greedy

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says what may be chosen."""
        return self._constraint is not None

    @property
    def is_plain(self) -> bool:
        """Whether logits and noise alone choose all further tokens, and one of `end_ids` or their number ends them.

        Stop strings aside, of which a sampler does not know.
        """
        state = self.state
        return not (state.edits or state.is_filtered or self.is_constrained or self.wants_log_probs)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end the generation."""
        return self._end_ids

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self._max_tokens - self.output_len

    @property
    def state(self) -> SamplerState:
        """What the next tokens depend on besides their logits; a view, valid until the next token is appended."""
        unblocked_from = self._prompt_len + self._min_tokens
        return SamplerState(self._params, self._context, self._position, self._end_ids, unblocked_from)

    def next_token(self, logits: FloatArray) -> int:
        """The token after the last one. `logits` is float32[padded vocab]; raises NonFiniteLogitsError."""
        blocked_ids, allowed = self._choices()
        return next_token(logits[: self._vocab_size], self._params, self._context, self._position, blocked_ids, allowed)

    def distribution(self, logits: FloatArray, ahead: Sequence[int] = ()) -> DoubleArray:
        """What a token is drawn from, at temperature > 0: float64[vocab]; raises NonFiniteLogitsError.

        Args:
            logits: float32[padded vocab], after the last token and `ahead`.
            ahead: tokens assumed to follow the last one; none where a grammar says what may follow.
        """
        context = self._context.followed_by(ahead) if ahead else self._context
        blocked_ids, allowed = self._choices(len(ahead))
        return target_distribution(logits[: self._vocab_size], self._params, context, blocked_ids, allowed)

    def uniforms(self, count: int) -> Sequence[float]:
        """Uniforms in (0, 1) for the choice of the next token, the same for the same seed and position."""
        drawn: list[float] = uniforms(self._params.seed, self._position, UniformStream.VERIFIER, count).tolist()
        return drawn

    def forced(self) -> Sequence[int]:
        """Tokens that come next whatever the logits: what the grammar leaves no choice of."""
        return () if self._constraint is None else self._constraint.forced()

    def would_end(self, token_id: int, num_ahead: int = 0) -> bool:
        """Whether a token would end the generation, if `num_ahead` tokens came before it; stop strings aside."""
        return token_id in self._end_ids or self.output_len + num_ahead + 1 >= self._max_tokens

    def log_probs(self, logits: FloatArray, token_id: int) -> PositionLogProbs:
        """Log-probabilities at the position after the last token, where `next_token` chose `token_id`."""
        blocked_ids, allowed = self._choices()
        return position_log_probs(
            logits[: self._vocab_size], self._params, self._context, token_id, blocked_ids, allowed
        )

    def append(self, token_id: int, *, stopped: bool = False) -> FinishReason | None:
        """Commit a token and say whether it ends the generation; a stop wins over the length limit.

        With a grammar it ends at an end id, too, or as soon as nothing can follow.

        Args:
            stopped: the token completed a stop string.

        Raises:
            RuntimeError: if the generation has already ended.
            InvalidArgumentError: if its grammar does not allow the token.
        """
        if self.finish_reason is not None:
            raise RuntimeError("the generation has ended")
        self._context.push(token_id)
        self._last_token_id = token_id
        self.output_len += 1
        if stopped or token_id in self._end_ids or self._completes(token_id):
            self.finish_reason = FinishReason.STOP
        elif self.output_len >= self._max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason

    @property
    def _position(self) -> int:
        """Position of the next token."""
        return self._prompt_len + self.output_len

    def _choices(self, num_ahead: int = 0) -> tuple[tuple[int, ...], BoolArray | None]:
        """Ids that must not be chosen next, or those that alone may be."""
        blocked_ids = self._end_ids if self.output_len + num_ahead < self._min_tokens else ()
        if self._constraint is None:
            return blocked_ids, None
        assert not num_ahead  # only typical acceptance looks ahead, which takes no grammar
        return (), choices(self._constraint, self._eos_ids, blocked_ids)

    def _completes(self, token_id: int) -> bool:
        """Whether nothing can follow a token in the grammar."""
        if self._constraint is None:
            return False
        self._constraint.advance(token_id)
        return self._constraint.is_complete


def accept(
    tree: TokenTree,
    logits_of: Callable[[int], FloatArray],
    sampler: SequenceSampler,
    should_stop: Callable[[int], bool] | None = None,
    acceptance: Acceptance | None = None,
) -> VerifyOutcome:
    """Walk the tree along the tokens that the acceptance rule chooses, and commit them.

    At each node the chosen token is emitted; the walk descends to the child that carries it. A token that no child
    carries is the bonus token. A token that ends the generation ends the walk: there is no bonus after it.

    Args:
        tree: its root is the sequence's last committed token.
        logits_of: the logits at a node, float32[padded vocab]; under replay and multi_step asked only for the nodes
            walked, in order.
        sampler: advanced by the emitted tokens. After an exception its state no longer matches the sequence.
        should_stop: told each emitted token once, in order; True if the token completes a stop string.
        acceptance: the rule; without it replay, whose tokens are those of plain decoding.

    Raises:
        ValueError: if the tree grows from another token.
        RuntimeError: if the generation has already ended.
        NonFiniteLogitsError: if the model gave NaN or infinite logits.
    """
    if tree.token_ids[0] != sampler.last_token_id:
        raise ValueError(f"the root is {tree.token_ids[0]}, the last committed token {sampler.last_token_id}")
    if sampler.finish_reason is not None:
        raise RuntimeError("the generation has ended")
    choose = _chooser(tree, logits_of, sampler, acceptance or Acceptance())
    node: int | None = 0
    accepted_nodes: list[int] = []
    token_ids: list[int] = []
    log_probs: list[PositionLogProbs] = []
    while node is not None and sampler.finish_reason is None:
        logits = logits_of(node)
        token_id = choose(node, logits)
        if sampler.wants_log_probs:
            log_probs.append(sampler.log_probs(logits, token_id))
        sampler.append(token_id, stopped=should_stop is not None and should_stop(token_id))
        token_ids.append(token_id)
        node = tree.child(node, token_id)
        if node is not None:
            accepted_nodes.append(node)
    return VerifyOutcome(tuple(accepted_nodes), tuple(token_ids), sampler.finish_reason, tuple(log_probs))


def is_replayed(sampler: SequenceSampler, acceptance: Acceptance) -> bool:
    """Whether a tree's tokens are those of plain decoding."""
    return sampler.is_greedy or acceptance.rule is AcceptanceRule.REPLAY


def _chooser(
    tree: TokenTree, logits_of: Callable[[int], FloatArray], sampler: SequenceSampler, acceptance: Acceptance
) -> Callable[[int, FloatArray], int]:
    """What chooses the token after a node that the walk has reached, given its logits."""
    if is_replayed(sampler, acceptance):
        return lambda node, logits: sampler.next_token(logits)
    if acceptance.rule is AcceptanceRule.MULTI_STEP:
        return lambda node, logits: _multi_step(tree, node, logits, sampler)
    return _typical(tree, logits_of, sampler, acceptance)


def _multi_step(tree: TokenTree, node: int, logits: FloatArray, sampler: SequenceSampler) -> int:
    draws = tree.draws_below(node)
    drawn = draws.token_ids if draws is not None else ()
    outright = [tree.token_ids[c] for c in tree.children[node] if tree.token_ids[c] not in drawn]
    uniforms = sampler.uniforms(multi_step.num_uniforms(draws, outright))
    return multi_step.choose(sampler.distribution(logits), draws, outright, uniforms)


def _typical(
    tree: TokenTree, logits_of: Callable[[int], FloatArray], sampler: SequenceSampler, acceptance: Acceptance
) -> Callable[[int, FloatArray], int]:
    path = typical.longest_path(
        tree, lambda node, ahead: sampler.distribution(logits_of(node), ahead), sampler.would_end, acceptance
    )
    left = iter(path)

    def choose(node: int, logits: FloatArray) -> int:
        token_id = next(left, None)
        return int(np.argmax(sampler.distribution(logits))) if token_id is None else token_id

    return choose
