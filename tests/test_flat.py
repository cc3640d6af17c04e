import copy
import math

import pytest
import torch
from torch import Tensor, nn

from outrider.agents.flat import PARAMS, FlatAdam, FlatParameters
from outrider.agents.networks import mlp


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.linear = nn.Linear(2, 1)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.fixed)
        return out


def squares(module: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
    return module(x).square().mean() * scale


def test_parameters_are_views_of_one_vector() -> None:
    module = mlp(3, (4,), 2)
    before = [p.detach().clone() for p in module.parameters()]
    flat = FlatParameters(module)
    assert torch.equal(flat.vector, torch.cat([p.reshape(-1) for p in before]))
    flat.vector.fill_(2.0)
    assert all((p == 2.0).all() for p in module.parameters())
    module.load_state_dict({name: torch.full_like(p, 5.0) for name, p in module.state_dict().items()})
    assert (flat.vector == 5.0).all()
    flat.check()


def test_a_copy_of_the_module_has_storage_of_its_own() -> None:
    module = mlp(3, (4,), 2)
    flat = FlatParameters(module)
    twin = copy.deepcopy(module)
    flat.vector.zero_()
    assert any((p != 0).any() for p in twin.parameters())


def test_a_module_that_was_cast_is_found() -> None:
    module = mlp(3, (4,), 2)
    flat = FlatParameters(module)
    module.double()
    with pytest.raises(RuntimeError, match="no longer views"):
        flat.check()


def test_a_trainable_parameter_that_is_not_float32_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'0\.weight': expected float32, got torch\.float64"):
        FlatParameters(mlp(3, (4,), 2).double())


def test_the_gradient_equals_that_of_backward() -> None:
    module = mlp(3, (4,), 2)
    flat = FlatParameters(module)
    x = torch.randn(7, 3)
    grad = flat.gradient(squares(module, x)).clone()
    squares(module, x).backward()
    assert torch.equal(grad, torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]))


def test_a_parameter_without_influence_has_gradient_zero() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    flat = FlatParameters(module)
    flat.grad.fill_(7.0)
    grad = flat.gradient(squares(module["used"], torch.randn(3, 2)))
    assert (grad[:3] != 0).any()
    assert (grad[3:] == 0).all()


@pytest.mark.parametrize("limit", [None, 0.01, 1e6])
def test_a_step_equals_torch_adam_with_clipping(limit: float | None) -> None:
    module = mlp(3, (16, 16), 2)
    twin = copy.deepcopy(module)
    flat = FlatParameters(module)
    adam = FlatAdam(flat, 1e-2, eps=1e-6, max_grad_norm=limit)
    reference = torch.optim.Adam(twin.parameters(), lr=1e-2, eps=1e-6)
    for step in range(3):
        x = torch.randn(8, 3)
        norm = adam.step(squares(module, x))
        reference.zero_grad()
        squares(twin, x).backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), limit or math.inf)
        reference.step()
        torch.testing.assert_close(norm, expected)
        if step == 0:
            moments = [reference.state[p]["exp_avg"].reshape(-1) for p in twin.parameters()]
            torch.testing.assert_close(adam.state_dict()["mean"], torch.cat(moments), rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(
                flat.vector, torch.cat([p.detach().reshape(-1) for p in twin.parameters()]), rtol=0, atol=1e-6
            )
    torch.testing.assert_close(
        flat.vector, torch.cat([p.detach().reshape(-1) for p in twin.parameters()]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_left_out_and_counted(bad: float) -> None:
    module = mlp(3, (4,), 2)
    flat = FlatParameters(module)
    adam = FlatAdam(flat, 1e-2, eps=1e-8, max_grad_norm=1.0)
    x = torch.randn(8, 3)
    adam.step(squares(module, x))
    before, state = flat.vector.clone(), adam.state_dict()
    adam.step(squares(module, x, bad))
    assert torch.equal(flat.vector, before)
    after = adam.state_dict()
    assert after.pop("skipped") == state.pop("skipped") + 1
    assert all(torch.equal(after[name], state[name]) for name in state)
    adam.step(squares(module, x))
    assert not torch.equal(flat.vector, before)
    assert flat.vector.isfinite().all()


def test_a_loss_that_is_not_finite_is_left_out_even_if_its_gradient_is() -> None:
    module = mlp(3, (4,), 2)
    flat = FlatParameters(module)
    adam = FlatAdam(flat, 1e-2, eps=1e-8)
    before = flat.vector.clone()
    adam.step(squares(module, torch.randn(8, 3)) + math.inf)
    assert torch.equal(flat.vector, before)
    assert adam.skipped == 1


def test_polyak_averaging_moves_the_share_tau_and_copies_buffers() -> None:
    a, b = Frozen(), Frozen()
    source, target = FlatParameters(a), FlatParameters(b)
    a.count.fill_(9)
    before = target.vector.clone()
    target.approach(source, 0.25)
    torch.testing.assert_close(target.vector, 0.75 * before + 0.25 * source.vector)
    assert b.count == 9
    target.approach(source, 1.0)
    assert torch.equal(target.vector, source.vector)


def test_model_info_holds_buffers_and_frozen_parameters_beside_the_vector() -> None:
    a, b = FlatParameters(Frozen()), FlatParameters(Frozen())
    assert set(a.model_info()) == {PARAMS, "rest.fixed", "rest.count"}
    a.module.fixed.fill_(4.0)
    a.module.count.fill_(8)
    b.copy_from(a.model_info())
    assert torch.equal(b.vector, a.vector)
    assert (b.module.fixed == 4.0).all()
    assert b.module.count == 8
    assert b.model_info()["rest.count"].dtype == "int64"


def test_the_state_goes_round() -> None:
    module = mlp(3, (4,), 2)
    flat = FlatParameters(module)
    adam = FlatAdam(flat, 1e-2, eps=1e-8)
    x = torch.randn(8, 3)
    adam.step(squares(module, x))
    saved = flat.state_dict(), adam.state_dict()
    adam.step(squares(module, x))
    after = flat.vector.clone()
    flat.load_state_dict(saved[0])
    adam.load_state_dict(saved[1])
    adam.step(squares(module, x))
    assert torch.equal(flat.vector, after)
