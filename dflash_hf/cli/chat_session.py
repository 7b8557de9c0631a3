"""A conversation with a target and its draft, with the tokens that the draft proposed and the speed of generation."""

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

from ..blocks.metrics import AcceptanceRecord
from ..data.chat_template import chat_inputs
from ..data.detokenize import IncrementalDetokenizer
from ..decoding.generate import speculative_generate
from ..decoding.generation_settings import ONE_RESPONSE, check_generation_config
from ..decoding.loop import VerifyPass
from ..model.configuration_dflash import describe_target
from ..model.modeling_dflash import DFlashDraftModel
from ..target.hidden_states import unwrap_peft
from ..target.learned_positions import context_length
from ..target.token_ids import check_prompt_ids

WARM_UP_TOKENS = 24
WARM_UP_S = 5.0  # with a slow target the warm-up ends before all its tokens


@dataclass(frozen=True)
class Span:
    """
    A piece of a response.

    Args:
        text (`str`): text of the piece, which is not empty.
        is_drafted (`bool`): the draft proposed every token of the piece, and the target accepted them.
    """

    text: str
    is_drafted: bool


class TokenText:
    """
    Decode tokens incrementally into spans of drafted and other text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer. Special tokens have no text.

    Attributes:
        text (`str`): the text that was returned so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text = ""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
        self._held: list[bool] = []  # for each token whose text is held back: whether it was drafted

    def put(self, token_ids: Iterable[int], num_drafted: int = 0) -> list[Span]:
        """
        Add tokens.

        Args:
            token_ids (`Iterable[int]`): new tokens.
            num_drafted (`int`, defaults to 0): number of leading tokens that the draft proposed.

        Returns:
            `list[Span]`: the characters that are complete now. Adjacent spans differ in `is_drafted`.
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
        """Append text to the spans, and join it with the last span if both are drafted or both are not."""
        self.text += text
        if spans and spans[-1].is_drafted == is_drafted:
            text = spans.pop().text + text
        spans.append(Span(text, is_drafted))


@dataclass
class Response:
    """
    One response, while it is generated and afterwards.

    Args:
        is_plain (`bool`): generated without the draft.
        token_ids (`list[int]`): new tokens, the end token included.
        committed (`list[int]`): tokens that each pass of the target committed, the prefill included.
        verified (`list[int]`): drafted tokens that each pass verified; 0 for a pass without a draft.
        is_stopped (`bool`): the user stopped the generation.
        start, first, last (`float`): clock in seconds at the call, after the prefill and after the latest pass.
    """

    is_plain: bool
    token_ids: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    is_stopped: bool = False
    start: float = field(default_factory=time.perf_counter)
    first: float = float("nan")
    last: float = float("nan")

    def record(self, token_ids: list[int], num_verified: int = 0) -> None:
        """
        Add a pass of the target.

        Args:
            token_ids (`list[int]`): tokens that the pass committed.
            num_verified (`int`, defaults to 0): drafted tokens that it verified.
        """
        self.last = time.perf_counter()
        if not self.committed:
            self.first = self.last
        self.token_ids += token_ids
        self.committed.append(len(token_ids))
        self.verified.append(num_verified)


@dataclass
class Speed:
    """
    Speed and acceptance of one or more responses, each counted from its first token on, without the prefill.

    Args:
        num_tokens (`int`): tokens after the first one of each response.
        seconds (`float`): wall time in which they were generated.
        acceptance ([`AcceptanceRecord`]): the verify passes with a draft.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    acceptance: AcceptanceRecord = field(default_factory=AcceptanceRecord)

    @classmethod
    def of(cls, response: Response) -> Speed:
        """
        Measure one response.

        Args:
            response ([`Response`]): the response.

        Returns:
            [`Speed`]: empty before the second pass of the target.
        """
        if len(response.committed) < 2:
            return cls()
        drafted = [each for each in zip(response.committed, response.verified, strict=True) if each[1]]
        acceptance = AcceptanceRecord.of([each[0] for each in drafted], [each[1] for each in drafted], block_size=1)
        return cls(sum(response.committed[1:]), response.last - response.first, acceptance)

    def __add__(self, other: Speed) -> Speed:
        """Combine two measurements."""
        return Speed(
            self.num_tokens + other.num_tokens, self.seconds + other.seconds, self.acceptance + other.acceptance
        )

    @property
    def tokens_per_s(self) -> float | None:
        """`float` or `None`: tokens per second; `None` if nothing was measured."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None

    @property
    def acceptance_length(self) -> float | None:
        """`float` or `None`: acceptance length; `None` if no pass had a draft."""
        return self.acceptance.acceptance_length


