"""A draft on answers that its target wrote itself: which slots are right, and against which token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.batch import TokenBatch
from ..blocks.forward import block_hidden_states
from ..blocks.losses import default_chunk_size
from ..blocks.plan import blocks_of_each_row
from ..data.chat_template import chat_inputs
from ..data.collator import DFlashCollator
from ..evaluation.simulate import accepted_tokens_at_every_anchor, simulate_decoding
from ..evaluation.timed_generation import generate_timed
from ..model.modeling_dflash import DFlashDraftModel
from ..target.hidden_states import target_hidden_states
from .finding import FAULT, OK, SKIPPED, Finding

BLOCKS_PER_PASS = 32
# A slot rule that is off by one leaves almost nothing right at its own place; repeated words give a few percent.
SHIFT_MARGIN = 0.1


@dataclass(frozen=True)
class AnsweredPrompts:
    """
    Prompts, the target's own greedy answers, and its states in every layer.

    Args:
        inputs (`list[dict]`): of `generate`, one a prompt.
        answers (`list[list[int]]`): new tokens of each prompt.
        input_ids (`torch.LongTensor` of shape `[R, S]`): prompt and answer, padded on the right.
        token_valid_mask, supervised_mask (`torch.BoolTensor` of shape `[R, S]`): real tokens; tokens of the answer.
        layer_states (`tuple[torch.FloatTensor, ...]`): each `[R, S, hidden_size]`: the embedding, then every layer.
        end_token_ids (`tuple[int, ...]`): tokens that end an answer.
    """

    inputs: list[dict[str, torch.Tensor]]
    answers: list[list[int]]
    input_ids: torch.Tensor
    token_valid_mask: torch.Tensor
    supervised_mask: torch.Tensor
    layer_states: tuple[torch.Tensor, ...]
    end_token_ids: tuple[int, ...]

    def context(self, layer_ids: Sequence[int]) -> torch.Tensor:
        """
        What a draft that taps these layers reads.

        Args:
            layer_ids (`Sequence[int]`): counted from 0; -1 is the embedding.

        Returns:
            `torch.FloatTensor` of shape `[R, S, len(layer_ids) * hidden_size]`.
        """
        return torch.cat([self.layer_states[layer_id + 1] for layer_id in layer_ids], dim=-1)

    def batch(self, layer_ids: Sequence[int]) -> TokenBatch:
        """
        Return the text with the hidden states that a draft of these target layers reads.

        Args:
            layer_ids (`Sequence[int]`): as for [`context`].

        Returns:
            [`TokenBatch`]
        """
        return TokenBatch(
            self.input_ids, self.token_valid_mask, self.supervised_mask, hidden_states=self.context(layer_ids)
        )

    @property
    def anchor_mask(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `[R, S]`: True where a block can be drafted."""
        return functional.pad(self.supervised_mask[:, 1:], (0, 1)) & self.token_valid_mask


def answer_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    chat_template_kwargs: dict[str, Any] | None = None,
    use_template: bool = True,
) -> AnsweredPrompts:
    """
    Let the target answer prompts greedily, and keep its states in all layers.

    Args:
        target (`PreTrainedModel`): in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        prompts (`Sequence[str]`): user messages.
        max_new_tokens (`int`): longest answer in tokens.
        chat_template_kwargs (`dict`, *optional*): for the template.
        use_template (`bool`, defaults to `True`): `False` continues the bare text.

    Returns:
        [`AnsweredPrompts`]
    """
    inputs: list[dict[str, torch.Tensor]] = []
    answers: list[list[int]] = []
    rows: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        if use_template:
            asked = chat_inputs(tokenizer, prompt, target.device, chat_template_kwargs)
        else:
            encoded = tokenizer(prompt, return_tensors="pt").to(target.device)
            asked = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        answer = generate_timed(
            target, asked, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        ).token_ids
        question = asked["input_ids"][0].tolist()
        mask = [False] * len(question) + [True] * len(answer)
        rows.append({"input_ids": question + answer, "supervised_mask": mask, "sample_id": index})
        inputs.append(asked)
        answers.append(answer)
    batch = DFlashCollator()(rows)
    ids, valid, supervised = (
        batch[name].to(target.device) for name in ("input_ids", "token_valid_mask", "supervised_mask")
    )
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    states = target_hidden_states(target, ids, valid, list(range(-1, depth)))
    ends = None if target.generation_config is None else target.generation_config.eos_token_id
    end_token_ids = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    return AnsweredPrompts(inputs, answers, ids, valid, supervised, states.chunk(depth + 1, dim=-1), end_token_ids)


