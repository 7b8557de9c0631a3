"""The draft model in the decoding loop: its cache, the context that it has not read yet, and its proposals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..model.modeling_dflash import DFlashDraftModel, DraftHead, embed_tokens
from .acceptance import best_tokens
from .kv_cache import RaggedCache
from .logits_processing import BlockLogitsProcessor
from .masks import draft_masks
from .sequences import SequenceState, column_range
from .tree import DraftTree, draft_tree


@dataclass
class Proposal:
    """
    Tokens that a pass of the target verifies.

    Args:
        token_ids (`torch.LongTensor` of shape `[sequences, nodes - 1]`):
            Drafted tokens of the nodes after the anchor. There are none in a pass without a draft.
        tree ([`DraftTree`]):
            The tree of these nodes, which is a chain for a plain block.
        scores (`torch.FloatTensor` of shape `[sequences, nodes - 1, vocabulary]`, *optional*):
            Log-probabilities, up to a constant, that the tokens were sampled from; `None` if they were not sampled.
        is_finite (`torch.BoolTensor` of shape `[]`, *optional*):
            Whether all hidden states of the draft were finite; `None` in a pass without a draft.
    """

    token_ids: torch.Tensor
    tree: DraftTree
    scores: torch.Tensor | None = None
    is_finite: torch.Tensor | None = None


@dataclass
class PendingContext:
    """
    Hidden states of the target that the draft has not read yet.

    Args:
        hidden_states (`torch.FloatTensor` of shape `[sequences, n, num_target_layers * hidden_size]`):
            States of committed tokens.
        counts (`torch.LongTensor` of shape `[sequences]`, *optional*):
            Number of states that belong to each sequence, counted from the first; all `n` of them if `None`.
    """

    hidden_states: torch.Tensor
    counts: torch.Tensor | None

    def mask(self) -> torch.Tensor:
        """Return a mask of shape `[sequences, n]` that is True at states that belong to their sequence."""
        num_sequences, count = self.hidden_states.shape[:2]
        places = torch.arange(count, device=self.hidden_states.device).expand(num_sequences, -1)
        return places >= 0 if self.counts is None else places < self.counts[:, None]


class Drafter:
    """
    Propose tokens with the draft model.

    The draft reads the hidden states of every committed token once, in the first proposal after they arrive.

    Args:
        draft ([`DFlashDraftModel`]): the draft model.
        target (`PreTrainedModel`): the target, whose embedding and head the draft uses.
        sequences ([`SequenceState`]): the text.
        logits_processor ([`BlockLogitsProcessor`]): applied to the draft's scores when its tokens are sampled.
        sample_proposals (`bool`): whether the draft's tokens are sampled instead of its best ones taken.
        confidence_threshold (`float`, *optional*): the confidence below which a block is truncated.
        markov_top_k (`int`, *optional*): number of best logits of a slot that a Markov head corrects, all by default.
    """

    def __init__(
        self,
        draft: DFlashDraftModel,
        target: PreTrainedModel,
        sequences: SequenceState,
        logits_processor: BlockLogitsProcessor,
        *,
        sample_proposals: bool,
        confidence_threshold: float | None = None,
        markov_top_k: int | None = None,
    ) -> None:
        self.draft, self.sequences = draft, sequences
        self.embedding = target.get_input_embeddings()
        self.head = DraftHead(draft, self.embedding, target.get_output_embeddings())
        self.logits_processor, self.sample_proposals = logits_processor, sample_proposals
        self.confidence_threshold, self.markov_top_k = confidence_threshold, markov_top_k
        self.cache = RaggedCache(draft.config)
        self.context_lengths = [0] * len(sequences)  # number of columns whose hidden states the draft has read
        self.pending: list[PendingContext] = []

    @property
    def tokens_per_block(self) -> int:
        """`int`: number of tokens of a block, which are the anchor and its proposals."""
        return self.draft.config.tokens_per_block

    def add_context(self, hidden_states: torch.Tensor, counts: list[int] | None = None) -> None:
        """
        Append hidden states of committed tokens to the context, which the next proposal reads.

        Args:
            hidden_states (`torch.FloatTensor` of shape `[sequences, n, num_target_layers * hidden_size]`):
                Hidden states of the target, on the device of the draft.
            counts (`list[int]`, *optional*):
                Number of them that belong to each sequence, counted from the first; all `n` if not given.
        """
        is_ragged = counts is not None and min(counts) < max(counts)
        self.pending.append(
            PendingContext(hidden_states, torch.tensor(counts, device=hidden_states.device) if is_ragged else None)
        )

    def propose(self, tree: DraftTree) -> Proposal:
        """
        Draft the tokens of a tree for each sequence.

        Args:
            tree ([`DraftTree`]): the tree; if it has the anchor alone, the draft model does not run.

        Returns:
            [`Proposal`]
        """
        sequences, block_size, device = self.sequences, self.draft.config.block_size, self.draft.device
        if tree.num_slots == 1:
            return Proposal(sequences.tokens[:, :0], tree)
        anchors = sequences.anchors
        context, context_columns = self._pending_context(anchors)
        end = max(anchors) + block_size
        block_columns = column_range(anchors, block_size, device)
        columns = torch.cat([context_columns, block_columns], dim=1)
        needs_mask = len(sequences) > 1 or bool(sequences.num_padding[0])
        self.cache.place(min(self.context_lengths), end, None if len(sequences) == 1 else columns)
        padding = torch.tensor(sequences.num_padding, device=device)[:, None]
        block_ids = sequences.tokens.new_full((len(sequences), block_size), self.draft.config.mask_token_id)
        block_ids[:, 0] = sequences.anchor_tokens()[:, 0]
        hidden_states = self.draft(
            noise_embeds=embed_tokens(self.embedding, block_ids).to(device),
            context_hidden_states=context,
            position_ids=(columns - padding).clamp(min=0),
            attention_mask=draft_masks(self.draft.config, self.cache, block_columns, padding, end)
            if needs_mask
            else None,
            cache=self.cache,
        ).last_hidden_state
        self.pending, self.context_lengths = [], anchors
        # The draft runs all slots, as in training. The head, which costs more, runs the slots in use alone.
        used = hidden_states[:, 1 : tree.num_slots].contiguous()
        logits = self.head.logits(used)
        if self.head.is_corrected:
            token_ids, scores = self._walk(logits.to(device), used, tree)
        else:
            token_ids, scores = self._choose(logits.to(sequences.device), tree)
        proposal = Proposal(token_ids, tree, scores, hidden_states.isfinite().all())
        threshold = self.confidence_threshold
        return proposal if threshold is None else self._truncate(proposal, used, threshold)

    def _choose(self, logits: torch.Tensor, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Choose the tokens of the tree where each slot is independent of the others.

        Returns the tokens, and the scores that they were sampled from.
        """
        if not self.sample_proposals:
            if tree.is_chain:
                return self.head.token_ids(best_tokens(logits)), None
            choices = logits.topk(tree.num_ranks).indices
            return self.head.token_ids(choices[:, tree.depths[1:] - 1, tree.ranks[1:]]), None
        scores = self._sampling_scores(logits, None)
        return torch.multinomial(scores.softmax(-1).flatten(0, 1), 1).view(scores.shape[:2]), scores

    def _walk(
        self, logits: torch.Tensor, hidden_states: torch.Tensor, tree: DraftTree
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Choose the tokens of the tree slot by slot, since the scores of a slot depend on the token before it.

        Args:
            logits (`torch.FloatTensor` of shape `[sequences, slots - 1, vocabulary]`), hidden_states
                (`torch.FloatTensor` of shape `[sequences, slots - 1, hidden_size]`): of slots 1 … `slots - 1`.
            tree ([`DraftTree`]): the tree, which is a chain if the tokens are sampled.

        Returns the tokens, and the scores that they were sampled from.
        """
        tokens = self.sequences.tokens.new_zeros(len(logits), tree.num_nodes)
        tokens[:, :1] = self.sequences.anchor_tokens()
        states, sampled_from = None, []
        for slot, level in enumerate(tree.levels):
            before = tokens[:, level.parents].to(logits.device)
            slot_states = hidden_states[:, slot, None].expand(-1, len(level.parents), -1)
            state = None if states is None else states[:, level.parents].to(logits.device)
            features, state = self.head.features(before, slot_states, state)
            scores, indices = self.head.correct(
                logits[:, slot, None], features, top_k=self.markov_top_k, num_choices=level.num_ranks
            )
            scores, indices = scores.to(tokens.device), None if indices is None else indices.to(tokens.device)
            if self.sample_proposals:
                scores = self._sampling_scores(scores, indices)
                sampled_from.append(scores)
                tokens[:, level.nodes] = torch.multinomial(scores[:, 0].softmax(-1), 1)
            else:
                choices = (
                    scores.topk(level.num_ranks).indices if level.num_ranks > 1 else best_tokens(scores)[..., None]
                )
                if indices is not None:
                    choices = indices.expand(*scores.shape).gather(-1, choices)
                tokens[:, level.nodes] = self.head.token_ids(choices[:, level.parent_indices, level.ranks])
            if state is not None:
                state = state.to(tokens.device)
                states = state.new_zeros(*tokens.shape, state.shape[-1]) if states is None else states
                states[:, level.nodes] = state[:, level.parent_indices]
        return tokens[:, 1:], torch.cat(sampled_from, dim=1) if sampled_from else None

    def _sampling_scores(self, scores: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """
        Return the scores that tokens are sampled from, over the vocabulary of the target.

        Args:
            scores (`torch.FloatTensor` of shape `[sequences, slots, C]`): scores of the candidates.
            indices (`torch.LongTensor` of shape `[sequences, slots, C]`, *optional*): the candidates, in the
                vocabulary of the draft; all of it in order if `None`.
        """
        # Values that are not finite cannot be sampled from. Replacing them is safe, because the accepted text has the
        # target's distribution whatever distribution the draft samples from.
        scores = scores.float().nan_to_num(0.0, 0.0, 0.0)
        if indices is None and self.head.vocabulary is None:
            return self.logits_processor.apply_prefix_free(scores)
        if indices is None:
            indices = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
        allowed = scores.new_full((*scores.shape[:2], self.draft.config.vocab_size), -torch.inf)
        allowed = allowed.scatter(-1, self.head.token_ids(indices), scores)
        processed = self.logits_processor.apply_prefix_free(allowed)
        # A processor may forbid all candidates, and something has to be proposed.
        return torch.where((processed == -torch.inf).all(-1, keepdim=True), allowed, processed)

    def _truncate(self, proposal: Proposal, hidden_states: torch.Tensor, threshold: float) -> Proposal:
        """Drop the tokens from the first one on in which the draft has too little confidence in every sequence."""
        before = torch.cat([self.sequences.anchor_tokens(), proposal.token_ids[:, :-1]], dim=1)
        before = before.to(hidden_states.device)
        confidence = self.head.confidence(before, hidden_states)
        if confidence is None:
            return proposal
        is_kept = (confidence.sigmoid() >= threshold).long().cumprod(1)
        kept = int(is_kept.sum(1).max())
        scores = None if proposal.scores is None else proposal.scores[:, :kept]
        tree = draft_tree(kept + 1, kept + 1, self.sequences.device)
        return Proposal(proposal.token_ids[:, :kept], tree, scores, proposal.is_finite)

    def _pending_context(self, anchors: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return the hidden states that the draft has not read yet, and the column of each.

        States that belong to no sequence get the column after the block, which no query can see.
        """
        device = self.draft.device
        hidden_states = torch.cat([context.hidden_states for context in self.pending], dim=1)
        if all(context.counts is None for context in self.pending):
            return hidden_states, column_range(self.context_lengths, hidden_states.shape[1], device)
        mask = torch.cat([context.mask() for context in self.pending], dim=1)
        columns = torch.tensor(self.context_lengths, device=device)[:, None] + mask.cumsum(1) - 1
        return hidden_states, torch.where(mask, columns, max(anchors) + self.draft.config.block_size)

    def select(self, kept: list[int], indices: torch.Tensor) -> None:
        """
        Keep some of the sequences.

        Args:
            kept (`list[int]`): the indices of the sequences to keep.
            indices (`torch.LongTensor`): the same indices as a tensor.
        """
        self.context_lengths = [self.context_lengths[index] for index in kept]
        self.cache.batch_select_indices(indices)
        self.pending = [
            PendingContext(
                context.hidden_states[indices.to(context.hidden_states.device)],
                None if context.counts is None else context.counts[indices.to(context.hidden_states.device)],
            )
            for context in self.pending
        ]
