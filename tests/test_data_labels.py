"""The supervised tokens of conversations, against masks written by hand, on templates like those of known families."""

from __future__ import annotations

from datetime import date, datetime

import pytest
from chat_templates import FAMILIES, end_ids, family_tokenizer, metaspace_tokenizer
from tokenizers import processors

from dflash_hf.data.chat_template import ChatTemplateError
from dflash_hf.data.labels import read_row, split_turns, tokenize_row

SYSTEM = {"role": "system", "content": "Be brief."}
HI, MORE = {"role": "user", "content": "Hi"}, {"role": "user", "content": "More?"}
FOUR, NO = {"role": "assistant", "content": "It is 4."}, {"role": "assistant", "content": "No."}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 4."}
TAIL_OF_THOUGHT = {"role": "assistant", "content": "hm\n</think>\n\nIt is 4."}  # where the prompt begins to think
APART = {"role": "assistant", "content": "It is 4.", "reasoning_content": "hm"}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALL, RESULT = {"role": "assistant", "tool_calls": [ADD]}, {"role": "tool", "content": "4"}
THOUGHT_CALL = {**CALL, "reasoning_content": "add"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
TOOLS_TEXT = '[{"type": "function", "function": {"name": "add"}}]'
DATE = {"date_string": "26 Jul 2024"}


def chat(*messages, **columns) -> dict:
    return {"messages": list(messages), **columns}


# Each case has the family, the row, and the text of the row in pieces with whether the target wrote each piece.
QWEN_HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
QWEN_MORE = "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
QWEN_RESULT = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
BLOCK = "<think>\n\n</think>\n\n"
WRITTEN_THOUGHT = "<think>\nhm\n</think>\n\nIt is 4.<|im_end|>"
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
CASES = {
    "qwen3 thinks": ("qwen3", chat(HI, THOUGHT), [(QWEN_HI, False), (WRITTEN_THOUGHT, True), ("\n", False)]),
    "qwen3 thinks in a field of its own": (
        "qwen3",
        chat(HI, APART),
        [(QWEN_HI, False), (WRITTEN_THOUGHT, True), ("\n", False)],
    ),
    "qwen3 does not think": (
        "qwen3",
        chat(HI, FOUR, **NOT_THINKING),
        [(QWEN_HI + BLOCK, False), ("It is 4.<|im_end|>", True), ("\n", False)],
    ),
    "qwen3 several turns with thoughts": (
        "qwen3",
        chat(SYSTEM, HI, THOUGHT, MORE, THOUGHT),
        [
            ("<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_HI + "It is 4.<|im_end|>" + QWEN_MORE, False),
            (WRITTEN_THOUGHT, True),
            ("\n", False),
        ],
    ),
    "qwen3 several turns without thoughts": (
        "qwen3",
        chat(HI, FOUR, MORE, NO, **NOT_THINKING),
        [
            (QWEN_HI + "It is 4.<|im_end|>" + QWEN_MORE + BLOCK, False),
            ("No.<|im_end|>", True),
            ("\n", False),
        ],
    ),
    "qwen3 calls a tool and thinks before and after": (
        "qwen3",
        chat(HI, THOUGHT_CALL, RESULT, THOUGHT, tools=TOOLS),
        [
            (f"<|im_start|>system\nYou may call: {TOOLS_TEXT}<|im_end|>\n" + QWEN_HI, False),
            ("<think>\nadd\n</think>\n\n" + QWEN_CALL, True),
            (QWEN_RESULT, False),
            (WRITTEN_THOUGHT, True),
            ("\n", False),
        ],
    ),
    "qwen3 ends with a question": (
        "qwen3",
        chat(HI, THOUGHT, MORE),
        [(QWEN_HI, False), (WRITTEN_THOUGHT, True), ("\n", False)],
    ),
    "qwen3 is cut in its answer": (
        "qwen3",
        chat(HI, FOUR, finish_reason="length", **NOT_THINKING),
        [(QWEN_HI + BLOCK, False), ("It is 4.", True)],
    ),
    "qwen3 is cut in its thought": (
        "qwen3",
        chat(HI, {"role": "assistant", "content": "<think>\nhm, let me "}, finish_reason="length"),
        [(QWEN_HI, False), ("<think>\nhm, let me ", True)],
    ),
    "qwen3 instruct": (
        "qwen3-instruct",
        chat(SYSTEM, HI, FOUR, MORE, NO),
        [
            ("<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_HI, False),
            ("It is 4.<|im_end|>", True),
            (QWEN_MORE, False),
            ("No.<|im_end|>", True),
            ("\n", False),
        ],
    ),
    "qwen3 instruct calls a tool": (
        "qwen3-instruct",
        chat(HI, CALL, RESULT, FOUR),
        [(QWEN_HI, False), (QWEN_CALL, True), (QWEN_RESULT, False), ("It is 4.<|im_end|>", True), ("\n", False)],
    ),
    "qwen3 instruct speaks and calls": (
        "qwen3-instruct",
        chat(HI, {**CALL, "content": "Wait."}),
        [(QWEN_HI, False), ("Wait.\n" + QWEN_CALL, True), ("\n", False)],
    ),
    "qwen3 instruct is cut behind a call": (
        "qwen3-instruct",
        chat(HI, CALL, finish_reason="length"),
        [(QWEN_HI, False), (QWEN_CALL.removesuffix("<|im_end|>"), True)],
    ),
    "qwen3 instruct ends with a question": (
        "qwen3-instruct",
        chat(HI, FOUR, MORE),
        [(QWEN_HI, False), ("It is 4.<|im_end|>", True), ("\n", False)],
    ),
    "qwen3 instruct is cut": (
        "qwen3-instruct",
        chat(HI, FOUR, finish_reason="length"),
        [(QWEN_HI, False), ("It is 4.", True)],
    ),
}
QWEN35_TAIL = "hm\n</think>\n\nIt is 4.<|im_end|>"
GLM_HI = "[gMASK]<sop><|user|>\nHi<|assistant|>"
CASES |= {
    "qwen3.5 thinks": (
        "qwen3.5",
        chat(HI, TAIL_OF_THOUGHT),
        [(QWEN_HI + "<think>\n", False), (QWEN35_TAIL, True), ("\n", False)],
    ),
    "qwen3.5 with the opening of its thought in the answer": (
        "qwen3.5",
        chat(HI, THOUGHT, MORE, THOUGHT),
        [
            (QWEN_HI + "It is 4.<|im_end|>" + QWEN_MORE + "<think>\n", False),
            (QWEN35_TAIL, True),
            ("\n", False),
        ],
    ),
    "qwen3.5 thinks in a field of its own": (
        "qwen3.5",
        chat(HI, APART),
        [(QWEN_HI + "<think>\n", False), (QWEN35_TAIL, True), ("\n", False)],
    ),
    "qwen3.5 is cut in its thought": (
        "qwen3.5",
        chat(HI, {"role": "assistant", "content": "hm, let "}, finish_reason="length"),
        [(QWEN_HI + "<think>\n", False), ("hm, let ", True)],
    ),
    "qwen3.5 is cut in a thought that it repeats the opening of": (
        "qwen3.5",
        chat(HI, {"role": "assistant", "content": "<think>\nhm, let "}, finish_reason="length"),
        [(QWEN_HI + "<think>\n", False), ("hm, let ", True)],
    ),
    "qwen3.5 is cut after its thought": (
        "qwen3.5",
        chat(HI, {"role": "assistant", "content": "hm\n</think>\n\nIt "}, finish_reason="length"),
        [(QWEN_HI + "<think>\n", False), ("hm\n</think>\n\nIt ", True)],
    ),
    "qwen3.5 is cut in a thought in a field of its own": (
        "qwen3.5",
        chat(HI, {"role": "assistant", "content": None, "reasoning_content": "hm, let"}, finish_reason="length"),
        [(QWEN_HI + "<think>\n", False), ("hm, let", True)],
    ),
    "glm thinks": (
        "glm-4.5",
        chat(HI, APART),
        [(GLM_HI, False), ("\n<think>hm</think>\nIt is 4.", True)],
    ),
    "glm does not think": (
        "glm-4.5",
        chat(HI, FOUR, **NOT_THINKING),
        [(GLM_HI + "\n<think></think>", False), ("\nIt is 4.", True)],
    ),
}
LLAMA_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n"
LLAMA_HI = (
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
LLAMA_MORE = (
    "<|start_header_id|>user<|end_header_id|>\n\nMore?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
CASES |= {
    "llama": (
        "llama-3.1",
        chat(HI, FOUR, chat_template_kwargs=DATE),
        [(LLAMA_SYSTEM + LLAMA_HI, False), ("It is 4.<|eot_id|>", True)],
    ),
    "llama with today's date": (
        "llama-3.1",
        chat(HI, FOUR),
        [
            (LLAMA_SYSTEM.replace("26 Jul 2024", datetime.now().strftime("%d %b %Y")) + LLAMA_HI, False),
            ("It is 4.<|eot_id|>", True),
        ],
    ),
    "llama several turns": (
        "llama-3.1",
        chat(SYSTEM, HI, FOUR, MORE, NO, chat_template_kwargs=DATE),
        [
            (LLAMA_SYSTEM + "Be brief." + LLAMA_HI, False),
            ("It is 4.<|eot_id|>", True),
            (LLAMA_MORE, False),
            ("No.<|eot_id|>", True),
        ],
    ),
    "llama writes spaces that its template trims": (
        "llama-3.1",
        chat(HI, {"role": "assistant", "content": " It is 4. \n"}, chat_template_kwargs=DATE),
        [(LLAMA_SYSTEM + LLAMA_HI, False), (" It is 4. \n<|eot_id|>", True)],
    ),
    "llama calls a tool": (
        "llama-3.1",
        chat(HI, CALL, RESULT, FOUR, chat_template_kwargs=DATE),
        [
            (LLAMA_SYSTEM + LLAMA_HI, False),
            ('{"name": "add", "parameters": {"a": 2}}<|eot_id|>', True),
            (
                '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                False,
            ),
            ("It is 4.<|eot_id|>", True),
        ],
    ),
    "llama ends with a question": (
        "llama-3.1",
        chat(HI, FOUR, MORE, chat_template_kwargs=DATE),
        [(LLAMA_SYSTEM + LLAMA_HI, False), ("It is 4.<|eot_id|>", True)],
    ),
    "llama is cut after a space": (
        "llama-3.1",
        chat(HI, {"role": "assistant", "content": "It is "}, finish_reason="length", chat_template_kwargs=DATE),
        [(LLAMA_SYSTEM + LLAMA_HI, False), ("It is ", True)],
    ),
}
GEMMA_HI = "Hi<end_of_turn>\n<start_of_turn>model\n"
GEMMA_MORE = "\n<start_of_turn>user\nMore?<end_of_turn>\n<start_of_turn>model\n"
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]</s>'
CASES |= {
    "gemma": (
        "gemma",
        chat(HI, FOUR),
        [("<bos><start_of_turn>user\n" + GEMMA_HI, False), ("It is 4.<end_of_turn>", True), ("\n", False)],
    ),
    "gemma several turns": (
        "gemma",
        chat(SYSTEM, HI, FOUR, MORE, NO),
        [
            ("<bos><start_of_turn>user\nBe brief.\n\n" + GEMMA_HI, False),
            ("It is 4.<end_of_turn>", True),
            (GEMMA_MORE, False),
            ("No.<end_of_turn>", True),
            ("\n", False),
        ],
    ),
    "gemma ends with a question": (
        "gemma",
        chat(HI, FOUR, MORE),
        [("<bos><start_of_turn>user\n" + GEMMA_HI, False), ("It is 4.<end_of_turn>", True), ("\n", False)],
    ),
    "gemma is cut": (
        "gemma",
        chat(HI, {"role": "assistant", "content": "It is\n"}, finish_reason="length"),
        [("<bos><start_of_turn>user\n" + GEMMA_HI, False), ("It is\n", True)],
    ),
    "mistral": ("mistral", chat(HI, FOUR), [("<s>[INST] Hi[/INST]", False), (" It is 4.</s>", True)]),
    "mistral several turns": (
        "mistral",
        chat(HI, FOUR, MORE, NO),
        [
            ("<s>[INST] Hi[/INST]", False),
            (" It is 4.</s>", True),
            ("[INST] More?[/INST]", False),
            (" No.</s>", True),
        ],
    ),
    "mistral with a system prompt that moves to the last question": (
        "mistral",
        chat(SYSTEM, HI, FOUR, MORE, NO),
        [("<s>[INST] Hi[/INST] It is 4.</s>[INST] Be brief.\n\nMore?[/INST]", False), (" No.</s>", True)],
    ),
    "mistral calls a tool": (
        "mistral",
        chat(HI, CALL, RESULT, FOUR, tools=TOOLS),
        [
            (f"<s>[AVAILABLE_TOOLS] {TOOLS_TEXT}[/AVAILABLE_TOOLS][INST] Hi[/INST]", False),
            (MISTRAL_CALL, True),
            ('[TOOL_RESULTS] {"content": "4"}[/TOOL_RESULTS]', False),
            (" It is 4.</s>", True),
        ],
    ),
    "mistral ends with a question": (
        "mistral",
        chat(HI, FOUR, MORE),
        [("<s>[INST] Hi[/INST]", False), (" It is 4.</s>", True)],
    ),
    "mistral is cut": (
        "mistral",
        chat(HI, FOUR, finish_reason="length"),
        [("<s>[INST] Hi[/INST]", False), (" It is 4.", True)],
    ),
}
HARMONY_SYSTEM = f"<|start|>system<|message|>Date: {date.today()}\nReasoning: medium<|end|>"
HARMONY_HI = HARMONY_SYSTEM + "<|start|>user<|message|>Hi<|end|><|start|>assistant"
HARMONY_MORE = "<|start|>user<|message|>More?<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>'
HARMONY_RESULT = '<|start|>functions to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
CASES |= {
    "harmony": ("harmony", chat(HI, FOUR), [(HARMONY_HI, False), (FINAL + "It is 4.<|return|>", True)]),
    "harmony thinks": (
        "harmony",
        chat(SYSTEM, HI, APART),
        [
            (
                HARMONY_SYSTEM + "<|start|>developer<|message|>Be brief.<|end|>"
                "<|start|>user<|message|>Hi<|end|><|start|>assistant",
                False,
            ),
            (ANALYSIS + FINAL + "It is 4.<|return|>", True),
        ],
    ),
    "harmony with another effort": (
        "harmony",
        chat(HI, FOUR, chat_template_kwargs={"reasoning_effort": "low"}),
        [(HARMONY_HI.replace("medium", "low"), False), (FINAL + "It is 4.<|return|>", True)],
    ),
    "harmony several turns: the end of an earlier answer is another token since": (
        "harmony",
        chat(HI, FOUR, MORE, NO),
        [
            (HARMONY_HI, False),
            (FINAL + "It is 4.", True),
            ("<|end|>" + HARMONY_MORE, False),
            (FINAL + "No.<|return|>", True),
        ],
    ),
    "harmony several turns with thoughts": (
        "harmony",
        chat(HI, APART, MORE, APART),
        [
            (HARMONY_HI + FINAL + "It is 4.<|end|>" + HARMONY_MORE, False),
            (ANALYSIS + FINAL + "It is 4.<|return|>", True),
        ],
    ),
    "harmony calls a tool": (
        "harmony",
        chat(HI, CALL, RESULT, FOUR),
        [
            (HARMONY_HI, False),
            (HARMONY_CALL, True),
            (HARMONY_RESULT, False),
            (FINAL + "It is 4.<|return|>", True),
        ],
    ),
    "harmony thinks and calls": (
        "harmony",
        chat(HI, {**CALL, "reasoning_content": "hm"}),
        [(HARMONY_HI, False), (ANALYSIS + HARMONY_CALL, True)],
    ),
    "harmony drops the thought before a call once it has answered, and had read it": (
        "harmony",
        chat(HI, {**CALL, "reasoning_content": "hm"}, RESULT, APART),
        [
            (HARMONY_HI, False),
            (ANALYSIS + HARMONY_CALL, True),
            (HARMONY_RESULT, False),
            (ANALYSIS + FINAL + "It is 4.<|return|>", True),
        ],
    ),
    "harmony ends with a question": (
        "harmony",
        chat(HI, FOUR, MORE),
        [(HARMONY_HI, False), (FINAL + "It is 4.<|return|>", True)],
    ),
    "harmony is cut": (
        "harmony",
        chat(HI, APART, finish_reason="length"),
        [(HARMONY_HI, False), (ANALYSIS + FINAL + "It is 4.", True)],
    ),
}
SMOL_SYSTEM = "<|im_start|>system\nYou are a small helper.<|im_end|>\n"
DEEPSEEK_HI = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
CASES |= {
    "smollm2 gets a system prompt": (
        "smollm2",
        chat(HI, FOUR),
        [(SMOL_SYSTEM + QWEN_HI, False), ("It is 4.<|im_end|>", True), ("\n", False)],
    ),
    "smollm2 several turns": (
        "smollm2",
        chat(SYSTEM, HI, FOUR, MORE, NO),
        [
            ("<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_HI, False),
            ("It is 4.<|im_end|>", True),
            (QWEN_MORE, False),
            ("No.<|im_end|>", True),
            ("\n", False),
        ],
    ),
    "smollm2 ends with a question": (
        "smollm2",
        chat(HI, FOUR, MORE),
        [(SMOL_SYSTEM + QWEN_HI, False), ("It is 4.<|im_end|>", True), ("\n", False)],
    ),
    "smollm2 is cut": (
        "smollm2",
        chat(HI, FOUR, finish_reason="length"),
        [(SMOL_SYSTEM + QWEN_HI, False), ("It is 4.", True)],
    ),
    "deepseek r1": (
        "deepseek-r1",
        chat(HI, TAIL_OF_THOUGHT),
        [(DEEPSEEK_HI + "<think>\n", False), ("hm\n</think>\n\nIt is 4." + DEEPSEEK_END, True)],
    ),
    "deepseek r1 with the opening of its thought in the answer": (
        "deepseek-r1",
        chat(HI, THOUGHT),
        [(DEEPSEEK_HI + "<think>\n", False), ("hm\n</think>\n\nIt is 4." + DEEPSEEK_END, True)],
    ),
    "deepseek r1 several turns": (
        "deepseek-r1",
        chat(SYSTEM, HI, THOUGHT, MORE, TAIL_OF_THOUGHT),
        [
            (
                "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>\n\nIt is 4." + DEEPSEEK_END
                + "<｜User｜>More?<｜Assistant｜><think>\n",
                False,
            ),
            ("hm\n</think>\n\nIt is 4." + DEEPSEEK_END, True),
        ],
    ),
    "deepseek r1 calls a tool after a thought": (
        "deepseek-r1",
        chat(HI, {**CALL, "content": "hm\n</think>\n\n"}),
        [
            (DEEPSEEK_HI + "<think>\n", False),
            (
                'hm\n</think>\n\n<｜tool▁calls▁begin｜>add\n```json\n{"a": 2}\n```<｜tool▁calls▁end｜>' + DEEPSEEK_END,
                True,
            ),
        ],
    ),
    "deepseek r1 ends with a question": (
        "deepseek-r1",
        chat(HI, THOUGHT, MORE),
        [(DEEPSEEK_HI + "<think>\n", False), ("hm\n</think>\n\nIt is 4." + DEEPSEEK_END, True)],
    ),
    "deepseek r1 is cut in its thought": (
        "deepseek-r1",
        chat(HI, {"role": "assistant", "content": "hm, let "}, finish_reason="length"),
        [(DEEPSEEK_HI + "<think>\n", False), ("hm, let ", True)],
    ),
    "deepseek v3 calls a tool": (
        "deepseek-v3",
        chat(HI, CALL, RESULT, FOUR),
        [
            (DEEPSEEK_HI, False),
            ('<｜tool▁calls▁begin｜>add\n```json\n{"a": 2}\n```<｜tool▁calls▁end｜>' + DEEPSEEK_END, True),
            ("<｜tool▁output▁begin｜>4<｜tool▁output▁end｜><｜Assistant｜>", False),
            ("It is 4." + DEEPSEEK_END, True),
        ],
    ),
    "deepseek v3 several turns": (
        "deepseek-v3",
        chat(HI, FOUR, MORE, NO),
        [
            (DEEPSEEK_HI, False),
            ("It is 4." + DEEPSEEK_END, True),
            ("<｜User｜>More?<｜Assistant｜>", False),
            ("No." + DEEPSEEK_END, True),
        ],
    ),
    "phi 3 several turns": (
        "phi-3",
        chat(SYSTEM, HI, FOUR, MORE, NO),
        [
            ("<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n", False),
            ("It is 4.<|end|>", True),
            ("\n<|user|>\nMore?<|end|>\n<|assistant|>\n", False),
            ("No.<|end|>", True),
            ("\n<|endoftext|>", False),
        ],
    ),
    "phi 3 ends with a question": (
        "phi-3",
        chat(HI, FOUR, MORE),
        [("<|user|>\nHi<|end|>\n<|assistant|>\n", False), ("It is 4.<|end|>", True), ("\n<|endoftext|>", False)],
    ),
    "phi 3 is cut": (
        "phi-3",
        chat(HI, FOUR, finish_reason="length"),
        [("<|user|>\nHi<|end|>\n<|assistant|>\n", False), ("It is 4.", True)],
    ),
    "phi 4 mini": (
        "phi-4-mini",
        chat(HI, FOUR),
        [("<|user|>Hi<|end|><|assistant|>", False), ("It is 4.<|end|>", True), ("<|endoftext|>", False)],
    ),
}  # fmt: skip


def expected_of(tokenizer, segments) -> tuple[list[int], list[bool]]:
    ids, mask = [], []
    for text, is_written in segments:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        mask += [is_written] * len(piece)
    return ids, mask


def start_of_last_answer(mask: list[bool]) -> int:
    start = max(index for index, keep in enumerate(mask) if keep)
    while start and mask[start - 1]:
        start -= 1
    return start


def generation_ids(tokenizer, row) -> list[int]:
    messages = list(row["messages"])
    while messages.pop()["role"] != "assistant":
        pass
    kwargs = row.get("chat_template_kwargs", {})
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tools=row.get("tools"), return_dict=False, **kwargs
    )


@pytest.mark.parametrize("name", CASES)
def test_the_mask_is_the_one_written_by_hand(name):
    family, row, segments = CASES[name]
    tokenizer = family_tokenizer(family)
    read = read_row(row, tokenizer, eos_token_ids=end_ids(tokenizer, family))
    assert tokenizer.decode(read.input_ids) == "".join(text for text, _ in segments)
    assert (read.input_ids, read.supervised_mask) == expected_of(tokenizer, segments)
    num_answers = sum(message["role"] == "assistant" for message in row["messages"])
    assert len(read.unsupervised_turns) + sum(is_written for _, is_written in segments) == num_answers


@pytest.mark.parametrize("name", CASES)
def test_the_training_prefix_is_what_generation_gets(name):
    """Cases 11 and 12, token for token."""
    family, row, _ = CASES[name]
    tokenizer = family_tokenizer(family, merges=(("Ċ", "Ċ"), ("Ġ", "I"), ("i", "s")))
    ids, mask = tokenize_row(row, tokenizer, max_length=9999, eos_token_ids=end_ids(tokenizer, family))
    assert ids[: start_of_last_answer(mask)] == generation_ids(tokenizer, row)


def test_every_family_has_its_five_kinds_of_rows():
    """One turn, several turns, a system prompt, a question at the end, a truncated response, and tool calls."""
    rows = {family: [row for name, row, _ in CASES.values() if name == family] for family in FAMILIES}
    rows["qwen3"] += rows.pop("qwen3-instruct") + rows.pop("qwen3.5")
    del rows["glm-4.5"]  # for its block alone
    rows["deepseek-r1"] += rows.pop("deepseek-v3")
    rows["phi-3"] += rows.pop("phi-4-mini")
    for family, own in rows.items():
        messages = [row["messages"] for row in own]
        assert any(sum(m["role"] == "assistant" for m in part) == 1 for part in messages), family
        assert any(sum(m["role"] == "assistant" for m in part) > 1 for part in messages), family
        assert any(part[0]["role"] == "system" for part in messages), family
        assert any(part[-1]["role"] == "user" for part in messages), family
        assert any(row.get("finish_reason") == "length" for row in own), family
        has_calls = any("tool_calls" in message for part in messages for message in part)
        assert has_calls == (family not in ("gemma", "smollm2", "phi-3")), family


@pytest.mark.parametrize("family", ["qwen3", "qwen3-instruct", "gemma", "phi-3", "llama-3.1"])
@pytest.mark.parametrize("content", ["\nIt is 4.", "\n\nIt", "It is 4.", "\n"])
def test_a_completion_that_would_merge_with_the_end_of_its_prompt_stays_apart(family, content):
    """The prompt ends with a line break, and two of them are one token."""
    tokenizer = family_tokenizer(family, merges=(("Ċ", "Ċ"),))
    row = {
        "messages": [HI, {"role": "assistant", "content": content}],
        "chat_template_kwargs": {"enable_thinking": False, **DATE},
    }
    end = "<end_of_turn>" if family == "gemma" else FAMILIES[family].ends[-1 if family == "phi-3" else 0]
    ids, mask = tokenize_row(row, tokenizer, max_length=999, eos_token_ids=end_ids(tokenizer, family))
    prompt = generation_ids(tokenizer, row)
    assert ids[: len(prompt)] == prompt
    if content.strip():
        written = tokenizer(content + end, add_special_tokens=False)["input_ids"]
        assert [token for token, keep in zip(ids, mask, strict=True) if keep] == written


def test_an_earlier_turn_that_the_tokenizer_merges_with_its_prompt_carries_no_loss():
    tokenizer = family_tokenizer("phi-3", merges=(("Ċ", "Ċ"),))
    row = chat(HI, {"role": "assistant", "content": "\nIt is 4."}, MORE, NO)
    read = read_row(row, tokenizer, eos_token_ids=end_ids(tokenizer, "phi-3"))
    assert read.unsupervised_turns == (1,)
    assert (
        tokenizer.decode([token for token, keep in zip(read.input_ids, read.supervised_mask, strict=True) if keep])
        == "No.<|end|>"
    )
    assert read.input_ids[: read.supervised_mask.index(True)] == generation_ids(tokenizer, row)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("family", ["mistral", "gemma", "phi-3"])
def test_tokenizers_that_add_a_space_before_a_text_do_not_add_one_before_a_completion(family, scheme):
    tokenizer = metaspace_tokenizer(family, scheme)
    for content in ("It is 4.", "\nIt is 4.", " It is"):
        row = {"messages": [HI, {"role": "assistant", "content": content}, MORE, NO]}
        ids, mask = tokenize_row(row, tokenizer, max_length=999, eos_token_ids=end_ids(tokenizer, family))
        last = start_of_last_answer(mask)
        assert ids[:last] == generation_ids(tokenizer, row)
        first_row = {"messages": row["messages"][:2]}
        ids, mask = tokenize_row(first_row, tokenizer, max_length=999, eos_token_ids=end_ids(tokenizer, family))
        prompt = generation_ids(tokenizer, first_row)
        assert ids[: len(prompt)] == prompt
        assert mask.index(True) == len(prompt)
        text = tokenizer.apply_chat_template(first_row["messages"][:1], add_generation_prompt=True, tokenize=False)
        lead = " " if family == "mistral" else ""
        expected = tokenizer.decode(tokenizer(text + lead + content, add_special_tokens=False)["input_ids"])
        assert tokenizer.decode(ids).startswith(expected)


def test_an_empty_thinking_block_of_the_template_is_context():
    """The target would think and the response has no thinking, so the target did not write the block."""
    tokenizer = family_tokenizer("qwen3")
    read = read_row(chat(HI, FOUR), tokenizer, eos_token_ids=end_ids(tokenizer, "qwen3"))
    expected = [(QWEN_HI + BLOCK, False), ("It is 4.<|im_end|>", True), ("\n", False)]
    assert (read.input_ids, read.supervised_mask) == expected_of(tokenizer, expected)
    glm = family_tokenizer("glm-4.5")
    read = read_row(chat(HI, FOUR), glm, eos_token_ids=end_ids(glm, "glm-4.5"))
    assert (read.input_ids, read.supervised_mask) == expected_of(
        glm, [(GLM_HI + "\n<think></think>\n", False), ("It is 4.", True)]
    )
    read = read_row(chat(HI, CALL), tokenizer, eos_token_ids=end_ids(tokenizer, "qwen3"))
    expected = [(QWEN_HI + BLOCK, False), (QWEN_CALL, True), ("\n", False)]
    assert (read.input_ids, read.supervised_mask) == expected_of(tokenizer, expected)


@pytest.mark.parametrize(
    ("family", "row", "words"),
    [
        ("deepseek-r1", chat(HI, FOUR), "opens a thinking block, and the assistant message has no thinking"),
        ("deepseek-r1", chat(HI, APART), "the template omits the thinking of the assistant message"),
        ("gemma", chat(HI, FOUR, NO), "refuses the conversation: roles must alternate"),
        ("llama-3.1", chat(HI, {**CALL, "tool_calls": [ADD, ADD]}), "refuses the conversation: one call a turn"),
        ("smollm2", chat(HI, CALL), "does not render tool calls, and the assistant message calls 'add'"),
        ("qwen3", chat(HI, THOUGHT, **NOT_THINKING), "does not begin with the prompt"),
    ],
)
def test_rows_that_the_template_cannot_render_are_refused_with_the_reason(family, row, words):
    tokenizer = family_tokenizer(family)
    with pytest.raises(ChatTemplateError, match=words):
        read_row(row, tokenizer, eos_token_ids=end_ids(tokenizer, family))


def test_nulls_of_columnar_storage_do_not_reach_the_template():
    tokenizer = family_tokenizer("qwen3")
    nulls = {"role": "assistant", "content": None, "tool_calls": [{**ADD, "id": None}], "reasoning_content": None}
    nulls["tool_calls"][0]["function"] = {"name": "add", "arguments": {"a": 2, "city": None}}
    row = {"messages": [HI, nulls], "tools": None, "chat_template_kwargs": {"enable_thinking": None}}
    assert read_row(row, tokenizer) == read_row(chat(HI, CALL), tokenizer)


@pytest.mark.parametrize(
    ("family", "thought", "prompt_of_first"),
    [("qwen3", THOUGHT, QWEN_HI), ("harmony", APART, HARMONY_HI), ("deepseek-r1", THOUGHT, DEEPSEEK_HI + "<think>\n")],
)
def test_turns_that_a_template_changes_later_get_rows_of_their_own(family, thought, prompt_of_first):
    tokenizer = family_tokenizer(family)
    ends = end_ids(tokenizer, family)
    row = chat(HI, thought, MORE, thought, MORE, thought, finish_reason="length", target="t")
    read = read_row(row, tokenizer, eos_token_ids=ends)
    assert read.unsupervised_turns == (1, 3)
    first, second = split_turns(row, read.unsupervised_turns)
    assert first["target"] == "t"
    single = read_row(first, tokenizer, eos_token_ids=ends)
    assert single == read_row(chat(HI, thought), tokenizer, eos_token_ids=ends)
    assert tokenizer.decode(single.input_ids[: single.supervised_mask.index(True)]) == prompt_of_first
    assert single.input_ids[single.supervised_mask.index(True) + sum(single.supervised_mask) - 1] in ends
    assert (
        read_row(second, tokenizer, eos_token_ids=ends).input_ids
        == read_row(chat(HI, thought, MORE, thought), tokenizer, eos_token_ids=ends).input_ids
    )


@pytest.mark.parametrize("added", ["<|user|> $A", "$A <|end|>", "<|user|> $A <|end|>", "<|user|> <|system|> $A", "$A"])
@pytest.mark.parametrize("prompt", ["2+2=", "", "<|user|>2+2=", "<|user|>", " "])
def test_the_prompt_of_a_text_row_has_the_special_tokens_that_the_tokenizer_adds(tokenizer, added, prompt):
    """It lacked the first token, with which every prompt of serving begins."""
    special = [(text, tokenizer.convert_tokens_to_ids(text)) for text in ("<|user|>", "<|end|>", "<|system|>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=added, special_tokens=special)
    ids, mask = tokenize_row({"prompt": prompt, "completion": "4"}, tokenizer, max_length=None)
    served = tokenizer(prompt)["input_ids"]
    if added.endswith("<|end|>"):  # the end of a text is not the end of a prompt
        served = served[:-1]
    assert ids == [*served, *tokenizer("4", add_special_tokens=False)["input_ids"]]
    assert mask == [False] * len(served) + [True]
    ids, _ = tokenize_row({"messages": [HI, FOUR]}, tokenizer, max_length=None)  # a template writes its own
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert ids.count(ids[0]) == 1
