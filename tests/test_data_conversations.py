"""Texts and messages in the forms that data sets have them."""

from __future__ import annotations

import json

import datasets
import pytest
from chat_templates import FAMILIES, QWEN3_INSTRUCT, family_tokenizer

from dflash_hf.data.chat_template import ChatTemplateError
from dflash_hf.data.conversations import UnreadableRowError, parse_row
from dflash_hf.data.labels import read_row, tokenize_row
from dflash_hf.data.prepare import prepare_for_training
from dflash_hf.data.prompts import conversation_of_row
from dflash_hf.data.settings import PreparationSettings
from dflash_hf.target.loading import TargetText

HI, MORE = {"role": "user", "content": "Hi"}, {"role": "user", "content": "More?"}
FOUR = {"role": "assistant", "content": "It is 4."}
RESULT = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CHAT = {"messages": [HI, FOUR, MORE, FOUR]}

# Templates that write arguments as they are: joined to other text, printed, or serialised unless they are text
SERIALISED = "{{ call.function.arguments | tojson }}"
ITEMS = "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}"
JOINED = "{{ '<' + call.function.arguments + '>' }}"
PRINTED = "<{{ call.function.arguments }}>"
EITHER = "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"


def call(arguments, **further) -> dict:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function, **further}]}


def tokenizer_with(arguments: str = SERIALISED, name: str = "qwen3-instruct"):
    tokenizer = family_tokenizer(name)
    tokenizer.chat_template = tokenizer.chat_template.replace(SERIALISED, arguments)
    return tokenizer


def read(tokenizer, *messages, **columns):
    return tokenize_row({"messages": list(messages), **columns}, tokenizer, max_length=None)


def written(tokenizer, *messages, **columns) -> str:
    ids, mask = read(tokenizer, *messages, **columns)
    return tokenizer.decode([token for token, keep in zip(ids, mask, strict=True) if keep])


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3-instruct", "qwen3.5", "llama-3.1", "mistral", "harmony", "deepseek-v3"]
)
@pytest.mark.parametrize("text", ['{"a": 2}', '{"a":2}', '{"a": "b\\"c", "d": [1]}'])
def test_arguments_in_json_text_are_learned_as_the_mapping_is(name, text):
    """JSON text is the form of requests and responses; it was learned escaped and in quotation marks."""
    tokenizer = family_tokenizer(name)
    last, first = (
        [
            read(tokenizer, HI, {**call(arguments), "reasoning_content": "hm"}, *more, tools=TOOLS)
            for arguments in (json.loads(text), text)
        ]
        for more in ((), (RESULT, {**FOUR, "reasoning_content": "hm"}))
    )
    assert last[0] == last[1]
    assert first[0] == first[1]


@pytest.mark.parametrize("arguments", [JOINED, PRINTED])
def test_a_template_that_writes_arguments_as_they_are_gets_text(arguments):
    """A mapping was refused, or learned as a representation of Python."""
    tokenizer = tokenizer_with(arguments)
    assert '"arguments": <{"a":2}>' in written(tokenizer, HI, call('{"a":2}'))
    assert '"arguments": <not JSON>' in written(tokenizer, HI, call("not JSON"))
    assert '"arguments": <{"a": "é"}>' in written(tokenizer, HI, call({"a": "é"}))


def test_a_template_that_takes_both_forms_of_arguments_gets_what_the_row_has():
    assert '"arguments": {"a":2}' in written(tokenizer_with(EITHER), HI, call('{"a":2}'))
    assert '"arguments": {"a": 2}' in written(tokenizer_with(EITHER), HI, call({"a": 2}))


def test_a_template_that_loops_over_arguments_gets_a_mapping():
    assert '"arguments": a=2' in written(tokenizer_with(ITEMS), HI, call('{"a": 2}'))


