"""The rotation Q of e8-iq3, in numpy: the definition of native/rotation.h, bit for bit when given float32."""

import numpy as np

MAX_TILE = 32768


def sign_bits(n: int) -> np.ndarray:
    """Pseudo-random sign bits of a tile of n values, packed: bit i is bit i & 7 of byte i >> 3 (xorshift64*)."""
    mask = 2**64 - 1
    state = 417 + n
    out = bytearray()
    for _ in range(n // 8):
        state ^= state >> 12
        state = (state ^ state << 25) & mask
        state ^= state >> 27
        out.append((state * 2685821657736338717 & mask) >> 56)
    return np.frombuffer(bytes(out), np.uint8)


def tiles(cols: int) -> list[int]:
    """Tile lengths of a row from column 0 on: the lowest set bit of what is left, at most 32768."""
    out = []
    while cols:
        out.append(min(cols & -cols, MAX_TILE))
        cols -= out[-1]
    return out


def rotate_tile(x: np.ndarray) -> np.ndarray:
    """x [..., n] with signs flipped, Walsh-Hadamard transformed, times 1 / sqrt(n) rounded to float32."""
    n = x.shape[-1]
    flips = np.unpackbits(sign_bits(n), bitorder="little")
    y = np.where(flips == 1, -x, x)
    distance = 1
    while distance < n:
        pairs = y.reshape(*x.shape[:-1], n // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        distance *= 2
    return y * x.dtype.type(np.float32(1 / np.sqrt(np.float64(n))))


def rotate(x: np.ndarray) -> np.ndarray:
    """x [..., cols] -> x Q, in the precision of x; cols is a multiple of 256."""
    bounds = np.cumsum(tiles(x.shape[-1]))[:-1]
    return np.concatenate([rotate_tile(part) for part in np.split(x, bounds, axis=-1)], axis=-1)
