"""The local generation backend: completions by a model in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.utils import logging

from ..data.chat_template import ChatRenderer, ChatTemplateError
from ..decoding.stopping_criteria import NO_TOKEN
from ..model.configuration_dflash import describe_target
from ..target.hidden_states import unwrap_peft
from ..target.learned_positions import context_length
from ..target.rotary import length_dependent_angles
from ..target.token_ids import check_prompt_ids
from .continuous_batching import ContinuousBatcher, continuous_batching_obstacle
from .defaults import BATCH_SIZE
from .requests import Completion, Failure, RequestQueue, SamplingParameters, TurnRequest
from .sampling import Prompt, RandomNumbers, SampledTokens, TokenSelection

logger = logging.get_logger(__name__)

WINDOW_BATCHES = 4  # this many batches of requests are read ahead and sorted by length


class _StopStringsAfterPadding(StoppingCriteria):
    """Look for stop strings in a batch, and not in the padding before its prompts."""

    def __init__(self, criterion: StopStringCriteria, padding_lengths: torch.Tensor) -> None:
        self.criterion, self.padding_lengths = criterion, padding_lengths

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        text: Any = input_ids.masked_fill(columns < self.padding_lengths[:, None], NO_TOKEN)
        ends: Any = self.criterion(text, scores)
        return ends


class StaticBatcher:
    """
    Decode batches of prompts by `target.generate`; each batch takes as long as its longest completion.

    Args:
        target (`PreTrainedModel`): in evaluation mode.
        selection ([`TokenSelection`]): selects the tokens.
        batch_size (`int`): the number of prompts of a batch.
    """

    is_idle = True  # no completion is in progress between two batches

    def __init__(self, target: PreTrainedModel, selection: TokenSelection, batch_size: int) -> None:
        self.target, self.selection = target, selection
        # A processor that reads the tokens so far would read the padding, too.
        self.batch_size = 1 if selection.num_prefix_processors else batch_size

    def advance(self, waiting: deque[Prompt]) -> list[tuple[Prompt, list[int]]]:
        """
        Decode the next batch.

        Args:
            waiting (`deque[Prompt]`): prompts are taken from its left; neighbours should have similar lengths.

        Returns:
            `list[tuple[Prompt, list[int]]]`: the completions, including their end tokens.
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
        padding_lengths = [longest - len(prompt.ids) for prompt in prompts]
        device = self.target.device
        input_ids = torch.tensor(
            [[0] * padding + prompt.ids for padding, prompt in zip(padding_lengths, prompts, strict=True)],
            device=device,
        )
        mask = torch.arange(longest, device=device) >= torch.tensor(padding_lengths, device=device)[:, None]
        kwargs = dict(self.selection.generate_kwargs)
        if self.selection.do_sample:
            numbers = [RandomNumbers(prompt.seed) for prompt in prompts]
            sampled = SampledTokens(self.selection.sampling_processors, numbers)
            kwargs |= {"do_sample": False, "logits_processor": LogitsProcessorList([sampled])}
        if self.selection.stop_strings is not None:
            criterion = _StopStringsAfterPadding(
                self.selection.stop_strings, torch.tensor(padding_lengths, device=device)
            )
            kwargs["stopping_criteria"] = StoppingCriteriaList([criterion])
        generate: Any = self.target.generate  # type checkers do not see this method of a mixin
        output = generate(
            input_ids,
            attention_mask=mask.long(),
            max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
            **kwargs,
        )
        return [
            (prompt, self._up_to_end(prompt, token_ids[: prompt.max_new_tokens]))
            for prompt, token_ids in zip(prompts, output[:, longest:].tolist(), strict=True)
        ]

    def _up_to_end(self, prompt: Prompt, token_ids: list[int]) -> list[int]:
        end = self.selection.end_of(prompt.ids, token_ids)
        return token_ids if end is None else token_ids[: end + 1]