def test_calls_in_other_forms_are_read():
    tokenizer = tokenizer_with()
    expected = read(tokenizer, HI, call({"a": 2}))
    function = {"name": "add", "arguments": '{"a": 2}'}
    for message in (
        {"role": "assistant", "tool_calls": json.dumps([{"type": "function", "function": function}])},
        {"role": "assistant", "tool_calls": [json.dumps({"type": "function", "function": function})]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": json.dumps(function)}]},
        {"role": "assistant", "content": None, "function_call": function},
        {"from": "function_call", "value": json.dumps(function)},
        {"from": "function_call", "value": json.dumps([function])},
    ):
        assert read(tokenizer, HI, message) == expected
    assert '"arguments": {}' in written(tokenizer, HI, call(""))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (call("[1]"), "has the text '\\[1\\]', which is not a JSON object"),
        (call('{"a": '), "which is not a JSON object"),
        ({"role": "assistant", "tool_calls": "add(2)"}, "tool_calls is the text 'add\\(2\\)', which is not JSON"),
        ({"role": "assistant", "tool_calls": [{"arguments": {}}]}, "has the tool call .*`name` and `arguments`"),
        ({"from": "function_call", "value": "add(2)"}, "function_call is the text 'add\\(2\\)', which is not JSON"),
    ],
)
def test_calls_that_are_not_json_are_refused(message, words):
    with pytest.raises((UnreadableRowError, ChatTemplateError), match=words):
        read(tokenizer_with(), HI, message)


def in_parts(message: dict, *texts: str) -> dict:
    return {**message, "content": [{"type": "text", "text": text} for text in texts or (message["content"],)]}


@pytest.mark.parametrize("name", ["qwen3", "qwen3-instruct", "llama-3.1", "gemma", "mistral", "harmony", "smollm2",
                                  "deepseek-v3", "phi-4-mini"])  # fmt: skip
def test_content_in_parts_is_learned_as_the_plain_text_is(name):
    """Parts were learned as a representation of Python, and an answer in parts as an empty one."""
    tokenizer = family_tokenizer(name)
    system = [] if name == "gemma" else [{"role": "system", "content": "Be brief."}]
    messages = [*system, HI, FOUR, MORE, FOUR]
    expected = read(tokenizer, *messages)
    assert read(tokenizer, *map(in_parts, messages)) == expected
    for index, message in enumerate(messages):
        half = len(message["content"]) // 2
        two = in_parts(message, message["content"][:half], message["content"][half:])
        assert read(tokenizer, *messages[:index], two, *messages[index + 1 :]) == expected
    texts = [{**message, "content": [message["content"]]} for message in messages]
    assert read(tokenizer, *texts) == expected


def test_a_tool_result_in_parts_is_learned_as_the_plain_text_is():
    for name in ("qwen3-instruct", "llama-3.1"):
        tokenizer = family_tokenizer(name)
        expected = read(tokenizer, HI, call({"a": 2}), RESULT, FOUR)
        assert read(tokenizer, HI, call({"a": 2}), in_parts(RESULT), FOUR) == expected


LOOP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }};{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{{- '<|im_start|>assistant\n' if add_generation_prompt }}"
)
PARTS_ALONE = LOOP.replace("{% if m.content is string %}{{ m.content }}{% else %}", "").replace("{% endif %}<", "<")


def test_parts_reach_a_template_that_loops_over_them():
    tokenizer = family_tokenizer("qwen3-instruct")
    tokenizer.chat_template = LOOP.replace(";", "")
    ids, _ = read(tokenizer, in_parts(HI, "Hi ", " you"), in_parts(FOUR, " It ", "is 4."))
    assert tokenizer.decode(ids) == ("<|im_start|>user\nHiyou<|im_end|>\n<|im_start|>assistant\nItis 4.<|im_end|>\n")
    assert read(tokenizer, HI, in_parts(FOUR)) == read(tokenizer, HI, FOUR)


