"""Simulated decoding: the acceptance length of `generate`, computed on finished text by teacher forcing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..blocks.batch import TokenBatch
from ..blocks.forward import block_hidden_states
from ..blocks.head_losses import default_chunk_size
from ..blocks.plan import blocks_of_each_row
from ..model.modeling_dflash import DFlashDraftModel, DraftHead


def simulate_passes(
    accepted: Sequence[int],
    input_ids: Sequence[int],
    supervised: Sequence[bool],
    *,
    end_token_ids: Collection[int] = (),
    segment_ids: Sequence[int] | None = None,
) -> list[int]:
    """
    Simulate decoding of all responses of a sequence and return the tokens that each verify pass commits.

    As in `generate`, the prefill yields the first token of a response, which is the first anchor. A pass commits the
    accepted tokens and the bonus token, but nothing past the end of the response. If a single token remains, it takes
    a verify pass only if it is an end token: for the last token of a truncated response nothing is drafted.

    Args:
        accepted (`Sequence[int]`): at every position, the number of drafted tokens that the target accepts with the
            anchor there.
        input_ids (`Sequence[int]`): tokens of the sequence, without padding.
        supervised (`Sequence[bool]`): True at tokens of a response; every run of them is one response.
        end_token_ids (`Collection[int]`): tokens that end a response.
        segment_ids (`Sequence[int]`, *optional*): document of each token in packed rows.

    Returns:
        `list[int]`: one count for each pass, at least 1 and at most the block size.

    Example:

    ```python
    >>> tokens, response = [5, 6, 7, 8, 9, 10, 11, 12], [False, False, True, True, True, True, True, True]
    >>> simulate_passes([0, 0, 2, 0, 0, 1, 0, 0], tokens, response)
    [3, 2]
    >>> simulate_passes([0, 0, 2, 0, 0, 0, 0, 0], tokens, response, end_token_ids={12})
    [3, 1, 1]

    ```
    """
    documents = segment_ids if segment_ids is not None else [0] * len(input_ids)
    committed = []
    for position, is_response in enumerate(supervised):
        starts_document = position == 0 or documents[position] != documents[position - 1]
        if not is_response or (not starts_document and supervised[position - 1]):
            continue
        last = position
        while last + 1 < len(supervised) and supervised[last + 1] and documents[last + 1] == documents[position]:
            last += 1
        anchor = position + 1 if starts_document else position  # without a prompt the first token serves as the prompt
        while anchor < last:
            remaining = last - anchor
            if remaining == 1 and input_ids[last] not in end_token_ids:
                break
            committed.append(min(accepted[anchor] + 1, remaining))
            anchor += committed[-1]
    return committed


@torch.no_grad()
def accepted_tokens_at_every_anchor(
    model: Callable[..., Any],
    draft: DFlashDraftModel,
    batch: TokenBatch,
    *,
    blocks_per_pass: int,
    head_chunk_size: int | None = None,
    block_attention: str = "auto",
    agree_on: Callable[[int], int] = int,
) -> torch.Tensor:
    """
    Count the drafted tokens that the target would accept with the anchor at each token of the responses.

    The blocks are computed as in training, and only the choice of anchors differs. All anchors are
    drafted, `blocks_per_pass` of each sequence at a time. Simulating only the anchors that decoding reaches would need
    fewer blocks, but one pass over the context for each of them. A later slot goes through the head only if the slots
    before it were right, so that the cost of the head grows with the number of accepted tokens.

    Args:
        model (`Callable`):
            The draft, its wrapper for distributed evaluation, or a function that calls it.
        draft ([`DFlashDraftModel`]):
            The draft itself, tied to its target.
        batch ([`TokenBatch`]):
            The text with the hidden states of the target; `supervised` marks the responses.
        blocks_per_pass (`int`):
            Blocks of a sequence that are in memory at one time.
        head_chunk_size (`int`, *optional*):
            Slots whose logits exist at one time; as in [`chunked_head_losses`].
        block_attention (`str`, defaults to `"auto"`):
            As in [`DFlashTrainingArguments`].
        agree_on (`Callable`):
            Takes the number of passes that this rank needs and returns the number that all ranks make, which is at
            least as large; needed where a pass is a collective operation.

    Returns:
        `torch.LongTensor` of shape `[R, S]`: 0 where no block has its anchor.
    """
    rows, length = batch.input_ids.shape
    config, head = draft.config, draft.draft_head()
    plan = batch.plan_every_anchor(config.tokens_per_block, sample_from_anchor=config.sample_from_anchor)
    chunk_size = head_chunk_size or default_chunk_size(batch.input_ids.device)
    accepted = torch.zeros_like(batch.input_ids)
    num_anchors = int(plan.block_valid.view(rows, length).sum(-1).max())
    num_passes = max(-(-num_anchors // blocks_per_pass), 1)
    for index in range(agree_on(num_passes)):
        start = min(index, num_passes - 1) * blocks_per_pass
        part = blocks_of_each_row(plan, rows, slice(start, start + blocks_per_pass))
        hidden_states = block_hidden_states(model, draft, part, batch, block_attention=block_attention)
        blocks, state = part.block_valid.nonzero()[:, 0], None
        for place in range(1, part.tokens_per_block):
            is_supervised = part.loss_mask[blocks, place]
            blocks, state = blocks[is_supervised], None if state is None else state[is_supervised]
            if len(blocks) == 0:
                break
            of_row, columns = part.sample_rows[blocks], part.label_positions[blocks, place]
            before, labels = batch.input_ids[of_row, columns - 1], batch.input_ids[of_row, columns]
            predictions, state = _predict(head, hidden_states[blocks, place], before, state, chunk_size)
            is_right = predictions.to(labels.device) == labels
            blocks, state = blocks[is_right], None if state is None else state[is_right]
            accepted[part.sample_rows[blocks], part.anchor_positions[blocks]] = place
    return accepted


def _predict(
    head: DraftHead,
    hidden_states: torch.Tensor,
    previous_token_ids: torch.Tensor,
    state: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token that the draft proposes in each of some slots, and the state of an `rnn` head for the next."""
    features, state = head.features(previous_token_ids, hidden_states, state)
    predictions = []
    for start in range(0, len(hidden_states), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits = head.logits(hidden_states[chunk])
        if features is None:
            predictions.append(head.token_ids(logits.argmax(-1)))
            continue
        scores, candidates = head.correct(logits, features[chunk])
        choices = scores.argmax(-1, keepdim=True)
        choices = choices if candidates is None else candidates.gather(-1, choices)
        predictions.append(head.token_ids(choices[:, 0]))
    return torch.cat(predictions), state


def simulate_decoding(
    accepted: torch.Tensor, batch: TokenBatch, *, block_size: int, end_token_ids: Collection[int] = ()
) -> torch.Tensor:
    """
    Simulate decoding of the responses of each sequence and count its verify passes by the tokens they commit.

    Args:
        accepted (`torch.LongTensor` of shape `[R, S]`): from [`accepted_tokens_at_every_anchor`].
        batch ([`TokenBatch`]): the same text.
        block_size (`int`): slots of a block, the anchor included.
        end_token_ids (`Collection[int]`): tokens that end a response.

    Returns:
        `torch.LongTensor` of shape `[R, block_size]` on the CPU: the number of passes that committed 1 … B tokens.
        The counts add up over sequences, batches and ranks, and [`record_of_counts`] makes an [`AcceptanceRecord`] of
        them.
    """
    supervised = batch.valid if batch.supervised is None else batch.supervised
    segment_ids = torch.zeros_like(batch.input_ids) if batch.segment_ids is None else batch.segment_ids
    tensors = [accepted, batch.input_ids, supervised, segment_ids]
    histograms = torch.zeros(batch.num_rows, block_size, dtype=torch.int64)
    for row, valid in enumerate(batch.valid.cpu()):
        counts, ids, is_response, documents = (tensor[row].cpu()[valid].tolist() for tensor in tensors)
        committed = simulate_passes(counts, ids, is_response, end_token_ids=end_token_ids, segment_ids=documents)
        histograms[row] = torch.tensor(committed, dtype=torch.int64).bincount(minlength=block_size + 1)[1:]
    return histograms
