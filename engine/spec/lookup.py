"""Prompt lookup: what followed the last occurrence of the present suffix, in the prompt or in the output.

Strong where a text copies (quotes, edits of code, lists), silent where it does not.
"""

import numpy as np

from .drafts import Offer

MIN_MATCH = 3  # tokens that must agree before anything is drafted
MAX_MATCH = 32  # a longer match says nothing more
MAX_CANDIDATES = 16  # places that are compared; bounds the work on texts of one repeated token


class LookupSource:
    """Longest suffix that occurred before, ties to the latest place. Every position is indexed once, as it comes."""

    name = "lookup"
    ms_per_draft = 0.0

    def __init__(self, min_match: int = MIN_MATCH):
        self.min_match = min_match
        self._places: dict[tuple, list[int]] = {}  # the min_match tokens before a place -> places, ascending
        self._indexed = 0
        self._text: np.ndarray | None = None
        self._at = 0

    def _index(self, text: np.ndarray) -> None:
        # The last place has no successor yet, so it is indexed with the token that follows it.
        m = self.min_match
        for end in range(max(self._indexed + 1, m), len(text)):
            self._places.setdefault(tuple(text[end - m : end].tolist()), []).append(end)
        self._indexed = max(self._indexed, len(text) - 1)

    def _match_length(self, text: np.ndarray, place: int) -> int:
        limit = min(place, MAX_MATCH)
        differ = np.nonzero(text[len(text) - limit :][::-1] != text[place - limit : place][::-1])[0]
        return int(differ[0]) if len(differ) else limit

    def offer(self, text: np.ndarray, limit: int) -> Offer | None:
        """See DraftSource. bucket: length of the match in powers of two above the minimum."""
        self._index(text)
        if len(text) < self.min_match or limit < 1:
            return None
        places = self._places.get(tuple(text[len(text) - self.min_match :].tolist()))
        if not places:
            return None
        length, self._at = max((self._match_length(text, p), p) for p in places[-MAX_CANDIDATES:])
        self._text = text
        return Offer(limit, min((length // self.min_match).bit_length(), 4))

    def draft(self, count: int) -> list[int]:
        """Copy from the place found; where the copy reaches the end of the text it goes on with what it copied."""
        period = len(self._text) - self._at
        return [int(self._text[self._at + i % period]) for i in range(count)]
