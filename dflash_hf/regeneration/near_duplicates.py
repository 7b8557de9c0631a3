"""Texts that are nearly the same as earlier ones."""

from __future__ import annotations

from collections import Counter, defaultdict

GREATEST_SIMILARITY = 0.7
SHINGLE_WORDS = 3
COMMON = 64  # a shingle of more texts than this leads to no candidates


class NearDuplicates:
    """
    Find texts whose sets of three consecutive words are nearly those of an earlier text (Jaccard similarity).

    An index from each such shingle to the texts that have it gives the candidates, so that the time of a text does not
    grow with the number of texts. Shingles that very many texts share are left out of the search, but not of the
    similarity.
    """

    def __init__(self) -> None:
        self.shingles: list[frozenset[int]] = []
        self.index: defaultdict[int, list[int]] = defaultdict(list)
        self.texts: set[str] = set()

    def add(self, text: str) -> str | None:
        """
        Add a text, unless it is one of the earlier ones or nearly so.

        Args:
            text (`str`): in lower case, with single spaces.

        Returns:
            `str`, *optional*: why it is not added, in a few words; None if it is.

        Example:
            >>> known = NearDuplicates()
            >>> known.add("write a poem about the sea and the wind")
            >>> known.add("write a poem about the sea and the wind")
            'is a repeat'
            >>> known.add("please write a poem about the sea and the wind")
            'is nearly a repeat'
            >>> known.add("write a poem about a cat")
        """
        if text in self.texts:
            return "is a repeat"
        own = _shingles(text)
        shared = Counter(
            number
            for shingle in own
            if len(self.index.get(shingle, ())) <= COMMON
            for number in self.index.get(shingle, ())
        )
        for number in shared:
            other = self.shingles[number]
            if len(own & other) > GREATEST_SIMILARITY * len(own | other):
                return "is nearly a repeat"
        self.texts.add(text)
        for shingle in own:
            self.index[shingle].append(len(self.shingles))
        self.shingles.append(own)
        return None


def _shingles(text: str) -> frozenset[int]:
    """Return hashes of all sequences of three words, or of the whole text if it is shorter."""
    words = text.split()
    count = max(1, len(words) - SHINGLE_WORDS + 1)
    return frozenset(hash(tuple(words[start : start + SHINGLE_WORDS])) for start in range(count))
