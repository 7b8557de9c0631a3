"""Block-parallel speculative decoding in its simplest form: one prompt, greedy, everything computed from the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..model.modeling_dflash import DFlashDraftModel, DraftHead, embed_tokens


@torch.no_grad()
def reference_generate(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    block_size: int | None = None,
) -> tuple[torch.Tensor, list[list[int]]]:
    """
    Decode one prompt greedily with a draft.

    It has no cache and runs both models over the whole text in every pass. [`speculative_generate`] commits the same
    tokens in the same passes.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair.
        input_ids (`torch.LongTensor` of shape `[1, columns]`): the prompt.
        max_new_tokens (`int`): number of tokens after which the text ends.
        eos_token_ids (`Sequence[int]`, *optional*): tokens that end the text.
        block_size (`int`, *optional*): number of slots to verify, the anchor included; the trained number by default.

    Returns:
        `tuple`: the text of shape `[1, columns]`, prompt included, and the tokens that each pass of the target
        committed. The first pass reads the prompt and commits one token.
    """
    text, max_length = input_ids, input_ids.shape[1] + max_new_tokens
    trained = draft.config.block_size
    embedding = target.get_input_embeddings()
    head = DraftHead(draft, embedding, target.get_output_embeddings())
    passes: list[list[int]] = []
    drafted = text[:, :0]  # [1, 0]: the first pass has no draft
    while True:
        # Verify: the target's best token after the anchor and after each drafted token. logits: [1, columns,
        # vocabulary]
        logits = target(torch.cat([text, drafted], dim=1), use_cache=False).logits
        best = logits[:, text.shape[1] - 1 :].argmax(-1)  # [1, 1 + drafted]

        # Commit: the drafted tokens up to the first wrong one, then the target's own token, called the bonus token.
        num_accepted = int((drafted == best[:, :-1]).long().cumprod(1).sum())
        new_tokens = best[:, : num_accepted + 1]  # [1, 1 + accepted]: an accepted token equals the target's best one
        is_end = torch.isin(new_tokens[0], text.new_tensor(eos_token_ids))
        if is_end.any():
            new_tokens = new_tokens[:, : int(is_end.long().argmax()) + 1]
        text = torch.cat([text, new_tokens], dim=1)
        passes.append(new_tokens[0].tolist())
        room = max_length - text.shape[1]
        if is_end.any() or room == 0:
            return text, passes

        # Context: the target's hidden states before the anchor, which is the last token. [1, anchor, layers * width]
        anchor = text.shape[1] - 1
        hidden_states = target(text, use_cache=False, output_hidden_states=True).hidden_states
        context = torch.cat([hidden_states[i + 1][:, :anchor] for i in draft.config.target_layer_ids or []], dim=-1)

        # Draft: the block is the anchor followed by mask tokens, at the positions after the context. [1, trained]
        block = text.new_full((1, trained), draft.config.mask_token_id)
        block[:, 0] = text[:, -1]
        positions = torch.arange(anchor + trained, device=text.device)[
            None
        ]  # [1, anchor + trained]: context first, then the block
        slots = draft(embed_tokens(embedding, block), context, position_ids=positions).last_hidden_state

        # State k predicts the token k places after the anchor. A selector or a Markov head corrects its logits
        # according to the token before, which is the anchor or was just drafted. drafted: [1, num_tokens - 1]
        num_tokens = min(block_size or draft.config.tokens_per_block, room)
        drafted, before, state = text[:, :0], text[:, -1], None
        for k in range(1, num_tokens):
            features, state = head.features(before, slots[:, k], state)
            scores, candidates = head.correct(head.logits(slots[:, k]), features)
            choice = scores.argmax(-1, keepdim=True)
            before = head.token_ids(choice if candidates is None else candidates.gather(1, choice))[:, 0]
            drafted = torch.cat([drafted, before[:, None]], dim=1)
