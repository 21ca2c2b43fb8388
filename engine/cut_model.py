"""Some layers of a model and a part of its head, timed each, in place of all: so a large model's speed is known in
seconds.

A model has few kinds of layers (dense, with experts, with a window). What one of a kind takes, its others take, too.
"""

import time
from collections import defaultdict

from .experts.layout import ROLES as EXPERT_ROLES
from .kv_cache import KVCache

# Multiplications of a pass that measuring may cost; reading a weight takes about as long as READ_COST of them.
MAX_WORK, READ_COST = 200e9, 6
HEAD_BYTES = 128 << 20  # of the head that are run beside some of the layers


def layer_kinds(files) -> list[list[int]]:
    """Layers in groups of the same tensors, formats and caches; only an expert's first of each layer is looked at."""
    forms = defaultdict(list)
    for name, record in files.tensors.items():
        if name.startswith("layers."):
            _, layer, stem = name.split(".", 2)
            if ".experts." not in stem or ".experts.0." in stem:
                forms[int(layer)].append((stem, record.format, record.layout, record.shape))
    caches, kinds = files.model_config.kv_shapes, defaultdict(list)
    for layer in sorted(forms):
        kinds[tuple(sorted(map(str, forms[layer]))), str(caches[layer])].append(layer)
    return list(kinds.values())


def choose_layers(files, tokens: int) -> dict[int, list[int]]:
    """Layer to run -> all layers that it stands for, itself among them.

    tokens: of the longest pass. All layers stand for themselves where that is no more than MAX_WORK.
    """
    kinds, work = layer_kinds(files), _work_by_layer(files, tokens)
    share = min(1.0, MAX_WORK / max(sum(work.values()), 1))
    chosen = {}
    for kind in kinds:
        run = kind[: max(1, int(len(kind) * share))]
        chosen |= {layer: kind[place :: len(run)] for place, layer in enumerate(run)}
    return dict(sorted(chosen.items()))


def _work_by_layer(files, tokens: int) -> dict[int, float]:
    """Multiplications of a pass, and reads as so many of them."""
    config, work = files.model_config, defaultdict(float)
    share = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    touched = 1 - (1 - share) ** tokens
    for name, record in files.tensors.items():
        if name.startswith("layers."):
            routed = record.role in EXPERT_ROLES
            size = record.rows * record.cols
            work[int(name.split(".", 2)[1])] += size * (
                tokens * share + READ_COST * touched if routed else tokens + READ_COST
            )
    return work


def head_part(files) -> int:
    """Rows of the head to run: all of a tied one, which is the embedding, too."""
    rows = files.model_config.vocab_size
    if files.tied_head:
        return rows
    nbytes = sum(record.nbytes for record in files.tensors.values() if record.role == "head")
    return -(-rows * min(HEAD_BYTES, nbytes) // nbytes)


class LayerClock:
    """Seconds of what was run, until `whole` is asked for. stands_for: as choose_layers gives it. head_parts: into how
    many parts the head was divided, of which one runs."""

    def __init__(self, stands_for: dict[int, list[int]], head_parts: float = 1.0):
        self.stands_for, self._head_parts = stands_for, head_parts
        self._weights = [len(layers) - 1 for layers in stands_for.values()]
        self.restart()

    def restart(self) -> None:
        self._place, self._extra, self._started = 0, 0.0, 0.0

    def begin(self) -> None:
        self._started = time.perf_counter()

    def end(self) -> None:
        self._extra += self._weights[self._place] * (time.perf_counter() - self._started)
        self._place = (self._place + 1) % len(self._weights)

    def end_head(self) -> None:
        self._extra += (self._head_parts - 1) * (time.perf_counter() - self._started)

    def whole(self, seconds: float) -> float:
        """Seconds of a run of the whole model, of which the run of some parts took `seconds`."""
        return seconds + self._extra


def cut_model(model_class, clock: LayerClock):
    """model_class with the layers of a clock only, each of them and the head timed."""
    kept = list(clock.stands_for)

    class CutModel(model_class):
        """Some layers of a model."""

        def make_block(self, n: int, weights):
            return super().make_block(n, weights) if n in clock.stands_for else None

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.blocks = [self.blocks[n] for n in kept]

        def new_kv(self, capacity: int, kind: str = "f16") -> KVCache:
            return KVCache([self.config.kv_shapes[n] for n in kept], capacity, kind, self.max_tokens)

        def attention(self, *arguments) -> None:
            clock.begin()
            super().attention(*arguments)

        def mlp(self, *arguments) -> int:
            rows = super().mlp(*arguments)
            clock.end()
            return rows

        def head(self, *arguments):
            clock.begin()
            logits = super().head(*arguments)
            clock.end_head()
            return logits

    return CutModel
