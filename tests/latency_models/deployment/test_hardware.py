"""Hardware files hold the datasheets' figures, dense, a device and a direction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from latency_models.deployment.hardware import WEIGHT_BYTES, Precision, load_hardware
from latency_models.io.config_io import read_yaml
from latency_models.io.files import FOLDER, builtin_names
from workloads.errors import BadInput

# As the datasheets print them: TFLOP/s (with 2:4 sparsity where `sparse`), TB/s, GB, and GB/s both ways of NVLink, of
# Infinity Fabric, of PCIe where there is neither, or of UB.
SHEETS: dict[str, tuple[dict[Precision, float], bool, float, float, float]] = {
    "a100-sxm-80gb": ({"bf16": 312, "int8": 624}, False, 2.039, 80, 600),
    "h100-sxm": ({"bf16": 1979, "fp8": 3958, "int8": 3958}, True, 3.35, 80, 900),
    "h200-sxm": ({"bf16": 1979, "fp8": 3958, "int8": 3958}, True, 4.8, 141, 900),
    "gb200": ({"bf16": 5000, "fp8": 10000, "int8": 10000, "fp4": 20000}, True, 8.0, 186, 1800),
    "l40s": ({"bf16": 362.05, "fp8": 733, "int8": 733}, False, 0.864, 48, 64),
    "rtx-pro-6000": ({"bf16": 1007.6, "fp8": 2015.2, "int8": 2015.2, "fp4": 4030.4}, True, 1.792, 96, 128),
    "mi300x": ({"bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9}, False, 5.3, 192, 896),
    "ascend-910c": ({"bf16": 752, "int8": 1504}, False, 3.2, 128, 784),
    "b200-sxm": ({"bf16": 4500, "fp8": 9000, "int8": 9000, "fp4": 18000}, True, 8.0, 180, 1800),
    # An eighth of a board and a 72nd of a rack, dense: sheets print FP4 dense, and the others with sparsity.
    "b300-sxm": ({"bf16": 36e3 / 16, "fp8": 72e3 / 16, "int8": 307 / 2, "fp4": 108e3 / 8}, False, 62 / 8, 270, 1800),
    "gb300": ({"bf16": 36e4 / 144, "fp8": 72e4 / 144, "int8": 330 / 2, "fp4": 1.08e6 / 72}, False, 576 / 72, 279, 1800),
    "mi355x": ({"bf16": 2516.6, "fp8": 5033.2, "int8": 5033.2, "fp4": 10066.3}, False, 8.0, 288, 1075.2),
    "l4": ({"bf16": 242, "fp8": 485, "int8": 485}, True, 0.3, 24, 64),
    "a30": ({"bf16": 165, "int8": 330}, False, 0.933, 24, 64),
    "tpu-v7x": ({"bf16": 2307, "fp8": 4614}, False, 7.38, 192, 1200),
    "trainium2": ({"bf16": 667, "fp8": 1299}, False, 2.9, 96, 1280),
    "trainium3": ({"bf16": 671, "fp8": 2517}, False, 4.9, 144, 2560),
}


def test_every_builtin_device_is_held_to_its_datasheet() -> None:
    assert builtin_names("hardware") == sorted(SHEETS)


@pytest.mark.parametrize("name", SHEETS)
def test_figures_are_the_datasheets(name: str) -> None:
    flops, sparse, bandwidth, capacity, nvlink = SHEETS[name]
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.peak_flops.keys() == flops.keys()
    for precision, teraflops in flops.items():
        assert hardware.flops(precision) == pytest.approx(teraflops * 1e12 / (2 if sparse else 1), rel=1e-3)
    assert hardware.memory_bandwidth == pytest.approx(bandwidth * 1e12)
    assert hardware.memory_capacity == capacity * 2**30
    assert hardware.network.intra_node == pytest.approx(nvlink * 1e9 / 2)
    assert "assum" in (FOLDER / "hardware" / f"{name}.yaml").read_text()


def test_a_precision_that_the_device_lacks() -> None:
    with pytest.raises(BadInput, match=r"^precision: got 'fp8', expected one that a100-sxm-80gb has: bf16, int8$"):
        load_hardware("a100-sxm-80gb").flops("fp8")


FEW_INTEGERS = ("b300-sxm", "gb300")
"""Blackwell Ultra, which gave up most of its INT8 for FP4."""


def test_fewer_bits_are_never_slower_nor_larger() -> None:
    for name in SHEETS:
        hardware = load_hardware(name)
        precisions = set(hardware.peak_flops) - ({"int8"} if name in FEW_INTEGERS else set())
        by_size = sorted(precisions, key=lambda precision: (-WEIGHT_BYTES[precision], precision))
        speeds = [hardware.flops(precision) for precision in by_size]
        assert speeds == sorted(speeds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_flops": {"bf16": 0}}, "peak_flops.bf16: got 0, expected a number above 0"),
        ({"peak_flops": {"fp7": 1e12}}, "peak_flops.fp7: got 'fp7', expected 'bf16', 'fp8', 'int8' or 'fp4'"),
        ({"peak_flops": {}}, "peak_flops: expected at least 1 items, found 0"),
        ({"memory_bandwidth": "3 TB/s"}, "memory_bandwidth: got '3 TB/s', expected a number"),
        (
            {"efficiency": {"memory": 80, "compute": 0.6, "network": 0.8}},
            "efficiency.memory: got 80, expected a number",
        ),
        ({"efficiency": {"memory": 0.8, "compute": 0, "network": 0.8}}, "efficiency.compute: got 0, expected a number"),
        ({"network": {"intra_node": 1e9}}, "network.inter_node: expected this field, which is missing"),
        ({"bandwidth": 1}, "bandwidth: unknown field, did you mean memory_bandwidth?"),
    ],
)
def test_figures_that_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "device.yaml"
    path.write_text(yaml.safe_dump(read_yaml(FOLDER / "hardware" / "h100-sxm.yaml") | change))
    with pytest.raises(BadInput) as error:
        load_hardware(path)
    assert str(error.value).startswith(f"{path}: {message}")
