"""Layers whose MLP is a choice of experts, and attention through latent vectors: two parts of an `Architecture`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dtlib.theory.valid import flag, whole


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What stands in place of the MLP: `num_experts` MLPs, of which a router picks `top_k` for each token.

    Each is `hidden` wide. A shared expert, `shared_hidden` wide in all (0: none), sees every token, behind a gate of
    its own with `shared_gate` (h weights). With `biases` the matrices of all of them have some. The router is a matrix
    from h to the experts, with a bias that is trained where `router_bias` says so. A bias that is moved by the load
    instead of a gradient (DeepSeek-V3's) is no parameter here. The first `first_dense` layers keep a dense MLP; from
    there on every `every`-th layer has experts, the first of them included, and the others are dense.

    ``ValueError`` for a size below 1, or a `top_k` above `num_experts`.
    """

    num_experts: int
    top_k: int
    hidden: int
    shared_hidden: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    biases: bool = False
    first_dense: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                flag(field.name, value)
            else:
                object.__setattr__(self, field.name, whole(field.name, value, int(field.name not in _MAY_BE_0)))
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts={self.num_experts}, not {self.top_k}")

    def layers(self, start: int, stop: int) -> int:
        """How many of the layers from `start` to before `stop` have experts; the model's first layer is 0."""
        first, n = self.first_dense, self.every
        after = first + n * max(0, -((first - start) // n))  # the first such layer that is not before `start`
        return len(range(after, stop, n))


_MAY_BE_0 = ("shared_hidden", "first_dense")


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads come from one vector of `kv_rank` entries a token.

    That vector has a norm. Queries come from one of `q_rank` entries with a norm of its own, or straight from the
    layer's input (None). A head's queries and keys have `nope_dim` entries and `rope_dim` rotated ones, of which the
    keys' are the same for all heads; its values have `value_dim`. Source: DeepSeek-AI 2024, arXiv 2405.04434, section
    2.1. ``ValueError`` for a size below 1.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "q_rank":
                object.__setattr__(self, field.name, whole(field.name, value, 1))

    @property
    def head_dim(self) -> int:
        """Entries of a query of one head."""
        return self.nope_dim + self.rope_dim
