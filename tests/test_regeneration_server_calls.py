from __future__ import annotations

import json

import pytest

from dflash_hf.regeneration.requests import Completion, SamplingParameters, TurnRequest
from dflash_hf.regeneration.server_calls import RequestError, read_completion, request_body, retry_after_s

BARE = TurnRequest("0", [{"role": "user", "content": "x"}])


def test_a_request_says_how_to_sample_and_leaves_to_the_server_what_is_none():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    request = TurnRequest("7", [{"role": "user", "content": "x"}], 2, tools, {"enable_thinking": False})
    everything = SamplingParameters(max_new_tokens=9, temperature=0.5, top_p=0.9, top_k=20, seed=4)
    assert request_body(request, everything, with_token_ids=True) == {
        "messages": [{"role": "user", "content": "x"}],
        "tools": tools,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": request.seed(4),
        "extra_body": {"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True},
    }
    nothing = SamplingParameters(max_new_tokens=9, temperature=None)
    assert request_body(BARE, nothing, with_token_ids=False) == {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        "seed": BARE.seed(0),
    }
    no_limit = request_body(BARE, SamplingParameters(top_k=0), with_token_ids=False)
    assert no_limit["extra_body"] == {"top_k": -1}
    assert no_limit["temperature"] == 0.0


def response_of(message: dict | None = None, **values) -> str:
    top = {key: values.pop(key) for key in ("prompt_token_ids", "usage") if key in values}
    message = message or {"role": "assistant", "content": "yes"}
    return json.dumps({**top, "choices": [{"message": message, "finish_reason": "stop", **values}]})


def test_an_answer_holds_what_the_server_tells():
    yes = {"role": "assistant", "content": "yes"}
    assert read_completion(response_of()) == Completion(yes, "stop")
    assert read_completion(response_of(finish_reason="length")) == Completion(yes, "length")
    assert read_completion(response_of(finish_reason="tool_calls")) == Completion(yes, "stop")
    vllm = read_completion(response_of(prompt_token_ids=[1, 2], token_ids=[3, 4]))
    assert vllm == Completion(yes, "stop", [1, 2], [3, 4])
    choice = {"message": yes, "finish_reason": "stop", "prompt_token_ids": [1, 2], "token_ids": [3, 4]}
    assert read_completion(json.dumps({"choices": [choice]})) == vllm
    assert read_completion(response_of(usage={"completion_tokens": 4})) == Completion(yes, "stop", num_tokens=4)
    for no_ids in (["3"], [True], [-1], [2**70], {"3": 3}):
        assert read_completion(response_of(prompt_token_ids=None, token_ids=no_ids)) == Completion(yes, "stop")

    as_text = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    no_json = {"function": {"name": "add", "arguments": "{a"}}
    message = {"role": "assistant", "content": None, "tool_calls": [as_text, no_json], "refusal": None}
    calls = [{**as_text, "function": {"name": "add", "arguments": {"a": 1}}}, no_json]
    assert read_completion(response_of(message)).message == {"role": "assistant", "content": "", "tool_calls": calls}
    message = {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [], "audio": None}
    expected = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert read_completion(response_of(message)).message == expected
    cut_while_thinking = {"role": "assistant", "content": None, "reasoning": "hm"}
    cut = read_completion(response_of(cut_while_thinking, finish_reason="length"))
    assert cut.message == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert read_completion(response_of({"role": "assistant", "content": ""})).message["content"] == ""


@pytest.mark.parametrize(
    ("text", "reason", "is_transient"),
    [
        ("", r"not JSON", True),
        ("[]", r"no choice", True),
        ('{"error": {"message": "over\\nloaded"}}', r"no choice: over loaded", True),
        ('{"choices": [null]}', r"no choice", True),
        (response_of(finish_reason="content_filter"), r"finish_reason='content_filter'", False),
        (response_of({"role": "assistant", "content": [{"type": "text"}]}), r"not text", True),
        (response_of({"role": "assistant", "content": "a", "reasoning": {"b": 1}}), r"reasoning .* not text", True),
        ("[" * 10**5, r"not JSON \(maximum recursion", True),
        ("9" * 5000, r"not JSON \(Exceeds the limit", True),
    ],
)
def test_a_response_without_an_answer_says_why(text, reason, is_transient):
    with pytest.raises(RequestError, match=reason) as caught:
        read_completion(text)
    assert caught.value.is_transient is is_transient


def test_a_pause_is_read_as_seconds_or_a_date():
    assert retry_after_s({}) is None
    assert retry_after_s({"retry-after": "1.5"}) == 1.5
    assert retry_after_s({"retry-after": "-1"}) == 0
    assert retry_after_s({"retry-after": "86400"}) == 600
    assert retry_after_s({"retry-after": "nan"}) is None
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert retry_after_s({"retry-after": "Wed, 21 Oct 2215 07:28:00 GMT"}) == 600
