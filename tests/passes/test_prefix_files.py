"""A folder of prefix outputs: bounded, shared by processes, and no harm when it is damaged or full."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import DetachFrozen
from passes.prefix_files import Files

SIZE = 264
"""Bytes of a file of `values`."""


def values(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {"hidden": torch.full((4, 4), fill)}


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*"))


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in paths(folder))


def test_what_is_put_is_found(tmp_path: Path) -> None:
    Files(str(tmp_path), 1 << 20).put("ab1", values(3.0))
    found = Files(str(tmp_path), 1 << 20).get("ab1")
    assert found is not None
    assert torch.equal(found["hidden"], values(3.0)["hidden"])
    assert total_bytes(tmp_path) <= SIZE


def test_files_are_bounded_and_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = Files(str(tmp_path), 2 * SIZE)
    for key in ("aa1", "aa2"):
        store.put(key, values())
    assert Files(str(tmp_path), 2 * SIZE).get("aa1") is not None  # by another process
    store.put("bb3", values())
    assert [path.stem for path in paths(tmp_path)] == ["aa1", "bb3"]
    store.put("cc4", {"hidden": torch.zeros(2 * SIZE)})
    assert [path.stem for path in paths(tmp_path)] == ["aa1", "bb3"]


def test_a_full_folder_is_not_looked_through_for_each_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    there = Files._there
    monkeypatch.setattr(Files, "_there", lambda self: looks.append(1) or there(self))
    store = Files(str(tmp_path), 150 * SIZE)
    for number in range(300):
        store.put(f"{number % 7}{number % 3}{number}", values())
    assert total_bytes(tmp_path) <= 150 * SIZE
    assert len(paths(tmp_path)) > 140
    assert len(looks) < 200


def _fill(folder: str, seed: int) -> None:
    store = Files(folder, 20 * SIZE)
    for number in range(60):
        store.put(f"{seed}{number % 10}-{number}", values())


def test_the_bound_is_that_of_the_folder_whoever_writes_to_it(tmp_path: Path) -> None:
    started = multiprocessing.get_context("fork")
    processes = [started.Process(target=_fill, args=(str(tmp_path), seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert 0 < total_bytes(tmp_path) <= 20 * SIZE


@pytest.mark.parametrize(
    "damage",
    [
        lambda written: written[:-9],
        lambda written: written[:-1] + bytes([written[-1] ^ 3]),
        lambda written: b"",
        lambda written: written.replace(b'"checksum"', b'"checksam"'),
    ],
    ids=["cut", "two bits", "empty", "no checksum"],
)
def test_a_damaged_file_counts_as_none_and_goes(damage: Any, tmp_path: Path) -> None:
    store = Files(str(tmp_path), 1 << 20)
    store.put("ab", values(3.0))
    path = tmp_path / "ab" / "ab.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert store.get("ab") is None
    assert not path.exists()
    store.put("ab", values(4.0))
    found = store.get("ab")
    assert found is not None
    assert torch.equal(found["hidden"], values(4.0)["hidden"])


def test_a_file_under_another_key_counts_as_none(tmp_path: Path) -> None:
    store = Files(str(tmp_path), 1 << 20)
    store.put("ab1", values())
    (tmp_path / "ab" / "ab1.safetensors").rename(tmp_path / "ab" / "ab2.safetensors")
    assert store.get("ab2") is None


def test_what_killed_runs_left_goes(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    old, new = tmp_path / "ab" / ".old.part", tmp_path / "ab" / ".new.part"
    for path in (old, new):
        path.write_bytes(bytes(1000))
    os.utime(old, (time.time() - 3600,) * 2)
    Files(str(tmp_path), 1 << 20).put("ab", values())
    assert not old.exists()
    assert new.exists()  # may be another process's, at work


def test_files_that_go_meanwhile_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process evicts between the look at a folder and the look at a file."""
    store = Files(str(tmp_path), 2 * SIZE)
    store.put("ab", values())
    read = Path.read_bytes

    def read_and_gone(path: Path) -> bytes:
        written = read(path)
        path.unlink()
        return written

    monkeypatch.setattr(Path, "read_bytes", read_and_gone)
    assert store.get("ab") is not None
    monkeypatch.undo()
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, what: [*glob(path, what), path / "ab" / "gone.safetensors"])
    store.put("cd", values())
    monkeypatch.undo()
    assert [path.stem for path in paths(tmp_path)] == ["cd"]


def test_a_full_disk_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    small = rewrite.optimize(model, [DetachFrozen(cache=tmp_path)], example_inputs=torch.randn(3, 4))  # type: ignore[arg-type]
    x = torch.randn(3, 4)
    with monkeypatch.context() as patched:
        patched.setattr("passes.prefix_files.os.replace", full)
        for _ in range(2):
            assert torch.equal(small(x), model(x))
    told = f"the frozen prefix is not kept: {tmp_path} cannot be written to ([Errno 28] No space left on device)\n"
    assert capsys.readouterr().err == told
    assert paths(tmp_path) == []
    small(x)
    assert len(paths(tmp_path)) == 3  # there is space again


def test_a_folder_may_be_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Files("~/kept", 1 << 20).put("ab", values())
    assert (tmp_path / "kept" / "ab" / "ab.safetensors").exists()
    (tmp_path / "file").touch()
    with pytest.raises(rewrite.PassError, match=r"cache=~/file}: .*/file is a file"):
        DetachFrozen(cache="~/file")
