"""Links and accelerators of real machines, in base units, for the numbers of the book.

Two confusions are kept out. A link's rate is that of **one direction**: data sheets of NVLink add both (600 GB/s of an
A100 are 300 in and 300 out), those of InfiniBand and Ethernet do not. Bits are not bytes: 400 Gb/s are 50 GB/s. A
collective sends and receives at once, so one direction is what its formulas ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from .lookup import find
from .units import GB, TB, TFLOP, Gbit, GiB


@dataclass(frozen=True)
class Link:
    """A link as its standard or data sheet has it.

    `link_bytes_per_s` is what one device sends over it in one direction, all lanes together, before any protocol's
    headers: an upper bound that no program reaches.
    """

    name: str
    link_bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Accelerator:
    """A GPU as its data sheet has it.

    `memory_bytes` is what the card shows to a program, after what its driver keeps: an "80 GB" card has 79 GiB, which
    is more than 80 decimal gigabytes (74.5 GiB). `half_flop_per_s` is the dense rate of 16-bit matrix products
    (bf16; fp16 on the V100), without sparsity; `measured_half_flop_per_s` the best that a plain matrix product has
    reached, None where nobody published it; `fp8_flop_per_s` the dense rate of products in 8 bits, added up in fp32,
    None where the sheet has none. `link` joins the GPUs of one node, `host_link` the GPU and its CPU, None
    where no data sheet says how fast. Chips of a TPU are joined in a torus, of which `link` has all directions
    together: a ring along one axis reaches a half of it on two axes, a third on three.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    half_flop_per_s: float
    measured_half_flop_per_s: float | None
    link: Link
    host_link: Link | None
    source: str
    fp8_flop_per_s: float | None = None

    def at_rate(self, half_flop_per_s: float, measured: float | None) -> Accelerator:
        """The card with other rates of products in 16 bits, in 8 bits as much faster."""
        fp8 = self.fp8_flop_per_s and self.fp8_flop_per_s / self.half_flop_per_s * half_flop_per_s
        return replace(self, half_flop_per_s=half_flop_per_s, measured_half_flop_per_s=measured, fp8_flop_per_s=fp8)


def _nvlink(generation: int, num_links: int, lane_bytes_per_s: float, gpu: str) -> Link:
    return Link(f"NVLink {generation}", num_links * lane_bytes_per_s, f"NVIDIA {gpu} data sheet")


def _pcie(generation: int, transfers_per_s: float) -> Link:
    # 16 lanes, one bit a transfer, 128 of every 130 bits carry data
    return Link(f"PCIe {generation} x16", 16 * transfers_per_s * 128 / 130 / 8, f"PCI Express {generation}.0")


def _infiniband(name: str, num_gbit: int) -> Link:
    return Link(f"InfiniBand {name}", num_gbit * Gbit, "InfiniBand roadmap, four lanes")


def _ethernet(num_gbit: int) -> Link:
    return Link(f"Ethernet {num_gbit}G", num_gbit * Gbit, "IEEE 802.3")


Named = TypeVar("Named", Link, Accelerator)


def _by_name(*known: Named) -> Mapping[str, Named]:
    return MappingProxyType({each.name: each for each in known})


LINKS: Mapping[str, Link] = _by_name(
    _nvlink(2, 6, 25 * GB, "V100"),
    _nvlink(3, 12, 25 * GB, "A100"),
    _nvlink(4, 18, 25 * GB, "H100"),
    _nvlink(5, 18, 50 * GB, "B200"),
    _pcie(3, 8e9),
    _pcie(4, 16e9),
    _pcie(5, 32e9),
    _infiniband("EDR", 100),
    _infiniband("HDR", 200),
    _infiniband("NDR", 400),
    _infiniband("XDR", 800),
    *(_ethernet(num_gbit) for num_gbit in (1, 10, 25, 100, 200, 400, 800)),
)
"""The links that `link` finds, by name."""

_SHEETS = "NVIDIA data sheets, collected in stas00/ml-engineering"
_AMD = "AMD Instinct MI300X data sheet"
_TPU = "Google Cloud TPU documentation, system architecture"