class _StopWhenAsked(StoppingCriteria):
    """Stop when a function says so."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self.is_asked = is_asked

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        asked: Any = torch.full((len(input_ids),), self.is_asked(), device=input_ids.device)
        return asked


class _TokenStreamer(BaseStreamer):
    """Pass the tokens of plain generation on, without the prompt."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self.on_tokens = on_tokens
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Pass new tokens on; the first call has the prompt."""
        if not self._is_prompt:
            self.on_tokens(value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing, since no token is held back."""


def never() -> bool:
    """Never stop a response."""
    return False


class ChatSession:
    """
    A conversation that is answered with the draft or without it.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]), tokenizer (`PreTrainedTokenizerBase`): the pair.
        system (`str`, *optional*): system message.
        block_size (`int` or `"auto"`, *optional*): slots to verify, see [`speculative_generate`].
        is_plain (`bool`, defaults to `False`): answer without the draft. The attribute may be changed at any time.
        max_new_tokens (`int`, defaults to 512): greatest length of a response in tokens.
        **generate_kwargs: further arguments of `generate`.

    Attributes:
        messages (`list[dict]`): the conversation, each message with `role` and `content`.

    Raises:
        ValueError: the target's generation config asks for more than greedy decoding or sampling.
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
        self.generate_kwargs = {**ONE_RESPONSE, "pad_token_id": tokenizer.pad_token_id, **generate_kwargs}
        check_generation_config(unwrap_peft(target), **self.generate_kwargs)
        self.warm_up_speed, self.plain_speed, self.drafted_speed = Speed(), Speed(), Speed()
        self.reset()

    def reset(self) -> None:
        """Start a new conversation. Measurements are kept."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._cache: Any = None

    def warm_up(self) -> None:
        """
        Generate once with the draft and once without it, and measure plain generation as a first baseline.

        All steps of plain generation cost the same, so the baseline is the median step. Otherwise another program that
        uses the machine during the warm-up would increase the speed-up that is shown.
        """
        inputs = chat_inputs(self.tokenizer, "Hello", self.target.device, self.draft.config.chat_template_kwargs)
        length = {"max_new_tokens": WARM_UP_TOKENS, "min_new_tokens": WARM_UP_TOKENS, "max_time": WARM_UP_S}
        times: list[float] = []
        self._generate(inputs, False, lambda _: None, **length)
        self._generate(inputs, True, lambda _: times.append(time.perf_counter()), **length)
        self._cache = None
        steps = [after - before for before, after in itertools.pairwise(times)]
        if steps:
            self.warm_up_speed = Speed(len(steps), len(steps) * statistics.median(steps))

    def answer(
        self,
        question: str,
        show: Callable[[Response, list[Span]], None],
        is_stopped: Callable[[], bool] = never,
    ) -> Response:
        """
        Answer a message, and add message and response to the conversation.

        Args:
            question (`str`): the user message.
            show (`Callable`): called after every pass of the target with the response so far and its new pieces.
            is_stopped (`Callable`, *optional*): called after every pass. `True` ends the response, and its tokens so
                far are kept.

        Returns:
            [`Response`]

        Raises:
            ValueError: the conversation is longer than the target's context, a token has no row in its embedding, or
                the chat template refuses the messages. Nothing is added to the conversation in this case.
            KeyboardInterrupt: raised during generation. The tokens so far are kept.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        inputs = chat_inputs(self.tokenizer, messages, self.target.device, self.draft.config.chat_template_kwargs)
        check_prompt_ids(self.target, inputs["input_ids"], self.tokenizer)
        room = self._room(inputs["input_ids"].shape[1])
        response, text = Response(self.is_plain), TokenText(self.tokenizer)

        def on_pass(verify_pass: VerifyPass) -> None:
            (token_ids,), (num_drafted,) = verify_pass.token_ids, verify_pass.num_drafted
            response.record(token_ids, verify_pass.num_verified)
            show(response, text.put(token_ids, num_drafted))

        try:
            self._generate(
                inputs,
                response.is_plain,
                on_pass,
                max_new_tokens=min(self.max_new_tokens, room),
                stopping_criteria=StoppingCriteriaList([_StopWhenAsked(is_stopped)]),
            )
            response.is_stopped = is_stopped()
        except KeyboardInterrupt:
            response.is_stopped = True
            raise
        finally:
            if response.token_ids:
                rest = text.end()
                self.messages = [*messages, {"role": "assistant", "content": text.text}]
                if response.is_plain:
                    self.plain_speed += Speed.of(response)
                else:
                    self.drafted_speed += Speed.of(response)
                show(response, rest)
        return response

    def _room(self, num_tokens: int) -> int:
        """Return the number of tokens that still fit into the target's context."""
        longest = context_length(self.target)
        if longest is None:
            return self.max_new_tokens
        if num_tokens >= longest:
            raise ValueError(
                f"The conversation has {num_tokens} tokens with this message, and {describe_target(self.target)} "
                f"needs fewer than {longest}. Shorten the message, or start a new conversation with /reset."
            )
        return longest - num_tokens

    def _generate(
        self, inputs: dict[str, torch.Tensor], is_plain: bool, on_pass: Callable[[VerifyPass], None], **kwargs: Any
    ) -> None:
        """Generate with the draft or without it, and call a function after every pass of the target."""
        kwargs = {**inputs, "tokenizer": self.tokenizer, **self.generate_kwargs, **kwargs}
        if is_plain:
            streamer = _TokenStreamer(lambda token_ids: on_pass(VerifyPass([token_ids], [0], [0])))
            generate: Any = self.target.generate  # a mixin's method, which type checkers do not see
            generate(**kwargs, streamer=streamer)
            return
        # An interrupted call leaves the cache in an unknown state, so it is kept only after a complete call.
        cache, self._cache = self._cache, None
        if cache is not None:
            kwargs["cache"] = cache
        output = speculative_generate(self.target, self.draft, block_size=self.block_size, on_pass=on_pass, **kwargs)
        self._cache = output.cache

    def plain_tokens_per_s(self) -> tuple[float, str] | None:
        """Return the tokens per second of plain generation and a description of the tokens that were measured.

        These are the tokens of the warm-up until plain responses have as many.
        """
        speed, source = self.plain_speed, "tokens of plain responses"
        if speed.num_tokens < self.warm_up_speed.num_tokens:
            speed, source = self.warm_up_speed, "warm-up tokens"
        if speed.tokens_per_s is None:
            return None
        return speed.tokens_per_s, f"{speed.num_tokens} {source}"

    def describe_speed(self, speed: Speed, is_plain: bool) -> str:
        """
        Write tokens per second, acceptance length and speed-up in one line, with a dash for what was not measured.

        Args:
            speed ([`Speed`]): speed of one or more responses.
            is_plain (`bool`): they were generated without the draft.

        Returns:
            `str`
        """
        rate = f"{_number(speed.tokens_per_s, '.1f')} tokens/s"
        if is_plain:
            return f"{rate} · plain decoding"
        length = f"acceptance length {_number(speed.acceptance_length, '.2f')} of {self.draft.config.tokens_per_block}"
        plain = self.plain_tokens_per_s()
        if plain is None:
            return f"{rate} · {length} · speed-up — (plain decoding was not measured)"
        ratio = None if speed.tokens_per_s is None else speed.tokens_per_s / plain[0]
        return f"{rate} · {length} · {_number(ratio, '.2f')}× plain ({plain[0]:.1f} tokens/s over {plain[1]})"

    def describe_response(self, response: Response) -> str:
        """Write the length of a response and the line of [`~ChatSession.describe_speed`]."""
        stopped = " · stopped" if response.is_stopped else ""
        tokens = f"{len(response.token_ids)} tokens"
        return f"{tokens} · {self.describe_speed(Speed.of(response), response.is_plain)}{stopped}"

    def describe_all(self) -> list[str]:
        """Write lines about all measurements of this session, earlier conversations included."""
        kinds = (("draft", self.drafted_speed), ("plain", self.plain_speed), ("warm-up", self.warm_up_speed))
        lines = []
        for name, speed in kinds:
            line = self.describe_speed(speed, is_plain=name != "draft")
            lines.append(f"{name}: {speed.num_tokens} tokens in {speed.seconds:.1f} s · {line}")
        return [
            *lines,
            "Tokens and seconds are counted from the second token of each response on, without the prefill.",
        ]


def _number(value: float | None, form: str) -> str:
    """Format a number, or a dash if there is none."""
    return "—" if value is None else format(value, form)
