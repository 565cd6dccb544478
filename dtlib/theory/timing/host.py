"""The optimizer on the host: seconds of what travels to it and back, and of the update in its memory."""

from __future__ import annotations

from typing import Any

from dtlib.theory.memory import recipe

from .plan import Machine, Plan


def host_bytes(mesh: Plan) -> tuple[float, float]:
    """Bytes of a parameter that travel between card and host in a step, and that the host's memory moves for it.

    Gradients travel down, new weights up: g + w (chapter "zero"). The host's memory takes the gradients in; the update
    reads them and the states of the optimizer, o bytes, and writes these and new weights, which are read again on their
    way up: 2(g + o + w).
    """
    each = recipe(mesh.recipe).per_param
    travels = each.gradients + each.weights
    return travels, 2 * (travels + each.optimizer)


def host_seconds(mesh: Plan, owned: Any, machine: Machine) -> dict[str, Any]:
    """Seconds that the `owned` parameters of a rank are on their way, and in the update.

    Nothing hides them: a library that lets them travel behind computation waits less. Link and memory are taken to
    reach the rates of their standards, which no program does: it waits longer. All cards of a node share its memory.
    ``ValueError`` where the rate of the link to the host, or that of its memory, is not known.
    """
    if not mesh.offload:
        return {"host_link": 0.0, "host_update": 0.0}
    link, rate = machine.accelerator.host_link, machine.host_rate
    if link is None or rate is None:
        lacks = "host_link" if link is None else "host_memory"
        raise ValueError(f"{lacks} must be given on {machine.accelerator.name} with offload, since none is known here")
    travels, moved = host_bytes(mesh)
    return {
        "host_link": owned * travels / link.link_bytes_per_s,
        "host_update": owned * moved * machine.node / rate,
    }