def test_texts_reach_a_template_that_only_loops_over_parts():
    """Such a template iterates over the letters of a text and renders none of them."""
    tokenizer = family_tokenizer("qwen3-instruct")
    tokenizer.chat_template = PARTS_ALONE.replace(";", "")
    assert read(tokenizer, HI, FOUR) == read(tokenizer, in_parts(HI), in_parts(FOUR))
    assert written(tokenizer, HI, FOUR) == "It is 4.<|im_end|>"
    truncated = written(tokenizer, HI, FOUR, finish_reason="length")
    assert truncated == "It is 4."


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
@pytest.mark.parametrize("part", [{"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {}},
                                  {"type": "input_audio"}, {"type": "text"}, {"type": "text", "text": 3}, 3,
                                  {"type": "thinking", "thinking": "hm"}])  # fmt: skip
def test_parts_that_are_no_text_are_refused(role, part):
    messages = [{"role": role, "content": [{"type": "text", "text": "Look"}, part]}, HI, FOUR]
    with pytest.raises(UnreadableRowError, match=f"A message of role '{role}' has a content of the type"):
        read(family_tokenizer("qwen3-instruct"), *messages)
    if role == "user":
        with pytest.raises(ValueError, match="has a content of the type"):
            conversation_of_row({"messages": messages})


@pytest.mark.parametrize("content", [4, {"a": 2}, True, 1.5])
def test_a_content_that_is_no_text_is_refused(content):
    with pytest.raises(UnreadableRowError, match="has a content of the type"):
        read(family_tokenizer("qwen3-instruct"), HI, {"role": "assistant", "content": content})


def test_a_message_without_content_is_refused():
    with pytest.raises(UnreadableRowError, match="A message of role 'assistant' has no content"):
        read(family_tokenizer("qwen3-instruct"), HI, {"role": "assistant", "content": None})


ANSWERERS = ["gpt", "chatgpt", "bing", "bard", "model", "assistant", "GPT"]


@pytest.mark.parametrize("speaker", ANSWERERS)
def test_answers_of_other_models_are_left_out_of_prompts_and_learned_as_answers(speaker):
    """The answer of ChatGPT became a part of the prompt."""
    for entry in ({"from": speaker, "value": "It is 4."}, {"role": speaker, "content": "It is 4."}):
        row = {"conversations": [{"from": "human", "value": "Hi"}, entry, {"from": "user", "value": "More?"}, entry]}
        assert conversation_of_row(row).turns == [[HI], [MORE]]
        tokenizer = family_tokenizer("qwen3-instruct")
        assert read_row(row, tokenizer) == read_row(CHAT, tokenizer)


@pytest.mark.parametrize("speaker", ["tool", "function", "observation", "function_response", "ipython"])
def test_results_of_tools_end_a_prompt_and_are_context_of_an_answer(speaker):
    calls = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    row = {"conversations": [{"from": "human", "value": "Hi"}, calls, {"from": speaker, "value": "4"},
                             {"from": "gpt", "value": "It is 4."}], "tools": json.dumps(TOOLS)}  # fmt: skip
    assert conversation_of_row(row).turns == [[HI]]
    assert conversation_of_row(row).tools == TOOLS
    tokenizer = family_tokenizer("qwen3-instruct")
    assert read_row(row, tokenizer) == read_row(
        {"messages": [HI, call({"a": 2}), RESULT, FOUR], "tools": TOOLS}, tokenizer
    )


def test_an_unknown_speaker_is_refused_by_name():
    row = {"conversations": [HI, {"from": "claude-9", "value": "x"}]}
    for read_it in (conversation_of_row, parse_row):
        with pytest.raises(ValueError, match="is from 'claude-9', and the known speakers are human, user"):
            read_it(row)
    with pytest.raises(ValueError, match="has the role 'expert', and the roles of prompts are"):
        conversation_of_row({"messages": [HI, {"role": "expert", "content": "x"}]})


COLUMNS = {
    "messages": CHAT["messages"],
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "It is 4."}, MORE, FOUR],
    "prompt": [HI, FOUR, MORE],
    "completion": [FOUR],
    "tools": TOOLS,
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.mark.parametrize(
    "names",
    [
        ("messages", "tools"),
        ("conversations", "chat_template_kwargs"),
        ("prompt", "completion"),
        ("messages", "tools", "chat_template_kwargs"),
    ],
)
def test_columns_of_json_text_are_parsed(names):
    """They were asked literally, or ended the preparation."""
    tokenizer = family_tokenizer("qwen3")
    parsed = {name: COLUMNS[name] for name in names}
    row = {name: json.dumps(value) for name, value in parsed.items()}
    assert read_row(row, tokenizer) == read_row(parsed, tokenizer)
    assert conversation_of_row(row) == conversation_of_row(parsed)
    listed = {**row, "tools": [json.dumps(tool) for tool in TOOLS]}
    assert read_row(listed, tokenizer) == read_row({**parsed, "tools": TOOLS}, tokenizer)


