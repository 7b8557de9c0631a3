"""How the next token of an answer is chosen: transformers' own rules, and draws that no other answer changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria

from ..decoding.logits_processing import PREFIX_FREE, ROW_NUMBERED, STATEFUL
from ..model.configuration_dflash import describe_target
from .requests import Sampling


@dataclass(frozen=True)
class Prompt:
    """
    A text that the target goes on with.

    Args:
        ids (`list[int]`): its tokens, at least one.
        max_new_tokens (`int`): longest answer.
        seed (`int`): of the answer's draws.
    """

    ids: list[int]
    max_new_tokens: int
    seed: int


class Draws:
    """
    The random numbers of one answer, one a token.

    Args:
        seed (`int`): the same seed gives the same numbers on every device.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> float:
        """A number in [0, 1), a multiple of 2⁻³²: its product with a sum of probabilities stays below the sum."""
        return self._random.getrandbits(32) / 2**32


class AnswerRules:
    """
    The rules of `target.generate` for a given sampling.

    Args:
        target (`PreTrainedModel`): its generation config is read at construction.
        tokenizer (`PreTrainedTokenizerBase`): names the end and padding tokens that the target does not name.
        sampling ([`Sampling`]): of the run.

    Raises:
        ValueError: the target's generation config asks for beams, or for an end that is neither a token nor a length;
            or no token ends an answer.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
        self.target = target
        config: Any = target.generation_config
        self.options: dict[str, Any] = {"num_return_sequences": 1, "return_dict_in_generate": False}
        if sampling.temperature is not None:
            self.options |= {"do_sample": sampling.temperature > 0, "num_beams": 1}
        if sampling.temperature:
            self.options["temperature"] = sampling.temperature
        if sampling.temperature != 0:
            self.options |= {
                name: getattr(sampling, name) for name in ("top_p", "top_k") if getattr(sampling, name) is not None
            }
        for name in ("eos_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                self.options[name] = getattr(tokenizer, name)
        prepared = self._prepare([0], sampling.max_new_tokens)
        self.do_sample = prepared["mode"] == GenerationMode.SAMPLE
        self.end_ids = prepared["end_ids"]
        if self.options.get("pad_token_id", 0) is None:
            self.options["pad_token_id"] = next(iter(self.end_ids), 0)
        unknown = prepared["other_criteria"]
        if unknown or prepared["mode"] not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
            raise ValueError(
                f"The generation config of the target {describe_target(target)} asks for "
                f"{', '.join([prepared['mode'].value, *unknown])}; answers are drawn token by token and end with an "
                "end token or a length. Unset that in target.generation_config, or pass a temperature (0 is greedy)."
            )
        processors = prepared["processors"]
        self.tells_rows_apart = any(isinstance(processor, (*STATEFUL, *ROW_NUMBERED)) for processor in processors)
        of_text = [index for index, processor in enumerate(processors) if type(processor) not in PREFIX_FREE]
        self.num_of_text = max(of_text, default=-1) + 1
        self.of_scores = LogitsProcessorList(processors[self.num_of_text :])
        num_greedy = len(self._prepare([0], sampling.max_new_tokens, do_sample=False)["processors"])
        self.warpers = LogitsProcessorList(processors[num_greedy:])

    def of_text(self, prompt: Prompt) -> LogitsProcessorList:
        """Logits processors that look at the text, or come before one that does; they may depend on the prompt."""
        if not self.num_of_text:
            return LogitsProcessorList()
        return LogitsProcessorList(self._prepare(prompt.ids, prompt.max_new_tokens)["processors"][: self.num_of_text])

    def _prepare(self, ids: list[int], max_new_tokens: int, **options: Any) -> dict[str, Any]:
        """What `generate` would decode this prompt with."""
        prepared: dict[str, Any] = {}

        def keep(
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
            prepared["end_ids"] = sorted({int(token) for item in ends for token in item.eos_token_id.flatten()})
            prepared["other_criteria"] = [type(item).__name__ for item in criteria if item not in ends]
            prepared["mode"] = generation_config.get_generation_mode()
            return input_ids

        generate: Any = self.target.generate  # a mixin's method, which type checkers do not see
        input_ids = torch.tensor([ids], device=self.target.device)
        generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            custom_generate=keep,
            max_new_tokens=max_new_tokens,
            **self.options | options,
        )
        return prepared


def draw(scores: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """
    Draw a token for each row: the one at which the summed probabilities first exceed the row's number.

    Args:
        scores (`torch.FloatTensor` of shape `[rows, vocabulary]`): processed logits.
        numbers (`Sequence[float]`): one a row, in [0, 1).

    Returns:
        `torch.LongTensor` of shape `[rows]`.

    Example:
        >>> import torch
        >>> draw(torch.tensor([[0.5, 0.25, 0.25]] * 3).log(), [0.0, 0.5, 0.75]).tolist()
        [0, 1, 2]
    """
    sums = scores.softmax(dim=-1, dtype=torch.float32).double().cumsum(dim=-1)
    points = torch.tensor(numbers, dtype=torch.float64, device=scores.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True)[:, 0]


class DrawnToken(LogitsProcessor):
    """
    Make greedy generation choose drawn tokens, so that every row of a batch draws from its own numbers.

    Args:
        warpers (`LogitsProcessorList`): what sampling applies to the scores beyond what greedy generation does.
        draws (`Sequence[Draws]`): one a row.
    """

    def __init__(self, warpers: LogitsProcessorList, draws: Sequence[Draws]) -> None:
        self.warpers, self.draws = warpers, draws

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens = draw(self.warpers(input_ids, scores), [draws.next() for draws in self.draws])
        chosen = torch.full_like(scores, float("-inf"))
        return chosen.scatter_(1, tokens[:, None], 0.0)  # type: ignore[return-value]  # a FloatTensor it is
