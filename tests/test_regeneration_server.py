from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
from faulty_server import PASSING, FaultyServer, answer_of, passing_faults

from dflash_hf.regeneration.requests import Completion, Failure, RequestQueue, SamplingParameters, TurnRequest
from dflash_hf.regeneration.server import MAX_CONSECUTIVE_FAILURES, ServerBackend, server_root


def request_of(prompt: str, **values) -> TurnRequest:
    return TurnRequest(prompt, [{"role": "user", "content": prompt}], **values)


def requests_of(count: int) -> list[TurnRequest]:
    return [request_of(f"prompt {number}") for number in range(count)]


def backend_of(server: FaultyServer, model: str | None = "tiny", **values) -> ServerBackend:
    return ServerBackend(server.url, model, SamplingParameters(), **{"first_wait_s": 0.01, "timeout_s": 10, **values})


def completions_of(backend: ServerBackend, requests: list[TurnRequest]) -> dict[str, Completion | Failure]:
    """By conversation; none comes twice."""
    outcomes = list(backend.completions(RequestQueue(requests)))
    by_conversation = {request.conversation_id: outcome for request, outcome in outcomes}
    assert len(by_conversation) == len(outcomes)
    return by_conversation


def first_calls(fault: str, count: int = 1) -> Callable[[int, dict], str | None]:
    """The first calls of each prompt fail."""
    seen: dict[str, int] = {}

    def choose(number: int, body: dict) -> str | None:
        prompt = body["messages"][-1]["content"]
        seen[prompt] = seen.get(prompt, 0) + 1
        return fault if seen[prompt] <= count else None

    return choose


def for_prompt(fault: str, *prompts: str) -> Callable[[int, dict], str | None]:
    return lambda number, body: fault if body["messages"][-1]["content"] in prompts else None


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_costs_one_more_call_and_nothing_else(fault):
    with FaultyServer(first_calls(fault), hang_s=0.05) as server:
        backend = backend_of(server)
        completions = completions_of(backend, requests_of(5))
    assert {name: answer.message for name, answer in completions.items()} == {
        f"prompt {number}": {"role": "assistant", "content": f"{number} tpmorp"} for number in range(5)
    }
    assert len(server.calls) == 10
    assert sum(backend.retried.values()) == 5


def test_faults_of_all_kinds_at_once_leave_every_request_answered_once():
    with FaultyServer(passing_faults(0.2, seed=3), hang_s=0.05) as server:
        backend = backend_of(server, concurrency=8)
        completions = completions_of(backend, requests_of(100))
    assert all(completions[name].message["content"] == name[::-1] for name in completions)
    assert len(completions) == 100
    faults = [call.fault for call in server.calls if call.fault]
    assert len(set(faults)) > 8
    assert len(server.calls) == 100 + len(faults) == 100 + sum(backend.retried.values())


def test_a_request_that_never_gets_an_answer_fails_with_its_reason_after_all_tries():
    kinds = ["500", "null", "no choices", "truncated", "abort", "null finish"]
    by_prompt = dict(zip([f"prompt {number}" for number in range(2, 8)], kinds, strict=True))
    with FaultyServer(lambda number, body: by_prompt.get(body["messages"][-1]["content"])) as server:
        completions = completions_of(backend_of(server, concurrency=2, max_retries=2), requests_of(8))
        assert [len(server.calls_of(prompt)) for prompt in by_prompt] == [3] * 6
    reasons = {name: answer.reason for name, answer in completions.items() if isinstance(answer, Failure)}
    tried = "(tried 3 times)"
    assert reasons == {
        "prompt 2": f"500: this is a 500 {tried}",
        "prompt 3": f"the content of the message is null {tried}",
        "prompt 4": f"the response has no choice {tried}",
        "prompt 5": f"the response is not JSON (Unterminated string starting at) {tried}",
        "prompt 6": f"finish_reason='abort' {tried}",
        "prompt 7": f"finish_reason=None {tried}",
    }


