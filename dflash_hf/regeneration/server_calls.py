"""One call of a chat server: what is sent, what an answer must hold, and when the next call may start."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from .requests import Answer, Sampling, TurnRequest

LONGEST_PAUSE_S = 600.0  # that a server may ask for; it is asked again afterwards
LONGEST_REASON = 400  # characters of a server's own words


class NoAnswer(Exception):  # noqa: N818  (most of these are met by trying again)
    """
    What a call brought instead of an answer.

    Args:
        reason (`str`): one line, for people.
        is_transient (`bool`): the same call may succeed later.
        status (`int`, *optional*): of the HTTP response; None if there was none, or the answer in it is unusable.
        pause_s (`float`, *optional*): seconds for which the server wants to be left alone.
        is_unreachable (`bool`): nothing came back at all.
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


def one_line(text: object) -> str:
    """A server's words on one line, cut where they are long."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + " …"


def words_of(body: object) -> str:
    """The message in the body of an error, wherever servers put it: `error.message`, `message`, `detail`."""
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "message", "detail") if body.get(key)), json.dumps(body))
    return one_line(body).rstrip(".") if body else "no message"


def pause_asked_for(headers: Any) -> float | None:
    """Seconds of a `Retry-After` header (a number, or a date), at most `LONGEST_PAUSE_S`; None without one."""
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
    return min(max(pause_s, 0.0), LONGEST_PAUSE_S) if pause_s == pause_s else None


def request_body(request: TurnRequest, sampling: Sampling, *, with_token_ids: bool) -> dict[str, Any]:
    """
    Arguments of `chat.completions.create` for one answer, without the model.

    Args:
        request (`TurnRequest`): what is asked.
        sampling (`Sampling`): what is None there is not sent: the server's own default holds.
        with_token_ids (`bool`): ask for the ids of prompt and answer (`return_token_ids` of vLLM and SGLang).

    Returns:
        `dict`: `extra_body` holds what is not in OpenAI's own interface.
    """
    body: dict[str, Any] = {"messages": request.messages, "max_tokens": sampling.max_new_tokens}
    chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "tools": request.tools}
    body.update((name, value) for name, value in chosen.items() if value is not None)
    body["seed"] = request.seed(sampling.seed)
    extra: dict[str, Any] = {}
    if sampling.top_k is not None:
        extra["top_k"] = sampling.top_k or -1  # "no limit": vLLM takes 0 and -1, SGLang -1 alone
    if request.chat_template_kwargs:
        extra["chat_template_kwargs"] = dict(request.chat_template_kwargs)
    if with_token_ids:
        extra["return_token_ids"] = True
    return {**body, "extra_body": extra} if extra else body


def read_answer(text: str) -> Answer:
    """
    Read the body of a chat completion.

    Args:
        text (`str`): JSON as the server sent it.

    Returns:
        `Answer`: with token ids where the server told them: `prompt_token_ids` of the response (vLLM) or of the choice
        (SGLang), `token_ids` of the choice (both).

    Raises:
        NoAnswer: not JSON, no choice, no message, nothing in the message, or it ended for another reason than being
            finished or long.
    """
    try:
        response = json.loads(text)
    except json.JSONDecodeError as error:
        raise NoAnswer(f"the response is not JSON ({error.msg})", is_transient=True) from error
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        told = f": {words_of(response)}" if isinstance(response, dict) and response.get("error") else ""
        raise NoAnswer(f"the response holds no choice{told}", is_transient=True)
    finish_reason = choice.get("finish_reason")
    if finish_reason not in ("stop", "tool_calls", "length"):
        # What a filter refuses it refuses again; "abort" and its like may be the server's troubles of the moment.
        raise NoAnswer(f"finish_reason={finish_reason!r}", is_transient=finish_reason != "content_filter")
    return Answer(
        message=_read_message(choice.get("message")),
        finish_reason="length" if finish_reason == "length" else "stop",
        prompt_ids=_ids(response.get("prompt_token_ids")) or _ids(choice.get("prompt_token_ids")),
        token_ids=_ids(choice.get("token_ids")),
        num_tokens=_num_tokens(response.get("usage")),
    )


def _read_message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise NoAnswer("the response holds no message", is_transient=True)
    # vLLM says "reasoning" for what SGLang, transformers and the chat templates call "reasoning_content"
    told_apart = {
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning"),
        "tool_calls": _with_read_arguments(message.get("tool_calls")),
    }
    told_apart = {key: value for key, value in told_apart.items() if value}
    content = message.get("content")
    if content is None and not told_apart:
        raise NoAnswer("the content of the message is null", is_transient=True)
    if not isinstance(content, str | None):
        raise NoAnswer("the content of the message is no text", is_transient=True)
    return {"role": "assistant", "content": content or "", **told_apart}


def _with_read_arguments(tool_calls: Any) -> Any:
    """Calls whose arguments are values: servers send them as text, chat templates write them as JSON themselves."""
    calls = []
    for call in tool_calls if isinstance(tool_calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(json.JSONDecodeError):  # what the target wrote may be no JSON, and stays as it is then
                call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        calls.append(call)
    return calls


def _num_tokens(usage: object) -> int | None:
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def _ids(value: object) -> list[int] | None:
    return value if isinstance(value, list) and all(type(each) is int for each in value) else None


class Pace:
    """
    When the next call may start: spread evenly, and later for everyone where a server asked for a pause.

    Args:
        interval_s (`float`): seconds between the starts of two calls; 0 is no limit.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_start_s = 0.0  # of time.monotonic

    async def turn(self) -> None:
        """Wait until a call may start."""
        while (wait_s := self._next_start_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        self._next_start_s = time.monotonic() + self._interval_s

    def pause(self, seconds: float) -> None:
        """Let no call start for this long."""
        self._next_start_s = max(self._next_start_s, time.monotonic() + seconds)


class BackgroundLoop:
    """
    An event loop in a thread of its own: calls go on while the caller writes rows, the caller may have a loop already
    (a notebook), and an interrupt of the main thread finds it free. Leaving the context cancels what is under way.

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
        self._thread.join(timeout=2)  # a look-up of a name cannot be cancelled; nobody waits for it

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine; its result comes as a future of `concurrent.futures`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)
