"""AdamW in mixed precision: one update rule in fp32, and a recipe that says what is kept between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.ranks.shared.quantise import SIGNED, UNSIGNED, dequantised, quantised
from dtlib.theory.memory import ModelStates, Recipe, recipe

_BYTES = {2: "bf16 or fp16", 4: "fp32"}


class MixedAdamW(Optimizer):
    """AdamW that keeps, for each parameter, what `recipe` lists.

    The arithmetic is fp32 and the same in every recipe, that of ``torch.optim.AdamW``; what differs is which numbers
    survive until the next step and in how many bits. Where the recipe has no master copy, the new weight is rounded to
    the parameter's dtype and the rest is gone. Where gradients have 4 bytes and weights 2, the gradient is kept in fp32
    from the start (torch's ``grad_dtype``), so that micro-batches add up in fp32.

    ``self.state[parameter]`` holds tensors under the names of `ModelStates`, so `stored` is a breakdown that is read
    off tensors. The count of steps is a plain number.

    Raises ``ValueError`` for an unknown recipe, one whose moments have other widths than 1 and 4 bytes, and parameters
    whose dtype does not have the recipe's width.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        recipe_name: str | Recipe = "16-byte",
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self.recipe = recipe(recipe_name)
        kept = self.recipe.per_param
        moments = (kept.first_moment, kept.second_moment)
        if moments not in ((4, 4), (1, 1)) or (moments == (1, 1)) != (kept.moment_scales > 0):
            raise ValueError(f"recipe must keep both moments in 4 bytes, or in 1 with scales, not {self.recipe.name!r}")
        self._block = round(2 * 4 / kept.moment_scales) if kept.moment_scales else 0
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for parameter in self._parameters():
            if parameter.element_size() != kept.weights:
                raise ValueError(
                    f"params must be {_BYTES.get(int(kept.weights), 'as wide')} for the recipe {self.recipe.name!r}, "
                    f"not {parameter.dtype}"
                )
        self._widen_gradients()

    def _widen_gradients(self) -> None:
        for parameter in self._parameters():
            if self.recipe.per_param.gradients == 4 and self.recipe.per_param.weights == 2:
                parameter.grad_dtype = torch.float32

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what `closure` returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._begin(parameter, state)
        state["step"] += 1
        gradient = self._main_gradient(parameter, state)
        exact = parameter.dtype == torch.float32 and "master_weights" not in state
        weight = state["master_weights"] if "master_weights" in state else parameter.detach().float()
        first, second = self._moments(state)
        adamw_(weight, gradient, first, second, step=state["step"], **{k: group[k] for k in _OPTIONS})
        if self._block:
            state["first_moment"], state["first_scales"] = quantised(first, SIGNED, self._block)
            state["second_moment"], state["second_scales"] = quantised(second, UNSIGNED, self._block)
        if not exact:
            parameter.copy_(weight)

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        state["step"] = 0
        if self.recipe.per_param.master_weights:
            state["master_weights"] = parameter.detach().float()
        if self.recipe.per_param.main_gradients:
            state["main_gradients"] = torch.empty_like(parameter, dtype=torch.float32)
        zeros = torch.zeros_like(parameter, dtype=torch.float32)
        if self._block:
            state["first_moment"], state["first_scales"] = quantised(zeros, SIGNED, self._block)
            state["second_moment"], state["second_scales"] = quantised(zeros, UNSIGNED, self._block)
        else:
            state["first_moment"], state["second_moment"] = zeros, torch.zeros_like(zeros)

    def _main_gradient(self, parameter: nn.Parameter, state: dict[str, Any]) -> Tensor:
        """The gradient in fp32: kept if the recipe keeps it, else itself or a copy that lives for one update."""
        assert parameter.grad is not None
        if "main_gradients" in state:
            return state["main_gradients"].copy_(parameter.grad)
        return parameter.grad.float()

    def _moments(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if not self._block:
            return state["first_moment"], state["second_moment"]
        return (
            dequantised(state["first_moment"], state["first_scales"], SIGNED, self._block),
            dequantised(state["second_moment"], state["second_scales"], UNSIGNED, self._block),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a ``state_dict()`` to the bit. ``ValueError``, before anything is changed, for one that another
        recipe left, or of parameters of other sizes.

        torch's own casts every tensor of floating point to the parameter's dtype: masters and moments would be bf16.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        saved = {p: state_dict["state"].get(n, {}) for n, p in zip(numbers, self._parameters(), strict=False)}
        for parameter, state in saved.items():
            found = {name: tuple(each.shape) for name, each in state.items() if isinstance(each, Tensor)}
            if state and found != (wanted := self._shapes(parameter)):
                raise ValueError(
                    f"state_dict must hold {wanted} for a parameter of {tuple(parameter.shape)} by the recipe "
                    f"{self.recipe.name!r}, and holds {found}"
                )
        super().load_state_dict(state_dict)
        for parameter, state in saved.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)

    def _shapes(self, parameter: nn.Parameter) -> dict[str, tuple[int, ...]]:
        """The tensors that `_begin` makes."""
        kept, shape = self.recipe.per_param, tuple(parameter.shape)
        names = [name for name in _KEPT if getattr(kept, name)]
        scales = ("first_scales", "second_scales") if self._block else ()
        return dict.fromkeys(names, shape) | {name: (-(-parameter.numel() // self._block),) for name in scales}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "recipe": self.recipe, "_block": self._block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._widen_gradients()  # a copied parameter has forgotten it

    def stored(self) -> ModelStates:
        """Bytes of all tensors that belong to the parameters now, by name: read off the tensors, not computed."""
        found = dict.fromkeys(ModelStates(0, 0).parts, 0)
        for parameter in dict.fromkeys(self._parameters()):
            found["weights"] += parameter.nbytes
            found["gradients"] += 0 if parameter.grad is None else parameter.grad.nbytes
            for name, value in self.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found["moment_scales" if name.endswith("_scales") else name] += value.nbytes
        return ModelStates(**found)


_KEPT = ("master_weights", "main_gradients", "first_moment", "second_moment")
_OPTIONS = ("lr", "betas", "eps", "weight_decay")


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One update of AdamW in place, all tensors fp32, `step` from 1; in the order of operations of torch's own."""
    beta1, beta2 = betas
    weight.mul_(1 - lr * weight_decay)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (1 - beta2**step) ** 0.5
    weight.addcdiv_(first, (second.sqrt() / scale).add_(eps), value=-lr / (1 - beta1**step))