def test_what_a_server_refuses_for_one_prompt_fails_after_one_call():
    with FaultyServer(for_prompt("400 too long", "prompt 3")) as server:
        completions = completions_of(backend_of(server, concurrency=1), requests_of(6))
    assert completions.pop("prompt 3") == Failure("400: this is a 400 too long")
    assert len(completions) == 5
    assert all(isinstance(answer, Completion) for answer in completions.values())
    assert len(server.calls) == 6


def test_a_time_out_is_tried_again_and_then_fails_while_the_server_is_there():
    with FaultyServer(for_prompt("hang", "prompt 1")) as server:
        completions = completions_of(backend_of(server, timeout_s=0.2, max_retries=1), requests_of(3))
        assert len(server.calls_of("prompt 1")) == 2
    assert completions["prompt 1"] == Failure("no response within 0.2 s (tried 2 times)")


def test_a_server_that_does_not_know_the_wish_for_token_ids_is_asked_without_it_from_then_on():
    def refuse(body: dict) -> dict:
        if "return_token_ids" in body:
            if body["messages"][-1]["content"] == "prompt 1":
                time.sleep(0.2)  # refused when others have been answered without
            return {"status": 422, "detail": "Unexpected fields in the request: {'return_token_ids'}"}
        return answer_of(body)

    with FaultyServer(answer=refuse) as server:
        completions = completions_of(backend_of(server, concurrency=3), requests_of(20))
    assert len(completions) == 20
    assert all(isinstance(answer, Completion) for answer in completions.values())
    assert len(server.calls) <= 20 + 3
    assert not any("return_token_ids" in call.body for call in server.calls[6:])


