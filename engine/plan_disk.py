"""How fast a disk reads what a planned run would miss: the model's own file, or a temporary one when it is not here."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from .disk_bandwidth import TEMPORARY_BYTES, temporary_file
from .errors import ConfigError
from .experts.cache import DEFAULT_READERS

MAX_BURSTS_PER_LAYER = 16  # reads of a layer's missing experts, to measure a disk with


def disk_figures(files, places, options, given: float | None, misses: float, measure, assumptions: list[str]) -> dict:
    """Figures of the disk. misses: of a layer call, which are read together."""
    readers = options.readers or DEFAULT_READERS
    if given is not None:
        assumptions.append(f"disk {given:g} MB/s, as given")
        return {"mb_s": given, "measured": False}
    first = places.table[places.keys[0]].pieces[0].file
    size = max(1, round(misses))
    bursts = _bursts(places, first, size)
    if files.kind == "plan":
        assumptions.append(f"the model will be on the disk of the current directory ({Path.cwd()}), whose speed counts")
        mode, found = _speed_here(bursts, readers, measure)
    else:
        mode, found = measure.disk_speed(files.path_of(places.file_names[first]), bursts, readers)
    if mode == "buffered":
        assumptions.append("the file system refuses direct reads: the page cache may have a part in the disk's figure")
    figures = {"request_bytes": found.request_bytes, "depth": found.depth, "burst": size, "mode": mode}
    return {"mb_s": found.gb_per_s * 1e3, "measured": True, **figures}


def _bursts(places, file_number: int, size: int) -> list[list[tuple[int, int]]]:
    """Ranges (offset, bytes) of `size` random experts of a layer, again and again, that lie in one file."""
    rng, layers = np.random.default_rng(), defaultdict(list)
    for key in places.keys:
        pieces = [places.table[key].pieces[n] for n in range(places.table[key].num_pieces)]
        if all(piece.file == file_number for piece in pieces):
            layers[key // places.num_experts].append([(piece.offset, piece.nbytes) for piece in pieces])
    bursts = []
    for experts in list(layers.values()) * MAX_BURSTS_PER_LAYER:
        chosen = rng.choice(len(experts), min(size, len(experts)), replace=False)
        bursts.append([piece for n in sorted(chosen) for piece in experts[n]])
    rng.shuffle(bursts)
    return bursts


def _speed_here(bursts, readers: int, measure):
    """The speed of such reads on the disk of the current directory: as many bytes from places in a temporary file."""
    rng = np.random.default_rng()

    def inside(nbytes: int) -> list[tuple[int, int]]:
        pieces = [min(nbytes - done, TEMPORARY_BYTES // 2) for done in range(0, nbytes, TEMPORARY_BYTES // 2)]
        return [(int(rng.integers(0, TEMPORARY_BYTES - piece + 1)) // 4096 * 4096, piece) for piece in pieces]

    try:
        with temporary_file(".") as path:
            return measure.disk_speed(path, [[at for _, n in burst for at in inside(n)] for burst in bursts], readers)
    except OSError as error:
        raise ConfigError(
            f"the model would stream, and the disk of the current directory cannot be measured ({error.strerror}); "
            "give --disk MB/S"
        ) from None
