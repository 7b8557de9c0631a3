"""
Text of tokens that arrive one after another.

Everything that shows text token by token uses this module. `tokenizers.decoders.DecodeStream` (tokenizers 0.23) is not
used, because it fails on incomplete characters, which a model may write and which may end a truncated completion. It
raises "Invalid prefix encountered" for vocabularies with byte fallback, holds complete characters back together with
an incomplete one, and cannot return at the end what it still holds.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are not a character, or not yet


class IncrementalDetokenizer:
    """
    Decode tokens one by one, such that the pieces join to the text of all tokens.

    The bytes of an incomplete character are held back until the character is complete. Each step decodes only the
    last few tokens, so the cost of a token does not grow with the text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): fast or slow.
        skip_special_tokens (`bool`, defaults to `False`): whether special tokens have no text.

    Attributes:
        num_pending (`int`): the last tokens, of which text is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.num_pending = 0
        # The tokens of the last piece, and all tokens since: some decoders drop a space at the very beginning.
        self._ids: list[int] = []
        self._num_given = 0  # characters of the text of `_ids` that were returned

    def put(self, token_id: int) -> str:
        """
        Add a token.

        Args:
            token_id (`int`): the next token.

        Returns:
            `str`: the characters that are complete now; empty if there are none.
        """
        self._ids.append(token_id)
        text = self._decode()
        complete = text.rstrip(INCOMPLETE)
        if len(text) == self._num_given:
            return ""  # a token without text
        self.num_pending += 1
        if len(complete) <= self._num_given:
            return ""
        piece = complete[self._num_given :]
        if complete == text:
            self._ids = self._ids[-self.num_pending :]
            self._num_given, self.num_pending = len(self._decode()), 0
        else:  # only the last token can have begun the character that is held back
            self._num_given, self.num_pending = len(complete), 1
        return piece

    def end(self) -> str:
        """
        Return the text that was held back and will not be completed, as the tokenizer decodes it.

        Returns:
            `str`: empty if nothing was held back.
        """
        text = self._decode()
        piece, self._num_given = text[self._num_given :], len(text)
        return piece

    def _decode(self) -> str:
        return str(
            self.tokenizer.decode(
                self._ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )
