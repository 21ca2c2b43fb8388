"""The OLMoE architecture as a training module, its fused loss and its optimiser.

Owns the forward pass, the gradients that plain autograd would compute slowly on a CPU, and the names the weights
have in a Hugging Face checkpoint. Knows nothing of text, schedules or files.
"""

from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

EXPERT_ROWS = 64
LOSS_CHUNK_TOKENS = 1024  # one chunk of logits stays in the second-level cache


@dataclass
class ModelConfig:
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 256  # of one expert
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def as_dict(self):
        return asdict(self)


class Dispatch(torch.autograd.Function):
    """Token rows into expert order: [T, H] -> [P, H]. rows[p] is the token of place p, places[t, a] its places."""

    @staticmethod
    def forward(ctx, x, rows, places):
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        # A gather instead of autograd's scatter-add, which runs on one core.
        places = ctx.saved_tensors[0]
        return grad.index_select(0, places.flatten()).view(*places.shape, -1).sum(1), None, None


class Collect(torch.autograd.Function):
    """Expert outputs back into token order: [P, H] -> [T, A, H]."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        ctx.num_places = len(x)
        return x.index_select(0, places.flatten()).view(*places.shape, -1)

    @staticmethod
    def backward(ctx, grad):
        # Padding rows get a zero gradient here, so they add nothing to the weights' gradients.
        places = ctx.saved_tensors[0].flatten()
        flat = grad.reshape(len(places), -1)
        return flat.new_zeros(ctx.num_places, flat.shape[1]).index_copy_(0, places, flat), None


def expert_places(chosen, num_experts):
    """chosen: [T, A] -> token of each place [P], place of each choice [T, A], rows per expert with padding and at
    last rows of none, and choices of each expert [E].

    An expert's rows are padded to a multiple of EXPERT_ROWS: the matrix library compiles a kernel per shape, and
    with a fresh row count for every expert and step that took more time than the products.
    """
    tokens, active = chosen.shape
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=num_experts)
    padded = (counts + EXPERT_ROWS - 1) // EXPERT_ROWS * EXPERT_ROWS
    # The total is the same in every step, too: what is left belongs to no expert.
    total = -(-flat.numel() // EXPERT_ROWS) * EXPERT_ROWS + num_experts * EXPERT_ROWS
    order = flat.argsort(stable=True)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    positions = torch.arange(len(flat)) + shift[flat[order]]
    places = torch.empty_like(flat)
    places[order] = positions
    rows = torch.zeros(total, dtype=torch.long)
    rows[positions] = order // active
    sizes = padded.tolist()
    return rows, places.view(tokens, active), [*sizes, total - sum(sizes)], counts


class GroupedLinear(torch.autograd.Function):
    """Rows in expert order times that expert's matrix: [P, I] x [E, O, I] -> [P, O]. counts: rows of each expert,
    then rows of none, which are left unread."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(x.shape[0], weight.shape[1])
        *targets, rest = out.split(counts)
        rest.zero_()
        for matrix, rows, target in zip(weight, x.split(counts), targets, strict=False):
            torch.mm(rows, matrix.t(), out=target)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        *targets, rest = grad_x.split(ctx.counts)
        rest.zero_()
        for expert, (rows, out_rows, target) in enumerate(
            zip(x.split(ctx.counts), grad.split(ctx.counts), targets, strict=False)
        ):
            torch.mm(out_rows, weight[expert], out=target)
            torch.mm(out_rows.t(), rows, out=grad_weight[expert])
        return grad_x, grad_weight, None


