"""Acceptance: replay the sampler along a token tree. The tree decides how far it gets in a step, never which tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.outcome import FinishReason, PositionLogProbs, VerifyOutcome
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.next_token import next_token, position_log_probs
from treeserve_engine.processors import FloatArray, TokenContext


class SequenceSampler:
    """Chooses one sequence's tokens and knows where they end. It holds the tokens' counts, not the tokens.

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
    ) -> None:
        """Take over a sequence at its beginning, or after the tokens it generated elsewhere.

        Args:
            prompt_token_ids: at least one.
            vocab_size: ids the tokenizer knows; logits beyond are padding.
            generated_token_ids: output so far, for replay; counted like freshly generated tokens.

        Raises:
            InvalidArgumentError: if an id does not fit the vocabulary, the prompt is empty, or nothing may be
                generated before `min_tokens`.
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
        self._end_ids = tuple(sorted({*stopping.stop_token_ids, *(() if stopping.ignore_eos else eos_token_ids)}))
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

    def next_token(self, logits: FloatArray) -> int:
        """The token after the last one. `logits` is float32[padded vocab]; raises NonFiniteLogitsError."""
        position = self._prompt_len + self.output_len
        return next_token(logits[: self._vocab_size], self._params, self._context, position, self._blocked_ids())

    def log_probs(self, logits: FloatArray, token_id: int) -> PositionLogProbs:
        """Log-probabilities at the position after the last token, where `next_token` chose `token_id`."""
        return position_log_probs(
            logits[: self._vocab_size], self._params, self._context, token_id, self._blocked_ids()
        )

    def append(self, token_id: int, *, stopped: bool = False) -> FinishReason | None:
        """Commit a token and say whether it ends the generation; a stop wins over the length limit.

        Args:
            stopped: the token completed a stop string.

        Raises:
            RuntimeError: if the generation has already ended.
        """
        if self.finish_reason is not None:
            raise RuntimeError("the generation has ended")
        self._context.push(token_id)
        self._last_token_id = token_id
        self.output_len += 1
        if stopped or token_id in self._end_ids:
            self.finish_reason = FinishReason.STOP
        elif self.output_len >= self._max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason

    def _blocked_ids(self) -> tuple[int, ...]:
        return self._end_ids if self.output_len < self._min_tokens else ()


def accept(
    tree: TokenTree,
    logits_of: Callable[[int], FloatArray],
    sampler: SequenceSampler,
    should_stop: Callable[[int], bool] | None = None,
) -> VerifyOutcome:
    """Walk the tree along the tokens that plain decoding would generate, and commit them.

    At each node the sampler's next token is emitted; the walk descends to the child that carries it. A token that no
    child carries is the bonus token. A token that ends the generation ends the walk: there is no bonus after it.

    Args:
        tree: its root is the sequence's last committed token.
        logits_of: the logits at a node, float32[padded vocab]; asked only for the nodes walked, in order.
        sampler: advanced by the emitted tokens. After an exception its state no longer matches the sequence.
        should_stop: told each emitted token once, in order; True if the token completes a stop string.

    Raises:
        ValueError: if the tree grows from another token.
        RuntimeError: if the generation has already ended.
        NonFiniteLogitsError: if the model gave NaN or infinite logits.
    """
    if tree.token_ids[0] != sampler.last_token_id:
        raise ValueError(f"the root is {tree.token_ids[0]}, the last committed token {sampler.last_token_id}")
    if sampler.finish_reason is not None:
        raise RuntimeError("the generation has ended")
    node: int | None = 0
    accepted_nodes: list[int] = []
    token_ids: list[int] = []
    log_probs: list[PositionLogProbs] = []
    while node is not None and sampler.finish_reason is None:
        logits = logits_of(node)
        token_id = sampler.next_token(logits)
        if sampler.wants_log_probs:
            log_probs.append(sampler.log_probs(logits, token_id))
        sampler.append(token_id, stopped=should_stop is not None and should_stop(token_id))
        token_ids.append(token_id)
        node = tree.child(node, token_id)
        if node is not None:
            accepted_nodes.append(node)
    return VerifyOutcome(tuple(accepted_nodes), tuple(token_ids), sampler.finish_reason, tuple(log_probs))
