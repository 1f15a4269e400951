"""Complex numbers, compiled: values, gradients, strides and bits as in eager, no eager kernels.

Only transforms, and products that are large, are left to the library.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support import Cases, check, values

C64, C128 = torch.complex64, torch.complex128
TRANSFORMS = ("_fft_r2c.default", "_fft_c2c.default", "_fft_c2r.default")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = C64) -> torch.Tensor:
    return values(*shape, dtype=dtype, seed=seed)


cases = Cases()


@cases
def arithmetic():
    return (
        lambda x, y: (x * y + x / y - y, -x, x.reciprocal()),
        numbers(3, 5),
        numbers(3, 5, seed=1),
    )


@cases
def broadcast():
    return lambda x, y: x[:, None] * y, numbers(3), numbers(4, seed=1)


@cases
def real_operands():
    return (
        lambda z, x: (z * x, z + x, x - z, z / x, x / z, z * 2, 3 - z),
        numbers(4),
        values(4, seed=1),
    )


@cases
def complex_numbers():
    return lambda z, x: (z * (1 + 2j), x * 2j, 1j - z, z**2, z ** (0.5 + 1j)), numbers(4), values(4)


@cases
def other_types():
    def fn(z, n, b):
        return z * n, z + b, torch.where(b, z, 0)

    return fn, numbers(4), values(4, dtype=torch.int64), values(4, dtype=torch.bool)


@cases
def promotion():
    return lambda z, x: (z * x, z + x[0], x * (1 + 1j)), numbers(4), values(4, dtype=torch.float64)


@cases
def functions():
    def fn(z):
        named = "exp log sqrt rsqrt sin cos tan sinh cosh tanh sigmoid square expm1 log1p exp2"
        return [getattr(torch, name)(z) for name in named.split()]

    return fn, numbers(5)


@cases
def real_results():
    return lambda z: (z.abs(), z.angle(), z.real, z.imag, z.abs().square()), numbers(5)


@cases
def polar_and_parts():
    def fn(r, t):
        return torch.polar(r, t), torch.complex(r, t)

    return fn, values(5, low=0.1, high=2), values(5)


@cases
def conjugates():
    def fn(z, w):
        return z.conj() * w, (z * w).conj().imag + 1, z.mH.conj_physical()

    return fn, numbers(3, 4), numbers(3, 4, seed=1)


@cases
def views():
    def fn(z):
        return (z.t() * 2, z[1:, ::2] + 1, z.reshape(-1)[3] * z.flip(0), z.unfold(1, 2, 1) * 2)

    return fn, numbers(3, 4)


@cases
def assembled():
    def fn(z, w):
        both = torch.cat([z, w]), torch.stack([z, w], -1), F.pad(z, (1, 2))
        return (*both, z.roll(1), z.repeat(2, 1), torch.tril(z), z.masked_fill(z.real > 0, 1j))

    return fn, numbers(3, 4), numbers(3, 4, seed=1)


@cases
def sums():
    def fn(z):
        return z.sum(0), z.mean(), z.cumsum(1), z.var(1), z.std(), z.norm(), torch.trace(z)

    return fn, numbers(4, 4)


@cases
def indexed():
    def fn(z, i):
        rows = i[:, None].expand(-1, 3)
        return z[i], z.gather(0, rows), z.index_select(0, i), z.scatter_add(0, rows, z)

    return fn, numbers(4, 3), torch.tensor([2, 0, 3, 3])


@cases
def products():
    def fn(x, y):
        return x @ y, x @ y.mH, torch.einsum("ij,kj->ik", x.conj(), y), (x @ y).sum()

    return fn, numbers(4, 4), numbers(4, 4, seed=1)


@cases
def comparisons():
    def fn(z):
        tests = z.isnan(), torch.isfinite(z), torch.isreal(z), z.bool()
        return z == z.conj(), z != 1, *tests

    return fn, numbers(4)


@cases
def doubles():
    return lambda z, x: (z.exp() * x, z.to(C64) + 1), numbers(4, dtype=C128), values(4)


def test_operations_agree_with_eager() -> None:
    cases.check(left=())


def test_gradients_agree_with_eager() -> None:
    trained = Cases()
    trained.makers = {
        k: v for k, v in cases.makers.items() if k not in ("comparisons", "other_types")
    }
    trained.check(train=True, left=())


def rotary(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rotate pairs of features, as the reference code of Llama does."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(x)

    return turned(q), turned(k)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_rotary_embedding(dtype: torch.dtype) -> None:
    turns = torch.polar(torch.ones(6, 4), values(6, 4))
    q, k = (values(2, 6, 3, 8, dtype=dtype, seed=s) for s in (0, 1))
    check(rotary, q, k, turns, train=True, left=())


def state_space(u, log_a, a_im, c, log_dt, d):
    """A diagonal state space (S4D), by a convolution in frequencies."""
    dt, length = log_dt.exp(), u.shape[-1]
    a = -log_a.exp() + 1j * a_im
    dt_a = a * dt[:, None]
    c = torch.view_as_complex(c) * (dt_a.exp() - 1.0) / a
    kernel = torch.einsum("hn,hnl->hl", c, torch.exp(dt_a[..., None] * torch.arange(length)))
    taps = torch.fft.rfft(2 * kernel.real, n=2 * length) * torch.fft.rfft(u, n=2 * length)
    return F.gelu(torch.fft.irfft(taps, n=2 * length)[..., :length] + u * d[:, None])


def test_state_space_leaves_only_transforms() -> None:
    given = [
        values(*s, seed=k)
        for k, s in enumerate(((2, 3, 16), (3, 4), (3, 4), (3, 4, 2), (3,), (3,)))
    ]
    check(state_space, *given, train=True, left=TRANSFORMS)


def spectral(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply the lowest frequencies of images by matrices (a Fourier neural operator)."""
    modes = w.shape[2]
    found = torch.fft.rfft2(x)
    mixed = torch.einsum("bixy,ioxy->boxy", found[:, :, :modes, :modes], torch.view_as_complex(w))
    kept = torch.zeros_like(found[:, : w.shape[1]])
    kept[:, :, :modes, :modes] = mixed
    return torch.fft.irfft2(kept, s=x.shape[-2:])


