"""Answer prompts by `generate`, a left-padded batch at a time: for every target that has it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from .sampling import AnswerRules, DrawnToken, Draws, Prompt


class PaddedDecoder:
    """
    Decode batches of prompts by `target.generate`; a batch ends with its longest answer.

    Args:
        target (`PreTrainedModel`): in evaluation mode.
        rules ([`AnswerRules`]): how tokens are chosen.
        batch_size (`int`): prompts a batch.
    """

    is_idle = True  # between batches nothing is under way

    def __init__(self, target: PreTrainedModel, rules: AnswerRules, batch_size: int) -> None:
        self.target, self.rules = target, rules
        # a processor that looks at the text would look at the padding, too
        self.batch_size = 1 if rules.num_of_text else batch_size

    def advance(self, waiting: deque[Prompt]) -> list[tuple[Prompt, list[int]]]:
        """
        Answer the next batch.

        Args:
            waiting (`deque[Prompt]`): prompts are taken from its left; neighbours should be about equally long.

        Returns:
            `list[tuple[Prompt, list[int]]]`: the answers, with the token that ended them.
        """
        prompts = [waiting.popleft() for _ in range(min(self.batch_size, len(waiting)))]
        try:
            return self._generate(prompts) if prompts else []
        except torch.OutOfMemoryError:
            if self.batch_size == 1:
                raise
            waiting.extendleft(reversed(prompts))
            self.batch_size //= 2
            return []

    def _generate(self, prompts: list[Prompt]) -> list[tuple[Prompt, list[int]]]:
        longest = max(len(prompt.ids) for prompt in prompts)
        numbers_of_padding = [longest - len(prompt.ids) for prompt in prompts]
        device = self.target.device
        input_ids = torch.tensor(
            [[0] * padding + prompt.ids for padding, prompt in zip(numbers_of_padding, prompts, strict=True)],
            device=device,
        )
        mask = torch.arange(longest, device=device) >= torch.tensor(numbers_of_padding, device=device)[:, None]
        options = dict(self.rules.options)
        if self.rules.do_sample:
            drawn = DrawnToken(self.rules.warpers, [Draws(prompt.seed) for prompt in prompts])
            options |= {"do_sample": False, "logits_processor": LogitsProcessorList([drawn])}
        generate: Any = self.target.generate  # a mixin's method, which type checkers do not see
        output = generate(
            input_ids,
            attention_mask=mask.long(),
            max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
            **options,
        )
        return [
            (prompt, self._until_end(answer[: prompt.max_new_tokens]))
            for prompt, answer in zip(prompts, output[:, longest:].tolist(), strict=True)
        ]

    def _until_end(self, answer: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(answer) if token in self.rules.end_ids]
        return answer[: ends[0] + 1] if ends else answer
