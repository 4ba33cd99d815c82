"""Arguments, results and running statistics that nobody planned for: all is as without recompute."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.recompute_api.odd import WAYS, Call, Found, Use, after, assert_equal, run, values
from tests.recompute_api.oracle import plainly

USES: list[Use] = []


def use(fn: Use) -> Use:
    USES.append(fn)
    return fn


# -- what goes in and comes out --------------------------------------------------------------------------------------


@use
def its_input_and_a_view_of_it(call: Call) -> Found:
    x = values(4, 6)
    same, view = call(lambda x: (x, x.view(6, 4).t()), x * 1)
    return after((same.sin().sum() + (view * view).exp().sum()), x)


@use
def nothing_in_it(call: Call) -> Found:
    x, w = values(0, 5), values(5, 3, seed=2)
    return after(call(lambda x, w: (x @ w).relu().exp(), x, w).sum(), x, w)


@use
def complex_numbers(call: Call) -> Found:
    x = values(4, dtype=torch.complex64)
    y = call(lambda x: (x * x.conj() * 1j).exp() * x, x)
    z = call(lambda y: (y * y).conj(), y)
    return after((z * z).abs().sum(), x)


@use
def integers_out(call: Call) -> Found:
    x, index = values(5, 3), torch.tensor([0, 2, 2, 4])
    rows, moved = call(lambda x, i: (x[i].sin(), i + 1), x, index)
    return [*after(rows.cos().sum(), x), moved]


@use
def as_many_as_there_are(call: Call) -> Found:
    x = values(40, 2)
    rows = call(lambda x: x.sin().unbind(0), x)
    return after(torch.stack([(row * i).exp().sum() for i, row in enumerate(rows)]).sum(), x)


@use
def turned_in_place_afterwards(call: Call) -> Found:
    x = values(4, 6)
    y = call(lambda x: x.sin() * 1, x)
    y.t_()
    return after((y.exp() * y).sum(), x)


@use
def an_inference_tensor(call: Call) -> Found:
    with torch.inference_mode():
        mask = torch.ones(4) * 2
    x = values(4)
    return after(call(lambda x, m: x.sin() + m, x, mask).sum(), x)


@use
def packed_sequences(call: Call) -> Found:
    torch.manual_seed(1)
    gru, x = nn.GRU(4, 5), values(3, 2, 4)
    y, h = call(gru, nn.utils.rnn.pack_padded_sequence(x, [3, 2]))
    return after(y.data.sum() + h.sum(), x, *gru.parameters())


@use
def loops_of_an_optimizer(call: Call) -> Found:
    torch.manual_seed(1)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4)), values(3, 4).detach()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        call(net, x).pow(2).sum().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


# -- running statistics ----------------------------------------------------------------------------------------------


def _with_norm(run: Callable[[nn.BatchNorm1d, Tensor], Tensor]) -> Found:
    global_norm.reset_running_stats()
    global_norm.zero_grad()
    x = values(3, 4)
    return [
        *after(run(global_norm, x).sum(), x, *global_norm.parameters()),
        *(b.clone() for b in global_norm.buffers()),
    ]


global_norm = nn.BatchNorm1d(4)


@use
def norm_as_argument(call: Call) -> Found:
    return _with_norm(lambda norm, x: call(lambda m, x: m(x).tanh(), norm, x))


def named_by_its_global_name(x: Tensor) -> Tensor:
    return global_norm(x).tanh()  # type: ignore[no-any-return]


@use
def norm_by_a_global_name(call: Call) -> Found:
    return _with_norm(lambda _, x: call(named_by_its_global_name, x))


@use
def norm_as_default(call: Call) -> Found:
    def fn(x: Tensor, m: nn.Module = global_norm) -> Tensor:
        return m(x).tanh()  # type: ignore[no-any-return]

    def by_keyword(x: Tensor, *, m: nn.Module = global_norm) -> Tensor:
        return m(x).tanh()  # type: ignore[no-any-return]

    return _with_norm(lambda _, x: call(by_keyword, call(fn, x)))


@use
def norm_in_a_namespace(call: Call) -> Found:
    class Holder:
        def __init__(self, norm: nn.Module) -> None:
            self.inner = types.SimpleNamespace(norm=norm)

        def __call__(self, x: Tensor) -> Tensor:
            return self.inner.norm(x).tanh()  # type: ignore[no-any-return]

    return _with_norm(lambda norm, x: call(Holder(norm), x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", USES, ids=lambda fn: fn.__name__)
def test_it_is_as_without_recompute(of: Use, way: str) -> None:
    assert_equal(run(of, WAYS[way]), run(of, plainly))
