"""Prompt lookup: what followed the last occurrence of the present suffix, in the prompt or in the output.

Strong where a text copies (quotes, edits of code, lists), silent where it does not.
"""

import numpy as np

from .drafts import DraftSource, Offer

MIN_MATCH = 3  # tokens that must agree before anything is drafted
MAX_MATCH = 32  # a longer match says nothing more
CHANCES = (0.4, 0.6, 0.8, 0.9)  # first belief in a match of min_match, 2, 4, 8 times that many tokens
MAX_CANDIDATES = 16  # places that are compared; bounds the work on texts of one repeated token


class LookupSource(DraftSource):
    """Longest suffix that occurred before, ties to the latest place. Every position is indexed once, as it comes."""

    name = "lookup"
    ms_per_draft = 0.0

    def __init__(self, min_match: int = MIN_MATCH):
        self.min_match = min_match
        self._tokens: list[int] = []  # the text so far; lists, because this runs beside every decode step
        self._latest: dict[tuple, int] = {}  # min_match tokens -> the latest place behind them that has a successor
        self._earlier: list[int] = []  # by place: the one before it with the same tokens, or 0
        self._at = 0

    def _index(self, text: np.ndarray) -> None:
        """Take in new tokens. A place is indexed when the token at it is known, so the end of the text never is."""
        tokens, m = self._tokens, self.min_match
        first = len(tokens)
        tokens.extend(text[first:].tolist())
        for place in range(first, len(tokens)):
            key = tuple(tokens[place - m : place]) if place >= m else None
            self._earlier.append(self._latest.get(key, 0))
            if key is not None:
                self._latest[key] = place

    def _match_length(self, place: int) -> int:
        """Of a place that is known to match min_match tokens. Matches are short: numpy costs more than a loop."""
        tokens, length, limit = self._tokens, self.min_match, min(place, MAX_MATCH)
        while length < limit and tokens[-1 - length] == tokens[place - 1 - length]:
            length += 1
        return length

    def offer(self, text: np.ndarray, limit: int) -> Offer | None:
        """See DraftSource. bucket: length of the match in powers of two above the minimum."""
        self._index(text)
        place = self._latest.get(tuple(self._tokens[-self.min_match :]), 0)
        if not place or limit < 1:
            return None
        length = 0
        for _ in range(MAX_CANDIDATES):  # the latest first
            found = self._match_length(place)
            if found > length:
                length, self._at = found, place
            place = self._earlier[place]
            if not place or length == MAX_MATCH:
                break
        bucket = min((length // self.min_match).bit_length(), len(CHANCES)) - 1
        return Offer(limit, bucket, CHANCES[bucket])

    def draft(self, count: int) -> list[int]:
        """Copy from the place found; where the copy reaches the end of the text it goes on with what it copied."""
        period = len(self._tokens) - self._at
        return [self._tokens[self._at + i % period] for i in range(count)]
