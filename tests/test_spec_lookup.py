"""Prompt lookup: what it copies, how sure it says it is, and that a long text makes it no slower."""

import numpy as np
import pytest

from engine.spec import LookupSource


def lookup(tokens, count=4, min_match=3):
    found = LookupSource(min_match)
    text = np.array(tokens, np.int32)
    offer = found.offer(text, count)
    return offer and found.draft(offer.count)


def test_lookup_copies_what_followed():
    assert lookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]
    assert lookup([1, 2, 3, 4, 9, 2, 3]) is None  # two tokens agree, three are needed
    assert LookupSource().offer(np.array([1, 2, 3, 4, 9, 2, 3], np.int32), 4) is None
    assert lookup([1, 2, 3]) is None and lookup([]) is None
    assert lookup([7] * 5) == [7] * 4  # goes on with its own copy
    assert lookup([1, 2, 1, 2, 1, 2], min_match=2) == [1, 2, 1, 2]
    # The longest match wins over a later one, the later one among equals.
    assert lookup([9, 1, 2, 3, 4, 0, 8, 1, 2, 3, 5, 0, 9, 1, 2, 3], count=1) == [4]
    assert lookup([8, 1, 2, 3, 4, 0, 8, 1, 2, 3, 5, 0, 8, 1, 2, 3], count=1) == [5]
    assert lookup([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3], count=1) == [5]


def test_lookup_indexes_as_the_text_grows_like_all_at_once():
    text = np.random.default_rng(3).integers(0, 4, 400).astype(np.int32)
    growing = LookupSource()
    for n in range(1, len(text)):
        offer, fresh = growing.offer(text[:n], 5), LookupSource()
        assert offer == fresh.offer(text[:n], 5)
        if offer:
            assert growing.draft(5) == fresh.draft(5)


def test_lookup_abstains_where_nothing_is_of_use():
    assert lookup([1, 2, 3, 4, 5, 1, 2, 3], count=1) == [4]
    assert lookup([1, 2, 3, 4, 5, 1, 2, 3], count=0) is None


@pytest.mark.parametrize(
    ("length", "bucket"), [(3, 0), (5, 0), (6, 1), (11, 1), (12, 2), (23, 2), (24, 3), (31, 3), (60, 3)]
)
def test_a_longer_match_is_believed_more(length, bucket):
    run = [*range(length)]
    offer = LookupSource().offer(np.array([900, *run, 901, 902, *run], np.int32), 7)
    assert (offer.count, offer.bucket, offer.chance) == (7, bucket, (0.4, 0.6, 0.8, 0.9)[bucket])


@pytest.mark.parametrize("min_match", [1, 2])
def test_the_longest_match_of_short_ones_has_a_bucket(min_match):
    assert LookupSource(min_match).offer(np.full(100, 7, np.int32), 7).bucket == 3


class Counting(list):
    """Counts the elements that are read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "text",
    [
        [7] * 3000,
        [t for i in range(1000) for t in (1, 2, 3, 10 + i)] + [1, 2, 3],  # three tokens agree, a thousand times
        [t for i in range(40) for t in (*range(60), 100 + i)] + [*range(60)],
    ],
)
def test_the_work_for_an_offer_is_bounded(text):
    found = LookupSource()
    found.offer(np.array(text[:-1], np.int32), 7)
    found._tokens = Counting(found._tokens)
    assert found.offer(np.array(text, np.int32), 7)
    assert found._tokens.reads < 16 * 2 * 32 + 10  # places, tokens of each compared with the text's last
