"""The token batch: the tensors of a padded batch of token sequences, which travel together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .plan import DFlashBatchPlan, build_dflash_batch_plan, position_ids_of


@dataclass(frozen=True)
class TokenBatch:
    """
    A padded batch of `R` token sequences of length `S`, with the hidden states of the target once they are known.

    `valid` and `supervised` answer different questions and must not be confused. `valid` says which tokens exist: a
    block may attend to every valid token before its anchor, prompt tokens included. `supervised` says which of them
    carry loss as labels: usually the tokens of the assistant. Every supervised token is valid.

    Args:
        input_ids (`torch.LongTensor` of shape `[R, S]`):
            Token ids; any id at padding.
        valid (`torch.BoolTensor` of shape `[R, S]`):
            The `token_valid_mask`: True at real tokens, False at padding.
        supervised (`torch.BoolTensor` of shape `[R, S]`, *optional*):
            The `supervised_mask`: True at tokens that carry loss as labels. All valid tokens do if unset.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*):
            Document of each token in packed rows; each sequence is one document if unset.
        hidden_states (`torch.FloatTensor` of shape `[R, S, num_target_layers * hidden_size]`, *optional*):
            Hidden states of the target in the chosen layers, which the draft reads as its context; 0 at padding.
        final_hidden_states (`torch.FloatTensor` of shape `[R, S, hidden_size]`, *optional*):
            Hidden states of the target after its final norm, from which its logits are computed.

    Example:

    ```python
    >>> batch = TokenBatch(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[True, True, True, False]]))
    >>> batch.num_rows, batch.length, batch.position_ids.tolist()
    (1, 4, [[0, 1, 2, 3]])

    ```
    """

    input_ids: torch.Tensor
    valid: torch.Tensor
    supervised: torch.Tensor | None = None
    segment_ids: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    final_hidden_states: torch.Tensor | None = None

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, torch.Tensor]) -> TokenBatch:
        """
        Take the tensors of a batch by their names.

        Args:
            inputs (`Mapping`): a batch of [`DFlashCollator`], with `input_ids` and `token_valid_mask`, and with
                `supervised_mask` and `segment_ids` where they exist. Other entries are ignored.

        Returns:
            [`TokenBatch`] without hidden states.
        """
        return cls(
            inputs["input_ids"], inputs["token_valid_mask"], inputs.get("supervised_mask"), inputs.get("segment_ids")
        )

    @property
    def num_rows(self) -> int:
        """`int`: number of sequences, `R`."""
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        """`int`: padded length of the sequences, `S`."""
        return self.input_ids.shape[1]

    @property
    def position_ids(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `[R, S]`: the positions of [`position_ids_of`]."""
        return position_ids_of(self.valid, self.segment_ids)

    def with_hidden_states(
        self, hidden_states: torch.Tensor, final_hidden_states: torch.Tensor | None = None
    ) -> TokenBatch:
        """
        Return the same batch with the target's hidden states.

        Args:
            hidden_states, final_hidden_states (`torch.FloatTensor`): as the fields of those names.

        Returns:
            [`TokenBatch`]
        """
        return replace(self, hidden_states=hidden_states, final_hidden_states=final_hidden_states)

    def plan_every_anchor(self, tokens_per_block: int, *, sample_from_anchor: bool = False) -> DFlashBatchPlan:
        """
        Plan one block at every possible anchor, where training would choose some of them.

        Args:
            tokens_per_block (`int`): tokens of a block, the anchor included.
            sample_from_anchor (`bool`, defaults to `False`): as in [`build_dflash_batch_plan`].

        Returns:
            [`DFlashBatchPlan`] of `R * S` blocks, `S` for each sequence and at least one: its valid blocks come
            first, in ascending order of their anchors.
        """
        return build_dflash_batch_plan(
            self.valid,
            torch.zeros(self.num_rows, dtype=torch.int64, device=self.input_ids.device),
            anchors_per_sample=max(self.length, 1),
            gamma=tokens_per_block - 1,
            optimizer_step=0,
            seed=0,
            supervised_mask=self.supervised,
            segment_ids=self.segment_ids,
            replacement=False,  # with as many anchors as columns, every window occurs exactly once
            partial_windows=True,
            sample_from_anchor=sample_from_anchor,
        )