def test_sampling_tools_and_template_arguments_reach_the_server():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    request = TurnRequest("7", [{"role": "user", "content": "x"}], 2, tools, {"enable_thinking": False})
    sampling = SamplingParameters(max_new_tokens=9, temperature=0.5, top_p=0.9, top_k=20, seed=4)
    with FaultyServer() as server:
        backend = ServerBackend(server.url, "tiny", sampling, api_key="secret")
        completions_of(backend, [request])
    extra = {"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}
    expected = {"model": "tiny", "messages": request.messages, "tools": tools, "max_tokens": 9, **extra}
    assert server.calls[0].body == {**expected, "temperature": 0.5, "top_p": 0.9, "seed": request.seed(4)}
    assert server.calls[0].authorization == "Bearer secret"


def test_a_request_that_is_no_json_fails_alone():
    broken = request_of("broken", tools=[{"minimum": float("nan")}])
    with FaultyServer() as server:
        completions = completions_of(backend_of(server), [request_of("a"), broken, request_of("b")])
    assert isinstance(completions["a"], Completion)
    assert isinstance(completions["b"], Completion)
    assert completions["broken"].reason.startswith("the request cannot be written as JSON (Out of range float values")
    assert len(server.calls) == 2


def test_a_filtered_answer_fails_without_further_tries():
    def filtered(body: dict) -> dict:
        answer = answer_of(body)
        answer["choices"][0]["finish_reason"] = "content_filter"
        return answer

    with FaultyServer(answer=filtered) as server:
        completions = completions_of(backend_of(server), requests_of(2))
    assert set(completions.values()) == {Failure("finish_reason='content_filter'")}
    assert len(server.calls) == 2


def test_a_refused_key_stops_the_run_and_is_never_shown():
    def refuse(body: dict) -> dict:
        return {"status": 401, "error": {"message": "Incorrect API key provided: sk-secret"}}

    with FaultyServer(answer=refuse) as server:
        backend = backend_of(server, api_key="sk-secret")
        with pytest.raises(
            RuntimeError, match=r"refused the request with 401: Incorrect .*: \*\*\*.*OPENAI_API_KEY"
        ) as caught:
            completions_of(backend, requests_of(40))
        assert len(server.calls) <= 32
    assert "sk-secret" not in str(caught.value)


def test_a_prompt_that_is_forbidden_fails_alone_but_not_if_all_are():
    with FaultyServer(for_prompt("403", "prompt 0", "prompt 7")) as server:
        completions = completions_of(backend_of(server, concurrency=1), requests_of(10))
        assert len(server.calls) == 10
    assert {name for name, answer in completions.items() if isinstance(answer, Failure)} == {"prompt 0", "prompt 7"}
    with FaultyServer(lambda number, body: "403") as server, pytest.raises(RuntimeError, match="403: this is a 403"):
        completions_of(backend_of(server), requests_of(40))


def test_the_environment_names_the_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-outside")
    with FaultyServer() as server:
        completions_of(backend_of(server), requests_of(1))
    assert server.calls[0].authorization == "Bearer from-outside"


def test_a_wrong_model_stops_the_run_and_the_right_names_are_listed(caplog):
    def only_served(body: dict) -> dict:
        if body["model"] == "served":
            return answer_of(body)
        return {"status": 404, "error": {"message": f"The model `{body['model']}` does not exist."}}

    with FaultyServer(answer=only_served, models=["listed/a", "listed/b"]) as server:
        with pytest.raises(
            ValueError,
            match=r"model='wrong' with 404: The model `wrong` .*that it lists, which are listed/a, listed/b\.",
        ):
            completions_of(backend_of(server, "wrong"), requests_of(40))
        assert len(server.calls) == 1
        assert not caplog.messages
        assert len(completions_of(backend_of(server, "served"), requests_of(40))) == 40
        assert len(server.calls) == 41
    (warning,) = caplog.messages
    assert "returns completions of 'served' but lists listed/a, listed/b." in warning


@pytest.mark.parametrize(
    ("status", "words"), [(400, "Server is pinned to 'tiny'; requested 'wrong'."), (500, "Internal Server Error")]
)
def test_a_model_that_is_not_listed_and_not_answered_for_is_wrong_whatever_the_status(status, words):
    with FaultyServer(answer=lambda body: {"status": status, "detail": words}) as server:
        with pytest.raises(ValueError, match=rf"model='wrong' with {status}: {words}.*that it lists, which are tiny"):
            completions_of(backend_of(server, "wrong"), requests_of(40))
        assert len(server.calls) <= 3


def test_without_a_name_the_only_model_is_taken():
    with FaultyServer() as server:
        backend = backend_of(server, None)
        assert backend.check() == backend.model == "tiny"
    for models, shown in ((["a", "b"], "a, b"), ([], "no models"), (None, "no models")):
        with (
            FaultyServer(models=models) as server,
            pytest.raises(ValueError, match=rf"No model was named.*lists {shown}\."),
        ):
            backend_of(server, None).check()


def test_a_server_without_a_list_is_asked_all_the_same():
    with FaultyServer(models=None) as server:
        assert len(completions_of(backend_of(server, "any"), requests_of(3))) == 3


def test_nobody_listening_is_one_error():
    with FaultyServer() as server:
        pass
    with pytest.raises(
        ConnectionError, match=r"^http://127.0.0.1:\d+/v1: connection failed: .*must be listening there"
    ):
        completions_of(backend_of(server), requests_of(3))


def test_a_server_that_dies_stops_the_run_and_keeps_the_answers_before():
    with FaultyServer() as server:
        backend = backend_of(server, concurrency=4, max_retries=3)
        completions = backend.completions(RequestQueue(requests_of(1000)))
        before = list(itertools.islice(completions, 20))
        server.die()
        with pytest.raises(ConnectionError, match="must be listening there"):
            before += list(completions)
    assert all(isinstance(answer, Completion) for _, answer in before)
    assert 20 <= len(before) < 200


def test_the_first_requests_all_failing_stop_the_run_and_nothing_is_written_off():
    reason = r"8 requests to .* failed without a completion between them, the last one with: 400: this is a 400"
    with FaultyServer(lambda number, body: "400") as server:
        completions = backend_of(server, concurrency=2).completions(RequestQueue(requests_of(100)))
        with pytest.raises(RuntimeError, match=reason):
            next(completions)
        # each is also tried without asking for token ids
        assert len(server.calls) <= 2 * (MAX_CONSECUTIVE_FAILURES + 2)


def test_fewer_failures_than_it_takes_to_give_up_are_reported_in_the_end():
    with FaultyServer(lambda number, body: "400") as server:
        assert list(completions_of(backend_of(server), requests_of(3)).values()) == [Failure("400: this is a 400")] * 3


def test_failures_before_the_first_answer_come_right_before_it():
    prompts = [f"prompt {number}" for number in range(5)]
    with FaultyServer(for_prompt("400", *prompts[:-1])) as server:
        outcomes = list(backend_of(server, concurrency=1).completions(RequestQueue(requests_of(5))))
    assert [request.conversation_id for request, _ in outcomes] == prompts
    assert [type(outcome) for _, outcome in outcomes] == [Failure] * 4 + [Completion]


def test_a_server_that_falls_ill_stops_the_run_and_nothing_is_written_off():
    with FaultyServer(lambda number, body: "500" if number >= 10 else None) as server:
        completions = backend_of(server, concurrency=1, max_retries=1).completions(RequestQueue(requests_of(100)))
        first = [answer for _, answer in itertools.islice(completions, 10)]
        assert [type(answer) for answer in first] == [Completion] * 10
        with pytest.raises(RuntimeError, match=r"the last one with: 500: this is a 500 \(tried 2 times\)"):
            next(completions)
    assert len(server.calls) == 10 + 2 * MAX_CONSECUTIVE_FAILURES


def test_a_pause_that_a_server_asks_for_holds_everyone_back():
    with FaultyServer(lambda number, body: "429 after" if number == 4 else None, retry_after="0.5") as server:
        backend = backend_of(server, concurrency=1)
        completions_of(backend, requests_of(4))
        backend.concurrency = 4
        completions_of(backend, [request_of(f"more {number}") for number in range(30)])
    refused_s = server.calls[4].started_s
    assert not [call for call in server.calls if refused_s + 0.1 < call.started_s < refused_s + 0.45]
    assert len(server.calls) == 35


def test_a_rate_limit_spreads_calls_evenly_further_tries_included():
    with FaultyServer(lambda number, body: "500" if number == 2 else None) as server:
        began_s = time.monotonic()
        completions_of(backend_of(server, requests_per_minute=1200), requests_of(8))
    starts = sorted(call.started_s for call in server.calls)
    assert len(starts) == 9
    # from before the first call, since a busy machine can delay its arrival but never advance that of the last one
    assert starts[-1] - began_s >= 8 * 0.05


def test_requests_are_taken_one_by_one_and_put_back_ones_are_answered():
    taken = 0

    def requests():
        nonlocal taken
        for taken in range(1, 101):
            yield request_of(f"prompt {taken}")

    def answer_slowly(body: dict) -> dict:
        time.sleep(0.01)
        return answer_of(body)

    queue, turns = RequestQueue(requests()), []
    with FaultyServer(answer=answer_slowly) as server:
        for count, (request, _) in enumerate(backend_of(server, concurrency=5).completions(queue), start=1):
            turns.append((request.conversation_id, request.turn))
            assert taken <= count + 5
            if request.turn == 0 and count % 3 == 0:
                queue.put(request_of(request.conversation_id, turn=1))
        assert 1 < server.most_at_once <= 5
    assert len(set(turns)) == len(turns)
    first = [name for name, turn in turns if turn == 0]
    assert sorted(first) == sorted(f"prompt {number}" for number in range(1, 101))
    assert len(turns) > 120


def test_a_turn_put_back_after_the_last_answer_is_answered():
    queue = RequestQueue([request_of("first")])
    with FaultyServer() as server:
        completions = backend_of(server).completions(queue)
        next(completions)
        queue.put(request_of("second", turn=1))
        assert [request.conversation_id for request, _ in completions] == ["second"]


def threads_of_the_client() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "process_request" not in thread.name}


