"""The benchmark next to peers: its arithmetic, and that a part's rows can be shown."""

import dataclasses
import json
from importlib import import_module

import pytest
import torch

from benchmarks.bench import growth, report
from benchmarks.bench.__main__ import keep
from benchmarks.bench.measure import Products, Sample, row_of_pairs
from benchmarks.bench.parts import PARTS, QUICK


def result_of(rows):
    part = {
        "rows": rows,
        "failure": "",
        "seconds": 1.0,
        "load": [0.0, 0.0],
        "threads": 1,
        "quick": True,
        "commit": "abc",
    }
    about = {
        "date": "2026-01-01",
        "words": "",
        "processor": "P",
        "processors": 2,
        "python": "3",
        "torch": "2",
    }
    return {**about, "parts": {"hjb": part}}


def a_row():
    found = [
        (Sample(2.0, 3.0), Sample(1.0, 1.0)),
        (Sample(4.0, 8.0), Sample(1.0, 2.0)),
        (Sample(3.0, 6.0), Sample(1.0, 2.0)),
    ]
    return dataclasses.asdict(
        row_of_pairs("task", "peer", found, limit=1.5, limit_is="its least", aim=1.0)
    )


def test_a_row_has_the_medians_of_pairs():
    row = a_row()
    assert (row["seconds"], row["peer_seconds"], row["ratio"][1], row["processor_ratio"][1]) == (
        3.0,
        1.0,
        3.0,
        3.0,
    )
    assert row["ratio"] == (2.5, 3.0, 3.5)


def test_products_are_those_of_the_work_forward_and_back():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with Products() as seen:
        (a @ b).sum().backward()
    assert seen.flops == 3 * 2 * 3 * 4 * 5
    assert sum(seen.calls.values()) == 3
    assert seen.seconds() > 0


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_the_exponent_of_a_power_is_found(power):
    sizes = (2, 4, 8, 16)
    assert growth.slope(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(
        power, abs=1e-12
    )


@pytest.mark.slow
def test_a_result_is_kept_as_json_text_and_page(tmp_path):
    path = tmp_path / "bench-2026-01-01-cpu2.json"
    keep(result_of([a_row()]), path)
    shown = path.with_suffix(".txt").read_text()
    assert "task: ours 3 s, peer 1 s, ratio 3.00 (2.50 to 3.50), CPU" in shown
    assert "limit 1.5 s (its least), ours 2.00 times it" in shown
    assert path.with_suffix(".png").stat().st_size > 1000
    assert report.newest(tmp_path) == json.loads(path.read_text())
    assert "| task | peer | 3.00 (2.50 to 3.50) |" in report.table(report.newest(tmp_path))


def test_the_table_takes_the_methods_of_a_library_together():
    rows = [
        {**a_row(), "name": f"shape: {method}", "peer": f"diffrax {method}", "ratio": ratio}
        for method, ratio in (
            ("tsit5", [1.0, 2.0, 3.0]),
            ("dopri5", [3.0, 4.0, 5.0]),
            ("tsit5, compiled", [0.4, 0.5, 0.6]),
        )
    ]
    assert report.table(result_of(rows)).splitlines()[2:] == [
        "| shape | diffrax | 2.00 to 4.00, 2 rows |",
        "| shape, compiled | diffrax | 0.50 (0.40 to 0.60) |",
    ]


def test_a_whole_result_goes_before_a_later_quick_one(tmp_path):
    for name in ("bench-2026-01-01-cpu2", "bench-quick-2026-02-02-cpu2"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    assert report.newest(tmp_path) == {"name": "bench-2026-01-01-cpu2"}


def test_the_parts_exist():
    for part in PARTS.values():
        assert callable(getattr(import_module(f"benchmarks.bench.{part.module}"), part.function))
    assert set(QUICK) <= set(PARTS)
