"""Tokens as text that can be shown: the piece of each token, and characters that would steer a terminal by name."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def token_pieces(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int]) -> list[str]:
    """
    What each token adds to the text; joined, they are the decoded text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): of the target.
        input_ids (`Sequence[int]`): token ids.

    Returns:
        `list[str]`, one for each token: empty if its bytes end inside a character, which then belongs to the token
        that completes it.
    """

    def decode(first: int, after: int) -> str:
        return str(
            tokenizer.decode(
                list(input_ids[first:after]), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    pieces = [""] * len(input_ids)
    first = told = 0  # decoding starts one piece early: some decoders drop a blank at the very beginning
    for index in range(len(input_ids)):
        known, text = decode(first, told), decode(first, index + 1)
        is_last = index + 1 == len(input_ids)
        if len(text) > len(known) and (is_last or not text.endswith("\N{REPLACEMENT CHARACTER}")):
            pieces[index] = text[len(known) :]
            first, told = told, index + 1
    return pieces


def visible(text: str) -> str:
    """
    Text that can be shown anywhere: line ends are marked, and what would steer a terminal or turn the line is named.

    Args:
        text (`str`): any text.

    Returns:
        `str`

    Example:

    ```python
    >>> visible("a" + chr(10) + chr(27) + "[31m" + chr(0x202E))
    'a↵\\n␛[31m<U+202E>'

    ```
    """
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥"
    if code < 0x20:
        return chr(0x2400 + code)  # control pictures
    if 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return f"<U+{code:04X}>"
    return character