def test_closing_abandons_calls_that_hang():
    with FaultyServer(lambda number, body: "hang" if number else None) as server:
        completions = backend_of(server).completions(RequestQueue(requests_of(40)))
        next(completions)
        while server.num_at_once < 10:
            time.sleep(0.01)
        started_s, threads = time.monotonic(), threads_of_the_client()
        completions.close()
        assert time.monotonic() - started_s < 2
        assert threads_of_the_client() < threads


def test_an_interrupt_ends_the_wait_at_once():
    with FaultyServer(lambda number, body: "hang") as server:

        def interrupt() -> None:
            while not server.calls:
                time.sleep(0.01)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        started_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            completions_of(backend_of(server), requests_of(40))
        assert time.monotonic() - started_s < 3


def test_it_answers_where_an_event_loop_runs_already():
    async def in_a_notebook() -> int:
        return len(completions_of(backend_of(server), requests_of(3)))

    with FaultyServer() as server:
        assert asyncio.run(in_a_notebook()) == 3


def test_a_proxy_of_the_environment_is_used_but_not_for_loopback(monkeypatch):
    with FaultyServer() as proxy, FaultyServer() as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "other.invalid")
        completions_of(backend_of(server), requests_of(1))
        assert (len(server.calls), len(proxy.calls)) == (1, 0)
        completions_of(ServerBackend("http://model.invalid/v1", "tiny", SamplingParameters()), requests_of(2))
        assert (len(server.calls), len(proxy.calls)) == (1, 2)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://host/gate/v1", "https://host/gate/v1"),
        ("https://host/gate", "https://host/gate/v1"),
        ("https://host/v1beta/openai/", "https://host/v1beta/openai"),
        ("http://host/v1/chat/completions", "http://host/v1"),
    ],
)
def test_an_address_may_come_in_several_forms(url, root):
    assert server_root(url) == root


