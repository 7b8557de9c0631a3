"""The decision of a pass with processors and criteria that must see the text grow token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .acceptance import choose_token
from .drafter import Proposal
from .logits_processing import BlockLogitsProcessor
from .sequences import SequenceState
from .stopping_criteria import BlockStoppingCriteria


@dataclass
class PassDecision:
    """
    What a pass of the target commits.

    Args:
        token_ids (`list[list[int]]`): the new tokens of each sequence, up to its end.
        num_accepted (`list[int]`): number of leading drafted tokens of each sequence that are accepted.
        is_finished (`list[bool]`): whether each sequence ends with its last new token.
        nodes (`list[int]`): the last accepted node of each sequence.
        path (`torch.LongTensor` of shape `[sequences, slots]`): the nodes of the tree on the way to that node.
        is_finite (`bool`): whether all hidden states of the draft were finite.
        expected_sum (`torch.FloatTensor` of shape `[]`): sum over the sequences of the number of tokens that the pass
            commits in expectation.
        scores (`torch.FloatTensor` of shape `[sequences, slots, vocabulary]` or one such tensor a sequence):
            The processed scores along the path; only for the new tokens they have to be there.
    """

    token_ids: list[list[int]]
    num_accepted: list[int]
    is_finished: list[bool]
    nodes: list[int]
    path: torch.Tensor
    is_finite: bool
    expected_sum: torch.Tensor
    scores: torch.Tensor | list[torch.Tensor]


@dataclass
class Progress:
    """
    How far a sequence has come within a pass.

    Args:
        children (`dict`): the node of each drafted token, by the node before it and the token.
        node (`int`, defaults to 0): the last accepted node.
        num_accepted (`int`, defaults to 0): number of accepted nodes.
        token_ids (`list[int]`): the new tokens.
        scores (`list[torch.FloatTensor]`): the processed scores of each new token, of shape `[vocabulary]`.
        is_finished (`bool`, defaults to `False`): whether the sequence has ended.
        is_accepted (`bool`, defaults to `True`): whether the last new token was drafted.
    """

    children: dict[tuple[int, int], int]
    node: int = 0
    num_accepted: int = 0
    token_ids: list[int] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    is_finished: bool = False
    is_accepted: bool = True


class OrderedDecision:
    """
    Choose the tokens of a pass one after the other, as plain generation does.

    The scores of a slot are processed, its token is chosen, and the stopping criteria see the text with it. If the
    token was drafted, the next slot follows, and otherwise the pass ends. So processors and criteria see every text of
    plain generation once, in its order, and no other text: they may keep a state, and they may reject other texts.

    Processors and criteria that are known to look at one sequence alone are called for each sequence by itself. All
    others are called with the whole batch once for each token, as in plain generation. The sequences then advance
    together, by as many tokens as the one with the fewest accepted tokens. Sequences that have ended are padded, and
    their scores are 0.

    Args:
        sequences ([`SequenceState`]): the text of the whole batch.
        logits_processor ([`BlockLogitsProcessor`]), stopping_criteria ([`BlockStoppingCriteria`]):
            Those of `generate`.
        do_sample (`bool`): whether tokens are sampled from the target's distribution instead of its best ones taken.
        pad_token_id (`int`): token that follows the end of a sequence.
        keep_scores (`bool`): whether criteria receive the processed scores of all new tokens, as with `output_scores`.
    """

    def __init__(
        self,
        sequences: SequenceState,
        logits_processor: BlockLogitsProcessor,
        stopping_criteria: BlockStoppingCriteria,
        *,
        do_sample: bool,
        pad_token_id: int,
        keep_scores: bool,
    ) -> None:
        self.sequences, self.batch_size = sequences, len(sequences)
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        self.do_sample, self.pad_token_id = do_sample, pad_token_id
        is_sequence_wise = logits_processor.is_sequence_wise and stopping_criteria.is_sequence_wise
        self.takes_whole_batch = self.batch_size == 1 or not is_sequence_wise
        self.all_scores: tuple[torch.Tensor, ...] | None = () if keep_scores and self.takes_whole_batch else None

    def __call__(self, proposal: Proposal, logits: torch.Tensor) -> PassDecision:
        """
        Choose the new tokens and write them after the text.

        Args:
            proposal ([`Proposal`]): the drafted tokens.
            logits (`torch.FloatTensor` of shape `[sequences, nodes, vocabulary]`): the target's logits after each
                node.

        Returns:
            [`PassDecision`]
        """
        tree = proposal.tree
        parents = tree.parents[1:].tolist()
        progress = [
            Progress(
                {(parent, token): node for node, (parent, token) in enumerate(zip(parents, drafted, strict=True), 1)}
            )
            for drafted in proposal.token_ids.tolist()
        ]
        everyone = list(range(len(progress)))
        for group in [everyone] if self.takes_whole_batch else [[index] for index in everyone]:
            for slot in range(tree.num_slots):
                self._choose(slot, {index: progress[index] for index in group}, proposal, logits)
                unfinished = [progress[index] for index in group if not progress[index].is_finished]
                if not unfinished or not all(sequence.is_accepted for sequence in unfinished):
                    break
        nodes = [sequence.node for sequence in progress]
        return PassDecision(
            token_ids=[sequence.token_ids for sequence in progress],
            num_accepted=[sequence.num_accepted for sequence in progress],
            is_finished=[sequence.is_finished for sequence in progress],
            nodes=nodes,
            path=tree.paths[torch.tensor(nodes, device=tree.paths.device)],
            is_finite=proposal.is_finite is None or bool(proposal.is_finite),
            expected_sum=torch.tensor(float(sum(len(sequence.token_ids) for sequence in progress))),
            scores=[torch.stack(sequence.scores) for sequence in progress],
        )

    def _choose(self, slot: int, group: dict[int, Progress], proposal: Proposal, logits: torch.Tensor) -> None:
        """Choose one token for each unfinished sequence of a group, which has advanced by `slot` tokens."""
        sequences, criteria = self.sequences, self.stopping_criteria
        rows = {index: sequences.batch_indices[index] if self.takes_whole_batch else 0 for index in group}
        scores = logits.new_zeros(self.batch_size if self.takes_whole_batch else 1, logits.shape[-1]).float()
        unfinished = {index: sequence for index, sequence in group.items() if not sequence.is_finished}
        for index, sequence in unfinished.items():
            scores[rows[index]] = logits[index, sequence.node]
        text: Any = self._text(rows, slot)  # transformers expects another class for integers
        scores = self.logits_processor.processors(text, scores.to(sequences.device))
        if self.all_scores is not None:
            self.all_scores += (scores,)
        for index, sequence in group.items():
            token = self.pad_token_id
            if not sequence.is_finished:
                token = self._choose_token(scores[rows[index]], proposal, index, slot)
                sequence.token_ids.append(token)
                sequence.scores.append(scores[rows[index]])
                child = sequence.children.get((sequence.node, token))
                sequence.is_accepted = child is not None
                if child is not None:
                    sequence.node, sequence.num_accepted = child, sequence.num_accepted + 1
            sequences.tokens[index, sequences.lengths[index] + slot] = token
        is_done = criteria.text_criteria(self._text(rows, slot + 1), self.all_scores)
        is_time_up = criteria.is_time_up
        for index, sequence in unfinished.items():
            is_end = sequence.token_ids[-1] in criteria.end_token_ids
            is_full = sequences.lengths[index] + slot + 1 >= criteria.max_length
            sequence.is_finished = is_end or is_full or is_time_up or bool(is_done[rows[index]])

    def _choose_token(self, scores: torch.Tensor, proposal: Proposal, index: int, slot: int) -> int:
        """Choose the token of a slot of one sequence."""
        if proposal.scores is None or slot == proposal.scores.shape[1]:
            return choose_token(scores, do_sample=self.do_sample)
        # Tokens that were sampled form a chain.
        drafted = int(proposal.token_ids[index, slot])
        return choose_token(
            scores, do_sample=self.do_sample, drafted=drafted, draft_scores=proposal.scores[index, slot]
        )

    def _text(self, rows: dict[int, int], num_new: int) -> torch.Tensor:
        """Return a copy of the text of a group with its first `num_new` new tokens, of shape `[rows, columns]`."""
        sequences = self.sequences
        end = max(sequences.lengths[index] for index in rows) + num_new
        if not self.takes_whole_batch:
            (index,) = rows
            return sequences.tokens[index : index + 1, :end].clone()
        text = sequences.tokens.new_full((self.batch_size, end), self.pad_token_id)
        for place, finished in sequences.finished.items():
            text[place, : len(finished)] = finished
        for index, row in rows.items():
            text[row] = sequences.tokens[index, :end]
        return text