def test_texts_that_look_like_json_stay_prompts():
    for text in ("[1, 2, 3]", '["a"]', "[] is an empty list", '{"role": "user"}'):
        assert conversation_of_row({"prompt": text}).turns == [[{"role": "user", "content": text}]]
        assert parse_row({"prompt": text, "completion": "x"})["prompt"] == text
    assert conversation_of_row({"turns": '["Hi", "More?"]'}).turns == [[HI], [MORE]]


@pytest.mark.parametrize("text", ["[" + "1" * 5000 + "]", "[" * 100_000], ids=["digits", "depth"])
def test_json_that_python_cannot_read_is_a_prompt_or_drops_its_row(text):
    """Python reads no integer of more than 4,300 digits, and raises another error than for text that is not JSON."""
    assert parse_row({"prompt": text, "completion": text}) == {"prompt": text, "completion": text}
    for name in ("prompt", "text"):
        assert conversation_of_row({name: text}).turns == [[{"role": "user", "content": text}]]
    for row in ({"messages": text}, {**CHAT, "tools": text}, {**CHAT, "chat_template_kwargs": text}):
        with pytest.raises(UnreadableRowError, match=r"is the text '\[.*, which is not JSON"):
            parse_row(row)
    with pytest.raises(ValueError, match="input_ids must be a flat list"):
        read_row({"input_ids": text}, None)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": "[{"}, r"messages is the text '\[{', which is not JSON"),
        ({"messages": "Hi"}, "messages is the text 'Hi', which is not JSON"),
        ({"messages": "{}"}, "must be a list of messages"),
        ({"messages": 3}, "messages is 3, and it must be a list of messages"),
        ({**CHAT, "tools": "add"}, "tools is the text 'add', which is not JSON"),
        ({**CHAT, "tools": "3"}, "tools are '3', and they must be a list of mappings"),
        ({**CHAT, "tools": ["3"]}, "they must be a list of mappings"),
        ({**CHAT, "chat_template_kwargs": "{"}, "chat_template_kwargs is the text"),
        ({**CHAT, "chat_template_kwargs": "[1]"}, r"chat_template_kwargs are '\[1\]', and they must be a mapping"),
        ({"prompt": "Hi", "completion": [FOUR]}, "is a text and the other a list"),
        ({"prompt": "Hi", "completion": 4}, "completion is 4, and it must be a text or a list"),
        ({"prompt": "Hi", "completion": "4", "label": False}, "label is False"),
        ({"prompt": "Hi", "completion": "4", "system": "Be brief."}, "a system prompt in `system`"),
        (
            {"messages": [{"role": "system", "content": "x"}, HI, FOUR], "system": "y"},
            "and another one in its messages",
        ),
        ({"messages": [HI, {**FOUR, "weight": 0.5}]}, r"weight=0\.5, and a message carries loss as a whole"),
        ({"messages": [HI, {**FOUR, "train_detail": [{"begin_offset": 0}]}]}, "train_detail="),
        ({**CHAT, "images": ["a.png"]}, "The row has images"),
    ],
)
def test_a_row_that_cannot_be_read_is_dropped_with_its_reason(row, words):
    with pytest.raises(UnreadableRowError, match=words):
        parse_row(row)
    tokenizer = family_tokenizer("qwen3-instruct")
    good = {"messages": json.dumps(CHAT["messages"])}
    columns = {*row, *good}
    try:
        rows = datasets.Dataset.from_list([{name: part.get(name) for name in columns} for part in (row, good)])
    except (TypeError, ValueError):  # no column holds both
        return
    prepared = prepare_for_training(rows, TargetText(tokenizer, (), 300), PreparationSettings())
    assert prepared.dropped == {"without readable messages or texts": 1}


