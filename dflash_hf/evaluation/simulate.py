"""Acceptance as serving shows it: every answer walked from block to block, each jump as long as what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..blocks.forward import block_hidden_states
from ..blocks.losses import default_chunk_size
from ..blocks.plan import blocks_of_each_row, build_dflash_batch_plan
from ..model.modeling_dflash import DFlashDraftModel


def walk_row(
    accepted: Sequence[int],
    input_ids: Sequence[int],
    supervised: Sequence[bool],
    *,
    end_token_ids: Collection[int] = (),
    documents: Sequence[int] | None = None,
) -> list[int]:
    """
    Tokens that each verify pass with a draft would commit, over all answers of a row.

    As in `generate`, the prefill yields an answer's first token, which is the first anchor. A pass commits what it
    accepts and the bonus token, but nothing past the end of the answer. A last token that ends the answer by itself
    takes a pass of its own; the last one of an answer that was cut off does not, since nothing is drafted for it.

    Args:
        accepted (`Sequence[int]`): at every position, the drafted tokens that are right with the anchor there.
        input_ids (`Sequence[int]`): the row's real tokens.
        supervised (`Sequence[bool]`): True at tokens of an answer; every run of them is an answer of its own.
        end_token_ids (`Collection[int]`): tokens that end an answer.
        documents (`Sequence[int]`, *optional*): document of each token in packed rows.

    Returns:
        `list[int]`: one count a pass, at least 1 and at most the block size.

    Example:

    ```python
    >>> tokens, answer = [5, 6, 7, 8, 9, 10, 11, 12], [False, False, True, True, True, True, True, True]
    >>> walk_row([0, 0, 2, 0, 0, 1, 0, 0], tokens, answer)
    [3, 2]
    >>> walk_row([0, 0, 2, 0, 0, 0, 0, 0], tokens, answer, end_token_ids={12})
    [3, 1, 1]

    ```
    """
    documents = documents if documents is not None else [0] * len(input_ids)
    committed = []
    for position, is_answer in enumerate(supervised):
        starts_document = position == 0 or documents[position] != documents[position - 1]
        if not is_answer or (not starts_document and supervised[position - 1]):
            continue
        last = position
        while last + 1 < len(supervised) and supervised[last + 1] and documents[last + 1] == documents[position]:
            last += 1
        anchor = position + 1 if starts_document else position  # no prompt: the first token takes its place
        while anchor < last:
            remaining = last - anchor
            if remaining == 1 and input_ids[last] not in end_token_ids:
                break
            committed.append(min(accepted[anchor] + 1, remaining))
            anchor += committed[-1]
    return committed


@torch.no_grad()
def accepted_at_every_anchor(
    model: Callable[..., Any],
    draft: DFlashDraftModel,
    input_ids: torch.Tensor,
    token_valid_mask: torch.Tensor,
    supervised_mask: torch.Tensor,
    context_hidden_states: torch.Tensor,
    *,
    blocks_per_pass: int,
    segment_ids: torch.Tensor | None = None,
    head_chunk_size: int | None = None,
    block_attention: str = "auto",
    agree_on: Callable[[int], int] = int,
) -> torch.Tensor:
    """
    Leading slots the draft gets right with the anchor at each token of the answers.

    The blocks are those of training, so that nothing but the choice of anchors can differ. All anchors are drafted,
    `blocks_per_pass` a row at a time: a walk that drafts only where it lands needs fewer blocks, but one pass over the
    context after another with a single block in each. A later slot goes through the head only if those before it were
    right, so that the head costs as much as the accepted tokens and one more.

    Args:
        model (`Callable`): the draft, its wrapper for distributed evaluation, or a function that calls it.
        draft ([`DFlashDraftModel`]): the draft itself, tied.
        input_ids (`torch.LongTensor` of shape `[R, S]`): the text.
        token_valid_mask, supervised_mask (`torch.BoolTensor` of shape `[R, S]`): real tokens; tokens of answers.
        context_hidden_states (`torch.FloatTensor` of shape `[R, S, num_target_layers * hidden_size]`): of the target.
        blocks_per_pass (`int`): blocks of a row that are in memory at one time.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*): document of each token in packed rows.
        head_chunk_size (`int`, *optional*): slots whose logits exist at one time; as in [`head_losses`].
        block_attention (`str`, defaults to `"auto"`): as in [`DFlashTrainingArguments`].
        agree_on (`Callable`): takes this rank's number of passes and returns the one that all ranks make, at least as
            large, where a pass is a collective.

    Returns:
        `torch.LongTensor` of shape `[R, S]`: 0 where no anchor is.
    """
    rows, length = input_ids.shape
    plan = build_dflash_batch_plan(
        token_valid_mask,
        torch.zeros(rows, dtype=torch.int64, device=input_ids.device),
        anchors_per_sample=length,
        gamma=draft.config.block_size - 1,
        optimizer_step=0,
        seed=0,
        supervised_mask=supervised_mask,
        segment_ids=segment_ids,
        replacement=False,  # as many anchors as columns: every window once, the valid ones first
        partial_windows=True,
    )
    chunk_size = head_chunk_size or default_chunk_size(input_ids.device)
    accepted = torch.zeros_like(input_ids)
    num_anchors = int(plan.block_valid.view(rows, length).sum(-1).max())
    num_passes = max(-(-num_anchors // blocks_per_pass), 1)
    for index in range(agree_on(num_passes)):
        start = min(index, num_passes - 1) * blocks_per_pass
        part = blocks_of_each_row(plan, rows, slice(start, start + blocks_per_pass))
        hidden_states = block_hidden_states(
            model,
            draft,
            part,
            input_ids,
            token_valid_mask,
            context_hidden_states,
            segment_ids=segment_ids,
            block_attention=block_attention,
        )
        blocks = part.block_valid.nonzero()[:, 0]
        for slot in range(1, part.block_size):
            blocks = blocks[part.loss_mask[blocks, slot]]
            if len(blocks) == 0:
                break
            labels = input_ids[part.sample_rows[blocks], part.label_positions[blocks, slot]]
            chunks = hidden_states[blocks, slot].split(chunk_size)
            predictions = torch.cat([draft.compute_logits(chunk).argmax(-1) for chunk in chunks])
            blocks = blocks[predictions.to(labels.device) == labels]
            accepted[part.sample_rows[blocks], part.anchor_positions[blocks]] = slot
    return accepted


def serving_statistics(
    accepted: torch.Tensor,
    input_ids: torch.Tensor,
    token_valid_mask: torch.Tensor,
    supervised_mask: torch.Tensor,
    *,
    end_token_ids: Collection[int] = (),
    segment_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Sums of each row, which add up over rows, batches and ranks to the acceptance length when serving.

    Args:
        accepted (`torch.LongTensor` of shape `[R, S]`): from [`accepted_at_every_anchor`].
        input_ids, token_valid_mask, supervised_mask, segment_ids: as there.
        end_token_ids (`Collection[int]`): tokens that end an answer.

    Returns:
        `torch.LongTensor` of shape `[R, 2]` on the CPU: committed tokens, and the verify passes with a draft.
    """
    tensors = [accepted, input_ids, supervised_mask, input_ids * 0 if segment_ids is None else segment_ids]
    statistics = []
    for row, valid in enumerate(token_valid_mask.cpu()):
        counts, ids, supervised, documents = (tensor[row].cpu()[valid].tolist() for tensor in tensors)
        committed = walk_row(counts, ids, supervised, end_token_ids=end_token_ids, documents=documents)
        statistics.append([sum(committed), len(committed)])
    return torch.tensor(statistics)