def accepted_slots(
    draft: DFlashDraftModel,
    answered: AnsweredPrompts,
    layer_ids: Sequence[int] | None = None,
    model: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """
    Leading slots that are right at every anchor of the answers.

    Args:
        draft ([`DFlashDraftModel`]): tied.
        answered ([`AnsweredPrompts`]): the text.
        layer_ids (`Sequence[int]`, *optional*): layers to read instead of the configuration's.
        model (`Callable`, *optional*): calls the draft in another way.

    Returns:
        `torch.LongTensor` of shape `[R, S]`: 0 where no anchor is.
    """
    return accepted_tokens_at_every_anchor(
        model or draft,
        draft,
        answered.batch(layer_ids or draft.config.target_layer_ids or []),
        blocks_per_pass=BLOCKS_PER_PASS,
    )


def simulated_passes(accepted: torch.Tensor, answered: AnsweredPrompts, block_size: int) -> torch.Tensor:
    """
    Simulate decoding of the answers and count the verify passes of each by the tokens they commit.

    Args:
        accepted (`torch.LongTensor` of shape `[R, S]`): from [`accepted_slots`].
        answered ([`AnsweredPrompts`]): the text.
        block_size (`int`): slots of a block, the anchor included.

    Returns:
        `torch.LongTensor` of shape `[R, block_size]`: as [`simulate_decoding`] returns it.
    """
    batch = TokenBatch(answered.input_ids, answered.token_valid_mask, answered.supervised_mask)
    return simulate_decoding(accepted, batch, block_size=block_size, end_token_ids=answered.end_token_ids)


@torch.no_grad()
def slot_predictions(draft: DFlashDraftModel, answered: AnsweredPrompts) -> torch.Tensor:
    """
    What every slot of every block says.

    Args:
        draft ([`DFlashDraftModel`]): tied.
        answered ([`AnsweredPrompts`]): the text.

    Returns:
        `torch.LongTensor` of shape `[R, S, B]`: the most likely token at anchor and slot; -1 where no block is.
    """
    rows, length = answered.input_ids.shape
    block_size = draft.config.block_size
    batch = answered.batch(draft.config.target_layer_ids or [])
    plan = batch.plan_every_anchor(block_size)
    predictions = answered.input_ids.new_full((rows, length, block_size), -1)
    num_anchors = int(plan.block_valid.view(rows, length).sum(-1).max())
    for start in range(0, num_anchors, BLOCKS_PER_PASS):
        part = blocks_of_each_row(plan, rows, slice(start, min(start + BLOCKS_PER_PASS, num_anchors)))
        hidden_states = block_hidden_states(draft, draft, part, batch)
        valid = part.block_valid
        chunks = hidden_states[valid].flatten(0, 1).split(default_chunk_size(hidden_states.device))
        best = torch.cat([draft.compute_logits(chunk).argmax(-1) for chunk in chunks]).view(-1, block_size)
        predictions[part.sample_rows[valid], part.anchor_positions[valid]] = best.to(predictions.device)
    return predictions


def shifted_accuracy(
    predictions: torch.Tensor, input_ids: torch.Tensor, supervised_mask: torch.Tensor, shift: int
) -> list[float]:
    """
    How often slots 1 … B - 1 say the token `shift` places after their own.

    Only slots count whose own place and both neighbours lie in the answer or at the anchor, so that accuracies of
    different shifts are of the same slots.

    Args:
        predictions (`torch.LongTensor` of shape `[R, S, B]`): from [`slot_predictions`].
        input_ids (`torch.LongTensor` of shape `[R, S]`): the text.
        supervised_mask (`torch.BoolTensor` of shape `[R, S]`): tokens of answers.
        shift (`int`): -1, 0 or 1.

    Returns:
        `list[float]`: one a slot; NaN where no slot counts.

    Example:

    ```python
    >>> ids, said = torch.tensor([[4, 5, 6, 7]]), torch.full((1, 4, 2), -1)
    >>> said[0, 0, 1] = 6
    >>> answer = torch.tensor([[False, True, True, True]])
    >>> shifted_accuracy(said, ids, answer, 0), shifted_accuracy(said, ids, answer, 1)
    ([0.0], [1.0])

    ```
    """
    length, block_size = input_ids.shape[1], predictions.shape[2]
    accuracies = []
    for slot in range(1, block_size):
        last = length - slot - 1  # anchors before it have a place after the slot's own
        said = predictions[:, : max(last, 0), slot]
        counts = (said >= 0) & supervised_mask[:, slot + 1 :]
        labels = input_ids[:, slot + shift : slot + shift + said.shape[1]]
        right = ((said == labels) & counts).sum().item()
        total = counts.sum().item()
        accuracies.append(right / total if total else float("nan"))
    return accuracies


def check_slots(draft: DFlashDraftModel, answered: AnsweredPrompts) -> Finding:
    """
    Compare what the slots say with their own tokens and with the neighbours.

    Args:
        draft ([`DFlashDraftModel`]): tied.
        answered ([`AnsweredPrompts`]): the text.

    Returns:
        [`Finding`] named "slot layout".
    """
    predictions = slot_predictions(draft, answered)
    by_shift = {
        shift: shifted_accuracy(predictions, answered.input_ids, answered.supervised_mask, shift)
        for shift in (0, 1, -1)
    }
    means = {shift: _mean(values) for shift, values in by_shift.items()}
    if means[0] != means[0]:
        return Finding("slot layout", SKIPPED, "the answers are shorter than two tokens", "Use other prompts.")
    slots = " ".join(f"{value:.0%}" for value in by_shift[0])
    measured = (
        f"slots 1 … {draft.config.block_size - 1} are right in {slots}; on average {means[0]:.0%} at their own "
        f"place, {means[1]:.0%} one place later, {means[-1]:.0%} one earlier"
    )
    shift = max((1, -1), key=lambda place: means[place])
    if means[shift] < means[0] + SHIFT_MARGIN:
        return Finding("slot layout", OK, measured)
    rule = "a + k + 1" if shift == 1 else "a + k - 1"
    return Finding(
        "slot layout",
        FAULT,
        measured,
        f"Slot k of the block at anchor a was trained on token {rule}; here and in servers it is a + k. Label slot k "
        "with input_ids[a + k], without a shift, and train again; a draft of the other rule (sample_from_anchor, "
        "DeepSpec) is served by the software that made it.",
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else float("nan")