@pytest.mark.parametrize("rows", [
    [{"question": "Hi", "answer": "x"}], [{"instruction": "Hi", "input": "", "output": "x"}],
    [{"prompt": "Hi", "chosen": "x", "rejected": "y"}], [{"chosen": [HI, FOUR], "rejected": [HI, FOUR]}],
    [{"text": "Hi"}], [{"prompt": "Hi", "completions": ["x"], "labels": [True]}], [{"prompt": [HI]}],
])  # fmt: skip
def test_other_columns_are_refused_by_their_names(rows):
    with pytest.raises(ValueError, match=r"The row has (the columns|labels)"):
        read_row(rows[0], family_tokenizer("qwen3-instruct"))


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
@pytest.mark.parametrize("value", [0, False])
def test_an_answer_that_a_key_leaves_out_of_the_loss_is_context(key, value):
    """OpenAI writes a weight of 0 and axolotl train=False; such answers were learned."""
    tokenizer = family_tokenizer("qwen3-instruct")
    other = {"role": "assistant", "content": "No."}
    assert written(tokenizer, HI, {**other, key: value}, MORE, FOUR) == "It is 4.<|im_end|>"
    assert written(tokenizer, HI, {**other, key: 1}, MORE, FOUR) == "No.<|im_end|>It is 4.<|im_end|>"
    assert written(tokenizer, HI, FOUR, MORE, {**other, key: value}) == "It is 4.<|im_end|>"
    assert written(tokenizer, HI, {**FOUR, key: value}) == ""


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_the_system_prompt_of_a_column_of_its_own_is_read(name):
    """LLaMA-Factory's rows have it beside the conversation; it was dropped."""
    tokenizer = family_tokenizer("qwen3-instruct")
    system = {"role": "system", "content": "Be brief."}
    expected = {"messages": [system, *CHAT["messages"]]}
    assert read_row({**CHAT, name: "Be brief."}, tokenizer) == read_row(expected, tokenizer)
    assert read_row({**expected, name: "Be brief."}, tokenizer) == read_row(expected, tokenizer)
    assert conversation_of_row({**CHAT, name: "Be brief."}).turns[0] == [system, HI]
    parts = {"prompt": [HI], "completion": [FOUR], name: "Be brief."}
    assert read_row(parts, tokenizer) == read_row({"prompt": [system, HI], "completion": [FOUR]}, tokenizer)


def test_parsing_a_row_twice_changes_nothing():
    row = {"conversations": json.dumps([*COLUMNS["conversations"], call('{"a": 2}')]), "tools": json.dumps(TOOLS),
           "system": "Be brief."}  # fmt: skip
    parsed = parse_row(row)
    assert parse_row(parsed) is parsed
    assert parse_row(dict(parsed)) == parsed


def test_nulls_of_json_text_stay_and_those_that_columns_add_go():
    """Arrow gives every mapping of a column the keys of all; JSON text has exactly what the target wrote."""
    tokenizer = tokenizer_with()
    assert '"arguments": {"a": null}' in written(tokenizer, HI, call('{"a": null}'))
    assert '"arguments": {}' in written(tokenizer, HI, call({"a": None}))
    text = json.dumps([HI, call({"a": None}), RESULT, FOUR])
    tools = [{"type": "function", "function": {"name": "add", "default": None}}]
    ids, _ = tokenize_row({"messages": text, "tools": json.dumps(tools)}, tokenizer, max_length=None)
    assert '"arguments": {"a": null}' in tokenizer.decode(ids)
    assert '"default": null' in tokenizer.decode(ids)
    ids, _ = tokenize_row({"messages": [HI, FOUR], "tools": tools}, tokenizer, max_length=None)
    assert "null" not in tokenizer.decode(ids)


def test_families_have_a_template_that_the_tests_of_arguments_change():
    assert SERIALISED in QWEN3_INSTRUCT
    assert FAMILIES["qwen3-instruct"].template is QWEN3_INSTRUCT
