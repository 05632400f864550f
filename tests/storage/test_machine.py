"""Memory that a process may take, by Linux and by the control groups of a container."""

import pytest

from bert_jax.storage import machine

GIB = 2**30


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Linux's folders, of a machine with 32 GiB that are free and no groups."""
    for name in ("PROC", "CGROUPS"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(machine, name, tmp_path / name)
    write(tmp_path / "PROC/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB")
    return tmp_path


def write(path, text) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group(folder, limit, used, freeable, version=2) -> None:
    names = "memory.max", "memory.current", "inactive_file"
    if version == 1:
        names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    for name, value in zip(names, (limit, used), strict=False):
        write(folder / name, value)
    write(folder / "memory.stat", f"anon 7\n{names[2]} {freeable}")


def test_of_a_machine_without_groups(folders):
    assert machine.available_memory() == 32 * GIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("place", ["", "jobs", "jobs/7", "elsewhere"])
def test_of_a_group_or_of_one_above_it(folders, version, place):
    path = "0::/jobs/7" if version == 2 else "4:cpu,memory:/jobs/7"
    write(folders / "PROC/self/cgroup", f"9:pids:/\n{path}")
    groups = folders / "CGROUPS" / ("memory" if version == 1 else "")
    group(groups / place, 4 * GIB, 3 * GIB, GIB, version)
    group(groups / "jobs/7/lower", 1, 1, 0, version)  # of another process
    assert machine.available_memory() == (32 if place == "elsewhere" else 2) * GIB


def test_a_group_without_a_limit(folders):
    write(folders / "PROC/self/cgroup", "0::/")
    group(folders / "CGROUPS", "max", 3 * GIB, GIB)
    assert machine.available_memory() == 32 * GIB


def test_a_group_that_takes_more_than_its_limit_leaves_nothing(folders):
    write(folders / "PROC/self/cgroup", "0::/")
    group(folders / "CGROUPS", GIB, 2 * GIB, 0)
    assert machine.available_memory() == 0


def test_of_another_system(folders):
    (folders / "PROC/meminfo").unlink()
    assert machine.available_memory() > GIB  # all that it has