def softmax_rows(logits):
    logits32 = logits.float()
    lse = torch.logsumexp(logits32, dim=-1, keepdim=True)
    return lse, torch.exp(logits32 - lse).to(logits.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T`, without ever holding the logits of all tokens."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, softmax):
        total = torch.zeros(())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape)
        transposed = weight.t()
        for rows, ids, out in zip(
            hidden.split(LOSS_CHUNK_TOKENS),
            targets.split(LOSS_CHUNK_TOKENS),
            grad_hidden.split(LOSS_CHUNK_TOKENS),
            strict=True,
        ):
            logits = rows @ transposed
            lse, grad = softmax(logits)
            surprise = lse - logits.gather(1, ids[:, None]).float()
            total += surprise.sum()
            # Gradient of the logits: the probabilities, less one at the target.
            grad.scatter_(1, ids[:, None], torch.expm1(-surprise).to(grad.dtype))
            torch.mm(grad, weight, out=out)
            grad_weight += grad.t() @ rows
        scale = 1.0 / len(targets)
        ctx.save_for_backward(grad_hidden.mul_(scale), grad_weight.mul_(scale))
        return total * scale

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), (grad_weight * grad).to(grad_hidden.dtype), None, None


def rms_norm(x, weight, eps):
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight


def norm_to(x, weight, eps: float, dtype: torch.dtype):
    return rms_norm(x, weight, eps).to(dtype)


def rotate(x, cos, sin):
    """RoPE with pairs (j, j + D/2). x: [B, T, N, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def heads_from_qkv(qkv, q_weight, k_weight, cos, sin, heads: int, eps: float):
    """q and k are normalised over the whole projection, before the split into heads and before RoPE."""
    batch, length, width = qkv.shape
    q, k, v = qkv.split(width // 3, dim=-1)
    q = rotate(rms_norm(q, q_weight, eps).view(batch, length, heads, -1), cos, sin).to(qkv.dtype)
    k = rotate(rms_norm(k, k_weight, eps).view(batch, length, heads, -1), cos, sin).to(qkv.dtype)
    v = v.view(batch, length, heads, -1)
    return (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def add_experts(residual, outputs, gates):
    """outputs: [T, A, H] in rank order; gates: [T, A], not renormalised."""
    return residual + (outputs.float() * gates[:, :, None]).sum(1)


class Kernels:
    """The element-wise parts, compiled for training and plain for evaluation."""

    def __init__(self, compiled):
        # One static version per shape: there are few shapes, and dynamic code is slower.
        wrap = partial(torch.compile, dynamic=False) if compiled else (lambda function: function)
        self.norm_to = wrap(norm_to)
        self.heads_from_qkv = wrap(heads_from_qkv)
        self.swiglu = wrap(swiglu)
        self.add_experts = wrap(add_experts)
        self.softmax_rows = wrap(softmax_rows)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, width, experts = config.hidden_size, config.intermediate_size, config.num_experts
        self.config = config
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.q_norm = nn.Parameter(torch.ones(hidden))
        self.k_norm = nn.Parameter(torch.ones(hidden))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.out = nn.Parameter(torch.empty(hidden, hidden))
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def attention(self, x, cos, sin, kernels):
        config, dtype = self.config, x.dtype
        qkv = F.linear(x, self.qkv.to(dtype))
        q, k, v = kernels.heads_from_qkv(
            qkv, self.q_norm, self.k_norm, cos, sin, config.num_attention_heads, config.rms_norm_eps
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).reshape(x.shape), self.out.to(dtype))

    def experts(self, residual, x, kernels):
        """x: [T, H]. Returns the new residual, the load-balancing loss and the chosen experts."""
        active, num_experts = self.config.num_experts_per_tok, self.config.num_experts
        # The router stays in f32 with f32 input, as in the reference: its argmax decides which weights are trained.
        logits = F.linear(x.float(), self.router)
        probabilities = logits.softmax(-1)
        gates, chosen = probabilities.topk(active, dim=-1)
        rows, places, sizes, counts = expert_places(chosen, num_experts)
        middle = kernels.swiglu(GroupedLinear.apply(Dispatch.apply(x, rows, places), self.gate_up.to(x.dtype), sizes))
        outputs = Collect.apply(GroupedLinear.apply(middle, self.down.to(x.dtype), sizes), places)
        residual = kernels.add_experts(residual, outputs, gates)
        balance = num_experts * (counts / counts.sum() * probabilities.mean(0)).sum()
        z_loss = logits.logsumexp(-1).square().mean()
        return residual, balance, z_loss, chosen

    def forward(self, residual, cos, sin, kernels, dtype):
        shape, eps = residual.shape, self.config.rms_norm_eps
        x = kernels.norm_to(residual, self.input_norm, eps, dtype)
        residual = residual + self.attention(x, cos, sin, kernels)
        flat = residual.reshape(-1, shape[-1])
        x = kernels.norm_to(flat, self.post_norm, eps, dtype)
        flat, balance, z_loss, chosen = self.experts(flat, x, kernels)
        return flat.view(shape), balance, z_loss, chosen


class TinyMoe(nn.Module):
    """OLMoE with a head tied to the embedding."""

    def __init__(self, config, compiled=False):
        super().__init__()
        self.config = config
        self.kernels = Kernels(compiled)
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.reset_parameters()

    def reset_parameters(self):
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.config.initializer_range)
            if name.endswith((".out", ".down")):
                parameter.data.mul_((2 * self.config.num_hidden_layers) ** -0.5)

    def rope(self, length):
        config = self.config
        dim = config.hidden_size // config.num_attention_heads
        frequency = config.rope_theta ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.outer(torch.arange(length).float(), frequency)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]  # [T, 1, D]
        return angles.cos(), angles.sin()

    def hidden(self, ids, dtype):
        """Final normalised hidden states [B, T, H], the auxiliary losses and the experts chosen in each layer."""
        residual = F.embedding(ids, self.embed)
        cos, sin = self.rope(ids.shape[1])
        balance, z_loss, choices = 0.0, 0.0, []
        for block in self.blocks:
            residual, layer_balance, layer_z, chosen = block(residual, cos, sin, self.kernels, dtype)
            balance, z_loss = balance + layer_balance, z_loss + layer_z
            choices.append(chosen)
        count = len(self.blocks)
        x = self.kernels.norm_to(residual, self.final_norm, self.config.rms_norm_eps, dtype)
        return x, balance / count, z_loss / count, choices

    def loss(self, ids, targets, dtype):
        x, balance, z_loss, choices = self.hidden(ids, dtype)
        x = x.view(-1, x.shape[-1])
        loss = LinearCrossEntropy.apply(x, self.embed.to(dtype), targets.flatten(), self.kernels.softmax_rows)
        return loss, balance, z_loss, choices

    def logits(self, ids, dtype=torch.float32):
        return F.linear(self.hidden(ids, dtype)[0], self.embed.to(dtype)).float()

    def checkpoint_tensors(self):
        """Weights under the names of a published OLMoE checkpoint, in bf16."""
        tensors = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.final_norm}
        for number, block in enumerate(self.blocks):
            layer = f"model.layers.{number}."
            for name, rows in zip(("q_proj", "k_proj", "v_proj"), block.qkv.chunk(3), strict=True):
                tensors[f"{layer}self_attn.{name}.weight"] = rows
            tensors[layer + "self_attn.o_proj.weight"] = block.out
            tensors[layer + "self_attn.q_norm.weight"] = block.q_norm
            tensors[layer + "self_attn.k_norm.weight"] = block.k_norm
            tensors[layer + "input_layernorm.weight"] = block.input_norm
            tensors[layer + "post_attention_layernorm.weight"] = block.post_norm
            tensors[layer + "mlp.gate.weight"] = block.router
            for expert in range(self.config.num_experts):
                gate, up = block.gate_up[expert].chunk(2)
                prefix = f"{layer}mlp.experts.{expert}."
                tensors[prefix + "gate_proj.weight"] = gate
                tensors[prefix + "up_proj.weight"] = up
                tensors[prefix + "down_proj.weight"] = block.down[expert]
        return {name: tensor.detach().to(torch.bfloat16).contiguous().clone() for name, tensor in tensors.items()}


def orthogonalise(matrices):
    """Newton-Schulz steps of Muon on a batch [N, R, C]: singular values go to about 1."""
    x = matrices.to(torch.bfloat16)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    transpose = x.shape[-2] > x.shape[-1]
    if transpose:
        x = x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if transpose else x


class Muon:
    """Momentum, then the nearest orthogonal matrix, in batches that fit the cache. Source: Jordan et al., Muon."""

    BATCH = 16

    def __init__(self, model, momentum=0.95, weight_decay=0.1):
        hidden, width = model.config.hidden_size, model.config.intermediate_size
        self.momentum, self.weight_decay = momentum, weight_decay
        self.names, self.jobs, self.buffers = set(), [], []
        for name, parameter in model.named_parameters():
            shape = {
                "qkv": (-1, hidden, hidden),
                "out": (-1, hidden, hidden),
                "gate_up": (-1, width, hidden),
                "down": (-1, hidden, width),
            }.get(name.rsplit(".", 1)[-1])
            if shape:
                self.names.add(name)
                self.buffers.append(torch.zeros_like(parameter).view(shape))
                weights, buffers = parameter.data.view(shape), self.buffers[-1]
                self.jobs += [
                    (name, shape, start, weights[start : start + self.BATCH], buffers[start : start + self.BATCH])
                    for start in range(0, len(weights), self.BATCH)
                ]

    def step(self, gradients, lr, run_jobs):
        """gradients: {name: tensor}; run_jobs(function, jobs) may run them on several threads."""

        def update(job):
            name, shape, start, weights, buffer = job
            gradient = gradients[name].view(shape)[start : start + len(weights)]
            buffer.lerp_(gradient, 1 - self.momentum)
            direction = orthogonalise(gradient.lerp(buffer, self.momentum)).float()
            scale = max(1.0, shape[1] / shape[2]) ** 0.5
            weights.mul_(1 - lr * self.weight_decay).add_(direction, alpha=-lr * scale)

        run_jobs(update, self.jobs)
