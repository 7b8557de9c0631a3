"""A conversation with a target and its draft: what is said, which tokens the draft got right, and how fast it went."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..data.chat_template import chat_inputs
from ..data.detokenize import IncrementalDetokenizer
from ..decoding.generate import speculative_generate
from ..decoding.loop import VerifyPass
from ..model.configuration_dflash import describe_target
from ..model.modeling_dflash import DFlashDraftModel

WARM_UP_TOKENS = 24
WARM_UP_S = 5.0  # a slow target measures fewer tokens


@dataclass(frozen=True)
class Span:
    """
    A piece of an answer.

    Args:
        text (`str`): not empty.
        is_drafted (`bool`): the draft proposed every token of it, and the target accepted them.
    """

    text: str
    is_drafted: bool


class TokenText:
    """
    Text of tokens that come one after another.

    Bytes that are not a whole character yet are held back. Each step decodes the last few tokens alone, so the cost of
    a token does not grow with the text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): of the target. Special tokens have no text.

    Attributes:
        text (`str`): everything given so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text = ""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
        self._held: list[bool] = []  # for each token whose text is held back: whether it was drafted

    def put(self, token_ids: Iterable[int], num_drafted: int = 0) -> list[Span]:
        """
        Add tokens.

        Args:
            token_ids (`Iterable[int]`): in their order.
            num_drafted (`int`): how many, from the first on, the draft proposed.

        Returns:
            `list[Span]`: the characters that are complete now; neighbours differ in `is_drafted`.
        """
        spans: list[Span] = []
        for index, token_id in enumerate(token_ids):
            piece = self._detokenizer.put(token_id)
            if piece:
                held = [*self._held, index < num_drafted]
                self._give(spans, piece, all(held))
                self._held = held[len(held) - self._detokenizer.num_pending :]
            elif self._detokenizer.num_pending > len(self._held):
                self._held.append(index < num_drafted)
        return spans

    def end(self) -> list[Span]:
        """Return the characters that were held back and will not be completed."""
        spans: list[Span] = []
        if piece := self._detokenizer.end():
            self._give(spans, piece, all(self._held))
        return spans

    def _give(self, spans: list[Span], text: str, is_drafted: bool) -> None:
        self.text += text
        if spans and spans[-1].is_drafted == is_drafted:
            text = spans.pop().text + text
        spans.append(Span(text, is_drafted))


@dataclass
class Answer:
    """
    One answer, while it is written and after.

    Args:
        is_plain (`bool`): written without the draft.
        token_ids (`list[int]`): new tokens, the end token included.
        committed (`list[int]`): tokens of each pass of the target, that of the prompt included.
        is_stopped (`bool`): the user stopped it.
        start, first, last (`float`): clock in seconds at the call, after the prompt's pass and after the latest one.
    """

    is_plain: bool
    token_ids: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    is_stopped: bool = False
    start: float = field(default_factory=time.perf_counter)
    first: float = float("nan")
    last: float = float("nan")

    def record(self, token_ids: list[int]) -> None:
        """Add what a pass committed."""
        self.last = time.perf_counter()
        if not self.committed:
            self.first = self.last
        self.token_ids += token_ids
        self.committed.append(len(token_ids))


