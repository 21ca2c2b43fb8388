"""All experts of one layer in memory (mapped from the file when it already holds the compute layout)."""

from ..kernels import Matrix, check, ffi, lib


class ResidentExperts:
    """`table`: C array of `struct moe_expert *`, indexed by expert id; keeps the matrices alive."""

    def __init__(self, experts: list[tuple[Matrix, Matrix, Matrix]]):
        self._matrices = experts
        self._structs = ffi.new("struct moe_expert[]", len(experts))
        for struct, (gate, up, down) in zip(self._structs, experts, strict=True):
            struct.gate, struct.up, struct.down = gate.cdata[0], up.cdata[0], down.cdata[0]
        self.table = ffi.new("struct moe_expert *[]", [self._structs + i for i in range(len(experts))])
        self.num_bytes = sum(m.num_bytes for expert in experts for m in expert)

    def run(self, layers, name: str, buffers, plan, num_used: int, x, num_tokens: int, top: int) -> None:
        """buffers.out [T * top, H] = the experts' outputs for x [T, H]; plan: the three arrays of moe_route_plan."""
        status = lib.moe_experts(layers.ctx, buffers.out.ptr, self.table, *plan, num_used, x.ptr, num_tokens, top)
        check(status, f"{name} experts")
