"""The target model in the decoding loop: its cache, the prefill, and the passes that verify drafted tokens."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model.configuration_dflash import describe_target
from ..model.modeling_dflash import DFlashDraftModel
from ..target.learned_positions import learned_positions
from ..target.rotary import exclusive_angles
from .drafter import Proposal
from .kv_cache import RaggedCache
from .masks import target_masks
from .sequences import SequenceState, column_range
from .statistics import Stopwatch
from .tree import DraftTree

# The state of a recurrent layer cannot be reset to an earlier token. When some of a block is rejected, the state goes
# back to the one before the pass, and the accepted tokens stay pending: the next pass reads them again in front of its
# block. Once a sequence has more pending tokens than this, an extra pass moves the state over them.
MAX_PENDING_TOKENS = 16


@dataclass
class VerifyOutput:
    """
    What the target returned for the anchor and the drafted tokens.

    Args:
        logits (`torch.FloatTensor` of shape `[sequences, nodes, vocabulary]`):
            Logits after the anchor and after each drafted token.
        outputs (`Any`):
            The target's model output, with hidden states.
        num_pending (`list[int]`):
            Number of pending tokens that each sequence had before its anchor in this pass.
    """

    logits: torch.Tensor
    outputs: Any
    num_pending: list[int]


class TargetRunner:
    """
    Run the target over the text and keep its cache.

    Target and draft write their keys and values at the columns of the text, so that the next pass overwrites those of
    rejected tokens.

    Args:
        target (`PreTrainedModel`): the target.
        draft ([`DFlashDraftModel`]): the draft, which reads some of the target's hidden states.
        sequences ([`SequenceState`]): the text.
        watch ([`Stopwatch`]): measures the time of extra passes over pending tokens.
    """

    def __init__(
        self, target: PreTrainedModel, draft: DFlashDraftModel, sequences: SequenceState, watch: Stopwatch
    ) -> None:
        self.target, self.sequences, self.watch = target, sequences, watch
        self.cache = RaggedCache(target.config)
        self.read_lengths = [0] * len(sequences)  # number of columns of committed text that the cache holds
        self.position_offset: torch.Tensor | None = None  # position of a token minus its column
        parameters = inspect.signature(target.forward).parameters
        self.takes_position_ids = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        self.exclusive_angles = exclusive_angles(target.config)
        self.learned_positions = learned_positions(target)
        # transformers counts the embedding as hidden state 0, so the output of layer i is hidden state i + 1.
        self.hidden_state_indices = [layer_id + 1 for layer_id in draft.config.target_layer_ids or []]
        self.hidden_state_device = draft.device

    @property
    def num_pending(self) -> list[int]:
        """`list[int]`: number of tokens of each sequence before its anchor that the cache does not hold."""
        return [anchor - read for anchor, read in zip(self.sequences.anchors, self.read_lengths, strict=True)]

    @property
    def room(self) -> int:
        """
        `int`: the largest number of slots that a pass may have, so that each has a position which the target knows.

        Raises:
            ValueError: a text has reached the end of the target's learned positions.
        """
        sequences = self.sequences
        if self.learned_positions is None:
            return sequences.room
        longest = max(map(operator.sub, sequences.lengths, sequences.num_padding))
        if longest > self.learned_positions:
            raise ValueError(
                f"A text has {longest} tokens, and the target {describe_target(self.target)} has learned "
                f"{self.learned_positions} positions, so that it cannot read on (plain generation ends in an "
                f"IndexError here). Pass max_length={self.learned_positions + 1 + min(sequences.num_padding)} or less."
            )
        return min(sequences.room, self.learned_positions - longest + 1)

    def prefill(self, prefill_inputs: list[dict[str, Any]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """
        Read the prompts.

        Args:
            prefill_inputs (`list[dict]`): inputs of the target, in one or several chunks.

        Returns:
            `tuple`: the logits of the first new token, of shape `[sequences, 1, vocabulary]`, and the hidden states
            for the draft, one tensor for each chunk.
        """
        hidden_states = []
        for inputs in prefill_inputs:
            start = self.read_lengths[0]
            end = start + inputs["input_ids"].shape[1]
            self.cache.place(start, end)
            with self.exclusive_angles:
                outputs = self.target(
                    **{**inputs, "cache": self.cache, "use_cache": True},
                    output_hidden_states=self.hidden_state_indices,
                    return_dict=True,
                )
            hidden_states.append(self._hidden_states(outputs, slice(None)))
            self.read_lengths = [end] * len(self.sequences)
        self.cache.accept_states()
        positions = inputs.get("position_ids")
        if positions is not None:  # `[sequences, n]`, or one such tensor for each axis of a multimodal target
            offset = positions[..., -1].to(self.sequences.device) - self.sequences.anchors[0]
            self.position_offset = offset.expand(*offset.shape[:-1], len(self.sequences))
        return outputs.logits[:, -1:], hidden_states

    def verify(self, proposal: Proposal) -> VerifyOutput:
        """
        Run the target over the anchor and the drafted tokens, in front of them the pending tokens.

        Args:
            proposal ([`Proposal`]): the drafted tokens.

        Returns:
            [`VerifyOutput`]
        """
        tree = proposal.tree
        if not tree.is_chain:
            input_ids = torch.cat([self.sequences.anchor_tokens(), proposal.token_ids], dim=1)
            outputs = self._run(tree.num_nodes, tree.num_nodes, input_ids, tree)
            return VerifyOutput(outputs.logits[:, -tree.num_nodes :], outputs, [0] * len(self.sequences))
        num_slots = tree.num_slots
        self.sequences.write_drafted(proposal.token_ids)
        if self.cache.is_recurrent:
            self.cache.save_states()
        pending = self.num_pending
        num_logits = num_slots + max(pending) - min(pending)
        outputs = self._run(max(pending) + num_slots, num_logits)
        logits = outputs.logits[:, -num_logits:]
        if min(pending) != max(pending):
            logits = _slice_each(logits, [count - min(pending) for count in pending], num_slots)
        return VerifyOutput(logits, outputs, pending)

    def commit(
        self, verified: VerifyOutput, tree: DraftTree, path: torch.Tensor | None, counts: list[int]
    ) -> torch.Tensor:
        """
        Move the cache to the end of the committed text and return the hidden states of the committed tokens.

        Call it when the lengths of the sequences include the committed tokens.

        Args:
            verified ([`VerifyOutput`]): the pass that verified them.
            tree ([`DraftTree`]): the tree of the pass.
            path (`torch.LongTensor` of shape `[sequences, slots]`, *optional*): nodes of the accepted path; `None` if
                it is the chain of first choices in every sequence, whose tokens are at the right columns already.
            counts (`list[int]`): number of tokens that each sequence received.

        Returns:
            `torch.FloatTensor` of shape `[sequences, max(counts), num_target_layers * hidden_size]`: for the anchor
            and the accepted tokens after it. Sequences that received fewer tokens have meaningless states at the end.
        """
        pending, longest = verified.num_pending, max(counts)
        is_uniform = min(pending) == max(pending)
        if path is not None:
            hidden_states = self._hidden_states(verified.outputs, slice(None))
            hidden_states = hidden_states.take_along_dim(path[:, :longest, None].to(hidden_states.device), 1)
            anchors = torch.tensor(self.read_lengths, device=self.sequences.device)[:, None]
            places = anchors + torch.arange(tree.num_slots, device=self.sequences.device)
            self.cache.move(anchors + path[:, 1:], places[:, 1:])
        elif is_uniform:
            hidden_states = self._hidden_states(verified.outputs, slice(pending[0], pending[0] + longest))
        else:
            hidden_states = _slice_each(self._hidden_states(verified.outputs, slice(None)), pending, longest)

        if self.cache.is_recurrent and not (is_uniform and min(counts) == tree.num_slots):
            self.cache.restore_states()
            self._read_pending_tokens()
        else:
            self.cache.accept_states()
            self.read_lengths = self.sequences.anchors
        return hidden_states

    def _read_pending_tokens(self) -> None:
        """Move recurrent states over committed tokens until no sequence has more than the largest number pending."""
        while True:
            pending = self.num_pending
            if max(pending) <= MAX_PENDING_TOKENS:
                return
            count = min(number for number in pending if number >= MAX_PENDING_TOKENS // 2)
            self.cache.save_states()
            self.watch.lap("overhead")
            self._run(count, num_logits=1)
            self.watch.lap("verify")
            moves = [number >= count for number in pending]
            self.cache.accept_states(torch.tensor(moves))
            self.read_lengths = [
                read + count if move else read for read, move in zip(self.read_lengths, moves, strict=True)
            ]

    def _run(
        self, count: int, num_logits: int, input_ids: torch.Tensor | None = None, tree: DraftTree | None = None
    ) -> Any:
        """
        Run the target over `count` tokens of each sequence, from the first one that its cache does not hold.

        They are tokens of the text, unless `input_ids` gives the tokens of a tree, whose first one is the anchor.
        """
        sequences = self.sequences
        start, end = min(self.read_lengths), max(self.read_lengths) + count
        columns = column_range(self.read_lengths, count, sequences.device)
        self.cache.place(start, end, None if len(sequences) == 1 else columns)
        mask = target_masks(self.target, self.cache, columns, sequences.num_padding, end, tree)
        inputs: dict[str, Any] = {"attention_mask": mask}
        if self.takes_position_ids and self.position_offset is not None:
            positions = columns if tree is None else columns[:, :1] + tree.depths
            inputs["position_ids"] = positions.clamp(max=sequences.max_length - 1) + self.position_offset[..., None]
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = num_logits
        with self.exclusive_angles:
            return self.target(
                input_ids=sequences.tokens.gather(1, columns) if input_ids is None else input_ids,
                cache=self.cache,
                use_cache=True,
                output_hidden_states=self.hidden_state_indices,
                return_dict=True,
                **inputs,
            )

    def _hidden_states(self, outputs: Any, places: Any) -> torch.Tensor:
        """Return the hidden states that the draft reads at some places, concatenated on the last axis."""
        states = outputs.hidden_states
        missing = [index - 1 for index in self.hidden_state_indices if index >= len(states) or states[index] is None]
        if missing:
            raise ValueError(
                f"The target {describe_target(self.target)} returned no hidden states for layers {missing}, which the "
                "draft reads. Use the draft with its own target."
            )
        return torch.cat(
            [states[index][:, places].to(self.hidden_state_device) for index in self.hidden_state_indices], dim=-1
        )

    def select(self, kept: list[int], indices: torch.Tensor) -> None:
        """
        Keep some of the sequences.

        Args:
            kept (`list[int]`): the indices of the sequences to keep.
            indices (`torch.LongTensor`): the same indices as a tensor.
        """
        self.read_lengths = [self.read_lengths[index] for index in kept]
        if self.position_offset is not None:
            self.position_offset = self.position_offset[..., indices]
        self.cache.batch_select_indices(indices)


def _slice_each(values: torch.Tensor, first: list[int], count: int) -> torch.Tensor:
    """
    Return `values[i, first[i] : first[i] + count]` for every sequence `i`.

    The last value repeats where a sequence has fewer.
    """
    places = torch.tensor(first, device=values.device)[:, None] + torch.arange(count, device=values.device)
    sequences = torch.arange(len(first), device=values.device)[:, None]
    return values[sequences, places.clamp(max=values.shape[1] - 1)]