@dataclass
class Speed:
    """
    Decoding of one or more answers, each counted from its first token on, so that reading the prompts is left out.

    Args:
        num_tokens (`int`): tokens after the first one of each answer.
        num_passes (`int`): passes of the target that gave them.
        seconds (`float`): wall time of it.
    """

    num_tokens: int = 0
    num_passes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, answer: Answer) -> Speed:
        """Of one answer; zero before its second pass."""
        if len(answer.committed) < 2:
            return cls()
        return cls(sum(answer.committed[1:]), len(answer.committed) - 1, answer.last - answer.first)

    def __add__(self, other: Speed) -> Speed:
        return Speed(
            self.num_tokens + other.num_tokens, self.num_passes + other.num_passes, self.seconds + other.seconds
        )

    @property
    def tokens_per_s(self) -> float | None:
        """`float`, *optional*: `None` if nothing was measured."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None

    @property
    def accept_len(self) -> float | None:
        """`float`, *optional*: tokens a pass of the target, a pass that verified no draft included; `None` if none."""
        return self.num_tokens / self.num_passes if self.num_passes else None


class _StopWhenAsked(StoppingCriteria):
    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self.is_asked = is_asked

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        asked: Any = torch.full((len(input_ids),), self.is_asked(), device=input_ids.device)
        return asked


class _TokenStreamer(BaseStreamer):
    """Hands the tokens of plain generation on as they come, without the prompt."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self.on_tokens = on_tokens
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.on_tokens(value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


def never() -> bool:
    """Nobody stops an answer."""
    return False


class ChatSession:
    """
    A conversation, answered with the draft or without it.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]), tokenizer (`PreTrainedTokenizerBase`): the pair.
        system (`str`, *optional*): system message.
        block_size (`int` or `"auto"`, *optional*): slots to verify; see [`speculative_generate`].
        is_plain (`bool`, defaults to `False`): answer without the draft; may be changed at any time.
        **generate_kwargs: for `generate`, `max_new_tokens` among them.

    Attributes:
        messages (`list[dict]`): what was said, with `role` and `content`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        block_size: int | str | None = None,
        is_plain: bool = False,
        max_new_tokens: int = 512,
        **generate_kwargs: Any,
    ) -> None:
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.system, self.block_size, self.is_plain = system, block_size, is_plain
        self.max_new_tokens = max_new_tokens
        self.generate_kwargs = {"pad_token_id": tokenizer.pad_token_id, **generate_kwargs}
        self.warm_up_speed, self.plain_speed, self.drafted_speed = Speed(), Speed(), Speed()
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; what was measured stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._cache: Any = None

    def warm_up(self) -> None:
        """
        Run both ways of decoding once, and measure the plain one for a first comparison.

        Its steps are all alike, so the median one counts for each: what else runs on the machine in these few seconds
        must not make the draft look better than it is.
        """
        inputs = chat_inputs(self.tokenizer, "Hello", self.target.device, self.draft.config.chat_template_kwargs)
        length = {"max_new_tokens": WARM_UP_TOKENS, "min_new_tokens": WARM_UP_TOKENS, "max_time": WARM_UP_S}
        times: list[float] = []
        self._generate(inputs, False, lambda _: None, **length)
        self._generate(inputs, True, lambda _: times.append(time.perf_counter()), **length)
        self._cache = None
        steps = [after - before for before, after in itertools.pairwise(times)]
        if steps:
            self.warm_up_speed = Speed(len(steps), len(steps), len(steps) * statistics.median(steps))

    def answer(
        self,
        question: str,
        show: Callable[[Answer, list[Span]], None],
        is_stopped: Callable[[], bool] = never,
    ) -> Answer:
        """
        Answer the user, and add both to the conversation.

        Args:
            question (`str`): what the user says.
            show (`Callable`): called with the answer so far and its new pieces, after every pass of the target.
            is_stopped (`Callable`): asked after every pass; `True` ends the answer, and what there is of it stays.

        Returns:
            [`Answer`]

        Raises:
            ValueError: the conversation is longer than the target's context, or its chat template refuses it. Nothing
                is added to the conversation then.
            KeyboardInterrupt: raised meanwhile; what there is of the answer stays.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        inputs = chat_inputs(self.tokenizer, messages, self.target.device, self.draft.config.chat_template_kwargs)
        room = self._room(inputs["input_ids"].shape[1])
        answer, text = Answer(self.is_plain), TokenText(self.tokenizer)

        def on_pass(verify_pass: VerifyPass) -> None:
            (token_ids,), (num_drafted,) = verify_pass.token_ids, verify_pass.num_drafted
            answer.record(token_ids)
            show(answer, text.put(token_ids, num_drafted))

        try:
            self._generate(
                inputs,
                answer.is_plain,
                on_pass,
                max_new_tokens=min(self.max_new_tokens, room),
                stopping_criteria=StoppingCriteriaList([_StopWhenAsked(is_stopped)]),
            )
            answer.is_stopped = is_stopped()
        except KeyboardInterrupt:
            answer.is_stopped = True
            raise
        finally:
            if answer.token_ids:
                rest = text.end()
                self.messages = [*messages, {"role": "assistant", "content": text.text}]
                if answer.is_plain:
                    self.plain_speed += Speed.of(answer)
                else:
                    self.drafted_speed += Speed.of(answer)
                show(answer, rest)
        return answer

    def _room(self, num_tokens: int) -> int:
        """How many tokens an answer can have before the target's context is full."""
        longest = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if longest is None:
            return self.max_new_tokens
        if num_tokens >= longest:
            raise ValueError(
                f"The conversation has {num_tokens} tokens with this line, and {describe_target(self.target)} reads "
                f"fewer than {longest}. Say it shorter, or start afresh with /reset."
            )
        return longest - num_tokens

    def _generate(
        self, inputs: dict[str, torch.Tensor], is_plain: bool, on_pass: Callable[[VerifyPass], None], **kwargs: Any
    ) -> None:
        kwargs = {**inputs, **self.generate_kwargs, **kwargs}
        if is_plain:
            streamer = _TokenStreamer(lambda token_ids: on_pass(VerifyPass([token_ids], [0], [0])))
            generate: Any = self.target.generate  # a mixin's method, which type checkers do not see
            generate(**kwargs, streamer=streamer)
            return
        # A call that is cut short leaves the cache in no known state, so it is put down only after the call.
        cache, self._cache = self._cache, None
        if cache is not None:
            kwargs["cache"] = cache
        output = speculative_generate(self.target, self.draft, block_size=self.block_size, on_pass=on_pass, **kwargs)
        self._cache = output.cache

    def plain_tokens_per_s(self) -> tuple[float, str] | None:
        """Measured speed of plain decoding, and over which tokens: the warm-up until plain answers have as many."""
        speed, source = self.plain_speed, "tokens of plain answers"
        if speed.num_tokens < self.warm_up_speed.num_tokens:
            speed, source = self.warm_up_speed, "warm-up tokens"
        if speed.tokens_per_s is None:
            return None
        return speed.tokens_per_s, f"{speed.num_tokens} {source}"

    def describe_speed(self, speed: Speed, is_plain: bool) -> str:
        """
        Tokens a second, acceptance length and speed-up in one line. What was not measured is a dash.

        Args:
            speed ([`Speed`]): of an answer, or of several.
            is_plain (`bool`): they were written without the draft.

        Returns:
            `str`
        """
        rate = f"{_number(speed.tokens_per_s, '.1f')} tokens/s"
        if is_plain:
            return f"{rate} · plain decoding"
        accept_len = f"acceptance length {_number(speed.accept_len, '.2f')} of {self.draft.config.block_size}"
        plain = self.plain_tokens_per_s()
        if plain is None:
            return f"{rate} · {accept_len} · speed-up — (plain decoding is not measured)"
        ratio = None if speed.tokens_per_s is None else speed.tokens_per_s / plain[0]
        return f"{rate} · {accept_len} · {_number(ratio, '.2f')}× plain ({plain[0]:.1f} tokens/s over {plain[1]})"

    def describe_answer(self, answer: Answer) -> str:
        """The line of [`~ChatSession.describe_speed`] for one answer, with its length."""
        stopped = " · stopped" if answer.is_stopped else ""
        tokens = f"{len(answer.token_ids)} tokens"
        return f"{tokens} · {self.describe_speed(Speed.of(answer), answer.is_plain)}{stopped}"

    def describe_all(self) -> list[str]:
        """Lines on all that was answered and measured so far, in this conversation and those before."""
        kinds = (("draft", self.drafted_speed), ("plain", self.plain_speed), ("warm-up", self.warm_up_speed))
        lines = []
        for name, speed in kinds:
            line = self.describe_speed(speed, is_plain=name != "draft")
            lines.append(f"{name}: {speed.num_tokens} tokens in {speed.seconds:.1f} s · {line}")
        return [*lines, "Counted and timed from the second token of each answer on: reading the prompt is left out."]


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)
