"""
Short chat templates, written for these tests, that behave like those of known model families.

The comment before each template names the behaviour that matters for the labels. The tokenizers have the markers of
the family as special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Qwen3 strips the thinking before the last user message. The last response always has a thinking block, which is empty
# if there is no thinking. With enable_thinking=False the generation prompt has an empty block. Tool results are
# rendered as user messages.
_QWEN3_TOOL_CALLS = (
    "{%- for call in m.tool_calls %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{%- endfor %}"
)
_QWEN3_HEAD = (
    "{%- if tools %}<|im_start|>system\n{{ messages[0].content + '\n\n' if messages[0].role == 'system' }}"
    "You may call: {{ tools | tojson }}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_QWEN3_TOOL_RESULT = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN3 = (
    _QWEN3_HEAD + "{%- set ns = namespace(question=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}"
    "{%- set said = (m.content or '').split('</think>')[-1].lstrip('\n') %}"
    "{%- set thought = m.reasoning_content or ((m.content or '').split('</think>')[0].split('<think>')[-1]"
    " if '</think>' in (m.content or '') else '') %}"
    "<|im_start|>assistant\n"
    "{%- if loop.index0 > ns.question and (loop.last or thought) %}"
    "{{ '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}"
    "{%- else %}{{ '\n' }}{% endif %}{{ said }}" + _QWEN3_TOOL_CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _QWEN3_TOOL_RESULT + "{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)

# Qwen3.5 is the same, and its generation prompt opens a thinking block.
QWEN35 = QWEN3.replace("and not enable_thinking }}{%", "and not enable_thinking else '<think>\n' }}{%")

# GLM 4.5 writes a line break before the thinking block, which every response has. No token ends a response.
GLM45 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{{ '\n<think>' + (m.reasoning_content or '') + '</think>\n' + m.content }}"
    "{% else %}<|{{ m.role }}|>{{ '\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)

# Qwen3 Instruct 2507 is the same without any thinking.
QWEN3_INSTRUCT = (
    _QWEN3_HEAD + "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}" + _QWEN3_TOOL_CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _QWEN3_TOOL_RESULT + "{% endif %}{% endfor %}"
    "{{- '<|im_start|>assistant\n' if add_generation_prompt }}"
)

# Llama 3.1 always writes a system header with a date. It strips contents, and a tool call is a whole turn.
LLAMA31 = (
    "{{- bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Today: {{ date_string if date_string is defined else strftime_now('%d %b %Y') }}{{ '\n\n' }}"
    "{%- set has_system = messages[0].role == 'system' %}"
    "{{ messages[0].content | trim if has_system }}<|eot_id|>"
    "{%- for m in messages[1 if has_system else 0:] %}"
    "{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>"
    "{%- elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{%- endfor %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt }}"
)

# Gemma has no system role: the system prompt starts the first user message. The assistant is called "model", and
# contents are stripped.
GEMMA = (
    "{{- bos_token }}{% set has_system = messages[0].role == 'system' %}"
    "{%- set said = messages[1:] if has_system else messages %}"
    "{%- for m in said %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{- '\n' + messages[0].content + '\n\n' if loop.first and has_system else '\n' }}"
    "{{- m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{{- '<start_of_turn>model\n' if add_generation_prompt }}"
)

# Mistral has no generation prompt. The system prompt and the tools are in the LAST user message, and a token ends each
# response.
MISTRAL = (
    "{{- bos_token }}{% set has_system = messages[0].role == 'system' %}"
    "{%- set said = messages[1:] if has_system else messages %}{% set ns = namespace(last=-1) %}"
    "{%- for m in said %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in said %}"
    "{%- if m.role == 'user' %}"
    "{%- if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ messages[0].content + '\n\n' if has_system and loop.index0 == ns.last }}{{ m.content }}[/INST]"
    "{%- elif m.tool_calls %}[TOOL_CALLS] ["
    '{%- for call in m.tool_calls %}{{ ", " if not loop.first }}{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}{% endfor %}]{{ eos_token }}'
    '{%- elif m.role == "tool" %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}}[/TOOL_RESULTS]'
    "{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)

# gpt-oss (harmony) has channels. The last response ends with <|return|>, and responses in the history with <|end|>.
# Thinking before a final response is stripped once that response exists. The system part has a date, and a tool call
# ends with <|call|>.
HARMONY = (
    "<|start|>system<|message|>Date: {{ strftime_now('%Y-%m-%d') }}\nReasoning: {{ reasoning_effort or 'medium' }}"
    "<|end|>{% set has_system = messages[0].role == 'system' %}"
    "{%- if has_system or tools %}<|start|>developer<|message|>{{ messages[0].content if has_system }}"
    "{{ tools | tojson if tools }}<|end|>{% endif %}"
    "{%- set said = messages[1:] if has_system else messages %}{% set ns = namespace(final=-1) %}"
    "{%- for m in said %}"
    "{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in said %}"
    "{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{%- elif m.tool_calls %}"
    "{%- if m.thinking and loop.index0 > ns.final %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{%- elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{%- else %}"
    "{%- if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{%- endif %}{% endfor %}"
    "{{- '<|start|>assistant' if add_generation_prompt }}"
)

# SmolLM2 inserts a system prompt if there is none.
SMOLLM2 = (
    "{%- for m in messages %}"
    "{%- if loop.first and m.role != 'system' %}<|im_start|>system\nYou are a small helper.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{- '<|im_start|>assistant\n' if add_generation_prompt }}"
)

# DeepSeek R1 has full-width markers. Its generation prompt opens a thinking block, and thinking is stripped from every
# response, the last one included.
DEEPSEEK_R1 = (
    "{{- bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{%- elif m.role == 'assistant' %}<｜Assistant｜>"
    "{%- if m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}{{ call.function.name }}\n```json\n"
    "{{ call.function.arguments | tojson }}\n```{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>"
    "{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{%- endif %}{% endfor %}"
    "{{- '<｜Assistant｜><think>\n' if add_generation_prompt }}"
)

# DeepSeek V3 is the same without the opened thinking block.
DEEPSEEK_V3 = DEEPSEEK_R1.replace("<｜Assistant｜><think>\n' if", "<｜Assistant｜>' if")

# Phi 3 writes a line break after the markers, and Phi 4 mini does not.
PHI3 = (
    "{%- for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)
PHI4 = (
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{{- '<|assistant|>' if add_generation_prompt else eos_token }}"
)


@dataclass(frozen=True)
class Family:
    """A template, the markers of its tokenizer, and the tokens that end a response (the first is the tokenizer's)."""

    template: str
    markers: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str | None = None


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")

FAMILIES = {
    "qwen3": Family(QWEN3, (*_CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>"), ("<|im_end|>",)),
    "qwen3.5": Family(QWEN35, (*_CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>"), ("<|im_end|>",)),
    "glm-4.5": Family(
        GLM45,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>", "<think>", "</think>"),
        ("<|endoftext|>", "<|user|>"),
    ),
    "qwen3-instruct": Family(QWEN3_INSTRUCT, (*_CHATML, "<tool_call>", "</tool_call>"), ("<|im_end|>",)),
    "llama-3.1": Family(
        LLAMA31,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ("<|eot_id|>", "<|eom_id|>"),
        "<|begin_of_text|>",
    ),
    "gemma": Family(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<eos>", "<end_of_turn>"), "<bos>"
    ),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("</s>",),
        "<s>",
    ),
    "harmony": Family(
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
    ),
    "smollm2": Family(SMOLLM2, _CHATML, ("<|im_end|>",)),
    "deepseek-r1": Family(
        DEEPSEEK_R1, (*_DEEPSEEK, "<think>", "</think>"), ("<｜end▁of▁sentence｜>",), "<｜begin▁of▁sentence｜>"
    ),
    "deepseek-v3": Family(
        DEEPSEEK_V3, (*_DEEPSEEK, "<think>", "</think>"), ("<｜end▁of▁sentence｜>",), "<｜begin▁of▁sentence｜>"
    ),
    "phi-3": Family(PHI3, _PHI, ("<|endoftext|>", "<|end|>")),
    "phi-4-mini": Family(PHI4, _PHI, ("<|endoftext|>", "<|end|>")),
}  # fmt: skip


def family_tokenizer(name: str, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a family: one token a byte, its markers, and the merges that are asked for."""
    family = FAMILIES[name]
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary += [left + right for left, right in merges]
    bytes_only = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(vocabulary)}, merges=list(merges))
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return _wrapped(bytes_only, family)


def metaspace_tokenizer(name: str, prepend_scheme: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a family as sentencepiece makes them: "▁" for a space, and one before a text."""
    family = FAMILIES[name]
    letters = [chr(code) for code in range(33, 127)]
    merges = [("▁", letter) for letter in letters] + [("\n", "\n")]
    vocabulary = ["<unk>", "▁", "\n", *letters, *(left + right for left, right in merges)]
    pieces = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(vocabulary)}, merges=merges, unk_token="<unk>")
    )
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    pieces.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme, split=False)
    return _wrapped(pieces, family)


def _wrapped(tokenizer: Tokenizer, family: Family) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.markers])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.ends[0], bos_token=family.bos, pad_token=family.ends[0]
    )
    wrapped.chat_template = family.template
    return wrapped


def end_ids(tokenizer: PreTrainedTokenizerFast, name: str) -> list[int]:
    """Ids that end an answer, as a generation config lists them."""
    return [tokenizer.convert_tokens_to_ids(text) for text in FAMILIES[name].ends]
