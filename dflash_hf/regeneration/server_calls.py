"""One request to a chat server: its body, its response, its errors, and the rate at which requests start."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

from .requests import Completion, SamplingParameters, TurnRequest

MAX_PAUSE_S = 600.0  # the longest `Retry-After` that is obeyed; the server is asked again afterwards
MAX_MESSAGE_LENGTH = 400  # characters of a server's error message


class RequestError(Exception):
    """
    A request to a server gave no completion.

    Args:
        reason (`str`): one line.
        is_transient (`bool`): whether the same request may succeed later.
        status (`int`, *optional*): of the HTTP response. None if there was no response, or one of status 200 without
            a usable completion.
        pause_s (`float`, *optional*): seconds for which the server asks for no requests.
        is_unreachable (`bool`, defaults to `False`): whether there was no response at all.
    """

    def __init__(
        self,
        reason: str,
        *,
        is_transient: bool,
        status: int | None = None,
        pause_s: float | None = None,
        is_unreachable: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason, self.is_transient, self.status = reason, is_transient, status
        self.pause_s, self.is_unreachable = pause_s, is_unreachable


def error_message(body: object) -> str:
    """
    Find the message in the body of an error response.

    Args:
        body (`object`): servers put the message under `error.message`, `message` or `detail`.

    Returns:
        `str`: one line, truncated if it is long.
    """
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "message", "detail") if body.get(key)), json.dumps(body))
    if not body:
        return "no message"
    line = " ".join(str(body).split())
    return (line if len(line) <= MAX_MESSAGE_LENGTH else line[:MAX_MESSAGE_LENGTH] + " …").rstrip(".")


def retry_after_s(headers: Any) -> float | None:
    """
    Read the `Retry-After` header of a response.

    Args:
        headers (`Mapping`): with lower-case names; the value is a number of seconds, or a date.

    Returns:
        `float`, *optional*: seconds, at most `MAX_PAUSE_S`. None without a valid header.
    """
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        pause_s = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
        except ValueError:
            return None
        pause_s = (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(pause_s, 0.0), MAX_PAUSE_S) if pause_s == pause_s else None


def request_body(
    request: TurnRequest, sampling: SamplingParameters, *, with_token_ids: bool, stop_strings: Sequence[str] = ()
) -> dict[str, Any]:
    """
    Make the arguments of `chat.completions.create` for one completion, without the model.

    Those for a request with `prompt_ids` are arguments of `completions.create`.

    Args:
        request ([`TurnRequest`]): what is requested.
        sampling ([`SamplingParameters`]): parameters that are None are left out, so that the server's defaults apply.
        stop_strings (`Sequence[str]`, defaults to none): strings that end the completion.
        with_token_ids (`bool`): whether to ask for the ids of prompt and completion (`return_token_ids` of vLLM and
            SGLang).

    Returns:
        `dict`: `extra_body` contains what OpenAI's own interface does not have.
    """
    is_raw = request.prompt_ids is not None
    body: dict[str, Any] = {"prompt": request.prompt_ids} if is_raw else {"messages": request.messages}
    body["max_tokens"] = sampling.max_new_tokens
    if stop_strings:
        body["stop"] = list(stop_strings)
    chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "tools": request.tools}
    body.update((name, value) for name, value in chosen.items() if value is not None)
    body["seed"] = request.seed(sampling.seed)
    extra: dict[str, Any] = {}
    if sampling.top_k is not None:
        extra["top_k"] = sampling.top_k or -1  # no limit is 0 or -1 for vLLM, and only -1 for SGLang
    if request.chat_template_kwargs and not is_raw:
        extra["chat_template_kwargs"] = dict(request.chat_template_kwargs)
    if with_token_ids:
        extra["return_token_ids"] = True
    return {**body, "extra_body": extra} if extra else body


def read_completion(text: str) -> Completion:
    """
    Read the body of a chat completion, or of a raw one.

    Args:
        text (`str`): JSON as the server sent it.

    Returns:
        [`Completion`]: with token ids if the server returned them. `prompt_token_ids` are in the response (vLLM) or in
        the choice (SGLang), `token_ids` are in the choice (both).

    Raises:
        RequestError: the text is not JSON, or has no choice, no message or nothing in the message; or generation ended
            for another reason than an end token or the length.
    """
    try:
        response = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise RequestError(f"the response is not JSON ({reason})", is_transient=True) from error
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        told = f": {error_message(response)}" if isinstance(response, dict) and response.get("error") else ""
        raise RequestError(f"the response has no choice{told}", is_transient=True)
    finish_reason = choice.get("finish_reason")
    if finish_reason not in ("stop", "tool_calls", "length"):
        # A content filter refuses the same prompt again; "abort" and others may be a temporary fault of the server.
        raise RequestError(f"finish_reason={finish_reason!r}", is_transient=finish_reason != "content_filter")
    message = choice.get("message")
    if message is None and isinstance(choice.get("text"), str):  # of a raw completion
        message = {"content": choice["text"]}
    return Completion(
        message=_read_message(message),
        finish_reason="length" if finish_reason == "length" else "stop",
        prompt_ids=_ids(response.get("prompt_token_ids")) or _ids(choice.get("prompt_token_ids")),
        token_ids=_ids(choice.get("token_ids")),
        num_tokens=_num_tokens(response.get("usage")),
    )


def _read_message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError("the response has no message", is_transient=True)
    # vLLM calls "reasoning" what SGLang, transformers and the chat templates call "reasoning_content".
    parts = {
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning"),
        "tool_calls": _with_parsed_arguments(message.get("tool_calls")),
    }
    parts = {key: value for key, value in parts.items() if value}
    content = message.get("content")
    if not isinstance(parts.get("reasoning_content", ""), str):
        raise RequestError("the reasoning of the message is not text", is_transient=True)
    if content is None and not parts:
        raise RequestError("the content of the message is null", is_transient=True)
    if not isinstance(content, str | None):
        raise RequestError("the content of the message is not text", is_transient=True)
    return {"role": "assistant", "content": content or "", **parts}


def _with_parsed_arguments(tool_calls: Any) -> Any:
    """Parse the arguments of tool calls: servers send them as JSON text, but chat templates need the values."""
    calls = []
    for call in tool_calls if isinstance(tool_calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError, RecursionError):  # what else a target may write stays text
                call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        calls.append(call)
    return calls


def _num_tokens(usage: object) -> int | None:
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def _ids(value: object) -> list[int] | None:
    are_ids = isinstance(value, list) and all(type(each) is int and 0 <= each < 2**31 for each in value)
    return cast(list[int], value) if are_ids else None


class RateLimiter:
    """
    Spread the starts of requests evenly, and delay all of them when the server asks for a pause.

    Args:
        interval_s (`float`): seconds between the starts of two requests; 0 is no limit.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_start_s = 0.0  # of time.monotonic

    async def wait(self) -> None:
        """Wait until a request may start."""
        while (wait_s := self._next_start_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        self._next_start_s = time.monotonic() + self._interval_s

    def pause(self, seconds: float) -> None:
        """Let no request start for this long."""
        self._next_start_s = max(self._next_start_s, time.monotonic() + seconds)


class BackgroundLoop:
    """
    An event loop in a thread of its own.

    Requests continue while the caller writes rows, the caller may have an event loop already (a notebook), and the
    main thread stays free for an interrupt. Leaving the context cancels everything in progress.

    Args:
        close (`Callable`): awaited in the loop before it ends.
    """

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close = close
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        self._is_ready.set()
        await self._is_over.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close()

    def __enter__(self) -> BackgroundLoop:
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(timeout=2)  # a name resolution cannot be cancelled, and is not waited for

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """
        Start a coroutine in the loop.

        Args:
            work (`Coroutine`): what is awaited.

        Returns:
            `concurrent.futures.Future` of its result.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop)
