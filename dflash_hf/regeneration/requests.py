"""Requests for completions, and the completions: the interface between prompts and generation backends."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..files import digest_number


@dataclass(frozen=True)
class SamplingParameters:
    """
    Parameters with which completions are generated.

    Args:
        max_new_tokens (`int`, defaults to 256):
            The maximum number of tokens of a completion.
        temperature (`float`, *optional*, defaults to 0.0):
            0 is greedy. None uses the target's own generation config, or the server's default.
        top_p (`float`, *optional*):
            In (0, 1]. None uses the target's own generation config, or the server's default.
        top_k (`int`, *optional*):
            0 is no limit. None uses the target's own generation config, or the server's default.
        seed (`int`, defaults to 0):
            The seed of the run, from which every completion derives a seed of its own.

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
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1. Pass a larger number.")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be a finite number of at least 0. Pass 0 for greedy decoding."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1. Pass 1 for no limit.")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0. Pass 0 for no limit.")


@dataclass(frozen=True)
class TurnRequest:
    """
    A request for one completion, which is one assistant turn of a conversation.

    Args:
        conversation_id (`str`): the conversation that the turn belongs to.
        messages (`list[dict]`): the conversation so far; its last message is not the assistant's.
        turn (`int`, defaults to 0): the index of the assistant turn within its conversation.
        tools (`list[dict]`, *optional*): passed to the chat template.
        chat_template_kwargs (`Mapping`): passed to the chat template.
        prompt_ids (`list[int]`, *optional*): the tokens to continue, instead of the rendered messages.
    """

    conversation_id: str
    messages: list[dict[str, Any]]
    turn: int = 0
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] | None = None

    def seed(self, seed: int) -> int:
        """
        Derive the seed of this completion, which does not depend on the order, the batch or the number of runs.

        Args:
            seed (`int`): the seed of the run.

        Returns:
            `int` of 32 bits.
        """
        return digest_number(f"{seed} {self.turn} {self.conversation_id}", size=4)


@dataclass(frozen=True)
class Completion:
    """
    The target's response to a [`TurnRequest`].

    Args:
        message (`dict`):
            The assistant's message with `role` and `content`, without the token that ends the turn. A server may add
            `reasoning_content` and `tool_calls`.
        finish_reason (`str`):
            `"stop"` if the target ended its turn (a server's `"tool_calls"` counts as this), `"length"` if the
            completion was truncated.
        prompt_ids (`list[int]`, *optional*):
            Token ids of the rendered prompt. None if a server does not return them.
        token_ids (`list[int]`, *optional*):
            Token ids of the completion, including the one that ends the turn. None if a server does not return them.
        num_tokens (`int`, *optional*):
            The number of tokens, for servers that return only the number.
    """

    message: dict[str, Any]
    finish_reason: Literal["stop", "length"]
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class Failure:
    """
    The outcome of a request that has no completion.

    Args:
        reason (`str`): one line.
    """

    reason: str


class RequestQueue:
    """
    The requests that no backend has taken yet.

    Args:
        requests (`Iterable[TurnRequest]`): read only as far as requests are taken.
    """

    def __init__(self, requests: Iterable[TurnRequest]) -> None:
        self._requests = iter(requests)
        self._follow_ups: deque[TurnRequest] = deque()

    def put(self, request: TurnRequest) -> None:
        """
        Add a follow-up request, such as the next turn of a conversation.

        Args:
            request ([`TurnRequest`]): it is taken before every request that has not been read yet.
        """
        self._follow_ups.append(request)

    def take(self) -> TurnRequest | None:
        """
        Take the next request.

        Returns:
            [`TurnRequest`], or None if there is none at present; a follow-up may still be added.
        """
        return self._follow_ups.popleft() if self._follow_ups else next(self._requests, None)


class GenerationBackend(Protocol):
    """Anything that turns requests into completions: transformers in this process, or a server."""

    def completions(self, requests: RequestQueue) -> Generator[tuple[TurnRequest, Completion | Failure]]:
        """
        Yield the outcome of every request, in any order, until the queue is empty and nothing is in progress.

        The caller may add requests to the queue before it asks for the next outcome, so an implementation must look
        into the queue again after every yield. Closing the generator abandons the requests in progress.

        Args:
            requests ([`RequestQueue`]): every request that is taken from it is yielded exactly once.
        """
        ...
