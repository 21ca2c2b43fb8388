"""The expert cache: which expert is in which slot, who goes when a slot is needed, and what that cost.

Slots, reader threads and their states are native (native/streamer.c); the decisions are here. One forward pass at a
time uses a cache.
"""

import os
from dataclasses import dataclass

import numpy as np

from ..errors import ExpertReadError
from ..kernels import check, ffi, lib, text
from ..weights.architectures import EXPERT_PARTS
from .files import ExpertFiles
from .places import ExpertPlaces
from .policy import make_policy

DEFAULT_READERS = 4
CHUNK_BYTES = 1 << 20
_WAIT_MS = 200  # then Python looks for signals
_MAX_EVENTS = 64


@dataclass
class Counters:
    """What Python counts: distinct experts per layer call, found in the cache or not; layer calls that missed some."""

    hits: int = 0
    misses: int = 0
    miss_calls: int = 0
    evictions: int = 0


def _destroyer(files: ExpertFiles, *kept):
    """What ends a native streamer. It holds all that reader threads look at, which must not go before they do."""

    def destroy(handle):
        lib.moe_streamer_destroy(handle)
        files.close()
        del kept[:]

    kept = list(kept)
    return destroy


class ExpertCache:
    """num_slots experts in memory. policy: see engine.experts.policy_base; a key in flight is not in it."""

    def __init__(self, places: ExpertPlaces, files: ExpertFiles, num_slots: int, policy, readers: int):
        self.places, self.files, self.num_slots, self.policy = places, files, num_slots, policy
        self.readers = readers
        error = ffi.new("const char **")
        sizes = (num_slots, places.slot_bytes, places.staging_bytes, readers, CHUNK_BYTES)
        handle = lib.moe_streamer_create(places.table, places.num_keys, *sizes, error)
        if not handle:
            files.close()
            raise ExpertReadError(f"expert cache of {num_slots} x {places.slot_bytes} bytes: {text(error[0])}")
        mappings = [ffi.NULL if mapping is None else ffi.from_buffer(mapping) for _, _, mapping in files.sources]
        self._owner = os.getpid()
        self.handle = ffi.gc(handle, _destroyer(files, places.table, mappings))
        for (direct, buffered, _), address in zip(files.sources, mappings, strict=True):
            check(lib.moe_streamer_add_file(self.handle, direct, buffered, address), "expert file")
        self.counters = Counters()
        self.pinned: frozenset[int] = frozenset()
        self.slot_of: list[int] = [-1] * places.num_keys
        self._free = list(range(num_slots - 1, -1, -1))
        self._in_flight = 0
        self._in_call = False
        self.lookahead = None  # set by the stream when there is one
        self._events = ffi.new("struct moe_stream_event[]", _MAX_EVENTS)
        self._keys = np.empty(num_slots, np.int64)
        self._slots = np.empty(num_slots, np.int32)
        self._keys_ptr = ffi.cast("int64_t *", self._keys.ctypes.data)
        self._slots_ptr = ffi.cast("int32_t *", self._slots.ctypes.data)
        self._base = int(ffi.cast("intptr_t", lib.moe_streamer_slot(self.handle, 0)))
        self.structs = self._make_structs()

    def _make_structs(self):
        """moe_expert by key; `data` is NULL while an expert is not resident, so that it cannot be used by mistake."""
        places, structs = self.places, ffi.new("struct moe_expert[]", self.places.num_keys)
        for key in places.keys:
            layer, expert = divmod(key, places.num_experts)
            for matrix, part in zip(self._matrices(structs[key]), EXPERT_PARTS, strict=True):
                record = places.record(layer, expert, part)
                matrix.layout = places.context.layout(places.layout_name(record))
                matrix.rows, matrix.cols = record.rows, record.cols
                if record.layout is None and places.compact:
                    matrix.storage = places.context.format(record.format)
        return structs

    @staticmethod
    def _matrices(struct):
        return struct.gate, struct.up, struct.down

    # ---- slots -------------------------------------------------------------------------------------------------------

    def take_slot(self, busy) -> int | None:
        """A slot to read into: a free one, that of a guess that came to nothing, or that of the policy's victim; None
        when everything is busy."""
        if self._free:
            return self._free.pop()
        key = self.lookahead.stale(busy) if self.lookahead else None
        if key is None:
            key = self.policy.victim(busy)
            if key is None:
                return None
            if self.lookahead:
                self.lookahead.evicted(key)
        return self._evict(key)

    def give_back(self, slot: int) -> None:
        """A slot whose read failed or was dropped is free again."""
        self._free.append(slot)

    def _evict(self, key: int) -> int:
        self.policy.remove(key)
        slot, self.slot_of[key] = self.slot_of[key], -1
        for matrix in self._matrices(self.structs[key]):
            matrix.data = ffi.NULL
        self.counters.evictions += 1
        return slot

    def publish(self, key: int, slot: int) -> None:
        base = self._base + slot * self.places.slot_bytes
        for matrix, offset in zip(self._matrices(self.structs[key]), self.places.offsets[key], strict=True):
            matrix.data = ffi.cast("void *", base + offset)
        self.slot_of[key] = slot
        if key not in self.pinned:
            self.policy.admit(key)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def request(self, keys: list[int], busy) -> int:
        """Ask for as many of `keys` as there is room for, in order. Returns how many; busy: keys that may not go."""
        slots = []
        for _ in keys:
            slot = self.take_slot(busy)
            if slot is None:
                break
            slots.append(slot)
        if slots:
            self.send(keys[: len(slots)], slots)
            self._in_flight += len(slots)
        return len(slots)

    def claim_guesses(self, keys: list[int]) -> set[int]:
        """Those of `keys` that are on their way as guesses: from now on they are wanted, and arrive like the others."""
        claimed = self.lookahead.claim(keys) if self.lookahead else set()
        self._in_flight += len(claimed)
        return claimed

    def send(self, keys: list[int], slots: list[int], speculative: bool = False) -> None:
        count = len(keys)
        self._keys[:count], self._slots[:count] = keys, slots
        args = (self.handle, self._keys_ptr, self._slots_ptr, count, speculative)
        check(lib.moe_streamer_request(*args), "expert request")

    def arrivals(self) -> list[int]:
        """Keys that have become resident since the last call, waiting for at least one; each is in use until `release`.

        Raises ExpertReadError for one that could not be read.
        """
        count = 0
        while not count:
            count = check(lib.moe_streamer_next(self.handle, self._events, _MAX_EVENTS, _WAIT_MS), "expert wait")
        self._in_flight -= count
        keys, failed = [], None
        for event in self._events[0:count]:
            if event.error:
                self.give_back(event.slot)
                failed = failed or self._read_error(event)
            else:
                self.publish(event.key, event.slot)
                keys.append(event.key)
        if failed:
            self.release(keys)
            raise failed
        return keys

    def pin(self, keys: list[int]) -> None:
        """Load keys into free slots and never evict them; before the first use. Raises ExpertReadError."""
        self.pinned = frozenset(keys)
        waiting = sorted(keys)
        while waiting or self._in_flight:
            asked = self.request(waiting[: self.num_slots], ())
            del waiting[:asked]
            self.release(self.arrivals())

    def load_all(self, progress=None) -> None:
        """Read every expert, in file order. progress: called with (bytes done, bytes in all)."""
        waiting = [key for key in self.places.keys if self.slot_of[key] < 0]
        total = done = len(waiting)
        asked = self.request(waiting, ())
        assert asked == total, "load_all needs a slot for every expert"
        while done:
            arrived = self.arrivals()
            self.release(arrived)
            done -= len(arrived)
            if progress is not None:
                progress((total - done) * self.places.expert_bytes, total * self.places.expert_bytes)

    def hold(self, keys: list[int]) -> None:
        self._use(keys, 1)

    def release(self, keys: list[int]) -> None:
        self._use(keys, -1)

    def _use(self, keys: list[int], change: int) -> None:
        for start in range(0, len(keys), self.num_slots):
            part = keys[start : start + self.num_slots]
            for i, key in enumerate(part):
                self._slots[i] = self.slot_of[key]
            check(lib.moe_streamer_use(self.handle, self._slots_ptr, len(part), change), "expert use count")

    def begin_call(self) -> None:
        """Before anything of a layer call; what the last one left behind, if it was interrupted, is put in order."""
        if os.getpid() != self._owner:
            raise ExpertReadError(
                "experts cannot be streamed in a forked process: the threads that read them stayed in its parent; load "
                "the model in the process that uses it"
            )
        if self._in_call:
            self._recover()
        self._in_call = True

    def end_call(self) -> None:
        self._in_call = False

    def _recover(self) -> None:
        """Ctrl-C may have come between any two statements, so only the native side knows what is in the slots."""
        while (status := lib.moe_streamer_reset(self.handle, self._keys_ptr, _WAIT_MS)) == lib.MOE_IN_USE:
            continue
        check(status, "expert cache")
        self.policy = make_policy(self.policy.name, self.num_slots, self.places.num_keys)
        self._free, self._in_flight = [], 0
        if self.lookahead:
            self.lookahead.forget()
        for key in self.places.keys:
            self.slot_of[key] = -1
            for matrix in self._matrices(self.structs[key]):
                matrix.data = ffi.NULL
        for slot, key in enumerate(self._keys.tolist()):
            if key < 0 or self.slot_of[key] >= 0:
                self._free.append(slot)
            else:
                self.publish(key, slot)

    def settle(self) -> None:
        """After an error: wait for what is under way, so that every slot is free or resident and out of use."""
        while self._in_flight:
            try:
                self.release(self.arrivals())
            except ExpertReadError:
                continue

    def _read_error(self, event) -> ExpertReadError:
        layer, expert = divmod(event.key, self.places.num_experts)
        path = self.files.paths[event.error_file]
        reason = "the file ended early" if event.error == lib.MOE_STREAM_EARLY_END else os.strerror(event.error)
        return ExpertReadError(
            f"{path}: layer {layer} expert {expert}: read at {event.error_offset}: {reason}; check the disk and the "
            "file (millstream inspect --verify)"
        )

    # ---- figures -----------------------------------------------------------------------------------------------------

    def wait_ms(self) -> float:
        """Milliseconds since the start that layers have waited for reads."""
        raw = ffi.new("struct moe_stream_stats *")
        lib.moe_streamer_stats(self.handle, raw)
        return raw.wait_ns / 1e6

    def stats(self) -> dict:
        """Counters since the start; times in seconds. See docs/streaming.md."""
        raw = ffi.new("struct moe_stream_stats *")
        lib.moe_streamer_stats(self.handle, raw)
        c = self.counters
        asked = c.hits + c.misses
        busy = raw.busy_ns / 1e9
        return {
            "hits": c.hits,
            "misses": c.misses,
            "miss_calls": c.miss_calls,
            "hit_rate": c.hits / asked if asked else 0.0,
            "evictions": c.evictions,
            "pinned": len(self.pinned),
            "bytes": raw.bytes,
            "reads": raw.reads,
            "read_calls": raw.calls,
            "service_s": raw.service_ns / 1e9,
            "busy_s": busy,
            "wait_s": raw.wait_ns / 1e9,
            "recode_s": raw.recode_ns / 1e9,
            "mb_per_s": raw.bytes / busy / 1e6 if busy else 0.0,
            "retries": raw.retries,
            "failures": raw.failures,
            "direct_refused": raw.direct_refused,
            **(self.lookahead.stats() if self.lookahead else {"lookahead": "off"}),
        }