class LocalBackend:
    """
    Generate completions with a target in this process; a [`GenerationBackend`].

    Completions are yielded as they end. In fp32 a greedy completion equals that of `target.generate` for the prompt
    alone, and a sampled one depends on its own seed only, not on the batch or the order. In 16-bit dtypes the batch
    may decide between tokens of nearly equal logits.

    Args:
        target (`PreTrainedModel`):
            The causal language model, on its device and in evaluation mode. It is not changed.
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer, with a chat template.
        sampling ([`SamplingParameters`]):
            Parameters of all completions.
        batch_size (`int`, defaults to 64):
            The maximum number of completions in progress. It is halved when an accelerator runs out of memory.
        continuous_batching (`bool`, *optional*):
            Whether the next prompt takes the place of a completion as soon as that ends. False decodes batches by
            `target.generate`, each of which takes as long as its longest completion. By default True for targets
            whose layers all have full or sliding-window attention, with the SDPA or eager implementation.
        stop_strings (`Sequence[str]`, defaults to none):
            Strings that end a completion, beside those of the target's generation config.

    Raises:
        ValueError: the batch size is not positive; the tokenizer has no chat template; the target is wrapped in prompt
            learning; its generation config asks for more than greedy decoding or sampling; or
            `continuous_batching=True` is not possible.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParameters,
        *,
        batch_size: int = BATCH_SIZE,
        continuous_batching: bool | None = None,
        stop_strings: Sequence[str] = (),
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1. Pass a larger number.")
        if not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template, which is needed to render messages. "
                "Set tokenizer.chat_template, or use the tokenizer of a chat model."
            )
        target = unwrap_peft(target)
        self.target, self.tokenizer, self.sampling, self.batch_size = target, tokenizer, sampling, batch_size
        self.selection = TokenSelection(target, tokenizer, sampling, stop_strings)
        obstacle = continuous_batching_obstacle(target, self.selection)
        if continuous_batching and obstacle:
            raise ValueError(
                f"continuous_batching=True is not possible for the target {describe_target(target)}, because "
                f"{obstacle}. Leave the argument out."
            )
        if continuous_batching is None and obstacle:
            logger.warning(
                f"The target {describe_target(target)} is decoded in static batches, each of which takes as long as "
                f"its longest completion, because {obstacle}."
            )
        self.continuous_batching = obstacle is None if continuous_batching is None else continuous_batching
        self.max_length = context_length(target)
        angles = length_dependent_angles(target.config)
        if angles is not None:  # a longer text would change the angles of all texts of its batch
            self.max_length = min(angles[1], self.max_length or angles[1])

    def completions(self, requests: RequestQueue) -> Generator[tuple[TurnRequest, Completion | Failure]]:
        """
        Yield the outcome of every request; see [`GenerationBackend.completions`].

        Args:
            requests ([`RequestQueue`]): read ahead by a few batches, which are sorted by length.

        Yields:
            `tuple[TurnRequest, Completion | Failure]`: a request fails if its prompt cannot be rendered, has a token
            without a row in the target's embedding, or leaves no room for a completion.
        """
        kind = ContinuousBatcher if self.continuous_batching else StaticBatcher
        batcher = kind(self.target, self.selection, self.batch_size)
        request_of: dict[int, TurnRequest] = {}  # by the identity of the prompt
        waiting: deque[Prompt] = deque()
        while True:
            if not waiting:
                read: list[Prompt] = []
                while len(read) < WINDOW_BATCHES * self.batch_size and (request := requests.take()) is not None:
                    prompt = self._prompt(request)
                    if isinstance(prompt, Failure):
                        yield request, prompt
                    else:
                        read.append(prompt)
                        request_of[id(prompt)] = request
                waiting.extend(sorted(read, key=lambda prompt: len(prompt.ids), reverse=True))
            if not waiting and batcher.is_idle:
                return
            for prompt, token_ids in batcher.advance(waiting):
                yield request_of.pop(id(prompt)), self._completion(prompt, token_ids)

    def _prompt(self, request: TurnRequest) -> Prompt | Failure:
        try:
            renderer = ChatRenderer(self.tokenizer, request.tools, request.chat_template_kwargs)
            ids = renderer.prompt_ids(request.messages) if request.prompt_ids is None else request.prompt_ids
        except ChatTemplateError as error:
            return Failure(str(error))
        try:
            check_prompt_ids(self.target, ids, self.tokenizer)
        except ValueError as error:
            return Failure(str(error))
        room = self.sampling.max_new_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - len(ids))
        if not ids or room < 1:
            return Failure(
                f"The prompt has {len(ids)} tokens. It must have at least one, and together with its completion at "
                f"most {self.max_length}."
            )
        return Prompt(ids, room, request.seed(self.sampling.seed))

    def _completion(self, prompt: Prompt, token_ids: list[int]) -> Completion:
        """
        Make the assistant's message.

        Special tokens within the text are kept, because tool calls are written with them, and because the template
        then gives the same tokens when the conversation is rendered again. So is a stop string, as in plain
        generation.
        """
        is_at_end = token_ids[-1] in self.selection.eos_token_ids
        is_stopped = is_at_end or self.selection.end_of(prompt.ids, token_ids) is not None
        text = self.tokenizer.decode(token_ids[:-1] if is_at_end else token_ids, clean_up_tokenization_spaces=False)
        return Completion(
            {"role": "assistant", "content": text},
            "stop" if is_stopped else "length",
            prompt_ids=prompt.ids,
            token_ids=token_ids,
        )
