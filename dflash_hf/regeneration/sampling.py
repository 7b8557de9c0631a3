"""
Selection of the next token of a completion.

Logits processors and end tokens are those that `target.generate` would use. Sampling takes its random numbers from one
generator per completion, so that a completion does not depend on the other sequences of its batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from ..decoding.generation_settings import ONE_RESPONSE, SUPPORTED_MODES, check_token_healing
from ..decoding.logits_processing import PREFIX_FREE, SEQUENCE_WISE
from ..decoding.stopping_criteria import stop_string_ends
from ..model.configuration_dflash import describe_target, text_tokenizer
from ..target.token_ids import padding_token_id
from .requests import SamplingParameters


@dataclass(frozen=True)
class Prompt:
    """
    A tokenised prompt.

    Args:
        ids (`list[int]`): its tokens, at least one.
        max_new_tokens (`int`): the maximum length of its completion.
        seed (`int`): for the random numbers of its completion.
    """

    ids: list[int]
    max_new_tokens: int
    seed: int


class RandomNumbers:
    """
    Generate the random numbers of one completion, one for each token.

    Args:
        seed (`int`): the same seed gives the same numbers on every device.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> float:
        """
        Return the next number.

        Returns:
            `float` in [0, 1). It is a multiple of 2⁻³², so that its product with a sum of probabilities stays below
            the sum.
        """
        return self._random.getrandbits(32) / 2**32


