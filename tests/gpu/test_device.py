"""fusec's Triton kernels on a CUDA device against eager, forward and training.

The comparison is that of tests/ops: values against fp64, dtypes, strides, gradients, mutation.
Shapes are wide, odd and larger than one tile, which the interpreter is too slow for.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support import HALF, check, compile_with, values, with_layout

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
MODES = pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))


def on_device(*shape, dtype=torch.float32, seed=0, **bounds):
    return values(*shape, dtype=dtype, seed=seed, **bounds).cuda()


@DTYPES
@MODES
def test_pointwise_chains(dtype, train):
    def chain(x, y):
        h = F.gelu(x + y, approximate="tanh") * 0.5
        return torch.where(h > 0, h, y).sigmoid() + x, F.silu(x) * y

    def chains(*xs):
        return [chain(x, y) for x, y in zip(xs[::2], xs[1::2], strict=True)]

    shapes = ((1,), (4097,), (513, 1023), (64, 4096))
    pairs = [on_device(*s, dtype=dtype, seed=seed) for s in shapes for seed in (0, 1)]
    check(chains, *pairs, train=train)


def test_every_elementary_function():
    def functions(x):
        p = x.abs() + 0.1
        return [
            x.exp(), x.exp2(), x.expm1(), p.log(), p.log2(), p.log1p(), p.sqrt(), p.rsqrt(),
            x.sin(), x.cos(), x.tan(), x.tanh(), x.atan(), x.sinh(), x.cosh(), x.asinh(),
            x.erf(), x.erfc(), x.sigmoid(), p**2.5, x**3, 1 / p, F.gelu(x), F.mish(x),
            F.softplus(x), F.elu(x), x.floor(), x.ceil(), x.round(), x.trunc(), x.frac(),
            torch.atan2(x, p), torch.fmod(x, p), torch.remainder(x, p), x.lgamma(),
        ]  # fmt: skip

    check(functions, on_device(33, 129))


def test_integers_booleans_and_casts():
    def whole(i, x, b):
        return [
            i // 3, i % 5, i >> 1, i & 6, i * i - 1, i.float() / 7, torch.div(i, 4,
            rounding_mode="trunc"), x.int(), x.to(torch.int8), (x > 0) & b, ~b, b.sum(),
            x.to(torch.bfloat16).float(), x.half(), x.double() * 3, i.to(torch.uint8) + 1,
        ]  # fmt: skip

    i = on_device(65, 33, dtype=torch.int64, low=0, high=200)
    check(whole, i, on_device(65, 33) * 20, on_device(65, 33, dtype=torch.bool))


@pytest.mark.parametrize("layout", ("transposed", "expanded", "stepped", "padded_rows", "offset"))
def test_strided_operands(layout):
    x = with_layout(on_device(65, 17, 130), layout)
    check(lambda x, y: (x * 2 + y, x.sum(-1), x.softmax(-1), x.transpose(0, 1) + 1), x,
          on_device(65, 17, 130, seed=1), train=True)  # fmt: skip


NORMS = [(n, torch.bfloat16) for n in (64, 1000, 1600, 4096, 16384)]
NORMS += [(1000, torch.float32), (4096, torch.float16), (33, torch.float64)]
SOFTMAXES = [(33, torch.bfloat16), (1024, torch.bfloat16), (4097, torch.float32)]

# Odd, wide, and around every boundary between tiles and loops.
WIDTHS = (1, 7, 33, 64, 100, 1000, 1024, 1600, 4096, 4097, 8192, 16384, 20001, 50257)


@pytest.mark.parametrize("n", WIDTHS)
def test_rows_of_every_width(n):
    def rows(x):
        return (x.sum(-1), x.amax(-1), x.softmax(-1), torch.var_mean(x, -1, correction=0),
                x.argmax(-1), x - x.mean(-1, keepdim=True), x.logsumexp(-1))  # fmt: skip

    check(rows, on_device(9, n))


@pytest.mark.parametrize("shape", ((1, 33), (4097, 33), (100, 1000), (20001, 7)), ids=str)
def test_columns_of_every_height(shape):
    check(lambda x: (x.sum(0), x.amax(0), x.mean(0), x.sum(), x.amin(), x.argmin(0)),
          on_device(*shape), tol=1e-4)  # fmt: skip


@MODES
@pytest.mark.parametrize(("n", "dtype"), NORMS, ids=str)
def test_residual_layer_norm(n, dtype, train):
    def norm(x, r, w, b):
        h = x + r
        return F.layer_norm(h, (n,), w, b), h

    rows = 65 if n <= 4096 else 9
    check(norm, on_device(rows, n, dtype=dtype), on_device(rows, n, dtype=dtype, seed=1),
          on_device(n, dtype=dtype, seed=2), on_device(n, dtype=dtype, seed=3), train=train,
          tol=2e-2 if dtype in HALF else 1e-4)  # fmt: skip


@DTYPES
@MODES
def test_rms_norm_and_rotary_embedding(dtype, train):
    angles = torch.arange(65.0)[:, None] * values(32, seed=3)
    angles = torch.cat((angles, angles), -1).cuda()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(x, w, cos, sin):
        q = F.rms_norm(x, (64,), w, 1e-6).transpose(1, 2)
        turned = torch.cat((-q[..., 32:], q[..., :32]), -1)
        return q * cos + turned * sin

    check(rotate, on_device(2, 65, 3, 64, dtype=dtype), on_device(64, dtype=dtype), cos, sin,
          train=train, tol=2e-2 if dtype in HALF else 1e-4)  # fmt: skip


@MODES
@pytest.mark.parametrize(("n", "dtype"), SOFTMAXES, ids=str)
def test_masked_softmax(n, dtype, train):
    mask = torch.ones(65, n, dtype=torch.bool, device="cuda").triu(1)

    def softmax(x, mask):
        return (x * 0.125).masked_fill(mask, torch.finfo(x.dtype).min).softmax(-1)

    check(softmax, on_device(3, 65, n, dtype=dtype), mask, train=train)


@MODES
@pytest.mark.parametrize("classes", (33, 1000, 50257))
def test_cross_entropy(classes, train):
    targets = on_device(65, dtype=torch.int64, low=0, high=classes)
    targets[3] = -100
    check(lambda x, t: (F.cross_entropy(x, t), F.cross_entropy(x, t, label_smoothing=0.1)),
          on_device(65, classes), targets, train=train, tol=1e-4)  # fmt: skip


@MODES
def test_group_and_batch_norm(train):
    def norms(x):
        return F.group_norm(x, 4) * 2, F.batch_norm(x, None, None, training=True).relu()

    check(norms, on_device(4, 16, 33, 17), train=train, tol=1e-4)
    check(norms, with_layout(on_device(4, 16, 33, 17), "channels_last"), train=train, tol=1e-4)


def test_views_pads_cats_and_gathers():
    def views(x, i):
        return (x.flip(1) * 2, F.pad(x, (3, 5)) + 1, torch.cat((x, -x), 1), x[i] * 2, x.roll(5, 0),
                x.reshape(13, -1).sum(1), x.gather(1, i[None, :33].expand(65, -1)),
                x.tril(), x[:, 1:] - x[:, :-1], x.unfold(1, 4, 3).amax(-1))  # fmt: skip

    check(views, on_device(65, 130), on_device(50, dtype=torch.int64, low=0, high=65), train=True)


def test_embedding_and_its_gradient():
    check(lambda i, w: F.embedding(i, w, padding_idx=3).relu() * 2,
          on_device(9, 33, dtype=torch.int64, low=0, high=101), on_device(101, 65), train=True,
          tol=1e-4)  # fmt: skip


def test_mutated_inputs():
    def mutate(x, y):
        x.add_(y).relu_()
        y[1:] *= 2
        return x.sum(0), y + x

    check(mutate, on_device(65, 130), on_device(65, 130, seed=1))


@MODES
def test_dynamic_shapes(train):
    def block(x, w):
        return F.layer_norm(x, (x.shape[-1],), w) + x.softmax(-1), x.sum(0) * x.shape[0]

    check(block, on_device(65, 130), on_device(130, seed=1), dynamic=True, train=train, tol=1e-4)


def test_tensors_without_elements():
    check(lambda x: (x * 2 + 1, x.sum(0), x.sum(1)), on_device(0, 7))


def test_more_elements_than_32_bit_indices_reach():
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of device memory")
    torch._dynamo.reset()
    x = torch.zeros(2**31 + 4096, dtype=torch.int8, device="cuda")
    x[-5:] = 3
    out = compile_with(lambda x: x * 2 + 1)(x)
    assert out[-5:].tolist() == [7] * 5
    assert out[:3].tolist() == [1, 1, 1]
    assert int((out != 1).sum()) == 5


def test_dropout_keeps_the_expected_share_and_its_mask_in_the_backward():
    torch._dynamo.reset()
    x = torch.ones(1000, 1001, device="cuda", requires_grad=True)
    out = compile_with(lambda x: F.dropout(x * 2, 0.25, True))(x)
    out.sum().backward()
    assert abs((out != 0).float().mean().item() - 0.75) < 0.01
    assert torch.equal(out != 0, x.grad != 0)


def test_random_numbers_on_the_device_are_those_of_a_cpu():
    torch._dynamo.reset()
    seeds = torch.tensor([7, -(2**62) + 12345])

    def draw(seeds):
        return [torch.ops.fusec.random([300, 701], [0, 1], seeds, k, *kind)
                for k, kind in enumerate((("uniform", torch.float32),
                                          ("integer", torch.int64, -3, 1000)))]  # fmt: skip

    for ours, theirs in zip(compile_with(draw)(seeds.cuda()), draw(seeds), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_a_block_trains():
    torch.manual_seed(0)
    width = 192

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.qkv = torch.nn.Linear(width, 3 * width)
            self.up = torch.nn.Linear(width, 4 * width)
            self.down = torch.nn.Linear(4 * width, width)

        def forward(self, x):
            q, k, v = (p.view(2, 65, 3, 64).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = x + y.transpose(1, 2).reshape(x.shape)
            return h + self.down(F.gelu(self.up(self.norm(h))))

    check(Block().cuda(), on_device(2, 65, width), train=True, tol=1e-3)


def test_work_on_another_stream_is_ordered():
    torch._dynamo.reset()
    compiled = compile_with(lambda x: x.relu() * 2 + 1)
    x = on_device(2048, 2049)
    compiled(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = compiled(x.clone() + 1)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.allclose(out, (x + 1).relu() * 2 + 1)


def test_a_captured_graph_replays_with_new_inputs():
    torch._dynamo.reset()
    compiled = compile_with(lambda x: F.layer_norm(x, (1000,)).sigmoid())
    x = on_device(65, 1000)
    compiled(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    x.copy_(on_device(65, 1000, seed=5))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(out, F.layer_norm(x, (1000,)).sigmoid(), atol=1e-5)
