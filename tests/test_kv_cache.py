"""The key/value cache: rings of sliding layers, taking positions back, memory."""

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.kernels import Context
from engine.kv_cache import SLACK, KVCache, KVShape
from engine.layers import Buffer, Layers

WINDOW, BLOCK, HEADS, DIM = 20, 50, 2, 16
SHAPES = [KVShape(HEADS, DIM), KVShape(HEADS, DIM, window=WINDOW)]


class Attender:
    """Runs positions of a fixed random text through every layer of a cache, as a forward pass does."""

    def __init__(self, length):
        self.layers = Layers(Context(num_threads=2))
        rng = np.random.default_rng(0)
        self.q, self.k, self.v = rng.standard_normal((3, length, HEADS * DIM)).astype(np.float32)

    def run(self, cache, first, num_tokens):
        """Outputs [layers, T, N * D] of positions first .. first + T."""
        cache.extend(first, num_tokens)
        q, k, v, out = (Buffer(num_tokens, HEADS * DIM) for _ in range(4))
        for buffer, rows in ((q, self.q), (k, self.k), (v, self.v)):
            buffer.array[:] = rows[first : first + num_tokens]
        outs = []
        for shape, kv in zip(cache.shapes, cache.layers, strict=True):
            self.layers.kv_store(kv, k, v, first, num_tokens)
            self.layers.attention(out, q, kv, num_tokens, HEADS, first, DIM**-0.5, window=shape.window)
            outs.append(out.array.copy())
        return np.stack(outs)


def whole(shapes, length):
    """A cache whose rings are as long as the text: nothing is ever overwritten."""
    return KVCache(shapes, length, max_tokens=length)


@pytest.mark.parametrize("taken_back", [1, 3, SLACK])
@pytest.mark.parametrize("block", [1, 8, 13, BLOCK])
def test_positions_taken_back_and_run_again_give_the_same_bits(taken_back, block):
    length = 400
    attender, cache = Attender(length), KVCache(SHAPES, length, max_tokens=BLOCK)
    assert cache.layers[1].capacity < length
    want, position = attender.run(whole(SHAPES, length), 0, length), 0
    while position < length:
        count = min(block, length - position)
        out = attender.run(cache, position, count)
        np.testing.assert_array_equal(out, want[:, position : position + count])
        position += count
        if position > taken_back and position % 3 == 0 and position < length:
            assert cache.truncate(position - taken_back) == position - taken_back
            out = attender.run(cache, position - taken_back, taken_back)
            np.testing.assert_array_equal(out, want[:, position - taken_back : position])


def test_a_ring_says_when_it_cannot_go_back():
    cache, attender = KVCache(SHAPES, 1000, max_tokens=BLOCK), Attender(400)
    for first in range(0, 400, BLOCK):
        attender.run(cache, first, BLOCK)
    slots = cache.layers[1].capacity
    oldest = 400 - slots + WINDOW - 1  # its window begins at the oldest position that is still there
    want = attender.run(whole(SHAPES, 400), 0, 400)
    assert cache.truncate(oldest) == oldest
    with pytest.raises(ConfigError, match="go on a little"):
        cache.regions(oldest)
    np.testing.assert_array_equal(attender.run(cache, oldest, 5), want[:, oldest : oldest + 5])
    assert cache.truncate(oldest - 1) == 0
    np.testing.assert_array_equal(attender.run(cache, 0, 9), want[:, :9])
    assert cache.truncate(3) == 3  # nothing was overwritten since


@pytest.mark.parametrize("length", [5, 100, 128, 130, 200, 399])
def test_regions_carry_a_ring_to_a_ring_of_another_size(length):
    attender = Attender(400)
    source, target = KVCache(SHAPES, 1000, max_tokens=BLOCK), KVCache(SHAPES, 500, max_tokens=4 * BLOCK)
    assert source.layers[1].capacity != target.layers[1].capacity
    want = attender.run(whole(SHAPES, 400), 0, 400)
    for first in range(0, length, BLOCK):
        attender.run(source, first, min(BLOCK, length - first))
    stream = np.concatenate(source.regions(length))
    for region in target.regions(length):
        region[:], stream = stream[: region.size], stream[region.size :]
    assert not stream.size
    target.restore(length)
    assert target.truncate(length - 1) == length - 1  # the last position is run again for its logits
    np.testing.assert_array_equal(attender.run(target, length - 1, 2), want[:, length - 1 : length + 1])
    assert target.truncate(length + 1 - SLACK) == max(length + 1 - SLACK, 0)
    if length > WINDOW + 2 * SLACK:  # the regions hold no more than that
        assert target.truncate(length - SLACK - 1) == 0


def test_running_over_lost_positions_is_refused():
    cache = KVCache(SHAPES, 1000, max_tokens=BLOCK)
    for first in range(0, 400, BLOCK):
        cache.extend(first, BLOCK)
    with pytest.raises(ConfigError, match="overwritten"):
        cache.extend(100, 1)
    cache = KVCache(SHAPES[:1], 1000, max_tokens=BLOCK)
    cache.extend(0, BLOCK)
    assert cache.truncate(7) == 7
    with pytest.raises(ConfigError, match="gap"):
        cache.extend(8, 1)
    with pytest.raises(ConfigError, match="made for 50"):
        cache.extend(7, BLOCK + 1)


def test_memory_is_what_the_shapes_need():
    cache = KVCache([*SHAPES, KVShape(1, 40, 32, latent=True), KVShape(2, 24, 8)], 1000, "f16", BLOCK)
    full, ring = 1024, 128  # 20 + 50 + 8 positions, whole chunks
    assert cache.layers[1].capacity == ring
    assert cache.num_bytes == 2 * (2 * HEADS * DIM * (full + ring) + 40 * full + 2 * 32 * full)
    assert KVCache(SHAPES, 30, "f32", BLOCK).num_bytes == 4 * 2 * 2 * HEADS * DIM * 64


def test_the_estimate_is_what_a_cache_takes():
    """Before there is a model: rings, latents and all, for any context and block."""
    for positions, block, kind in ((1000, BLOCK, "f16"), (30, 512, "f32"), (129, 64, "f16")):
        shapes = [*SHAPES, KVShape(1, 40, 32, latent=True), KVShape(2, 24, 8)]
        cache = KVCache(shapes, positions, kind, block)
        assert sum(shape.num_bytes(positions, kind, block) for shape in shapes) == cache.num_bytes
