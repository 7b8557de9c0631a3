"""
The server generation backend: completions by an OpenAI-compatible chat server.

Retries are done here and not by the client of `openai` (`max_retries`, seen in 3.57), because the client does not

- retry a response of status 200 without a usable completion (half a JSON document, no choice, null content, an
  aborted generation); a second loop around the client's would multiply the tries,
- share a `Retry-After` or a rate limit between requests: each request waits alone, and its retries pass no limit,
- obey a `Retry-After` of more than two minutes, nor retry the status 425,
- let its first wait be set, or tell how often and why it retried.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import queue
import random
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from transformers.utils import logging

from .defaults import CONCURRENCY, TIMEOUT_S
from .requests import Completion, Failure, RequestQueue, SamplingParameters, TurnRequest
from .server_calls import (
    BackgroundLoop,
    RateLimiter,
    RequestError,
    error_message,
    read_completion,
    request_body,
    retry_after_s,
)

logger = logging.get_logger(__name__)

MAX_CONSECUTIVE_FAILURES = 8
MAX_WAIT_S = 30.0  # between two tries, unless the server asks for more
LIST_TIMEOUT_S = 30.0  # the list of models needs no generation
REFUSED_KEY_STATUS = (401, 402)
NOT_FOUND_STATUS = (404, 405)
RETRIED_STATUS = (408, 409, 425, 429)  # in addition to all from 500 on

_Outcome = tuple[TurnRequest, Completion | Failure, bool]


class ServerBackend:
    """
    Generate completions with an OpenAI-compatible chat server, many at a time; a [`GenerationBackend`].

    A request that fails temporarily (no connection, a timeout, status 408, 409, 425, 429 or 5xx, a response without a
    usable completion) is retried with exponential backoff. A `Retry-After` delays all requests. A request without a
    completion becomes a `Failure`. A fault that no request can succeed with stops the run with one error; to report
    nothing as failed in that case, failures are yielded only after a later completion or at the end.

    vLLM and SGLang return token ids. `transformers serve` returns none and takes no `top_k`. It samples only if the
    target's generation config has `do_sample`. With `--continuous-batching`, which is much faster, it keeps the
    sampling parameters of its first request.

    Args:
        url (`str`):
            Root of the server, with or without `/v1`. The proxies of the environment are used (`HTTPS_PROXY`,
            `NO_PROXY`), except for loopback addresses.
        model (`str`, *optional*):
            The target's name on the server. None uses the only model that the server lists.
        sampling ([`SamplingParameters`]):
            Parameters of all completions. Those that are None are left to the server.
        concurrency (`int`, defaults to 32):
            The maximum number of requests in progress.
        timeout_s (`float`, defaults to 600):
            The maximum seconds of one try, including the wait in the server's queue.
        max_retries (`int`, defaults to 8):
            The maximum number of retries of a request; with `first_wait_s=0.5` they span one to two minutes.
        first_wait_s (`float`, defaults to 0.5):
            The maximum wait before the first retry, in seconds. It doubles with every further one, up to 30 s. The
            actual wait is random, between half of it and all of it.
        requests_per_minute (`float`, *optional*):
            The maximum number of tries that start in a minute, spread evenly.
        api_key (`str`, *optional*):
            None uses `OPENAI_API_KEY`, or a placeholder for servers without keys.
        stop_strings (`Sequence[str]`, defaults to none):
            Strings that end a completion; the server leaves them out.

    Attributes:
        retried (`Counter`): the number of retries by reason.

    Raises:
        ImportError: the `openai` package is not installed.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        sampling: SamplingParameters,
        *,
        concurrency: int = CONCURRENCY,
        timeout_s: float = TIMEOUT_S,
        max_retries: int = 8,
        first_wait_s: float = 0.5,
        requests_per_minute: float | None = None,
        api_key: str | None = None,
        stop_strings: Sequence[str] = (),
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError(
                "Requests to a server need the openai package, which is not installed: pip install "
                "'dflash-hf[server]'."
            ) from error
        if concurrency < 1 or max_retries < 0 or not timeout_s > 0 or first_wait_s < 0:
            raise ValueError(
                f"concurrency={concurrency}, max_retries={max_retries}, timeout_s={timeout_s}, first_wait_s="
                f"{first_wait_s}: concurrency must be at least 1, timeout_s positive, and the others at least 0. Pass "
                "values in these ranges."
            )
        if requests_per_minute is not None and not requests_per_minute > 0:
            raise ValueError(f"requests_per_minute={requests_per_minute} must be positive. Pass None for no limit.")
        self._openai = openai
        self.url, self.model, self.sampling = server_root(url), model, sampling
        self.concurrency, self.timeout_s = concurrency, timeout_s
        self.max_retries, self.first_wait_s = max_retries, first_wait_s
        self.stop_strings = stop_strings
        self.retried: Counter[str] = Counter()
        self._key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._rate_limiter = RateLimiter(60 / requests_per_minute if requests_per_minute else 0.0)
        self._random = random.Random()
        self._models: list[str] | None = None  # the models that the server lists; None before it was asked
        self._num_completions = 0
        self._returns_token_ids: bool | None = None  # None until the first completion

    def check(self) -> str:
        """
        Ask the server which models it has; `completions` does so if it was not done before.

        Returns:
            `str`: the name of the model that completions are requested from.

        Raises:
            ConnectionError: nothing answers at `url`.
            RuntimeError: the server refuses the key, or has only errors.
            ValueError: `model=None`, and the server does not list exactly one model.
        """
        client = self._client()
        with BackgroundLoop(client.close) as loop:
            models = loop.submit(self._list_models(client)).result()
        if self.model is None:
            if len(models) != 1:
                raise ValueError(
                    f"No model was named, and {self.shown_url} lists {_names(models)}. The name can be left out only "
                    "if the server lists a single model: name one."
                )
            self.model = models[0]
        self._models = models
        return self.model

    @property
    def shown_url(self) -> str:
        """`str`: the address of the server without user name and password."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def completions(self, requests: RequestQueue) -> Generator[tuple[TurnRequest, Completion | Failure]]:
        """
        Yield the outcome of every request; see [`GenerationBackend.completions`].

        Args:
            requests ([`RequestQueue`]): a request is taken when fewer than `concurrency` are in progress.

        Yields:
            `tuple[TurnRequest, Completion | Failure]`: every request that was taken, once.

        Raises:
            ConnectionError: the server cannot be reached any more.
            RuntimeError: it refuses the key, or `MAX_CONSECUTIVE_FAILURES` requests failed without a completion
                between them.
            ValueError: it does not have the model.
        """
        if self._models is None:
            self.check()
        held: list[tuple[TurnRequest, Failure]] = []
        with closing(self._outcomes(requests)) as outcomes:
            for request, outcome, is_servers_fault in outcomes:
                if isinstance(outcome, Completion):
                    yield from held
                    held.clear()
                    yield request, outcome
                elif self._num_completions and not is_servers_fault:
                    yield request, outcome
                else:
                    held.append((request, outcome))
                    if len(held) == MAX_CONSECUTIVE_FAILURES:
                        raise RuntimeError(
                            f"{MAX_CONSECUTIVE_FAILURES} requests to {self.shown_url} failed without a completion "
                            f"between them, the last one with: {outcome.reason}. At least one of "
                            f"{MAX_CONSECUTIVE_FAILURES} must succeed. Look into the log of the server, correct the "
                            "server or the requests, and run the same command again."
                        )
        yield from held

    def _outcomes(self, requests: RequestQueue) -> Generator[_Outcome]:
        """Yield the outcome of each request, and whether a failure may be the server's rather than the request's."""
        client = self._client()
        done: queue.SimpleQueue[Future[_Outcome]] = queue.SimpleQueue()
        num_in_progress = 0
        with BackgroundLoop(client.close) as loop:
            while True:
                while num_in_progress < (1 if self._is_model_unconfirmed() else self.concurrency):
                    request = requests.take()
                    if request is None:
                        break
                    loop.submit(self._outcome(client, request)).add_done_callback(done.put)
                    num_in_progress += 1
                if not num_in_progress:
                    return
                yield done.get().result()
                num_in_progress -= 1

    def _is_model_unconfirmed(self) -> bool:
        """Whether the server does not list the model and has not returned a completion of it either."""
        return bool(self._models) and self.model not in cast(list[str], self._models) and not self._num_completions

    async def _outcome(self, client: Any, request: TurnRequest) -> _Outcome:
        num_completions = self._num_completions
        num_retries = min(self.max_retries, 2) if self._is_model_unconfirmed() else self.max_retries
        try:
            completion = await self._retrying(lambda: self._request(client, request), num_retries)
        except RequestError as error:
            is_silent = error.is_unreachable and num_completions == self._num_completions
            if is_silent and not await self._is_reachable(client):
                raise self._unreachable(error) from error
            if self._is_model_unconfirmed() and ((error.status or 0) >= 500 or cast(str, self.model) in error.reason):
                raise self._refused_model(error) from error
            if error.is_transient and num_retries:
                return request, Failure(f"{error.reason} (tried {num_retries + 1} times)"), True
            # 403 means a key without rights, or a gateway that refuses this prompt.
            return request, Failure(error.reason), error.is_transient or error.status == 403
        if self._is_model_unconfirmed():
            logger.warning(
                f"{self.shown_url} returns completions of {self.model!r} but lists {_names(self._models or [])}. Some "
                "servers list fewer models than they have, and some accept any name. Make sure that this is the "
                "target."
            )
        self._num_completions += 1
        return request, completion, False

    async def _request(self, client: Any, request: TurnRequest) -> Completion:
        """Try once, and again without asking for token ids if the server may have refused only that."""
        asks_ids = self._returns_token_ids is not False
        try:
            completion = await self._post(client, request, with_token_ids=asks_ids)
        except RequestError as error:
            if not asks_ids or self._returns_token_ids or error.status not in (400, 422):
                raise
            completion = await self._post(client, request, with_token_ids=False)
            asks_ids = False
        if self._returns_token_ids is None:
            self._returns_token_ids = asks_ids
        return completion

    async def _post(self, client: Any, request: TurnRequest, *, with_token_ids: bool) -> Completion:
        body = request_body(request, self.sampling, with_token_ids=with_token_ids, stop_strings=self.stop_strings)
        try:
            json.dumps(body, allow_nan=False)  # the client of openai would raise the same errors
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"the request cannot be written as JSON ({error})", is_transient=False) from error
        completions = client.chat.completions if request.prompt_ids is None else client.completions
        create = completions.with_raw_response.create
        return read_completion((await self._call(create, self.timeout_s, model=self.model, **body)).text)

    async def _call(self, method: Any, timeout_s: float, **arguments: Any) -> Any:
        """Call a method of the client; every fault becomes a `RequestError`, or an error that stops the run."""
        await self._rate_limiter.wait()
        try:
            async with asyncio.timeout(timeout_s):
                return await method(**arguments)
        except TimeoutError as error:
            raise RequestError(
                f"no response within {timeout_s:g} s", is_transient=True, is_unreachable=True
            ) from error
        except self._openai.APIStatusError as error:
            raise self._status_error(error) from error
        except self._openai.APIConnectionError as error:
            cause = error_message(str(error.__cause__ or error) or type(error.__cause__).__name__)
            raise RequestError(f"connection failed: {cause}", is_transient=True, is_unreachable=True) from error

    def _status_error(self, error: Any) -> Exception:
        status, message = error.status_code, self._without_key(error_message(error.body))
        reason = f"{status}: {message}"
        is_of_list = error.request.url.path.endswith("/models")
        if status in REFUSED_KEY_STATUS or (status == 403 and is_of_list):
            return RuntimeError(
                f"{self.shown_url} refused the request with {reason}. The server must accept the key: set "
                "OPENAI_API_KEY to one that it accepts."
            )
        if status in NOT_FOUND_STATUS and not is_of_list:
            return self._refused_model(RequestError(reason, is_transient=False))
        is_transient = status in RETRIED_STATUS or status >= 500
        pause_s = retry_after_s(error.response.headers) if is_transient else None
        return RequestError(reason, is_transient=is_transient, status=status, pause_s=pause_s)

    async def _retrying(self, call: Any, num_retries: int) -> Any:
        for number in range(num_retries):
            try:
                return await call()
            except RequestError as error:
                if not error.is_transient:
                    raise
                kind = error.reason.partition(":")[0]
                self.retried[kind] += 1
                if error.pause_s is not None:
                    self._rate_limiter.pause(error.pause_s)
                if number == 2 or (error.pause_s or 0) > MAX_WAIT_S:
                    logger.warning_once(f"{self.shown_url} fails repeatedly ({kind}). The requests are retried.")
                longest_s = min(self.first_wait_s * 2**number, MAX_WAIT_S)
                await asyncio.sleep(longest_s * self._random.uniform(0.5, 1.0))
        return await call()

    async def _list_models(self, client: Any) -> list[str]:
        """Return the names of the models that the server lists; none if it has no list."""
        list_models = client.models.with_raw_response.list
        num_retries = min(self.max_retries, 2)
        try:
            response = await self._retrying(lambda: self._call(list_models, LIST_TIMEOUT_S), num_retries)
        except RequestError as error:
            if error.is_unreachable:
                raise self._unreachable(error) from error
            if error.is_transient:
                raise RuntimeError(
                    f"{self.shown_url}/models responded with {error.reason}. The server must be ready: look into its "
                    "log, and run the same command again."
                ) from error
            return []
        try:
            return [model["id"] for model in response.http_response.json()["data"]]
        except (ValueError, TypeError, KeyError):  # not JSON, or not a list of models
            return []

    async def _is_reachable(self, client: Any) -> bool:
        try:
            await self._call(client.models.with_raw_response.list, LIST_TIMEOUT_S)
        except RequestError as error:
            return not error.is_unreachable
        return True

    def _unreachable(self, error: RequestError) -> ConnectionError:
        return ConnectionError(
            f"{self.shown_url}: {error.reason}. An OpenAI-compatible server must be listening there: check the "
            "address, start the server (`vllm serve`, `transformers serve`, …), and run the same command again."
        )

    def _refused_model(self, error: RequestError) -> ValueError:
        return ValueError(
            f"{self.shown_url} refused model={self.model!r} with {error.reason}. The address must be the root of an "
            "OpenAI-compatible server, and the model one of its models: name one of those that it lists, which are "
            f"{_names(self._models or [])}."
        )

    def _without_key(self, message: str) -> str:
        return message.replace(self._key, "***") if self._key != "none" else message

    def _client(self) -> Any:
        http = self._openai.DefaultAsyncHttpxClient(trust_env=not _is_loopback(self.url), timeout=None)
        return self._openai.AsyncOpenAI(
            base_url=self.url, api_key=self._key, max_retries=0, timeout=None, http_client=http
        )


def server_root(url: str) -> str:
    """
    Complete the address of a server to the form that the client of `openai` needs.

    Args:
        url (`str`): `http://host:8000`, `http://host:8000/v1/`, or the address of the chat completions themselves.

    Returns:
        `str`: the address with a version as the last part of its path, and without a slash at its end.

    Raises:
        ValueError: it is not an HTTP address.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"url={url!r} must be the HTTP address of a server. Pass one such as http://localhost:8000/v1."
        )
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
