"""The local generation backend: completions by a model in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..model.configuration_dflash import describe_target
from .continuous_batching import SlotDecoder, why_not_slots
from .defaults import BATCH_SIZE
from .requests import Answer, Failure, RequestFeed, Sampling, TurnRequest
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


logger = logging.get_logger(__name__)

WINDOW_BATCHES = 4  # requests read ahead and sorted by length, in batches
# what a chat template raises by itself, and what its expressions raise for messages of a form it does not expect
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)


class LocalEngine:
    """
    Answer requests with a target of this process; an [`AnswerEngine`].

    Answers come as they end. In fp32 a greedy answer is the one that `target.generate` gives to the prompt alone, and
    a sampled one depends on its own seed, not on batch or order; in 16 bits near-ties may fall otherwise in a batch.

    Args:
        target (`PreTrainedModel`):
            The causal language model, on its device, in eval mode. It is not changed.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer, with a chat template.
        sampling ([`Sampling`]):
            How answers are drawn.
        batch_size (`int`, defaults to 64):
            Answers under way at once. Halved when an accelerator runs out of memory.
        refill (`bool`, *optional*):
            Whether the place of an answer that ended is taken by the next prompt at once. `False`: batches of
            `target.generate`, each as long as its longest answer. By default True for targets whose layers are all
            attention, over the whole text or a window, with SDPA or eager attention.

    Raises:
        ValueError: the batch size is not positive; the tokenizer has no chat template; the target's generation config
            asks for more than drawing tokens; or `refill=True` for a target that it is not possible for.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        batch_size: int = BATCH_SIZE,
        refill: bool | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        if not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template, so that messages cannot be rendered. "
                "Set tokenizer.chat_template, or take the tokenizer of a chat model."
            )
        self.target, self.tokenizer, self.sampling, self.batch_size = target, tokenizer, sampling, batch_size
        self.rules = AnswerRules(target, tokenizer, sampling)
        reason = why_not_slots(target, self.rules)
        if refill and reason:
            raise ValueError(
                f"refill=True, but the target {describe_target(target)} cannot have it: {reason}. Leave refill out."
            )
        if refill is None and reason:
            logger.warning(
                f"The target {describe_target(target)} answers in batches that each last as long as their longest "
                f"answer: {reason}."
            )
        self.refill = reason is None if refill is None else refill
        self.max_length: int | None = getattr(
            target.config.get_text_config(decoder=True), "max_position_embeddings", None
        )

    def answers(self, feed: RequestFeed) -> Generator[tuple[TurnRequest, Answer | Failure]]:
        """
        Answer requests as they end, until the feed is empty; see [`AnswerEngine.answers`].

        Yields:
            `tuple[TurnRequest, Answer | Failure]`: a request whose prompt cannot be rendered, or leaves no room for an
            answer, fails by itself.
        """
        kind = SlotDecoder if self.refill else PaddedDecoder
        decoder = kind(self.target, self.rules, self.batch_size)
        requests: dict[int, TurnRequest] = {}  # by identity of the prompt
        waiting: deque[Prompt] = deque()
        while True:
            if not waiting:
                read: list[Prompt] = []
                while len(read) < WINDOW_BATCHES * self.batch_size and (request := feed.take()) is not None:
                    prompt = self._prompt(request)
                    if isinstance(prompt, Failure):
                        yield request, prompt
                    else:
                        read.append(prompt)
                        requests[id(prompt)] = request
                waiting.extend(sorted(read, key=lambda prompt: len(prompt.ids), reverse=True))
            if not waiting and decoder.is_idle:
                return
            for prompt, token_ids in decoder.advance(waiting):
                yield requests.pop(id(prompt)), self._answer(prompt, token_ids)

    def _prompt(self, request: TurnRequest) -> Prompt | Failure:
        try:
            tools: Any = request.tools
            ids: Any = self.tokenizer.apply_chat_template(
                request.messages,
                tools=tools,
                add_generation_prompt=True,
                return_dict=False,
                **request.chat_template_kwargs,
            )
        except TEMPLATE_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            return Failure(f"The chat template cannot render the messages: {reason}")
        room = self.sampling.max_new_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - len(ids))
        if not ids or room < 1:
            return Failure(
                f"The prompt has {len(ids)} tokens; the target reads at least one, and prompt and answer together may "
                f"have {self.max_length}."
            )
        return Prompt(ids, room, request.seed(self.sampling.seed))

    def _answer(self, prompt: Prompt, token_ids: list[int]) -> Answer:
        """
        The answer as a message.

        Special tokens inside the text stay in it (calls of tools are written with them), so that the template gives
        the same tokens when the conversation is rendered again.
        """
        has_end = token_ids[-1] in self.rules.end_ids
        text = self.tokenizer.decode(token_ids[:-1] if has_end else token_ids, clean_up_tokenization_spaces=False)
        return Answer(
            {"role": "assistant", "content": text},
            "stop" if has_end else "length",
            prompt_ids=prompt.ids,
            token_ids=token_ids,
        )
