import dataclasses

import pytest

from dtlib.theory import hardware
from dtlib.theory.memory import recipe
from dtlib.theory.units import GB, TB, TFLOP, GiB

# device, memory GiB that it shows, memory TB/s, dense and measured TFLOP/s, NVLink and PCIe GB/s in one direction: data
# sheets and measured matrix products as collected in stas00/ml-engineering.
PUBLISHED = [
    ("A100-40GB-SXM", 39.39, 1.555, 312, 271.2, 300, 31),
    ("A100-80GB-SXM", 79.15, 2.0, 312, 271.2, 300, 31),
    ("H100-80GB-SXM", 79.11, 3.35, 989, 794.5, 450, 63),
    ("H200-141GB-SXM", 139.81, 4.8, 989, None, 450, 63),
    ("B200-180GB", 178.35, 8.0, 2250, 1745, 900, 63),
]


@pytest.mark.parametrize(("name", "memory", "rate", "flops", "measured", "nvlink", "pcie"), PUBLISHED)
def test_accelerators_are_those_of_the_data_sheets(name, memory, rate, flops, measured, nvlink, pcie):
    gpu = hardware.accelerator(name)
    assert gpu.memory_bytes == memory * GiB
    assert gpu.memory_bytes_per_s == rate * TB
    assert gpu.half_flop_per_s == flops * TFLOP
    assert gpu.measured_half_flop_per_s == (measured and measured * TFLOP)
    assert gpu.link.link_bytes_per_s == nvlink * GB
    assert gpu.host_link.link_bytes_per_s == pytest.approx(pcie * GB, rel=0.02)  # the table prints two digits
    assert gpu.source


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVLink 2", 150),
        ("InfiniBand HDR", 25),
        ("InfiniBand NDR", 50),
        ("Ethernet 100G", 12.5),
        ("Ethernet 1G", 0.125),
    ],
)
def test_links_count_one_direction_in_bytes(name, gigabytes):
    found = hardware.link(name)
    assert found.link_bytes_per_s == gigabytes * GB


def test_nvlinks_sheets_count_both_directions():
    totals = [2 * hardware.link(f"NVLink {n}").link_bytes_per_s / GB for n in (2, 3, 4, 5)]
    assert totals == [300, 600, 900, 1800]


def test_each_pcie_doubles_the_last():
    third, fourth, fifth = (hardware.link(f"PCIe {n}").link_bytes_per_s for n in (3, 4, 5))
    assert fifth == pytest.approx(2 * fourth)
    assert fourth == pytest.approx(2 * third)
    assert third == pytest.approx(15.754 * GB, rel=1e-4)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("nvlink4", "NVLink 4"),
        ("NVLINK-4", "NVLink 4"),
        ("ndr", "InfiniBand NDR"),
        ("infiniband_ndr", "InfiniBand NDR"),
        ("PCIe 5", "PCIe 5 x16"),
        ("10G", "Ethernet 10G"),
        ("Ethernet 100", "Ethernet 100G"),
    ],
)
def test_links_are_found_by_what_people_say(said, name):
    assert hardware.link(said).name == name


def test_accelerators_are_found_by_what_people_say():
    assert hardware.accelerator("h100").name == "H100-80GB-SXM"
    assert hardware.accelerator(" a100 ").name == "A100-80GB-SXM"
    assert hardware.accelerator("A100 40GB").name == "A100-40GB-SXM"
    assert hardware.accelerator("H100 PCIe").name == "H100-80GB-PCIe"
    assert hardware.accelerator("RTX 4090").name == "RTX-4090-24GB"
    assert hardware.accelerator("5090").name == "RTX-5090-32GB"
    assert hardware.accelerator("B200").name == "B200-180GB"
    assert hardware.accelerator("gb200").name == "GB200-186GB"
    assert hardware.accelerator("MI300X").name == "MI300X-192GB"
    assert hardware.accelerator("TPU v5p").name == "TPU-v5p-95GB"
    for name in hardware.ACCELERATORS:
        assert hardware.accelerator(name).name == name
    for name in hardware.LINKS:
        assert hardware.link(name).name == name


@pytest.mark.parametrize("name", ["", "token ring", None, 4])
def test_unknown_links_list_what_there_is(name):
    with pytest.raises(ValueError, match="is unknown; there are NVLink 2, NVLink 3"):
        hardware.link(name)


@pytest.mark.parametrize("name", ["NVLink 40", "vlink", "nvlink 4 5"])
def test_what_is_nearly_a_name_is_told_which(name):
    with pytest.raises(ValueError, match=r"is unknown; did you mean NVLink 3 or NVLink 4 or NVLink 5\?$"):
        hardware.link(name)


def test_a_card_shows_more_than_the_decimal_gigabytes_of_its_name_and_less_than_the_binary_ones():
    for name, gpu in hardware.ACCELERATORS.items():
        sold = int(next(word for word in name.split("-") if word.endswith("GB"))[:-2])
        built_in = {"B200-180GB": 192, "TPU-v5p-95GB": 96}  # sold with less
        sold = built_in.get(name, sold)
        assert 0.9 * sold * GiB < gpu.memory_bytes < sold * GiB, name


def test_ambiguous_names_list_what_fits():
    with pytest.raises(ValueError, match="'infiniband' of link fits InfiniBand EDR, InfiniBand HDR"):
        hardware.link("infiniband")
    with pytest.raises(ValueError, match="fits A100-80GB-SXM, H100-80GB-PCIe, H100-80GB-SXM;"):
        hardware.accelerator("80GB")


def test_presets_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.link("ndr").link_bytes_per_s = 1
    with pytest.raises(TypeError):
        hardware.LINKS["NVLink 9"] = hardware.link("ndr")


@pytest.mark.parametrize(("find", "said"), [(hardware.accelerator, "x"), (hardware.link, "8"), (recipe, "8")])
def test_a_single_letter_or_figure_means_nothing_by_chance(find, said):
    with pytest.raises(ValueError, match=f"'{said}' of \\w+ is unknown; there are "):
        find(said)
