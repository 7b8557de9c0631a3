"""Teacher-forced measurements of a draft on responses of its target: accepted tokens, and the token of each slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.batch import TokenBatch
from ..blocks.forward import block_hidden_states
from ..blocks.head_losses import default_chunk_size
from ..blocks.plan import blocks_of_each_row
from ..data.chat_template import chat_inputs
from ..data.collator import DFlashCollator
from ..decoding.generation_settings import ONE_RESPONSE, check_generation_config
from ..evaluation.simulate import accepted_tokens_at_every_anchor, simulate_decoding
from ..evaluation.timed_generation import generate_timed
from ..model.modeling_dflash import DFlashDraftModel
from ..target.hidden_states import target_hidden_states
from ..target.learned_positions import learned_positions
from .finding import FAULT, OK, SKIPPED, Finding

BLOCKS_PER_PASS = 32
# If slots are labelled one position off, almost no prediction is right at its own position. Repeated words give a few
# percent.
SHIFT_MARGIN = 0.1


@dataclass(frozen=True)
class TargetResponses:
    """
    The greedy responses of a target to prompts, and its hidden states in every layer.

    Args:
        inputs (`list[dict]`): The inputs of `generate` for each prompt.
        completions (`list[list[int]]`): The new tokens of each response.
        input_ids (`torch.LongTensor` of shape `[R, S]`): Prompts and responses, padded on the right.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        supervised_mask (`torch.BoolTensor` of shape `[R, S]`): True at tokens of the responses.
        layer_states (`tuple[torch.FloatTensor, ...]`): The embedding and the output of every layer, each of shape
            `[R, S, hidden_size]`.
        end_token_ids (`tuple[int, ...]`): Tokens that end a response.
    """

    inputs: list[dict[str, torch.Tensor]]
    completions: list[list[int]]
    input_ids: torch.Tensor
    token_valid_mask: torch.Tensor
    supervised_mask: torch.Tensor
    layer_states: tuple[torch.Tensor, ...]
    end_token_ids: tuple[int, ...]

    def context(self, layer_ids: Sequence[int]) -> torch.Tensor:
        """
        Return the hidden states that a draft with these target layers reads.

        Args:
            layer_ids (`Sequence[int]`): Layers, counted from 0; -1 is the embedding.

        Returns:
            `torch.FloatTensor` of shape `[R, S, len(layer_ids) * hidden_size]`.
        """
        return torch.cat([self.layer_states[layer_id + 1] for layer_id in layer_ids], dim=-1)

    def batch(self, layer_ids: Sequence[int]) -> TokenBatch:
        """
        Return the text with the hidden states that a draft of these target layers reads.

        Args:
            layer_ids (`Sequence[int]`): The argument of [`context`].

        Returns:
            [`TokenBatch`]
        """
        return TokenBatch(
            self.input_ids, self.token_valid_mask, self.supervised_mask, hidden_states=self.context(layer_ids)
        )

    @property
    def anchor_mask(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `[R, S]`: True where the anchor of a block may stand."""
        return functional.pad(self.supervised_mask[:, 1:], (0, 1)) & self.token_valid_mask


def generate_responses(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    chat_template_kwargs: dict[str, Any] | None = None,
    use_template: bool = True,
) -> TargetResponses:
    """
    Generate greedy responses of the target and keep its hidden states in all layers.

    Args:
        target (`PreTrainedModel`): The target in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        prompts (`Sequence[str]`): User messages.
        max_new_tokens (`int`): The longest response in tokens.
        chat_template_kwargs (`dict`, *optional*): Arguments for the chat template.
        use_template (`bool`, defaults to `True`): Whether to render the prompts with the chat template. Otherwise the
            target continues their text.

    Returns:
        [`TargetResponses`]

    Raises:
        ValueError: See [`response_length`].
    """
    check_generation_config(target, **ONE_RESPONSE, do_sample=False)
    inputs: list[dict[str, torch.Tensor]] = []
    completions: list[list[int]] = []
    rows: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        if use_template:
            prompt_inputs = chat_inputs(tokenizer, prompt, target.device, chat_template_kwargs)
        else:
            encoded = tokenizer(prompt, return_tensors="pt").to(target.device)
            prompt_inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        num_tokens = response_length(target, prompt_inputs["input_ids"].shape[1], max_new_tokens)
        completion = generate_timed(
            target,
            prompt_inputs,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            tokenizer=tokenizer,
        ).token_ids
        prompt_ids = prompt_inputs["input_ids"][0].tolist()
        mask = [False] * len(prompt_ids) + [True] * len(completion)
        rows.append({"input_ids": prompt_ids + completion, "supervised_mask": mask, "sample_id": index})
        inputs.append(prompt_inputs)
        completions.append(completion)
    batch = DFlashCollator()(rows)
    ids, valid, supervised = (
        batch[name].to(target.device) for name in ("input_ids", "token_valid_mask", "supervised_mask")
    )
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    states = target_hidden_states(target, ids, valid, list(range(-1, depth)))
    ends = None if target.generation_config is None else target.generation_config.eos_token_id
    end_token_ids = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    return TargetResponses(inputs, completions, ids, valid, supervised, states.chunk(depth + 1, dim=-1), end_token_ids)