ACCELERATORS: Mapping[str, Accelerator] = _by_name(
    Accelerator(
        "V100-32GB-SXM", 31.74 * GiB, 0.9 * TB, 125 * TFLOP, None,
        LINKS["NVLink 2"], LINKS["PCIe 3 x16"], "NVIDIA V100 data sheet",
    ),
    Accelerator(
        "A100-40GB-SXM", 39.39 * GiB, 1.555 * TB, 312 * TFLOP, 271.2 * TFLOP,
        LINKS["NVLink 3"], LINKS["PCIe 4 x16"], _SHEETS,
    ),
    Accelerator(
        "A100-80GB-SXM", 79.15 * GiB, 2.0 * TB, 312 * TFLOP, 271.2 * TFLOP,
        LINKS["NVLink 3"], LINKS["PCIe 4 x16"], _SHEETS,
    ),
    Accelerator(
        "H100-80GB-PCIe", 79.11 * GiB, 2.0 * TB, 756 * TFLOP, None,
        LINKS["PCIe 5 x16"], LINKS["PCIe 5 x16"], "NVIDIA H100 data sheet", 1513 * TFLOP,
    ),
    Accelerator(
        "H100-80GB-SXM", 79.11 * GiB, 3.35 * TB, 989 * TFLOP, 794.5 * TFLOP,
        LINKS["NVLink 4"], LINKS["PCIe 5 x16"], _SHEETS, 1979 * TFLOP,
    ),
    Accelerator(
        "H200-141GB-SXM", 139.81 * GiB, 4.8 * TB, 989 * TFLOP, None,
        LINKS["NVLink 4"], LINKS["PCIe 5 x16"], _SHEETS, 1979 * TFLOP,
    ),
    Accelerator(
        "B200-180GB", 178.35 * GiB, 8.0 * TB, 2250 * TFLOP, 1745 * TFLOP,
        LINKS["NVLink 5"], LINKS["PCIe 5 x16"], _SHEETS, 4500 * TFLOP,
    ),
    Accelerator(
        "GB200-186GB", 184.31 * GiB, 8.0 * TB, 2500 * TFLOP, None,
        LINKS["NVLink 5"], None, "NVIDIA GB200 NVL72 data sheet, its 72 GPUs alike", 5000 * TFLOP,
    ),
    Accelerator(
        "MI300X-192GB", 191.69 * GiB, 5.3 * TB, 1307.4 * TFLOP, None,
        Link("Infinity Fabric of MI300X", 7 * 64 * GB, _AMD), LINKS["PCIe 5 x16"], _AMD, 2614.9 * TFLOP,
    ),
    Accelerator(
        "TPU-v5p-95GB", 95.74 * GiB, 2.765 * TB, 459 * TFLOP, None,
        Link("ICI of TPU v5p", 600 * GB, _TPU), None, _TPU,
    ),
    Accelerator(
        "TPU-v6e-32GB", 31.25 * GiB, 1.6 * TB, 918 * TFLOP, None,
        Link("ICI of TPU v6e", 3200 * Gbit, _TPU), None, _TPU,
    ),
    Accelerator(
        "RTX-4090-24GB", 23.64 * GiB, 1.008 * TB, 165.2 * TFLOP, None,
        LINKS["PCIe 4 x16"], LINKS["PCIe 4 x16"], "NVIDIA Ada architecture paper, appendix A", 330.3 * TFLOP,
    ),
    Accelerator(
        "RTX-5090-32GB", 31.36 * GiB, 1.792 * TB, 209.5 * TFLOP, None,
        LINKS["PCIe 5 x16"], LINKS["PCIe 5 x16"], "NVIDIA RTX Blackwell architecture paper, appendix A",
        419 * TFLOP,
    ),
)  # fmt: skip
"""The accelerators that `accelerator` finds, by name. Their memory is the total that CUDA, ROCm or XLA reports."""

HOST_MEMORY: Mapping[str, float] = MappingProxyType(
    {"PCIe 3 x16": 2 * 4 * 19.2 * GB, "PCIe 4 x16": 2 * 8 * 25.6 * GB, "PCIe 5 x16": 2 * 8 * 38.4 * GB}
)
"""Bytes a second of the memory of a node whose cards have such a link to it: two sockets, with four channels of
DDR4-2400, eight of DDR4-3200, eight of DDR5-4800, eight bytes each. Hosts of NVIDIA DGX-1 (V100), DGX A100, DGX H100;
rates of JEDEC's standards, which no program reaches."""

POWER_WATTS: Mapping[str, float] = MappingProxyType(
    {
        "V100-32GB-SXM": 300, "A100-40GB-SXM": 400, "A100-80GB-SXM": 400, "H100-80GB-PCIe": 350, "H100-80GB-SXM": 700,
        "H200-141GB-SXM": 700, "B200-180GB": 1000, "GB200-186GB": 1200, "MI300X-192GB": 750, "RTX-4090-24GB": 450,
        "RTX-5090-32GB": 575,
    }
)  # fmt: skip
"""The design power of each accelerator whose data sheet has one: what it draws at most, hosts and cooling apart."""

_MEANT = {"A100": "A100-80GB-SXM", "H100": "H100-80GB-SXM"}
"""Which of several a bare name means."""


def link(name: str) -> Link:
    """The link called `name`, for example ``link("NVLink 4")`` or ``link("ndr")``.

    Case, spaces and hyphens do not matter, and any words of the name will do where they fit one link only. Raises
    ``ValueError`` that lists the names otherwise.
    """
    return find("link", name, LINKS)


def accelerator(name: str) -> Accelerator:
    """The accelerator called `name`, for example ``accelerator("H100")``; rules and errors as for `link`.

    A bare "A100" or "H100" means the card of 80 GB in an SXM socket.
    """
    usual = _MEANT.get(name.strip().upper(), name) if isinstance(name, str) else name
    return find("accelerator", usual, ACCELERATORS)
