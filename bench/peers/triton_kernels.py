"""Attention KL as plain Triton kernels, an afternoon's work. One kernel each for KL, dq and dk; no N x N matrix.

A program computes a tile of queries (dk: of keys) and loops over the other side. Logits are in base 2 throughout:
x = scale / ln 2 <q_t, k_t>, P = 2^(x - lse_x), and the same with y and S for the student. Tensors are contiguous
bf16 [heads, length, DIM]; the length is a multiple of every tile.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
TILE = 128  # the largest tile below; divides all lengths

# (queries, keys) of a tile, warps, stages; tuned once per DIM and CAUSAL
TILES = [
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 8, 2), (128, 32, 4, 3),
    (64, 32, 4, 2),  # for GPUs with 99 KB of shared memory
]  # fmt: skip
CONFIGS = [
    triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=warps, num_stages=stages)
    for rows, keys, warps, stages in TILES
]


@triton.jit
def load_tile(tensor, head, rows, length, DIM: tl.constexpr):
    """[rows, DIM] of one head."""
    columns = tl.arange(0, DIM)
    return tl.load(tensor + head.to(tl.int64) * length * DIM + rows[:, None] * DIM + columns[None, :])


@triton.jit
def store_tile(tensor, head, rows, length, DIM: tl.constexpr, values):
    columns = tl.arange(0, DIM)
    address = tensor + head.to(tl.int64) * length * DIM + rows[:, None] * DIM + columns[None, :]
    tl.store(address, values.to(tensor.dtype.element_ty))


@triton.jit
def query_tile(CAUSAL: tl.constexpr):
    """The tile of this program. With a causal mask the longest tiles come first, which balances the load."""
    tile = tl.program_id(0)
    return tl.num_programs(0) - 1 - tile if CAUSAL else tile


@triton.autotune(CONFIGS, key=["DIM", "CAUSAL"])
@triton.jit
def forward_kernel(q_t, k_t, q_s, k_s, kl, lse_x, lse_y, scale2, length,
                   DIM: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    tile, head = query_tile(CAUSAL), tl.program_id(1)
    i = tile * ROWS + tl.arange(0, ROWS)
    teacher, student = load_tile(q_t, head, i, length, DIM), load_tile(q_s, head, i, length, DIM)
    m_x, m_y = tl.full([ROWS], -1e30, tl.float32), tl.full([ROWS], -1e30, tl.float32)
    l_x, l_y, w = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    end = (tile + 1) * ROWS if CAUSAL else length
    for begin in range(0, end, KEYS):
        j = begin + tl.arange(0, KEYS)
        x = tl.dot(teacher, tl.trans(load_tile(k_t, head, j, length, DIM))) * scale2
        y = tl.dot(student, tl.trans(load_tile(k_s, head, j, length, DIM))) * scale2
        if CAUSAL:
            if begin + KEYS > tile * ROWS:
                visible = i[:, None] >= j[None, :]
                x, y = tl.where(visible, x, -1e30), tl.where(visible, y, -1e30)
        # The sums so far, rescaled to the new maxima: l = sum 2^(x - m), w = sum 2^(x - m) (x - y)
        next_x, next_y = tl.maximum(m_x, tl.max(x, 1)), tl.maximum(m_y, tl.max(y, 1))
        shrink_x, shrink_y = tl.exp2(m_x - next_x), tl.exp2(m_y - next_y)
        p, s = tl.exp2(x - next_x[:, None]), tl.exp2(y - next_y[:, None])
        l_x, l_y = l_x * shrink_x + tl.sum(p, 1), l_y * shrink_y + tl.sum(s, 1)
        w = w * shrink_x + tl.sum(p * (x - y), 1)
        m_x, m_y = next_x, next_y
    log_x, log_y = m_x + tl.log2(l_x), m_y + tl.log2(l_y)
    row = head.to(tl.int64) * length + i
    tl.store(kl + row, (w / l_x - log_x + log_y) * 0.6931471805599453)  # ln 2
    tl.store(lse_x + row, log_x)
    tl.store(lse_y + row, log_y)


@triton.autotune(CONFIGS, key=["DIM", "CAUSAL"])
@triton.jit
def dq_kernel(q_t, k_t, q_s, k_s, lse_x, lse_y, grad_kl, dq, scale, scale2, length,
              DIM: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    tile, head = query_tile(CAUSAL), tl.program_id(1)
    i = tile * ROWS + tl.arange(0, ROWS)
    row = head.to(tl.int64) * length + i
    log_x, log_y, g = tl.load(lse_x + row), tl.load(lse_y + row), tl.load(grad_kl + row)
    teacher, student = load_tile(q_t, head, i, length, DIM), load_tile(q_s, head, i, length, DIM)
    total = tl.zeros([ROWS, DIM], tl.float32)
    end = (tile + 1) * ROWS if CAUSAL else length
    for begin in range(0, end, KEYS):
        j = begin + tl.arange(0, KEYS)
        keys = load_tile(k_s, head, j, length, DIM)
        x = tl.dot(teacher, tl.trans(load_tile(k_t, head, j, length, DIM))) * scale2
        y = tl.dot(student, tl.trans(keys)) * scale2
        dy = tl.exp2(y - log_y[:, None]) - tl.exp2(x - log_x[:, None])  # S - P
        if CAUSAL:
            if begin + KEYS > tile * ROWS:
                dy = tl.where(i[:, None] >= j[None, :], dy, 0.0)
        total += tl.dot(dy.to(keys.dtype), keys)
    store_tile(dq, head, i, length, DIM, total * (g * scale)[:, None])


@triton.autotune(CONFIGS, key=["DIM", "CAUSAL"])
@triton.jit
def dk_kernel(q_t, k_t, q_s, k_s, lse_x, lse_y, grad_kl, dk, scale, scale2, length,
              DIM: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    j = tile * KEYS + tl.arange(0, KEYS)
    teacher, student = load_tile(k_t, head, j, length, DIM), load_tile(k_s, head, j, length, DIM)
    total = tl.zeros([KEYS, DIM], tl.float32)
    first = tile * KEYS // ROWS * ROWS if CAUSAL else 0
    for begin in range(first, length, ROWS):
        i = begin + tl.arange(0, ROWS)
        row = head.to(tl.int64) * length + i
        log_x, log_y, g = tl.load(lse_x + row), tl.load(lse_y + row), tl.load(grad_kl + row)
        queries = load_tile(q_s, head, i, length, DIM)
        x = tl.dot(teacher, tl.trans(load_tile(q_t, head, i, length, DIM))) * scale2  # transposed: [keys, queries]
        y = tl.dot(student, tl.trans(queries)) * scale2
        dy = (tl.exp2(y - log_y[None, :]) - tl.exp2(x - log_x[None, :])) * g[None, :]
        if CAUSAL:
            if begin < (tile + 1) * KEYS:
                dy = tl.where(i[None, :] >= j[:, None], dy, 0.0)
        total += tl.dot(dy.to(queries.dtype), queries)
    store_tile(dk, head, j, length, DIM, total * scale)


class TritonKL:
    """The kernels on one set of tensors, and their results."""

    def __init__(self, tensors, causal, upstream):
        q_s, k_s = tensors[2:]
        batch, heads, self.length, dim = q_s.shape
        if self.length % TILE or dim not in (64, 128):
            raise ValueError(f"length {self.length}, head size {dim}: must be a multiple of {TILE}, and 64 or 128")
        self.tensors, self.heads = tensors, batch * heads
        self.scale, self.shape = dim**-0.5, {"DIM": dim, "CAUSAL": causal}
        self.kl, self.lse_x, self.lse_y = (q_s.new_empty(q_s.shape[:3], dtype=torch.float32) for _ in range(3))
        self.upstream = upstream
        self.dq, self.dk = torch.empty_like(q_s), torch.empty_like(k_s)

    def grid(self, side):
        return lambda config: (self.length // config[side], self.heads)

    def forward(self):
        rows = (self.kl, self.lse_x, self.lse_y)
        forward_kernel[self.grid("ROWS")](*self.tensors, *rows, self.scale * LOG2_E, self.length, **self.shape)

    def backward(self):
        rows = (self.lse_x, self.lse_y, self.upstream)
        scales = (self.scale, self.scale * LOG2_E, self.length)
        dq_kernel[self.grid("ROWS")](*self.tensors, *rows, self.dq, *scales, **self.shape)
        dk_kernel[self.grid("KEYS")](*self.tensors, *rows, self.dk, *scales, **self.shape)
