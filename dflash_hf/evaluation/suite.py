"""Evaluation of a draft on prompt sets: every prompt is answered without and with the draft in every setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat_template import chat_inputs
from ..data.text import short
from ..files import digest_number
from ..model.configuration_dflash import text_tokenizer
from ..model.modeling_dflash import DFlashDraftModel
from ..model.remote_code import local_draft
from ..target.hidden_states import unwrap_peft
from ..target.learned_positions import context_length
from ..target.rotary import length_dependent_angles
from ..target.token_ids import check_prompt_ids
from .prompt_sets import PromptSet
from .response_pairs import ResponsePair, Setting
from .settings import SuiteSettings
from .timed_generation import GenerationProtocol, TimedBatch, generate_batch

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Batch:
    """
    Conversations that are decoded together, turn by turn.

    Args:
        set_name (`str`): name of the prompt set.
        setting ([`Setting`]): how the conversations are decoded.
        number (`int`): index of the batch in its set.
        prompts (`tuple[int, ...]`): indices of the conversations in their set.
        num_turns (`int`): turns of each conversation.
    """

    set_name: str
    setting: Setting
    number: int
    prompts: tuple[int, ...]
    num_turns: int

    def key(self, turn: int) -> tuple[str, Setting, int, int]:
        """Return the [`ResponsePair.key`] of a turn."""
        return self.set_name, self.setting, self.number, turn


class SuiteEvaluation:
    """
    Answer every prompt without and with the draft.

    Both methods are warmed up in each setting, and the one that comes first alternates from pair to pair. Both use the
    whole distribution of the target: its generation config is replaced by one that keeps only its special tokens and
    stop strings. A later turn continues from the plain responses to the turns before it, so that both methods answer
    the same conversation.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]), tokenizer (`PreTrainedTokenizerBase`): the pair.
        sets (`Sequence[PromptSet]`): prompt sets to answer.
        settings ([`SuiteSettings`]): settings to answer them in.

    Attributes:
        left_out (`list[str]`): prompts that are not answered, each with its reason: the target's embedding has no row
            for one of their tokens, or such prompts left a batch without enough others.

    Raises:
        ValueError: the draft does not fit the target, no prompt of a set can be read, the prompts do not fill whole
            batches, a prompt is too long, or a setting is outside the range of this draft.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        tokenizer: PreTrainedTokenizerBase,
        sets: Sequence[PromptSet],
        settings: SuiteSettings,
    ) -> None:
        draft, target = local_draft(draft), unwrap_peft(target)
        draft.check_target(target)
        tokenizer = text_tokenizer(tokenizer)
        self.target, self.draft, self.tokenizer, self.settings = target, draft, tokenizer, settings
        self.sets = {prompt_set.name: prompt_set for prompt_set in sets}
        self.protocol = GenerationProtocol(target, tokenizer)
        self._check_block_size()
        self.thinking = self._thinking_modes()
        self.left_out: list[str] = []
        sets = [self._readable(prompt_set) for prompt_set in sets]
        self.sets = {prompt_set.name: prompt_set for prompt_set in sets}
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
    def notes(self) -> list[str]:
        """`list[str]`: what is not answered, and which entries of the target's generation config are not used."""
        return [*self.left_out, *([] if self.protocol.ignored is None else [self.protocol.ignored])]

    @property
    def num_pairs(self) -> int:
        """`int`: number of response pairs of the whole evaluation."""
        return sum(batch.num_turns for batch in self.batches)

    def share(self, done: Collection[Any], index: int = 0, num_processes: int = 1) -> list[Batch]:
        """
        Return the batches that one of several processes has to decode.

        Args:
            done (`Collection`): keys of the pairs that exist already.
            index (`int`, defaults to 0), num_processes (`int`, defaults to 1): index of the process, and their number.

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
        done: Mapping[Any, ResponsePair] | None = None,
        on_start: Callable[[str], None] | None = None,
    ) -> Iterator[ResponsePair]:
        """
        Decode batches without and with the draft.

        Args:
            batches (`Sequence[Batch]`): some of `batches`.
            done (`Mapping`, *optional*): pairs that exist already, by key. They are not decoded again.
            on_start (`Callable`, *optional*): called before each pair with a short description of it.

        Yields:
            [`ResponsePair`], one for each turn of a batch.
        """
        report = on_start or (lambda description: None)
        known = dict(done or {})
        warm: set[Setting] = set()
        num_pairs = 0
        with self.protocol.override_generation_config():
            for batch in batches:
                description = f"{self.sets[batch.set_name].title}, {batch.setting.label}"
                if batch.setting not in warm:
                    report(f"{description}: warm-up")
                    prompts = self._prompts(batch, 0, known)
                    for draft in (None, self.draft):
                        self._decode(prompts, batch, 0, draft, min(WARM_UP_TOKENS, self.settings.max_new_tokens))
                    warm.add(batch.setting)
                for turn in range(batch.num_turns):
                    if batch.key(turn) not in known:
                        report(description)
                        known[batch.key(turn)] = pair = self._pair(batch, turn, known, num_pairs % 2 == 1)
                        num_pairs += 1
                        yield pair

    def _pair(
        self, batch: Batch, turn: int, known: Mapping[Any, ResponsePair], is_drafted_first: bool
    ) -> ResponsePair:
        """Decode one turn of a batch without and with the draft."""
        prompts = self._prompts(batch, turn, known)
        outputs: dict[bool, TimedBatch] = {}
        for is_drafted in (True, False) if is_drafted_first else (False, True):
            draft = self.draft if is_drafted else None
            outputs[is_drafted] = self._decode(prompts, batch, turn, draft, self.settings.max_new_tokens)
        num_prompt_tokens = [len(prompt) for prompt in prompts]
        plain, drafted = (
            self.protocol.responses(outputs[is_drafted].sequences, max(num_prompt_tokens))
            for is_drafted in (False, True)
        )
        statistics: Any = outputs[True].statistics  # generation with the draft has them
        return ResponsePair(
            set_name=batch.set_name,
            temperature=batch.setting.temperature,
            thinking=batch.setting.thinking,
            batch_size=batch.setting.batch_size,
            batch=batch.number,
            turn=turn,
            prompts=list(batch.prompts),
            first="drafted" if is_drafted_first else "plain",
            num_prompt_tokens=num_prompt_tokens,
            plain_token_ids=plain,
            plain_s=outputs[False].seconds,
            drafted_token_ids=drafted,
            drafted_s=outputs[True].seconds,
            is_truncated=[
                self.protocol.is_truncated(prompt, tokens) for prompt, tokens in zip(prompts, drafted, strict=True)
            ],
            committed=statistics.committed,
            verified=statistics.verified,
            starts=statistics.starts,
        )

    def _decode(
        self, prompts: list[torch.Tensor], batch: Batch, turn: int, draft: DFlashDraftModel | None, max_new_tokens: int
    ) -> TimedBatch:
        """Generate once. The seed depends on the pair alone, so that the order of the pairs does not matter."""
        key = f"{self.settings.seed} {batch.key(turn)}"
        torch.manual_seed(digest_number(key, size=6))
        return generate_batch(
            self.target,
            draft,
            self.protocol.arguments(prompts, batch.setting.temperature, max_new_tokens),
            block_size=self.settings.block_size,
            tree_size=self.settings.tree_size,
        )

    def _prompts(self, batch: Batch, turn: int, known: Mapping[Any, ResponsePair]) -> list[torch.Tensor]:
        """Return the prompts of a turn, which contain the plain responses to the turns before it."""
        prompts = []
        for place, prompt in enumerate(batch.prompts):
            responses = [known[batch.key(earlier)].plain_token_ids[place] for earlier in range(turn)]
            texts = [self._text(token_ids) for token_ids in responses]
            prompts.append(self._prompt(batch.set_name, prompt, texts, batch.setting.thinking))
        return prompts

    def _text(self, token_ids: list[int]) -> str:
        """Decode a response."""
        decoded: Any = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return decoded

    def _prompt(self, set_name: str, prompt: int, responses: Sequence[str], thinking: bool | None) -> torch.Tensor:
        """Return the token ids, of shape `[length]`, of a conversation up to the turn after these responses."""
        turns = self.sets[set_name].conversations[prompt].turns
        messages = list(turns[0])
        for response, turn in zip(responses, turns[1:], strict=False):
            messages += [{"role": "assistant", "content": response}, *turn]
        kwargs = dict(self.draft.config.chat_template_kwargs or {})
        if thinking is not None:
            kwargs["enable_thinking"] = thinking
        return chat_inputs(self.tokenizer, messages, self.target.device, kwargs)["input_ids"][0]

    def _thinking_modes(self) -> tuple[bool | None, ...]:
        """Return the values of `enable_thinking` to measure, or `None` alone if the chat template does not use it."""
        set_name = next(iter(self.sets))
        with_thinking, without = (self._prompt(set_name, 0, [], thinking).tolist() for thinking in (True, False))
        if self.tokenizer.chat_template is not None and with_thinking != without:
            return {"both": (False, True), "on": (True,), "off": (False,)}[self.settings.thinking]
        if self.settings.thinking == "on":
            raise ValueError(
                f"thinking='on', but the chat template of {self.tokenizer.name_or_path!r} renders the same text with "
                "enable_thinking=True and False. Leave the option out."
            )
        return (None,)

    def _readable(self, prompt_set: PromptSet) -> PromptSet:
        """
        Return a prompt set without the conversations that have a token which the target cannot read.

        Where these leave the last batch with too few conversations, the rest of that batch is left out, too.
        """
        kept, shown = [], []
        for number, conversation in enumerate(prompt_set.conversations):
            responses = [""] * (len(conversation.turns) - 1)
            ids = torch.cat([self._prompt(prompt_set.name, number, responses, each) for each in self.thinking])
            text = short(conversation.turns[-1][-1]["content"])
            description = f"Prompt {number + 1} of {prompt_set.name!r}, {text}, is left out: "
            try:
                check_prompt_ids(self.target, ids, self.tokenizer)
                kept.append(conversation)
                shown.append(description)
            except ValueError as error:
                self.left_out.append(f"{description}{error}")
        if not kept:
            raise ValueError(f"No prompt of the set {prompt_set.name!r} can be answered. {self.left_out[-1]}")
        num_prompts, size = len(prompt_set.conversations), math.lcm(*self.settings.batch_sizes)
        whole = len(kept) - len(kept) % size
        if 0 < whole < len(kept) < num_prompts and num_prompts % size == 0:
            self.left_out += [f"{each}its batch of {size} has too few other prompts." for each in shown[whole:]]
            kept = kept[:whole]
        return replace(prompt_set, conversations=tuple(kept))

    def _check_block_size(self) -> None:
        """Refuse numbers of verified tokens that do not fit the draft."""
        size, trained = self.settings.block_size, self.draft.config.tokens_per_block
        tree_size = self.settings.tree_size
        if tree_size is not None and (size is not None or tree_size <= trained):
            raise ValueError(
                f"tree_size={tree_size} must be more than the {trained} slots that the draft was trained for, and "
                f"excludes block_size (here {'trained' if size is None else size}). Pass a larger tree, and no "
                "block_size."
            )
        if size not in (None, "auto") and not (isinstance(size, int) and 1 < size <= trained):
            raise ValueError(
                f"block_size={size!r} must be 2 to {trained}, the slots that the draft was trained for, or 'auto'. "
                "Pass such a number, or leave it out to verify all slots."
            )

    def _check_lengths(self) -> None:
        """Refuse conversations that could become longer than the context of target or draft."""
        longest = {
            "target": context_length(self.target),
            "draft": getattr(self.draft.config, "max_position_embeddings", None),
        }
        known = {name: length for name, length in longest.items() if length is not None}
        if not known:
            return
        member, angles = min(known, key=lambda name: known[name]), length_dependent_angles(self.target.config)
        for name, prompt_set in self.sets.items():
            for number, conversation in enumerate(prompt_set.conversations):
                num_turns = len(conversation.turns)
                for thinking in self.thinking:
                    prompt = len(self._prompt(name, number, ["-"] * (num_turns - 1), thinking))
                    limit, why = known[member], f"the {member} reads at most"
                    if angles is not None and angles[1] < limit and (angles[0] == "dynamic" or prompt <= angles[1]):
                        limit, why = angles[1], f"the target changes its rotary angles ({angles[0]!r}) after"
                    if prompt + num_turns * self.settings.max_new_tokens > limit:
                        raise ValueError(
                            f"Prompt {number + 1} of {name!r} has {prompt} tokens and may get {num_turns} responses "
                            f"of {self.settings.max_new_tokens} tokens, but {why} {limit}. Pass a smaller "
                            "--max-new-tokens, or remove the prompt."
                        )


def _batches(prompt_set: PromptSet, setting: Setting) -> list[Batch]:
    """Divide a prompt set into batches, in its order."""
    size, num_prompts = setting.batch_size, len(prompt_set.conversations)
    num_turns = [len(conversation.turns) for conversation in prompt_set.conversations]
    if num_prompts % size:
        raise ValueError(
            f"The {num_prompts} prompts of {prompt_set.name!r} do not fill whole batches of {size}, and the speed of "
            "a smaller batch would be counted as that of a full one. "
            + (f"Pass --limit {num_prompts - num_prompts % size}." if num_prompts > size else "Pass a smaller batch.")
        )
    if size > 1 and len(set(num_turns)) > 1:
        raise ValueError(
            f"The prompts of {prompt_set.name!r} have {min(num_turns)} to {max(num_turns)} turns, so that batches of "
            f"{size} would become smaller from turn to turn. Pass a batch size of 1, or one file for each number of "
            "turns."
        )
    return [
        Batch(prompt_set.name, setting, first // size, tuple(range(first, first + size)), num_turns[first])
        for first in range(0, num_prompts, size)
    ]
