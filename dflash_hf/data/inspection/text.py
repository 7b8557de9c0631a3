"""The text of single tokens, made safe to show in a terminal or on a page."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..detokenize import IncrementalDetokenizer


def token_pieces(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int]) -> list[str]:
    """
    Return the text that each token adds. The pieces joined are the decoded text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        input_ids (`Sequence[int]`): Token ids.

    Returns:
        `list[str]`: One piece for each token. The piece is empty if the bytes of the token end inside a character;
        the character then belongs to the token that completes it.
    """
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.put(token_id) for token_id in input_ids]
    if pieces:
        pieces[-1] += detokenizer.end()
    return pieces


def visible(text: str) -> str:
    """
    Mark line ends and replace every character that could control a terminal or reverse the direction of the text.

    Args:
        text (`str`): Any text.

    Returns:
        `str`: The text with control characters shown as symbols or as code points.

    Example:

    ```python
    >>> visible("a" + chr(10) + chr(27) + "[31m" + chr(0x202E))
    'a↵\\n␛[31m<U+202E>'

    ```
    """
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    """Return a printable substitute for one character, or the character if it needs none."""
    code = ord(character)
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥"
    if code < 0x20:
        return chr(0x2400 + code)  # the Unicode block of control pictures
    if 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return f"<U+{code:04X}>"
    return character
