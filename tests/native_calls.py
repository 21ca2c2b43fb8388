"""Thin numpy wrappers over the native calls that the tests of operations, products and routing share."""

import numpy as np
from engine._native import ffi, lib

F32, Q8_32, Q8_256 = lib.MOE_ACT_F32, lib.MOE_ACT_Q8_32, lib.MOE_ACT_Q8_256
NAMES = [ffi.string(lib.moe_tier_name(i)).decode() for i in range(lib.moe_tier_count())]
TIERS = [name for name in NAMES if lib.moe_tier_supported(name.encode())]


def pointer(array, ctype="float *"):
    assert array.flags.c_contiguous
    return ffi.cast(ctype, array.ctypes.data)


def context(tier=None, threads=1):
    error = ffi.new("const char **")
    handle = lib.moe_ctx_create(ffi.NULL if tier is None else tier.encode(), threads, error)
    assert handle, ffi.string(error[0])
    return ffi.gc(handle, lib.moe_ctx_destroy)


def bits(array):
    """The bytes of an array as unsigned integers, so that comparisons are exact and see the sign of zero."""
    return array.view({8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}[array.dtype.itemsize])


def assert_same_bits(got, want):
    np.testing.assert_array_equal(bits(np.asarray(got)), bits(np.asarray(want)))


def poisoned(*shape, dtype=np.float32):
    """Output buffer of NaN: an element that a call leaves out shows up."""
    return np.full(shape, np.nan, dtype)


def rmsnorm(ctx, x, weight, eps=1e-5):
    y = poisoned(*x.shape)
    assert lib.moe_rmsnorm(ctx, pointer(y), pointer(x), pointer(weight), x.shape[0], x.shape[1], eps) == 0
    return y


def softmax(ctx, x):
    y = poisoned(*x.shape)
    assert lib.moe_softmax(ctx, pointer(y), pointer(x), x.shape[0], x.shape[1]) == 0
    return y


def swiglu(ctx, gate, up):
    y = poisoned(*gate.shape)
    assert lib.moe_swiglu(ctx, pointer(y), pointer(gate), pointer(up), gate.size) == 0
    return y


def swiglu_clamped(ctx, gate, up, limit):
    y = poisoned(*gate.shape)
    assert lib.moe_swiglu_clamped(ctx, pointer(y), pointer(gate), pointer(up), gate.size, limit) == 0
    return y


def sigmoid(ctx, x):
    y = poisoned(*x.shape)
    assert lib.moe_sigmoid(ctx, pointer(y), pointer(x), x.size) == 0
    return y


