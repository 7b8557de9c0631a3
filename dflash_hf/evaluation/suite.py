"""Answer the prompts of a suite without and with a draft, in turn, in every setting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat_template import chat_inputs
from ..decoding.generate import speculative_generate
from ..files import digest_number
from ..model.modeling_dflash import DFlashDraftModel
from .compare import PairDecoding, timed
from .prompt_sets import PromptSet
from .results import AnswerPair, Setting
from .settings import SuiteSettings

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Batch:
    """
    Conversations that are decoded together, turn by turn.

    Args:
        set_name (`str`), setting ([`Setting`]): of what, and how.
        number (`int`): which batch of the set.
        prompts (`tuple[int, ...]`): numbers of the conversations.
        num_turns (`int`): of each of them.
    """

    set_name: str
    setting: Setting
    number: int
    prompts: tuple[int, ...]
    num_turns: int

    def key(self, turn: int) -> tuple[str, Setting, int, int]:
        """[`AnswerPair.key`] of a turn."""
        return self.set_name, self.setting, self.number, turn


class SuiteEvaluation:
    """
    Answer every prompt without and with the draft.

    Both are warmed up in each setting; which of the two begins changes from batch to batch. All draw from the whole
    distribution of the target: its own settings for generation, apart from its special tokens, are set aside. A later
    turn goes on from the plain answers to the turns before it, so that both answer the same conversation.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]), tokenizer (`PreTrainedTokenizerBase`): the pair.
        sets (`Sequence[PromptSet]`): what to ask.
        settings ([`SuiteSettings`]): how.

    Raises:
        ValueError: the pair does not fit, the prompts make no whole batches, a prompt is too long, or a setting is
            none of this pair.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        tokenizer: PreTrainedTokenizerBase,
        sets: Sequence[PromptSet],
        settings: SuiteSettings,
    ) -> None:
        draft.check_target(target)
        self.target, self.draft, self.tokenizer, self.settings = target, draft, tokenizer, settings
        self.sets = {prompt_set.name: prompt_set for prompt_set in sets}
        self.decoding = PairDecoding(target, tokenizer)
        self._check_block_size()
        self.thinking = self._thinking_modes()
        self.batches = [
            batch
            for temperature in settings.temperatures
            for thinking in self.thinking
            for batch_size in settings.batch_sizes
            for prompt_set in sets
            for batch in _batches(prompt_set, Setting(temperature, thinking, batch_size))
        ]
        self._check_lengths()

    @property
    def num_pairs(self) -> int:
        """`int`: pairs of answers in all."""
        return sum(batch.num_turns for batch in self.batches)

    def share(self, done: Collection[Any], index: int = 0, num_processes: int = 1) -> list[Batch]:
        """
        What one of several processes has to do.

        Args:
            done (`Collection`): keys of the pairs that are there.
            index (`int`), num_processes (`int`): of the process.

        Returns:
            `list[Batch]`: every `num_processes`-th of the batches that lack a turn.
        """
        missing = [
            batch for batch in self.batches if any(batch.key(turn) not in done for turn in range(batch.num_turns))
        ]
        return missing[index::num_processes]

    def run(
        self,
        batches: Sequence[Batch],
        done: Mapping[Any, AnswerPair] | None = None,
        on_start: Callable[[str], None] | None = None,
    ) -> Iterator[AnswerPair]:
        """
        Measure.

        Args:
            batches (`Sequence[Batch]`): some of `batches`.
            done (`Mapping`, *optional*): pairs that are there, by key: they are passed over.
            on_start (`Callable`, *optional*): called with a few words before each pair.

        Yields:
            [`AnswerPair`], one a turn of a batch.
        """
        say = on_start or (lambda words: None)
        known = dict(done or {})
        warm: set[Setting] = set()
        num_pairs = 0
        with self.decoding.own_settings_aside():
            for batch in batches:
                place = f"{self.sets[batch.set_name].title}, {batch.setting.label}"
                if batch.setting not in warm:
                    say(f"{place}: warm-up")
                    rows = self._rows(batch, 0, known)
                    for draft in (None, self.draft):
                        self._decode(rows, batch, 0, draft, min(WARM_UP_TOKENS, self.settings.max_new_tokens))
                    warm.add(batch.setting)
                for turn in range(batch.num_turns):
                    if batch.key(turn) not in known:
                        say(place)
                        known[batch.key(turn)] = pair = self._pair(batch, turn, known, num_pairs % 2 == 1)
                        num_pairs += 1
                        yield pair

    def _pair(self, batch: Batch, turn: int, known: Mapping[Any, AnswerPair], is_drafted_first: bool) -> AnswerPair:
        rows = self._rows(batch, turn, known)
        results: dict[bool, Any] = {}
        for is_drafted in (True, False) if is_drafted_first else (False, True):
            draft = self.draft if is_drafted else None
            results[is_drafted] = self._decode(rows, batch, turn, draft, self.settings.max_new_tokens)
        (plain, plain_s, _), (drafted, drafted_s, statistics) = results[False], results[True]
        return AnswerPair(
            set_name=batch.set_name,
            temperature=batch.setting.temperature,
            thinking=batch.setting.thinking,
            batch_size=batch.setting.batch_size,
            batch=batch.number,
            turn=turn,
            prompts=list(batch.prompts),
            first="drafted" if is_drafted_first else "plain",
            num_prompt_tokens=[len(row) for row in rows],
            plain_token_ids=plain,
            plain_s=plain_s,
            drafted_token_ids=drafted,
            drafted_s=drafted_s,
            is_cut=[row[-1] not in self.decoding.end_token_ids for row in drafted],
            committed=statistics.committed,
            verified=statistics.verified,
            starts=statistics.starts,
        )

    def _decode(
        self, rows: list[torch.Tensor], batch: Batch, turn: int, draft: DFlashDraftModel | None, max_new_tokens: int
    ) -> tuple[list[list[int]], float, Any]:
        """Answers, seconds, and with a draft the statistics. A pair has a seed of its own, whatever ran before it."""
        arguments = self.decoding.arguments(rows, batch.setting.temperature, max_new_tokens)
        words = f"{self.settings.seed} {batch.key(turn)}"
        torch.manual_seed(digest_number(words, size=6))
        generate: Any = self.target.generate  # a mixin's method, which type checkers do not see
        statistics: Any = None
        if draft is None:
            sequences, seconds = timed(self.target.device, lambda: generate(**arguments))
        else:
            output, seconds = timed(
                self.target.device,
                lambda: speculative_generate(
                    self.target,
                    draft,
                    block_size=self.settings.block_size,
                    tree_size=self.settings.tree_size,
                    **arguments,
                ),
            )
            sequences, statistics = output.sequences, output.statistics
        answers = sequences[:, arguments["input_ids"].shape[1] :].tolist()
        return [self.decoding.answer(row) for row in answers], seconds, statistics

    def _rows(self, batch: Batch, turn: int, known: Mapping[Any, AnswerPair]) -> list[torch.Tensor]:
        """Prompts of a turn, with the plain answers to the turns before it."""
        rows = []
        for place, prompt in enumerate(batch.prompts):
            answers = [known[batch.key(earlier)].plain_token_ids[place] for earlier in range(turn)]
            texts = [self._text(token_ids) for token_ids in answers]
            rows.append(self._prompt(batch.set_name, prompt, texts, batch.setting.thinking))
        return rows

    def _text(self, token_ids: list[int]) -> str:
        decoded: Any = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return decoded

    def _prompt(self, set_name: str, prompt: int, answers: Sequence[str], thinking: bool | None) -> torch.Tensor:
        """Ids of the conversation up to the turn after these answers, of shape `[columns]`."""
        turns = self.sets[set_name].conversations[prompt].turns
        messages = list(turns[0])
        for answer, turn in zip(answers, turns[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}, *turn]
        kwargs = dict(self.draft.config.chat_template_kwargs or {})
        if thinking is not None:
            kwargs["enable_thinking"] = thinking
        return chat_inputs(self.tokenizer, messages, self.target.device, kwargs)["input_ids"][0]

    def _thinking_modes(self) -> tuple[bool | None, ...]:
        """Values of `enable_thinking` to measure; `None` alone where the chat template makes no difference of them."""
        set_name = next(iter(self.sets))
        with_thinking, without = (self._prompt(set_name, 0, [], thinking).tolist() for thinking in (True, False))
        if self.tokenizer.chat_template is not None and with_thinking != without:
            return {"both": (False, True), "on": (True,), "off": (False,)}[self.settings.thinking]
        if self.settings.thinking == "on":
            raise ValueError(
                f"thinking='on', but the chat template of {self.tokenizer.name_or_path!r} renders the same text with "
                "enable_thinking=True and False. Leave it out."
            )
        return (None,)

    def _check_block_size(self) -> None:
        size, trained = self.settings.block_size, self.draft.config.block_size
        tree_size = self.settings.tree_size
        if tree_size is not None and (size is not None or tree_size <= trained):
            raise ValueError(
                f"tree_size={tree_size} must be more than the {trained} slots that the draft was trained for, and "
                f"goes without block_size (here {'trained' if size is None else size})."
            )
        if size not in (None, "auto") and not (isinstance(size, int) and 1 < size <= trained):
            raise ValueError(
                f"block_size={size!r} must be 2 to {trained}, the slots that the draft was trained for, or 'auto'."
            )

    def _check_lengths(self) -> None:
        """Refuse conversations that could outgrow target or draft, before anything is decoded."""
        configs = {"target": self.target.config.get_text_config(decoder=True), "draft": self.draft.config}
        longest = {name: getattr(config, "max_position_embeddings", None) for name, config in configs.items()}
        known = {name: length for name, length in longest.items() if length is not None}
        if not known:
            return
        member = min(known, key=lambda name: known[name])
        for name, prompt_set in self.sets.items():
            for number, conversation in enumerate(prompt_set.conversations):
                num_turns = len(conversation.turns)
                for thinking in self.thinking:
                    prompt = len(self._prompt(name, number, ["-"] * (num_turns - 1), thinking))
                    if prompt + num_turns * self.settings.max_new_tokens > known[member]:
                        raise ValueError(
                            f"Prompt {number + 1} of {name!r} has {prompt} tokens and may get {num_turns} answers of "
                            f"{self.settings.max_new_tokens}; the {member} reads at most {known[member]}. Give a "
                            "smaller --max-new-tokens, or leave the prompt out."
                        )


def _batches(prompt_set: PromptSet, setting: Setting) -> list[Batch]:
    """Batches of a set, in its order."""
    size, num_prompts = setting.batch_size, len(prompt_set.conversations)
    num_turns = [len(conversation.turns) for conversation in prompt_set.conversations]
    if num_prompts % size:
        raise ValueError(
            f"The {num_prompts} prompts of {prompt_set.name!r} make no whole batches of {size}: a part of a batch "
            f"would count as a full one. "
            + (f"Pass --limit {num_prompts - num_prompts % size}." if num_prompts > size else "Take a smaller batch.")
        )
    if size > 1 and len(set(num_turns)) > 1:
        raise ValueError(
            f"The prompts of {prompt_set.name!r} have {min(num_turns)} to {max(num_turns)} turns, so that batches of "
            f"{size} would shrink. Give them a batch size of 1, or a file for each number of turns."
        )
    return [
        Batch(prompt_set.name, setting, first // size, tuple(range(first, first + size)), num_turns[first])
        for first in range(0, num_prompts, size)
    ]
