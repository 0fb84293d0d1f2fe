"""Exact numerics: a row's bits are its own, whatever is beside it, wherever it is, and with any number of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from offbeat_core import ConfigError
from offbeat_device import (
    _exact,
    check_exact,
    check_exact_family,
    exact_attention,
    exact_head,
    exact_logsumexp,
    exact_norm,
    exact_product,
    exact_with_gradient_of,
    pack_matrix,
    row_sum,
    trained_product,
)
from offbeat_device._exact import _folded, _swiglu

CPU = torch.device("cpu")
SHAPES = [(20, 48), (77, 100), (192, 576), (1536, 576), (576, 1536), (896, 4864), (4096, 64)]
CUTS = [slice(0, 1), slice(1, 4), slice(7, 24), slice(63, 64), slice(5, 70)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_are_their_own(compute: Callable[[Tensor], Tensor], x: Tensor, threads: Callable[[int], None]) -> None:
    threads(1)
    wanted = compute(x)
    for count in (1, 2, 4):
        threads(count)
        for cut in CUTS:
            assert torch.equal(compute(x[cut].clone()), wanted[cut]), f"{count} threads, {cut}"
        assert torch.equal(compute(x.flip(0)).flip(0), wanted), f"{count} threads, another order"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_of_a_product_does_not_depend_on_others(
    shape: tuple[int, int], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    weight, x, bias = numbers(*shape).to(dtype), numbers(70, shape[1], seed=1).to(dtype), numbers(shape[0]).to(dtype)
    packed = pack_matrix(weight)
    assert_rows_are_their_own(lambda x: exact_product(x, packed, bias), x, threads)
    wanted = linear(x.double(), weight.double(), bias.double())
    found = exact_product(x, packed, bias)
    assert found.dtype == dtype
    bound = {torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]
    assert (found - wanted).abs().max() <= bound * wanted.abs().max()
    assert exact_product(x[:0], packed).shape == (0, shape[0])


def test_a_head_does_not_round_its_logits() -> None:
    weight, x = numbers(600, 64), numbers(5, 64, seed=1)
    found = exact_product(x, exact_head(weight, torch.bfloat16), wide=True)
    wanted = linear(x.double(), weight.bfloat16().double())
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("size", [1, 16, 33, 576, 49_152])
def test_a_sum_over_a_row_does_not_depend_on_others(size: int, threads: Callable[[int], None]) -> None:
    x = numbers(70, size)
    assert_rows_are_their_own(row_sum, x, threads)
    for add_up in (row_sum, _folded):
        torch.testing.assert_close(add_up(x).double(), x.double().sum(-1), rtol=0, atol=1e-5 * size**0.5)


def test_elements_and_norms_do_not_depend_on_others(threads: Callable[[int], None]) -> None:
    x, weight = 4 * numbers(70, 100), numbers(100, seed=2)
    for compute, wanted in (
        (lambda x: exact_norm(x, weight, 1e-6), rms_norm(x.double(), (100,), weight.double(), 1e-6)),
        (lambda x: _swiglu(x, x + 1), silu(x.double()) * (x.double() + 1)),
        (exact_logsumexp, x.double().logsumexp(-1)),
    ):
        assert_rows_are_their_own(compute, x, threads)
        torch.testing.assert_close(compute(x).double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_log_probability_is_never_above_zero() -> None:
    logits = torch.tensor([[30.0, 0.0], [1e-7, -40.0], [0.0, 0.0]])
    assert bool((logits.amax(-1) - exact_logsumexp(logits) <= 0).all())


def attended(
    query: Tensor, key: Tensor, value: Tensor, cut: slice, capacity: int, *, beside: int = 0, stale: float = 0.0
) -> Tensor:
    """Return attention of some queries of the first row, whose keys lie in a cache among `beside` other rows."""
    keys, values = (torch.full((1 + beside, each.shape[1], capacity, each.shape[3]), stale) for each in (key, value))
    keys[0, :, : cut.stop], values[0, :, : cut.stop] = key[0, :, : cut.stop], value[0, :, : cut.stop]
    queries = torch.cat([query[:1, :, cut], *[query[1:2, :, cut]] * beside])
    starts = [cut.start, *[capacity - (cut.stop - cut.start)] * beside]
    return exact_attention(queries, keys, values, starts, 0.125)[0]


@pytest.mark.parametrize(("num_heads", "num_keys", "size"), [(4, 4, 16), (6, 2, 64), (14, 2, 128)])
def test_attention_does_not_depend_on_passes_and_other_rows(
    num_heads: int, num_keys: int, size: int, threads: Callable[[int], None]
) -> None:
    length = 150
    query, key, value = (numbers(2, n, length, size, seed=n) for n in (num_heads, num_keys, num_keys + 1))
    value = value[:, :num_keys]
    whole = exact_attention(query, key, value, [0, 0], 0.125)[0]
    wanted = scaled_dot_product_attention(
        *(x[:1].double() for x in (query, key, value)), is_causal=True, enable_gqa=True, scale=0.125
    )
    assert (whole - wanted[0]).abs().max() < 1e-5
    for count, steps in ((1, (13, 65)), (2, (64,))):
        threads(count)
        cuts = [slice(start, min(start + step, length)) for step in steps for start in range(0, length, step)]
        for cut in (*cuts, slice(64, 65), slice(149, 150)):
            alone = attended(query, key, value, cut, 192)
            assert torch.equal(alone, whole[:, cut]), (count, cut)
            assert torch.equal(attended(query, key, value, cut, 256, beside=2, stale=2.0), alone), (count, cut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_product_are_those_of_the_rounded_weight(dtype: torch.dtype) -> None:
    x, low, high = numbers(70, 48).requires_grad_(), numbers(12, 48, seed=1), numbers(8, 48, seed=2)
    inputs = [x, low.requires_grad_(), high.requires_grad_(), numbers(20).requires_grad_(), numbers(20, seed=4)]
    grad = numbers(70, 20, seed=3)

    def make(low: Tensor, high: Tensor, bias: Tensor, frozen: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((low, high)).to(dtype), (bias + frozen).to(dtype)

    found = torch.autograd.grad(trained_product(inputs[0], make, *inputs[1:]), inputs[:-1], grad.to(dtype))
    with torch.no_grad():
        weight, bias = make(*inputs[1:])
    exact = [each.detach().to(dtype).double().requires_grad_() for each in (x, weight, bias)]
    of_x, of_weight, of_bias = torch.autograd.grad(linear(*exact), exact, grad.to(dtype).double())
    for one, other in zip(found, (of_x, of_weight[:12], of_weight[12:], of_bias), strict=True):
        assert one.dtype == torch.float32
        bound = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        assert (one - other).abs().max() <= bound * other.abs().max()


def test_a_value_may_have_the_gradient_of_another_function() -> None:
    x, still = numbers(5).requires_grad_(), numbers(5, seed=1)
    y = exact_with_gradient_of(lambda x, still: (x * still).round(), lambda x, still: x * still, x, still)
    assert torch.equal(y, (x * still).round())
    y.sum().backward()
    assert torch.equal(x.grad, still)


def test_a_device_whose_rows_depend_on_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(192, 96), (576, 1536)]
    for dtype in (torch.float32, torch.bfloat16):
        check_exact(CPU, dtype, shapes, 64, head=(4096, 64))
    monkeypatch.setattr(_exact, "ROW_TILE", 1)  # products of single rows add up in another order
    with pytest.raises(ConfigError, match=r'576 x 1536.*numerics = "native"'):
        check_exact(CPU, torch.float32, shapes, 64, head=(4096, 64))


def test_families_with_other_layers_are_refused_by_name() -> None:
    check_exact_family("qwen3")
    with pytest.raises(ConfigError, match="this model is of gemma3_text"):
        check_exact_family("gemma3_text")
