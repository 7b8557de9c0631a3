"""Answers of an OpenAI-compatible chat server: vLLM, SGLang, `transformers serve` and their like."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import queue
import random
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import closing
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from transformers.utils import logging

from .defaults import CONCURRENCY, TIMEOUT_S
from .requests import Answer, Failure, RequestFeed, Sampling, TurnRequest
from .server_calls import (
    BackgroundLoop,
    NoAnswer,
    Pace,
    pause_asked_for,
    read_answer,
    request_body,
    words_of,
)

logger = logging.get_logger(__name__)

GIVE_UP_AFTER = 8  # failures without an answer between them
LONGEST_WAIT_S = 30.0  # between two tries, unless the server asks for more
CHECK_TIMEOUT_S = 30.0  # a list of models takes no generation
REFUSES_KEY = (401, 402)
NOT_SERVED = (404, 405)
WORTH_ANOTHER_TRY = (408, 409, 425, 429)  # and everything from 500 on

_Outcome = tuple[TurnRequest, Answer | Failure, bool]


class ServerEngine:
    """
    Answers from an OpenAI-compatible chat server, many at a time.

    A call that fails in passing (no connection, a time-out, 408, 409, 425, 429, 5xx, a response without a usable
    answer) is repeated after a wait that doubles each time; `Retry-After` holds back all calls. An answer that cannot
    be had becomes a `Failure`. What no prompt can get around stops the run with one error. Failures are only reported
    once an answer has come after them, or at the end, so that such an error finds nothing written off.

    vLLM and SGLang tell token ids. `transformers serve` does not and takes no `top_k`; it samples only where the
    target's generation config says `do_sample`, and with `--continuous-batching` (much the faster) all its life long
    as the first request asked.

    Args:
        url (`str`):
            Root of the server, with or without `/v1`. The environment's proxies hold (`HTTPS_PROXY`, `NO_PROXY`),
            except for loopback addresses.
        model (`str`, *optional*):
            Name under which the server has the target. None takes the only one it lists.
        sampling (`Sampling`):
            How answers are drawn. What is None there is left to the server.
        concurrency (`int`, defaults to 32):
            Calls under way at a time.
        timeout_s (`float`, defaults to 600):
            Seconds for one call, waiting in the server's queue included.
        max_retries (`int`, defaults to 8):
            Further tries of a call; with `first_wait_s=0.5` they span one to two minutes.
        first_wait_s (`float`, defaults to 0.5):
            Longest wait before the second try. It doubles with every further one, up to 30 s; the wait that is taken
            is drawn between half of it and all of it.
        requests_per_minute (`float`, *optional*):
            Calls that may start, tries included, spread evenly.
        api_key (`str`, *optional*):
            None takes `OPENAI_API_KEY`; a server without keys is sent a placeholder.

    Attributes:
        retried (`Counter`): how often which reason had a call repeated.

    Raises:
        ImportError: the `openai` package is missing.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        sampling: Sampling,
        *,
        concurrency: int = CONCURRENCY,
        timeout_s: float = TIMEOUT_S,
        max_retries: int = 8,
        first_wait_s: float = 0.5,
        requests_per_minute: float | None = None,
        api_key: str | None = None,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError(
                "Asking a server needs the openai package, which is not installed: pip install 'dflash-hf[server]'."
            ) from error
        if concurrency < 1 or max_retries < 0 or not timeout_s > 0 or first_wait_s < 0:
            raise ValueError(
                f"concurrency={concurrency}, max_retries={max_retries}, timeout_s={timeout_s}, first_wait_s="
                f"{first_wait_s}: concurrency must be at least 1, timeout_s positive, the others at least 0."
            )
        if requests_per_minute is not None and not requests_per_minute > 0:
            raise ValueError(f"requests_per_minute={requests_per_minute} must be positive; None is no limit.")
        self._openai = openai
        self.url, self.model, self.sampling = server_root(url), model, sampling
        self.concurrency, self.timeout_s = concurrency, timeout_s
        self.max_retries, self.first_wait_s = max_retries, first_wait_s
        self.retried: Counter[str] = Counter()
        self._key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._pace = Pace(60 / requests_per_minute if requests_per_minute else 0.0)
        self._random = random.Random()
        self._models: list[str] | None = None  # what the server lists; None before it was asked
        self._num_answers = 0
        self._tells_ids: bool | None = None  # None until a first answer has shown whether the server takes the wish

    def check(self) -> str:
        """
        Ask the server which models it has; `answers` does so if nobody did before.

        Returns:
            `str`: the name that answers are asked of.

        Raises:
            ConnectionError: nobody answers at `url`.
            RuntimeError: the server refuses (key, address), or has only errors.
            ValueError: `model=None`, and the server does not list exactly one.
        """
        client = self._client()
        with BackgroundLoop(client.close) as loop:
            models = loop.submit(self._list_models(client)).result()
        if self.model is None:
            if len(models) != 1:
                raise ValueError(
                    f"No model was named, and {self.shown_url} lists {_names(models)}: name the one to be asked."
                )
            self.model = models[0]
        self._models = models
        return self.model

    @property
    def shown_url(self) -> str:
        """The server's address without a password that may be in it."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def answers(self, feed: RequestFeed) -> Generator[tuple[TurnRequest, Answer | Failure]]:
        """
        Answer requests as answers come; see `AnswerEngine`.

        Args:
            feed (`RequestFeed`): a request is taken when a place among the `concurrency` is free.

        Yields:
            `tuple[TurnRequest, Answer | Failure]`: every request that was taken, once.

        Raises:
            ConnectionError: the server is gone, and stayed away for all tries.
            RuntimeError: it refuses everyone, or `GIVE_UP_AFTER` requests failed without an answer between them.
            ValueError: it does not have the model.
        """
        if self._models is None:
            self.check()
        held: list[tuple[TurnRequest, Failure]] = []
        with closing(self._outcomes(feed)) as outcomes:
            for request, outcome, is_servers in outcomes:
                if isinstance(outcome, Answer):
                    yield from held
                    held.clear()
                    yield request, outcome
                elif self._num_answers and not is_servers:
                    yield request, outcome
                else:
                    held.append((request, outcome))
                    if len(held) == GIVE_UP_AFTER:
                        raise RuntimeError(
                            f"{GIVE_UP_AFTER} requests failed without an answer between them, the last one: "
                            f"{outcome.reason}. {self.shown_url} must answer at least one of {GIVE_UP_AFTER}: look "
                            "into its log, mend it or what it is sent, and start again."
                        )
        yield from held

    def _outcomes(self, feed: RequestFeed) -> Generator[_Outcome]:
        """What became of each request, and whether a failure is the server's rather than the request's own."""
        client = self._client()
        done: queue.SimpleQueue[Future[_Outcome]] = queue.SimpleQueue()
        num_under_way = 0
        with BackgroundLoop(client.close) as loop:
            while True:
                while num_under_way < (1 if self._is_doubtful() else self.concurrency):
                    request = feed.take()
                    if request is None:
                        break
                    loop.submit(self._answer(client, request)).add_done_callback(done.put)
                    num_under_way += 1
                if not num_under_way:
                    return
                yield done.get().result()
                num_under_way -= 1

    def _is_doubtful(self) -> bool:
        """The server does not list the model, and has not answered in its name yet."""
        return bool(self._models) and self.model not in cast(list[str], self._models) and not self._num_answers

    async def _answer(self, client: Any, request: TurnRequest) -> _Outcome:
        num_answers = self._num_answers
        num_retries = min(self.max_retries, 2) if self._is_doubtful() else self.max_retries
        try:
            answer = await self._retrying(lambda: self._ask(client, request), num_retries)
        except NoAnswer as fault:
            if fault.is_unreachable and num_answers == self._num_answers and not await self._is_there(client):
                raise self._gone(fault) from fault
            if self._is_doubtful() and ((fault.status or 0) >= 500 or cast(str, self.model) in fault.reason):
                raise self._wrong_model(fault) from fault
            if fault.is_transient and num_retries:
                return request, Failure(f"{fault.reason} (tried {num_retries + 1} times)"), True
            # 403 may be a key without rights, or a gateway that dislikes this prompt
            return request, Failure(fault.reason), fault.is_transient or fault.status == 403
        if self._is_doubtful():
            logger.warning(
                f"{self.shown_url} answers to {self.model!r} but lists {_names(self._models or [])}. Some servers "
                "list less than they have, and some answer to any name: make sure that this is the target."
            )
        self._num_answers += 1
        return request, answer, False

    async def _ask(self, client: Any, request: TurnRequest) -> Answer:
        """One try, and a second one if the server may have refused nothing but the wish for token ids."""
        asks_ids = self._tells_ids is not False
        try:
            answer = await self._post(client, request, with_token_ids=asks_ids)
        except NoAnswer as fault:
            if not asks_ids or self._tells_ids or fault.status not in (400, 422):
                raise
            answer = await self._post(client, request, with_token_ids=False)
            asks_ids = False
        if self._tells_ids is None:
            self._tells_ids = asks_ids
        return answer

    async def _post(self, client: Any, request: TurnRequest, *, with_token_ids: bool) -> Answer:
        body = request_body(request, self.sampling, with_token_ids=with_token_ids)
        create = client.chat.completions.with_raw_response.create
        return read_answer((await self._call(create, self.timeout_s, model=self.model, **body)).text)

    async def _call(self, method: Any, timeout_s: float, **arguments: Any) -> Any:
        """Call a method of the client; everything that goes wrong is a `NoAnswer`, or stops the run."""
        await self._pace.turn()
        try:
            async with asyncio.timeout(timeout_s):
                return await method(**arguments)
        except TimeoutError as error:
            raise NoAnswer(f"no answer within {timeout_s:g} s", is_transient=True, is_unreachable=True) from error
        except self._openai.APIStatusError as error:
            raise self._refusal(error) from error
        except self._openai.APIConnectionError as error:
            cause = words_of(str(error.__cause__ or error) or type(error.__cause__).__name__)
            raise NoAnswer(f"connection failed: {cause}", is_transient=True, is_unreachable=True) from error

    def _refusal(self, error: Any) -> Exception:
        status, words = error.status_code, self._without_key(words_of(error.body))
        reason = f"{status}: {words}"
        is_of_list = error.request.url.path.endswith("/models")
        if status in REFUSES_KEY or (status == 403 and is_of_list):
            return RuntimeError(
                f"{self.shown_url} refused with {reason}. It must let this key ask for answers: set OPENAI_API_KEY to "
                "one that may."
            )
        if status in NOT_SERVED and not is_of_list:
            return self._wrong_model(NoAnswer(reason, is_transient=False))
        is_transient = status in WORTH_ANOTHER_TRY or status >= 500
        pause_s = pause_asked_for(error.response.headers) if is_transient else None
        return NoAnswer(reason, is_transient=is_transient, status=status, pause_s=pause_s)

    async def _retrying(self, call: Any, num_retries: int) -> Any:
        for number in range(num_retries):
            try:
                return await call()
            except NoAnswer as fault:
                if not fault.is_transient:
                    raise
                kind = fault.reason.partition(":")[0]
                self.retried[kind] += 1
                if fault.pause_s is not None:
                    self._pace.pause(fault.pause_s)
                if number == 2 or (fault.pause_s or 0) > LONGEST_WAIT_S:
                    logger.warning_once(f"{self.shown_url}: {kind}, again and again; each call is tried on.")
                longest_s = min(self.first_wait_s * 2**number, LONGEST_WAIT_S)
                await asyncio.sleep(longest_s * self._random.uniform(0.5, 1.0))
        return await call()

    async def _list_models(self, client: Any) -> list[str]:
        """Names that the server lists; none where it has no list."""
        list_models = client.models.with_raw_response.list
        num_retries = min(self.max_retries, 2)
        try:
            response = await self._retrying(lambda: self._call(list_models, CHECK_TIMEOUT_S), num_retries)
        except NoAnswer as fault:
            if fault.is_unreachable:
                raise self._gone(fault) from fault
            if fault.is_transient:
                raise RuntimeError(
                    f"{self.shown_url}/models answered with {fault.reason}. The server must be up: look into its log, "
                    "and start again."
                ) from fault
            return []
        try:
            return [model["id"] for model in response.http_response.json()["data"]]
        except (ValueError, TypeError, KeyError):  # not JSON, or no list of models
            return []

    async def _is_there(self, client: Any) -> bool:
        try:
            await self._call(client.models.with_raw_response.list, CHECK_TIMEOUT_S)
        except NoAnswer as fault:
            return not fault.is_unreachable
        return True

    def _gone(self, fault: NoAnswer) -> ConnectionError:
        return ConnectionError(
            f"{self.shown_url}: {fault.reason}. An OpenAI-compatible server must be listening there: check the "
            "address, start it (`vllm serve`, `transformers serve`, …), and start again."
        )

    def _wrong_model(self, fault: NoAnswer) -> ValueError:
        return ValueError(
            f"{self.shown_url} refused model={self.model!r} with {fault.reason}. The address must be the root of an "
            f"OpenAI-compatible server, and the model one that it has; it lists {_names(self._models or [])}."
        )

    def _without_key(self, words: str) -> str:
        return words.replace(self._key, "***") if self._key != "none" else words

    def _client(self) -> Any:
        http = self._openai.DefaultAsyncHttpxClient(trust_env=not _is_loopback(self.url), timeout=None)
        return self._openai.AsyncOpenAI(
            base_url=self.url, api_key=self._key, max_retries=0, timeout=None, http_client=http
        )


def server_root(url: str) -> str:
    """
    The address that OpenAI's client wants: ending in a version, without a slash.

    Args:
        url (`str`): `http://host:8000`, `http://host:8000/v1/`, or the address of the chat completions themselves.

    Raises:
        ValueError: it is no address of the web.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url={url!r} must be the address of a server, as in http://localhost:8000/v1.")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    if not any(part[:1] == "v" and part[1:2].isdigit() for part in path.split("/")):
        path += "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _is_loopback(url: str) -> bool:
    host = cast(str, urlsplit(url).hostname)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _names(models: list[str]) -> str:
    shown = ", ".join(models[:20]) + (f" and {len(models) - 20} more" if len(models) > 20 else "")
    return shown or "no models"