def response_length(target: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> int:
    """
    Return the greatest length of a response, so that the target can read prompt and response.

    Args:
        target (`PreTrainedModel`): The target.
        prompt_length (`int`): The tokens of the prompt.
        max_new_tokens (`int`): The longest response in tokens.

    Returns:
        `int`: `max_new_tokens`, or less if the target has a table of positions that ends before.

    Raises:
        ValueError: Fewer than two tokens could follow the prompt.
    """
    positions = learned_positions(target)
    room = max_new_tokens if positions is None else min(max_new_tokens, positions - prompt_length)
    if room < 2:
        raise ValueError(
            f"A prompt has {prompt_length} tokens, and the target has learned {positions} positions, of which two are "
            "needed for the response. Use shorter prompts."
        )
    return room


def accepted_tokens(
    draft: DFlashDraftModel,
    responses: TargetResponses,
    layer_ids: Sequence[int] | None = None,
    model: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """
    Count the drafted tokens that the target accepts at every anchor of the responses.

    Args:
        draft ([`DFlashDraftModel`]): The draft, tied.
        responses ([`TargetResponses`]): The text.
        layer_ids (`Sequence[int]`, *optional*): The target layers to read instead of those of the configuration.
        model (`Callable`, *optional*): A function that calls the draft in another way.

    Returns:
        `torch.LongTensor` of shape `[R, S]`: 0 at positions that are no anchor.
    """
    return accepted_tokens_at_every_anchor(
        model or draft,
        draft,
        responses.batch(layer_ids or draft.config.target_layer_ids or []),
        blocks_per_pass=BLOCKS_PER_PASS,
    )


def simulated_passes(accepted: torch.Tensor, responses: TargetResponses, block_size: int) -> torch.Tensor:
    """
    Simulate decoding of the responses and count the verify passes of each by the tokens they commit.

    Args:
        accepted (`torch.LongTensor` of shape `[R, S]`): The result of [`accepted_tokens`].
        responses ([`TargetResponses`]): The text.
        block_size (`int`): Slots of a block, the anchor included.

    Returns:
        `torch.LongTensor` of shape `[R, block_size]`: The counts of [`simulate_decoding`].
    """
    batch = TokenBatch(responses.input_ids, responses.token_valid_mask, responses.supervised_mask)
    return simulate_decoding(accepted, batch, block_size=block_size, end_token_ids=responses.end_token_ids)


@torch.no_grad()
def slot_predictions(draft: DFlashDraftModel, responses: TargetResponses) -> torch.Tensor:
    """
    Return the most likely token of every place of every block, before a selector or a Markov head corrects it.

    Args:
        draft ([`DFlashDraftModel`]): The draft, tied.
        responses ([`TargetResponses`]): The text.

    Returns:
        `torch.LongTensor` of shape `[R, S, T]`: The token by anchor and distance from it; -1 at positions that are no
        anchor.
    """
    rows, length = responses.input_ids.shape
    config, head = draft.config, draft.draft_head()
    batch = responses.batch(config.target_layer_ids or [])
    plan = batch.plan_every_anchor(config.tokens_per_block, sample_from_anchor=config.sample_from_anchor)
    predictions = responses.input_ids.new_full((rows, length, config.tokens_per_block), -1)
    num_anchors = int(plan.block_valid.view(rows, length).sum(-1).max())
    for start in range(0, num_anchors, BLOCKS_PER_PASS):
        part = blocks_of_each_row(plan, rows, slice(start, min(start + BLOCKS_PER_PASS, num_anchors)))
        hidden_states = block_hidden_states(draft, draft, part, batch)
        valid = part.block_valid
        chunks = hidden_states[valid].flatten(0, 1).split(default_chunk_size(hidden_states.device))
        best = head.token_ids(torch.cat([head.logits(chunk).argmax(-1) for chunk in chunks]))
        best = best.view(-1, config.tokens_per_block)
        predictions[part.sample_rows[valid], part.anchor_positions[valid]] = best.to(predictions.device)
    return predictions


def shifted_accuracy(
    predictions: torch.Tensor, input_ids: torch.Tensor, supervised_mask: torch.Tensor, shift: int
) -> list[float]:
    """
    Return how often slots 1 … B - 1 predict the token `shift` positions after their own.

    Only slots count whose own position and both neighbours are in the response or at the anchor, so that the
    accuracies of different shifts are measured on the same slots.

    Args:
        predictions (`torch.LongTensor` of shape `[R, S, B]`): The result of [`slot_predictions`].
        input_ids (`torch.LongTensor` of shape `[R, S]`): The text.
        supervised_mask (`torch.BoolTensor` of shape `[R, S]`): True at tokens of the responses.
        shift (`int`): -1, 0 or 1.

    Returns:
        `list[float]`: The accuracy of each slot; NaN for a slot that is never counted.

    Example:

    ```python
    >>> ids, predictions = torch.tensor([[4, 5, 6, 7]]), torch.full((1, 4, 2), -1)
    >>> predictions[0, 0, 1] = 6
    >>> response = torch.tensor([[False, True, True, True]])
    >>> shifted_accuracy(predictions, ids, response, 0), shifted_accuracy(predictions, ids, response, 1)
    ([0.0], [1.0])

    ```
    """
    length, block_size = input_ids.shape[1], predictions.shape[2]
    accuracies = []
    for slot in range(1, block_size):
        last = length - slot - 1  # for anchors before it, the position after the slot's own exists
        predicted = predictions[:, : max(last, 0), slot]
        is_counted = (predicted >= 0) & supervised_mask[:, slot + 1 :]
        labels = input_ids[:, slot + shift : slot + shift + predicted.shape[1]]
        num_correct = ((predicted == labels) & is_counted).sum().item()
        num_counted = is_counted.sum().item()
        accuracies.append(num_correct / num_counted if num_counted else float("nan"))
    return accuracies


def check_slots(draft: DFlashDraftModel, responses: TargetResponses) -> Finding:
    """
    Compare the predictions of the slots with the tokens at their own positions and at the neighbouring ones.

    Args:
        draft ([`DFlashDraftModel`]): The draft, tied.
        responses ([`TargetResponses`]): The text.

    Returns:
        [`Finding`] named "slot layout".
    """
    predictions = slot_predictions(draft, responses)
    by_shift = {
        shift: shifted_accuracy(predictions, responses.input_ids, responses.supervised_mask, shift)
        for shift in (0, 1, -1)
    }
    means = {shift: _mean(values) for shift, values in by_shift.items()}
    if math.isnan(means[0]):
        return Finding("slot layout", SKIPPED, "the responses are shorter than two tokens", "Use other prompts.")
    slots = " ".join(f"{value:.0%}" for value in by_shift[0])
    measured = (
        f"proposals 1 … {draft.config.tokens_per_block - 1} are right in {slots}; on average {means[0]:.0%} at their "
        f"own position, {means[1]:.0%} one position later, {means[-1]:.0%} one earlier"
    )
    shift = max((1, -1), key=lambda position: means[position])
    if means[shift] < means[0] + SHIFT_MARGIN:
        return Finding("slot layout", OK, measured)
    if draft.config.sample_from_anchor:
        trained, expected = ("a + k + 2" if shift == 1 else "a + k"), "a + k + 1 (sample_from_anchor=True)"
    else:
        trained, expected = ("a + k + 1" if shift == 1 else "a + k - 1"), "a + k"
    return Finding(
        "slot layout",
        FAULT,
        measured,
        f"Slot k of the block at anchor a was trained on token {trained}, while its configuration says {expected}. "
        "Correct sample_from_anchor in the configuration if one of its two values fits. Otherwise label the slots "
        "accordingly and train again.",
    )


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else float("nan")