class TokenSelection:
    """
    The logits processors and end tokens that `target.generate` uses with given sampling parameters.

    A processor that reads the tokens so far, and every processor before it, must run on one sequence at a time; these
    are the prefix processors. All later processors run on the whole batch.

    Args:
        target (`PreTrainedModel`): its generation config is read once, here.
        tokenizer (`PreTrainedTokenizerBase`): supplies the end and padding tokens that the target does not define.
        sampling ([`SamplingParameters`]): of the run.
        stop_strings (`Sequence[str]`, defaults to none): strings that end a completion, beside those of the generation
            config.

    Attributes:
        generate_kwargs (`dict`): arguments of `target.generate` for these sampling parameters.
        do_sample (`bool`): whether tokens are sampled; otherwise decoding is greedy.
        eos_token_ids (`list[int]`): the tokens that end a completion.
        stop_strings (`StopStringCriteria`, *optional*): the strings that end a completion.
        is_stateful (`bool`): whether a processor keeps a state from token to token, or depends on the batch index.
        num_prefix_processors (`int`): the number of prefix processors.
        processors (`LogitsProcessorList`): those after the prefix processors.
        sampling_processors (`LogitsProcessorList`): those that sampling adds to the ones of greedy decoding.

    Raises:
        ValueError: the target's generation config asks for beam search, for token healing, or for a stopping criterion
            other than an end token, a stop string or a length.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParameters,
        stop_strings: Sequence[str] = (),
    ) -> None:
        self.target = target
        config: Any = target.generation_config
        check_token_healing(config.token_healing)
        self.stop_strings: StopStringCriteria | None = None
        own = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or []
        if strings := [*own, *stop_strings]:
            self.stop_strings = StopStringCriteria(text_tokenizer(tokenizer), strings)
        # The batchers look for stop strings themselves, because a batch has padding that has a text, too.
        self.generate_kwargs: dict[str, Any] = {**ONE_RESPONSE, "stop_strings": None}
        del self.generate_kwargs["num_beams"]  # own sampling may not replace beams silently
        if sampling.temperature is not None:
            self.generate_kwargs |= {"do_sample": sampling.temperature > 0, "num_beams": 1}
        if sampling.temperature:
            self.generate_kwargs["temperature"] = sampling.temperature
        if sampling.temperature != 0:
            self.generate_kwargs |= {
                name: getattr(sampling, name) for name in ("top_p", "top_k") if getattr(sampling, name) is not None
            }
        if config.eos_token_id is None:
            self.generate_kwargs["eos_token_id"] = tokenizer.eos_token_id
        padding = [config.pad_token_id, tokenizer.pad_token_id]
        self.generate_kwargs["pad_token_id"] = padding_token_id(target, padding)
        prepared = self._prepare([0], sampling.max_new_tokens)
        self.do_sample = prepared["do_sample"]
        self.eos_token_ids = prepared["eos_token_ids"]
        unsupported = prepared["other_criteria"]
        if unsupported or prepared["mode"] not in SUPPORTED_MODES:
            raise ValueError(
                f"The generation config of the target {describe_target(target)} asks for "
                f"{', '.join([prepared['mode'].value, *unsupported])}. Completions are decoded greedily or by "
                "sampling, and end with an end token, a stop string or a length. Unset the others in "
                "target.generation_config, or pass a temperature (0 is greedy)."
            )
        processors = prepared["processors"]
        self.is_stateful = any(type(processor) not in SEQUENCE_WISE for processor in processors)
        reading = [index for index, processor in enumerate(processors) if type(processor) not in PREFIX_FREE]
        self.num_prefix_processors = max(reading, default=-1) + 1
        self.processors = LogitsProcessorList(processors[self.num_prefix_processors :])
        num_greedy = len(self._prepare([0], sampling.max_new_tokens, do_sample=False)["processors"])
        self.sampling_processors = LogitsProcessorList(processors[num_greedy:])

    def end_of(self, prompt_ids: list[int], token_ids: list[int]) -> int | None:
        """
        Find the token that ends a completion.

        Args:
            prompt_ids (`list[int]`): the prompt, in which a stop string may begin.
            token_ids (`list[int]`): the completion.

        Returns:
            `int`, *optional*: the index of the first end token or token that completes a stop string.
        """
        is_end = [token in self.eos_token_ids for token in token_ids]
        if self.stop_strings is not None:
            text = torch.tensor(prompt_ids + token_ids)
            is_stop = stop_string_ends(self.stop_strings, text, len(prompt_ids))
            is_end = [end or stop for end, stop in zip(is_end, is_stop, strict=True)]
        return is_end.index(True) if any(is_end) else None

    def prefix_processors(self, prompt: Prompt) -> LogitsProcessorList:
        """
        Make the prefix processors of one sequence; they may depend on its prompt.

        Args:
            prompt ([`Prompt`]): of the sequence.

        Returns:
            `LogitsProcessorList`
        """
        if not self.num_prefix_processors:
            return LogitsProcessorList()
        prepared = self._prepare(prompt.ids, prompt.max_new_tokens)
        return LogitsProcessorList(prepared["processors"][: self.num_prefix_processors])

    def _prepare(self, ids: list[int], max_new_tokens: int, **kwargs: Any) -> dict[str, Any]:
        """Run the preparation of `generate` for a prompt, and return what it would decode with."""
        prepared: dict[str, Any] = {}

        def record(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: Any,
            generation_config: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            criteria = [item for item in stopping_criteria if not isinstance(item, MaxLengthCriteria)]
            ends = [item for item in criteria if isinstance(item, EosTokenCriteria)]
            prepared["processors"] = logits_processor
            prepared["eos_token_ids"] = sorted({int(token) for item in ends for token in item.eos_token_id.flatten()})
            prepared["other_criteria"] = [type(item).__name__ for item in criteria if item not in ends]
            prepared["mode"] = generation_config.get_generation_mode()
            prepared["do_sample"] = bool(generation_config.do_sample)
            return input_ids

        generate: Any = self.target.generate  # type checkers do not see this method of a mixin
        input_ids = torch.tensor([ids], device=self.target.device)
        generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            custom_generate=record,
            max_new_tokens=max_new_tokens,
            **self.generate_kwargs | kwargs,
        )
        return prepared


def sample_tokens(scores: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """
    Sample a token for each sequence by inversion: the first token at which the cumulative probability exceeds the
    sequence's number.

    Args:
        scores (`torch.FloatTensor` of shape `[batch, vocabulary]`): processed logits.
        numbers (`Sequence[float]`): one for each sequence, in [0, 1).

    Returns:
        `torch.LongTensor` of shape `[batch]`.

    Example:
        >>> import torch
        >>> sample_tokens(torch.tensor([[0.5, 0.25, 0.25]] * 3).log(), [0.0, 0.5, 0.75]).tolist()
        [0, 1, 2]
    """
    sums = scores.softmax(dim=-1, dtype=torch.float32).double().cumsum(dim=-1)
    points = torch.tensor(numbers, dtype=torch.float64, device=scores.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True)[:, 0]


class SampledTokens(LogitsProcessor):
    """
    Make greedy generation return sampled tokens, so that every sequence of a batch uses its own random numbers.

    Args:
        processors (`LogitsProcessorList`): those that sampling adds to the ones of greedy decoding.
        numbers (`Sequence[RandomNumbers]`): one for each sequence.
    """

    def __init__(self, processors: LogitsProcessorList, numbers: Sequence[RandomNumbers]) -> None:
        self.processors, self.numbers = processors, numbers

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens = sample_tokens(self.processors(input_ids, scores), [numbers.next() for numbers in self.numbers])
        chosen = torch.full_like(scores, float("-inf"))
        # The stub's return type is narrower than the runtime type.
        return chosen.scatter_(1, tokens[:, None], 0.0)  # type: ignore[return-value]
