"""What a target is asked to answer, and what comes back: the meeting point of prompts and engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..files import digest_number


@dataclass(frozen=True)
class Sampling:
    """
    How answers are drawn.

    Args:
        max_new_tokens (`int`, defaults to 256):
            Longest answer, in tokens.
        temperature (`float`, *optional*, defaults to 0.0):
            0 is greedy. None leaves it to the target's own generation config (on a server: to the server).
        top_p (`float`, *optional*):
            In (0, 1]. None leaves it to the target's own generation config.
        top_k (`int`, *optional*):
            0 is no limit. None leaves it to the target's own generation config.
        seed (`int`, defaults to 0):
            Of the run; every turn of every conversation draws from a seed of its own.

    Raises:
        ValueError: a value is out of its range.
    """

    max_new_tokens: int = 256
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1.")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1.")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (no limit) or positive.")


@dataclass(frozen=True)
class TurnRequest:
    """
    One answer that the target is asked for.

    Args:
        conversation_id (`str`): of the conversation that the answer belongs to.
        messages (`list[dict]`): the conversation so far; the last message is not the assistant's.
        turn (`int`, defaults to 0): number of the answer within its conversation.
        tools (`list[dict]`, *optional*): reach the chat template.
        chat_template_kwargs (`Mapping`): reach the chat template.
    """

    conversation_id: str
    messages: list[dict[str, Any]]
    turn: int = 0
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def seed(self, seed: int) -> int:
        """A seed (32 bits) of this answer alone, made of the run's: the same in any order, batch and rerun."""
        text = f"{seed} {self.turn} {self.conversation_id}"
        return digest_number(text, size=4)


@dataclass(frozen=True)
class Answer:
    """
    What the target wrote.

    Args:
        message (`dict`):
            The assistant's message: `role`, `content`, and what else a server tells apart (`reasoning_content`,
            `tool_calls`). Without the token that ends the turn.
        finish_reason (`str`):
            `"stop"`: the answer ended by itself (`"tool_calls"` of a server counts as this). `"length"`: it was cut.
        prompt_ids (`list[int]`, *optional*):
            What the target read, as it was rendered and tokenised. None if a server does not tell.
        token_ids (`list[int]`, *optional*):
            What the target wrote, the token that ends the turn included. None if a server does not tell.
        num_tokens (`int`, *optional*):
            How many tokens the target wrote, where a server tells the number alone.
    """

    message: dict[str, Any]
    finish_reason: Literal["stop", "length"]
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class Failure:
    """An answer that could not be had, and why (one line)."""

    reason: str


class RequestFeed:
    """
    Requests that no engine has taken yet. What is put back (the next turn of a conversation) is taken first.

    Args:
        requests (`Iterable[TurnRequest]`): read only as far as requests are taken.
    """

    def __init__(self, requests: Iterable[TurnRequest]) -> None:
        self._requests = iter(requests)
        self._put_back: deque[TurnRequest] = deque()

    def put(self, request: TurnRequest) -> None:
        """Add a request, to be taken before all that have not been read."""
        self._put_back.append(request)

    def take(self) -> TurnRequest | None:
        """The next request, or None: at present there is no further one."""
        return self._put_back.popleft() if self._put_back else next(self._requests, None)


class AnswerEngine(Protocol):
    """Whatever answers: transformers in this process, or a server."""

    def answers(self, feed: RequestFeed) -> Generator[tuple[TurnRequest, Answer | Failure]]:
        """
        Answer requests in any order, until the feed is empty and every answer has been yielded.

        The caller may put further requests into the feed before it asks for the next answer: look into the feed again
        after every yield. Closing the iterator abandons what is under way.
        """
        ...
