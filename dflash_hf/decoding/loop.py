"""The loop of block-parallel speculative decoding: draft, verify and commit, for sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..model.modeling_dflash import DFlashDraftModel
from .acceptance import Acceptance, accept_by_probability, accept_greedily, accept_in_tree
from .draft_length import DraftLengthScheduler
from .drafter import Drafter, Proposal
from .gqa_attention import use_grouped_query_sdpa
from .kv_cache import RaggedCache
from .logits_processing import BlockLogitsProcessor
from .ordered_decision import OrderedDecision, PassDecision
from .recorder import PassRecorder
from .sequences import SequenceState, column_range
from .statistics import Stopwatch
from .stopping_criteria import BlockStoppingCriteria
from .target_runner import MAX_PENDING_TOKENS, TargetRunner, VerifyOutput
from .tree import DraftTree, draft_tree

logger = logging.get_logger(__name__)


@dataclass
class VerifyPass:
    """
    The tokens that one pass of the target committed.

    Args:
        token_ids (`list[list[int]]`):
            The new tokens of each sequence that was unfinished before the pass.
        num_drafted (`list[int]`):
            For each of these sequences, how many of the new tokens, counted from the first, the draft proposed. The
            token after them is the target's own.
        batch_indices (`list[int]`):
            The places of these sequences in the batch of the call.
        num_verified (`int`, defaults to 0):
            Number of drafted tokens that the pass verified along one path. It is 0 in a pass without a draft.
    """

    token_ids: list[list[int]]
    num_drafted: list[int]
    batch_indices: list[int]
    num_verified: int = 0

    @property
    def rows(self) -> list[int]:
        """`list[int]`: earlier name of `batch_indices`, kept for one release."""
        return self.batch_indices


@dataclass
class Continuation:
    """
    The state that a later call needs, besides the target's cache, to continue from the end of a call.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]):
            The pair.
        tokens (`torch.LongTensor` of shape `[1, columns]`):
            The text.
        read_length (`int`):
            Number of columns that the target's cache holds.
        draft_cache ([`RaggedCache`]):
            The cache of the draft.
        context_length (`int`):
            Number of columns whose hidden states the draft has read.
        hidden_states (`torch.FloatTensor` of shape `[1, n, num_target_layers * hidden_size]`):
            Hidden states of the columns after these.
    """

    target: PreTrainedModel
    draft: DFlashDraftModel
    tokens: torch.Tensor
    read_length: int
    draft_cache: RaggedCache
    context_length: int
    hidden_states: torch.Tensor


class DecodingLoop:
    """
    Decode a batch of prompts with a draft.

    [`SequenceState`] holds the text, [`Drafter`] runs the draft and [`TargetRunner`] runs the target. The loop
    connects them: it decides which drafted tokens are accepted, commits them, and removes finished sequences.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]):
            The pair.
        input_ids (`torch.LongTensor` of shape `[sequences, columns]`):
            The prompts, padded on the left.
        num_padding (`list[int]`):
            Number of padding columns of each sequence.
        logits_processor ([`BlockLogitsProcessor`]), stopping_criteria ([`BlockStoppingCriteria`]):
            Those of `generate`.
        do_sample (`bool`):
            Whether tokens are sampled from the target's distribution instead of its best ones taken.
        sample_proposals (`bool`):
            Whether the draft's tokens are sampled, too, instead of its best ones taken.
        scheduler ([`DraftLengthScheduler`]):
            Chooses how many tokens each pass verifies. It exceeds the slots of a block only where trees are possible.
        confidence_threshold (`float`, *optional*), markov_top_k (`int`, *optional*):
            As in [`Drafter`].
        pad_token_id (`int`, defaults to 0):
            The token that processors and criteria of a batch see after the end of a sequence.
        keep_scores, keep_logits (`bool`, defaults to `False`):
            Whether the processed and the raw scores of every new token are kept.
        on_pass (`Callable`, *optional*):
            Called with a [`VerifyPass`] after the prefill and after every pass.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        input_ids: torch.Tensor,
        num_padding: list[int],
        *,
        logits_processor: BlockLogitsProcessor,
        stopping_criteria: BlockStoppingCriteria,
        do_sample: bool,
        sample_proposals: bool,
        scheduler: DraftLengthScheduler,
        confidence_threshold: float | None = None,
        markov_top_k: int | None = None,
        pad_token_id: int = 0,
        keep_scores: bool = False,
        keep_logits: bool = False,
        on_pass: Callable[[VerifyPass], None] | None = None,
    ) -> None:
        tokens_per_block = draft.config.tokens_per_block
        self.sequences = SequenceState(
            input_ids,
            num_padding,
            max_length=stopping_criteria.max_length,
            num_spare_columns=2 * (tokens_per_block + MAX_PENDING_TOKENS),
        )
        self.watch = Stopwatch(self.sequences.device)
        self.drafter = Drafter(
            draft,
            target,
            self.sequences,
            logits_processor,
            sample_proposals=sample_proposals,
            confidence_threshold=confidence_threshold,
            markov_top_k=markov_top_k,
        )
        self.target_runner = TargetRunner(target, draft, self.sequences, self.watch)
        self.recorder = PassRecorder(
            self.sequences, tokens_per_block, keep_scores=keep_scores, keep_logits=keep_logits
        )
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        self.scheduler, self.do_sample, self.on_pass = scheduler, do_sample, on_pass
        self.decide_in_order = OrderedDecision(
            self.sequences,
            logits_processor,
            stopping_criteria,
            do_sample=do_sample,
            pad_token_id=pad_token_id,
            keep_scores=keep_scores,
        )

    def resume(self, cache: RaggedCache, continuation: Continuation) -> int:
        """
        Continue from the end of an earlier call, as far as the text is the same.

        Args:
            cache ([`RaggedCache`]), continuation ([`Continuation`]): those of the earlier call, with one sequence.

        Returns:
            `int`: number of columns that need not be read again; 0 if nothing can be reused.
        """
        target_runner, drafter, sequences = self.target_runner, self.drafter, self.sequences
        is_same_pair = continuation.target is target_runner.target and continuation.draft is drafter.draft
        if not is_same_pair or sequences.num_padding != [0]:
            return 0
        size = min(continuation.tokens.shape[1], sequences.lengths[0])
        is_equal = continuation.tokens[0, :size] == sequences.tokens[0, :size]
        num_equal = int(is_equal.long().cumprod(0).sum())
        start = min(num_equal, continuation.read_length, sequences.anchors[0])
        if cache.is_recurrent and start < continuation.read_length:
            return 0
        context_length = min(start, continuation.context_length)
        if not (start and cache.shows(start) and continuation.draft_cache.shows(context_length)):
            return 0
        cache.continuation = None  # this call writes to the cache, and may be interrupted
        target_runner.cache, target_runner.read_lengths = cache, [start]
        drafter.cache, drafter.context_lengths = continuation.draft_cache, [context_length]
        drafter.add_context(continuation.hidden_states[:, : start - context_length])
        return start

    def run(self, prefill_inputs: list[dict[str, Any]]) -> None:
        """
        Decode until every sequence is finished.

        Args:
            prefill_inputs (`list[dict]`): inputs of the target for the prompt, in one or several chunks.
        """
        watch, target, draft = self.watch, self.target_runner.target, self.drafter.draft
        watch.start()
        logits, context = self.target_runner.prefill(prefill_inputs)
        for hidden_states in context:
            self.drafter.add_context(hidden_states)
        watch.lap("prefill")
        self._commit(self.drafter.propose(draft_tree(1, 1, self.sequences.device)), logits)
        watch.lap("overhead")
        is_on_cpu = self.sequences.device.type == "cpu"  # grouped queries were measured on CPUs alone
        with use_grouped_query_sdpa(target, draft) if is_on_cpu else nullcontext():
            self._run_passes()
        self.recorder.close(watch)
        if len(self.sequences.finished) == 1:
            self._keep_continuation()

    def _run_passes(self) -> None:
        """Draft, verify and commit until every sequence is finished."""
        watch = self.watch
        while self.sequences.batch_indices:
            self.scheduler.start_pass()
            self.sequences.reserve()
            num_sequences, room = len(self.sequences), self.target_runner.room
            num_tokens = self.scheduler.choose(num_sequences)
            proposal = self.drafter.propose(self._tree(num_tokens, room))
            watch.lap("draft")
            verified = self.target_runner.verify(proposal)
            watch.lap("verify")
            counts = self._commit(proposal, verified.logits, verified)
            # The last, shorter passes and truncated blocks would mislead the scheduler.
            if room >= self.drafter.tokens_per_block and self.drafter.confidence_threshold is None:
                self.scheduler.end_pass(num_sequences, num_tokens, counts)
            watch.lap("overhead")

    def _tree(self, num_tokens: int, room: int) -> DraftTree:
        """Return the tree of the tokens to verify, which is a chain unless there are more of them than slots."""
        num_slots = min(self.drafter.tokens_per_block, num_tokens, room)
        is_chain = num_tokens <= self.drafter.tokens_per_block
        return draft_tree(num_slots, num_slots if is_chain else num_tokens, self.sequences.device)

    def _decide_at_once(self, proposal: Proposal, logits: torch.Tensor) -> PassDecision:
        """Choose the new tokens of all slots in one call, and write them after the text."""
        sequences, recorder, tree = self.sequences, self.recorder, proposal.tree
        scores = logits
        if len(self.logits_processor) or self.do_sample or recorder.scores is not None:
            scores = scores.to(torch.float32, copy=True)
        if len(self.logits_processor):
            scores = self.logits_processor(sequences.tokens, sequences.lengths, scores, sequences.batch_indices)
        if not tree.is_chain:
            acceptance, node = accept_in_tree(proposal.token_ids, scores, tree, do_sample=self.do_sample)
        elif self.do_sample:
            acceptance = accept_by_probability(proposal.token_ids, scores, proposal.scores)
            node = acceptance.num_accepted
        else:
            acceptance = accept_greedily(proposal.token_ids, scores)
            node = acceptance.num_accepted
        path = tree.paths[node]
        if not tree.is_chain and recorder.scores is not None:
            scores = scores.take_along_dim(path[..., None], 1)
        written = self._write(proposal, acceptance, path)
        is_finite = (
            torch.ones_like(node) if proposal.is_finite is None else proposal.is_finite.to(node).expand_as(node)
        )
        values = torch.stack([acceptance.num_accepted, node, is_finite, *written.unbind(1)], dim=1)
        on_host = values.tolist()  # the one place of a pass where the host waits for the device
        token_ids, is_finished = [], []
        for length, (num_accepted, _, _, *tokens) in zip(sequences.lengths, on_host, strict=True):
            count, done = self.stopping_criteria.truncate(length, tokens[: num_accepted + 1])
            token_ids.append(tokens[:count])
            is_finished.append(done)
        return PassDecision(
            token_ids=token_ids,
            num_accepted=[values[0] for values in on_host],
            is_finished=is_finished,
            nodes=[values[1] for values in on_host],
            path=path,
            is_finite=bool(on_host[0][2]),
            expected_sum=acceptance.expected.sum(),
            scores=scores,
        )

    def _takes_blocks(self, tree: DraftTree) -> bool:
        """Return whether nothing has to see the text grow token by token."""
        if self.stopping_criteria.text_criteria:
            return False
        return self.logits_processor.is_prefix_free or (tree.is_chain and self.logits_processor.takes_chains)

    def _commit(self, proposal: Proposal, logits: torch.Tensor, verified: VerifyOutput | None = None) -> list[int]:
        """
        Append the accepted tokens to the text and remove finished sequences.

        Args:
            proposal ([`Proposal`]): the drafted tokens.
            logits (`torch.FloatTensor` of shape `[sequences, nodes, vocabulary]`): the target's logits after each
                node.
            verified ([`VerifyOutput`], *optional*): the pass that verified them; `None` after the prefill.

        Returns:
            `list[int]`: number of tokens that each sequence received.
        """
        sequences, recorder, tree = self.sequences, self.recorder, proposal.tree
        logits = logits.to(sequences.device)
        decision = (self._decide_at_once if self._takes_blocks(tree) else self.decide_in_order)(proposal, logits)
        counts = [len(token_ids) for token_ids in decision.token_ids]
        if proposal.is_finite is not None:
            recorder.expected_sum = recorder.expected_sum + decision.expected_sum
            if not decision.is_finite:
                self._warn_of_overflow()
        if not tree.is_chain and recorder.logits is not None:
            logits = logits.take_along_dim(decision.path[..., None], 1)
        recorder.record(tree.num_slots, counts, decision.scores, logits, is_prefill=verified is None)
        sequences.lengths = [length + count for length, count in zip(sequences.lengths, counts, strict=True)]
        if verified is not None:
            is_on_chain = all(node < tree.chain_length for node in decision.nodes)
            context = self.target_runner.commit(verified, tree, None if is_on_chain else decision.path, counts)
            self.drafter.add_context(context, counts)
        if self.on_pass is not None:
            self.on_pass(
                VerifyPass(
                    decision.token_ids,
                    [min(pair) for pair in zip(decision.num_accepted, counts, strict=True)],
                    list(sequences.batch_indices),
                    tree.num_slots - 1,
                )
            )
        if any(decision.is_finished):
            self._remove_finished(decision.is_finished)
        return counts

    def _write(self, proposal: Proposal, acceptance: Acceptance, path: torch.Tensor) -> torch.Tensor:
        """Write the accepted path and the bonus token after the text, and return what the slots hold now."""
        tokens, tree = self.sequences.tokens, proposal.tree
        columns = column_range(self.sequences.lengths, tree.num_slots, self.sequences.device)
        if not tree.is_chain:  # a chain was written before it was verified
            tokens.scatter_(1, columns[:, :-1], proposal.token_ids.gather(1, (path[:, 1:] - 1).clamp(min=0)))
        bonus_columns = columns.gather(1, acceptance.num_accepted[:, None])
        tokens.scatter_(1, bonus_columns, acceptance.next_tokens[:, None])
        return tokens.gather(1, columns)

    def _remove_finished(self, is_finished: list[bool]) -> None:
        """Remove finished sequences from all parts, so that they cost nothing in later passes."""
        kept = self.sequences.finish(is_finished)
        if kept:
            indices = torch.tensor(kept, device=self.sequences.device)
            for part in (self.sequences, self.target_runner, self.drafter):
                part.select(kept, indices)

    def _keep_continuation(self) -> None:
        """Store with the target's cache what a later call needs to continue from here."""
        target_runner, drafter = self.target_runner, self.drafter
        target_runner.cache.close(target_runner.read_lengths[0])
        drafter.cache.close(drafter.context_lengths[0])
        target_runner.cache.continuation = Continuation(
            target_runner.target,
            drafter.draft,
            self.sequences.finished[0][None],
            target_runner.read_lengths[0],
            drafter.cache,
            drafter.context_lengths[0],
            torch.cat([context.hidden_states for context in drafter.pending], dim=1),
        )

    def _warn_of_overflow(self) -> None:
        """Warn once that the draft's hidden states are not finite."""
        logger.warning_once(
            f"The hidden states of the draft are not finite, so the target accepts none of its tokens. The target is "
            f"in {self.target_runner.target.dtype} and the draft in {self.drafter.draft.dtype}, and float16 overflows "
            "in the first projection of the draft. Load both models in bfloat16 or float32."
        )