def test_spectral_layer_leaves_only_transforms() -> None:
    check(spectral, values(2, 3, 8, 8), values(3, 3, 4, 4, 2), train=True, left=TRANSFORMS)


def test_a_large_product_is_the_library_s() -> None:
    x, y = numbers(40, 64), numbers(64, 48, seed=1)
    check(lambda x, y: ((x * 2) @ y.conj()).abs(), x, y, train=True, left=("mm.default",))


def test_symbolic_sizes() -> None:
    def fn(z: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            z.conj() * w,
            torch.view_as_real(z).sum(1),
            torch.cat([z, w], 1).t(),
            z.reshape(-1).exp(),
        )

    more = [(numbers(n, m), numbers(n, m, seed=1)) for n, m in ((5, 7), (9, 2))]
    check(fn, numbers(4, 6), numbers(4, 6, seed=1), dynamic=True, more=more, left=())


def test_writes_into_inputs() -> None:
    def fn(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        z.mul_(2j)
        z.real.add_(1)
        z[1:, 0] = 3 - 1j
        x.copy_(z.abs())
        return z.sum()

    check(fn, numbers(3, 4), values(3, 4), left=("copy_.default",))


def test_strided_window_of_a_computed_conjugate() -> None:
    def fn(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        there = torch.as_strided((z * 2).conj(), (2, 3), (3, 2), 1)
        return there, there * 1

    check(fn, numbers(9), left=("as_strided.default",))


def test_writes_through_the_imaginary_part_of_a_conjugate() -> None:
    """Such a graph runs as eager kernels: in the trace, complex tensors have the negative bit."""

    def fn(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = z * 1.5
        y.conj().imag.mul_(2)
        return y.mT, y

    torch._dynamo.reset()
    z = numbers(3, 4)
    for made, expected in zip(torch.compile(fn, backend="fusec")(z), fn(z), strict=True):
        torch.testing.assert_close(made.resolve_neg(), expected)


@pytest.mark.parametrize("writes", (False, True))
def test_complex_input_with_the_negative_bit(writes: bool) -> None:
    def fn(z: torch.Tensor) -> torch.Tensor:
        return z.mul_(2j) + 1 if writes else z * 2j

    made, expected = (torch._neg_view(numbers(4)) for _ in range(2))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="fusec")(made), fn(expected))
    torch.testing.assert_close(made, expected)


FORMS = {
    "conj": lambda z: z.conj(),
    "imag of conj": lambda z: z.conj().imag,
    "transposed": lambda z: z.t(),
    "offset": lambda z: z.view(-1)[3:],
}


@pytest.mark.parametrize("form", FORMS)
def test_inputs_of_any_form(form: str) -> None:
    x = FORMS[form](numbers(4, 6))

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x.sum(), x.abs()

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="fusec", options={"strict": True})
    for a, b in zip(compiled(x), fn(x), strict=True):
        torch.testing.assert_close(a, b)


def test_a_product_of_no_terms_is_zero() -> None:
    a, b = values(3, 0, dtype=torch.complex64), values(0, 3, dtype=torch.complex64)
    check(lambda a, b: a @ b + 1, a, b)