def linear_heads(ctx, matrix, x, num_heads, tail=0):
    """[T, N, rows + tail] of x [T, N, width]."""
    out = poisoned(x.shape[0], num_heads, matrix.rows // num_heads + tail)
    args = (matrix.cdata, pointer(out), pointer(x), x.shape[0], num_heads, x.shape[2], tail)
    return lib.moe_linear_heads(ctx, *args), out


def token_logprobs(ctx, logits, targets):
    out = poisoned(len(targets), dtype=np.float64)
    targets = np.asarray(targets, np.int32)
    status = lib.moe_token_logprobs(
        ctx, pointer(out, "double *"), pointer(logits), pointer(targets, "int32_t *"), len(targets), logits.shape[1]
    )
    return status, out


def quantize_activations(ctx, x, form):
    """(q int8 [T, cols], d float32 [T, cols / block], sum16, sum32) of the canonical activation quantizer."""
    num_tokens, cols = x.shape
    block = {Q8_32: 32, Q8_256: 256}[form]
    stride = lib.moe_activation_bytes(form, cols)
    act = np.full((num_tokens, stride), 0xA5, np.uint8)
    assert lib.moe_quantize_activations(ctx, pointer(act, "void *"), form, pointer(x), num_tokens, cols) == 0
    parts, start = [], 0
    for count, dtype in ((cols, np.int8), (cols // block, np.float32), (cols // 16, np.int16), (cols // 32, np.int32)):
        num_bytes = count * np.dtype(dtype).itemsize
        parts.append(np.ascontiguousarray(act[:, start : start + num_bytes]).view(dtype))
        start += (num_bytes + 63) // 64 * 64
    assert start == stride
    return parts


class Matrix:
    """float32 weights stored in a format and re-coded to its layout, with an optional bias."""

    def __init__(self, ctx, fmt, weights, bias=None):
        rows, cols = weights.shape
        error = ffi.new("const char **")
        table = lib.moe_select_format(ctx, fmt.encode(), error)
        assert table, ffi.string(error[0])
        layout = lib.moe_select_layout(ctx, table.layout, error)
        assert layout, ffi.string(error[0])
        weights = np.ascontiguousarray(weights, np.float32)
        storage = np.zeros((rows, cols // table.block_len * table.block_bytes), np.uint8)
        status = lib.moe_quantize(ctx, pointer(storage, "void *"), fmt.encode(), pointer(weights), rows, cols)
        assert status == 0, (fmt, status)
        self.strips = np.zeros(lib.moe_matrix_bytes(layout, rows, cols) + 64, np.uint8)
        self.strips = self.strips[-self.strips.ctypes.data % 64 :]
        status = lib.moe_encode(
            ctx, pointer(self.strips, "void *"), table, layout, pointer(storage, "void *"), rows, cols
        )
        assert status == 0
        self.bias = bias
        self.rows, self.cols = rows, cols
        self.cdata = ffi.new("struct moe_matrix *")
        self.cdata.data = pointer(self.strips, "void *")
        self.cdata.layout, self.cdata.rows, self.cdata.cols = layout, rows, cols
        if bias is not None:
            self.cdata.bias = pointer(bias)

    def dense(self, ctx):
        """The stored weights as float32, through moe_embed."""
        y, ids = poisoned(self.rows, self.cols), np.arange(self.rows, dtype=np.int32)
        assert lib.moe_embed(ctx, pointer(y), self.cdata, pointer(ids, "int32_t *"), self.rows) == 0
        return y


def linear(ctx, matrices, x, add_to=None):
    """One [T, rows] array per matrix."""
    num_tokens = x.shape[0]
    outs = [a.copy() for a in add_to] if add_to else [poisoned(num_tokens, m.rows) for m in matrices]
    w = ffi.new("const struct moe_matrix *[]", [m.cdata for m in matrices])
    y = ffi.new("float *[]", [pointer(out) for out in outs])
    status = lib.moe_linear(ctx, w, y, len(matrices), pointer(x), num_tokens, int(bool(add_to)))
    assert status == 0, status
    return outs


class Experts:
    """A table of experts, each a (gate, up, down) triple of Matrix."""

    def __init__(self, triples, activation=lib.MOE_SWIGLU, limit=0.0):
        self.triples = triples
        self.cdata = []
        for gate, up, down in triples:
            expert = ffi.new("struct moe_expert *")
            expert.gate, expert.up, expert.down = gate.cdata[0], up.cdata[0], down.cdata[0]
            expert.activation, expert.limit = activation, limit
            self.cdata.append(expert)
        self.table = ffi.new("const struct moe_expert *[]", self.cdata)


def route(ctx, logits, top, score=lib.MOE_SOFTMAX_THEN_TOPK, norm=0, scale=1.0, correction=None, **rest):
    """(status, ids [T, A], weights [T, A]); rest: further fields of the rule."""
    num_tokens, num_experts = logits.shape
    ids, weights = np.full((num_tokens, top), -1, np.int32), poisoned(num_tokens, top)
    rule = ffi.new("struct moe_router_rule *", {"score": score, "norm_topk_prob": norm, "scale": scale, **rest})
    if correction is not None:
        rule.correction = pointer(correction)
    status = lib.moe_route(
        ctx, pointer(ids, "int32_t *"), pointer(weights), pointer(logits), num_tokens, num_experts, top, rule
    )
    return status, ids, weights


def route_plan(ids, num_experts):
    """(expert ids, offsets, assignments) of one routed batch."""
    num_tokens, top = ids.shape
    most = min(num_experts, ids.size)
    experts, offsets, assignments = (np.full(n, -1, np.int32) for n in (most, most + 1, ids.size))
    arrays = [pointer(a, "int32_t *") for a in (experts, offsets, assignments, np.ascontiguousarray(ids))]
    count = lib.moe_route_plan(context(), *arrays, num_tokens, top, num_experts)
    assert count >= 0, count
    return experts[:count], offsets[: count + 1], assignments


def run_experts(ctx, experts, x, ids, plan=None, out=None):
    """[T * A, H] expert outputs; plan limits the call to some experts."""
    num_tokens, top = ids.shape
    if out is None:
        out = poisoned(num_tokens * top, x.shape[1])
    chosen, offsets, assignments = plan or route_plan(ids, len(experts.triples))
    arrays = [pointer(a, "int32_t *") for a in (chosen, offsets, assignments)]
    status = lib.moe_experts(ctx, pointer(out), experts.table, *arrays, len(chosen), pointer(x), num_tokens, top)
    assert status == 0, status
    return out