def test_arguments_out_of_range_are_named(monkeypatch):
    for url in ("localhost:8000", "ftp://host", "http://"):
        with pytest.raises(ValueError, match=r"url='.*' must be the HTTP address of a server"):
            ServerBackend(url, "tiny", SamplingParameters())
    for values in ({"concurrency": 0}, {"max_retries": -1}, {"timeout_s": 0}, {"first_wait_s": -1}):
        with pytest.raises(ValueError, match=rf"{next(iter(values))}={next(iter(values.values()))}\b.*must be"):
            ServerBackend("http://host", "tiny", SamplingParameters(), **values)
    with pytest.raises(ValueError, match=r"requests_per_minute=0 must be positive"):
        ServerBackend("http://host", "tiny", SamplingParameters(), requests_per_minute=0)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install 'dflash-hf\[server\]'"):
        ServerBackend("http://host", "tiny", SamplingParameters())


def test_a_password_in_the_address_is_not_shown():
    backend = ServerBackend("http://user:hidden@host:8000", "tiny", SamplingParameters())
    assert backend.shown_url == "http://host:8000/v1"


def test_token_ids_are_continued_by_raw_completions_with_the_stop_strings():
    def answer(body: dict) -> dict:
        choice = {"index": 0, "text": f"after {body['prompt']}", "finish_reason": "stop", "token_ids": [7, 8]}
        return {"id": "1", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]}

    requests = [TurnRequest(str(number), [], prompt_ids=[5, number]) for number in range(6)]
    with FaultyServer(lambda number, body: "500" if number < 2 else None, answer=answer) as server:
        found = completions_of(backend_of(server, stop_strings=["<|im_end|>"]), requests)
    assert [found[str(number)].message["content"] for number in range(6)] == [f"after [5, {n}]" for n in range(6)]
    assert found["0"].token_ids == [7, 8]
    assert all(call.body["stop"] == ["<|im_end|>"] and "messages" not in call.body for call in server.calls)
    assert len({call.body["seed"] for call in server.calls}) == 6
    assert len(server.calls) == 8
