import os
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from slimformer.export import machine
from slimformer.export.machine import SystemFiles
from slimformer.transformer.errors import InputError

X86 = "processor\t: 0\nmodel name\t: Testium 9\nmodel\t\t: 1\nflags\t\t: fpu avx2 {}\n\nmodel name\t: second\n"


def system(
    folder: Path, flags: str = "", membership: str = "0::/\n", files: dict[str, str] | None = None
) -> SystemFiles:
    folder.mkdir(exist_ok=True)
    (folder / "cpuinfo").write_text(X86.format(flags))
    (folder / "meminfo").write_text("MemTotal:       2097152 kB\nMemFree: 1 kB\n")
    (folder / "membership").write_text(membership)
    for name, text in (files or {}).items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SystemFiles(folder / "cpuinfo", folder / "meminfo", folder / "cgroup", folder / "membership")


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: 8)


@pytest.mark.parametrize("flag", ["avx512_vnni", "avx_vnni", "amx_int8", "asimddp"])
def test_a_dot_product_instruction_allows_eight_bits(tmp_path: Path, flag: str) -> None:
    files = system(tmp_path, flag)
    assert machine.has_int8_dot(files)
    assert machine.int8_weight_bits(files=files) == 8
    assert machine.advice(files=files) == []


@pytest.mark.skipif(sys.platform == "darwin", reason="Apple silicon is known without cpuinfo")
@pytest.mark.parametrize("flags", ["", "avx512f avx512_vnni_not"])
def test_without_one_seven_bits_and_a_warning(tmp_path: Path, flags: str) -> None:
    files = system(tmp_path, flags)
    assert not machine.has_int8_dot(files)
    assert machine.int8_weight_bits(files=files) == 7
    assert machine.advice(files=files)[0].startswith("no VNNI, AMX or NEON dot product: expect about 1.5x")


KINDS = {
    "": "avx2",
    "avx512f": "avx512",
    "avx_vnni": "vnni",
    "avx512f avx512_vnni": "vnni",
    "avx512f avx512_vnni amx_int8": "amx",
    "asimddp": "neon",
}


@pytest.mark.skipif(sys.platform == "darwin", reason="Apple silicon is known without cpuinfo")
def test_the_kind_of_a_cpu_is_the_first_that_it_shows(tmp_path: Path) -> None:
    """And each kind, as a target, has the bits that such a CPU takes by itself."""
    for flags, kind in KINDS.items():
        files = system(tmp_path, flags)
        assert machine.machine_kind(files) == kind
        assert machine.int8_weight_bits(kind) == machine.int8_weight_bits(files=files)
    assert set(KINDS.values()) == set(machine.TARGETS)
    assert machine.machine_kind(SystemFiles(*[tmp_path / "absent"] * 4)) is None


@pytest.mark.parametrize(
    ("flags", "target", "asked"),
    [
        ("", None, (8,)),  # this machine: parity will tell
        ("", "avx2", (0,)),
        ("", "avx512", (0, 7)),
        ("", "vnni", ()),  # a float model
        ("", "vnni", (7,)),
        ("avx_vnni", "avx2", (0, 7)),
        ("avx_vnni", "amx", (0, 7, 8)),
    ],
)
def test_a_target_that_can_be_proven_here(
    flags: str, target: str | None, asked: tuple[int, ...], tmp_path: Path
) -> None:
    machine.require_target(target, asked, system(tmp_path, flags))


@pytest.mark.skipif(sys.platform == "darwin", reason="Apple silicon is known without cpuinfo")
@pytest.mark.parametrize(
    ("flags", "target", "asked", "message"),
    [
        ("avx_vnni", "sparc", (), "target 'sparc' is unknown: choose amx, vnni, neon, avx512, avx2"),
        ("avx_vnni", "avx2", (7, 8, 0), "8 bits saturate on the target avx2: quantize the float model with bits = 7"),
        ("avx512f", "vnni", (7, 0), "8 bits, for the target vnni, saturate on this CPU.* or take 7 .* --target avx2"),
        ("", "neon", (8,), "8 bits, for the target neon, saturate on this CPU"),
    ],
)
def test_a_target_that_cannot_be_proven_is_refused(
    flags: str, target: str, asked: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        machine.require_target(target, asked, system(tmp_path, flags))


def test_advice_is_of_the_target(tmp_path: Path) -> None:
    vnni, old = system(tmp_path, "avx_vnni"), system(tmp_path / "old")
    assert machine.advice("vnni", vnni) == []
    slow, other = machine.advice("avx2", vnni)
    assert slow.startswith("the target avx2 has no VNNI, AMX or NEON dot product: expect about 1.5x")
    assert other == "times are those of this machine (vnni), not of the target avx2"
    assert [line for line in machine.advice("avx2", old) if "times" in line] == []
    assert machine.advice("amx", old) == ["times are those of this machine (avx2), not of the target amx"]


def test_arm_lists_features(tmp_path: Path) -> None:
    files = system(tmp_path)
    files.cpuinfo.write_text("processor : 0\nFeatures : fp asimd asimddp\n")
    assert machine.cpu_flags(files)["neon_dot"]
    assert not machine.cpu_flags(files)["avx2"]


def test_the_largest_weights_are_exact_in_onnxruntime_here() -> None:
    """Every product 255 * w of the most extreme weights sums exactly, which 8 bits without a dot product do not."""
    top = 2 ** (machine.int8_weight_bits() - 1)
    weight = np.stack([np.full(64, -top), np.full(64, top - 1)], axis=1).astype(np.int8)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [8, 64])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [8, 2])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": np.full((8, 64), 255, np.uint8)})
    np.testing.assert_array_equal(got, np.tile([-255 * top * 64, 255 * (top - 1) * 64], (8, 1)))


V1 = "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n"


@pytest.mark.parametrize(
    ("membership", "files", "quota", "threads"),
    [
        ("0::/\n", {}, None, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None, 8),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5, 2),
        ("0::/\n", {"unified/cpu.max": "20000 100000\n"}, 0.2, 1),
        ("0::/../../x\n", {"cpu.max": "300000 100000\n"}, 3.0, 3),
        # the parent is tighter than the leaf
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4.0, 4),
        (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1\n"}, None, 8),
        (V1, {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5, 3),
        # a quota above the cores changes nothing
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 64.0, 8),
    ],
)
@pytest.mark.usefixtures("eight_cores")
def test_cgroup_quota(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None, threads: int
) -> None:
    fake = system(tmp_path, membership=membership, files=files)
    assert machine.cpu_quota(fake) == quota
    assert machine.available_threads(None, fake) == threads
    assert machine.available_threads(1, fake) == 1
    assert machine.available_threads(100, fake) == threads


@pytest.mark.usefixtures("eight_cores")
def test_advice_names_the_quota(tmp_path: Path) -> None:
    files = system(tmp_path, "avx_vnni", files={"cpu.max": "150000 100000"})
    assert machine.advice(files=files) == ["the cgroup grants 1.5 of 8 CPUs: give onnxruntime 2 thread(s), not 8"]


def test_no_threads_is_refused() -> None:
    with pytest.raises(InputError, match="threads is 0"):
        machine.available_threads(0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux sets affinity")
def test_affinity_bounds_the_threads() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.available_threads(64) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_cgroup_bounds_the_memory(tmp_path: Path) -> None:
    assert machine.memory_bytes(system(tmp_path)) == 2 * 2**30
    bounded = system(tmp_path, files={"memory.max": f"{2**30}\n"})
    assert machine.memory_bytes(bounded) == 2**30


def test_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: 8)
    found = machine.describe_machine(system(tmp_path, "avx512_vnni", files={"cpu.max": "150000 100000"}))
    assert (found["cpu"], found["int8_weight_bits"], found["memory_gib"]) == ("Testium 9", 8, 2.0)
    assert (found["cores_affinity"], found["cores_quota"], found["threads"]) == (8, 1.5, 2)
    assert found["flags"]["avx2"]
    assert not found["flags"]["amx_int8"]
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["onnxruntime"] == onnxruntime.__version__


def test_a_machine_that_says_nothing_is_described(tmp_path: Path) -> None:
    nowhere = SystemFiles(*[tmp_path / "absent"] * 4)
    found = machine.describe_machine(nowhere)
    assert (found["memory_gib"], found["cores_quota"]) == (None, None)
    assert found["threads"] == machine.affinity()


def with_runtime(monkeypatch: pytest.MonkeyPatch, providers: list[str], packages: set[str]) -> None:
    monkeypatch.setattr(machine, "available_providers", lambda: providers)
    monkeypatch.setattr(machine, "installed_version", lambda package: "1.0" if package in packages else None)


CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def test_providers_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.require_provider("cpu") == CPU
    with_runtime(monkeypatch, [CUDA, CPU], {"onnxruntime-gpu"})
    assert machine.require_provider("cuda") == CUDA


@pytest.mark.parametrize(
    ("name", "providers", "packages", "message"),
    [
        ("tpu", [CPU], {"onnxruntime"}, "provider 'tpu' is unknown: choose cpu or cuda"),
        ("cuda", [CPU], {"onnxruntime"}, r"which has cpu: uninstall it and install slimformer\[gpu\], or choose cpu"),
        ("cuda", [CPU], {"onnxruntime", "onnxruntime-gpu"}, "onnxruntime and onnxruntime-gpu are both installed"),
        ("cpu", [], set(), r"cannot be imported: install slimformer\[cpu\]"),
    ],
)
def test_missing_providers_are_explained(
    monkeypatch: pytest.MonkeyPatch, name: str, providers: list[str], packages: set[str], message: str
) -> None:
    with_runtime(monkeypatch, providers, packages)
    with pytest.raises(InputError, match=message) as caught:
        machine.require_provider(name)
    assert "\n" not in str(caught.value)


def test_advice_names_both_runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_runtime(monkeypatch, [CPU], {"onnxruntime", "onnxruntime-gpu"})
    assert machine.advice(files=system(tmp_path, "avx_vnni")) == [machine.BOTH_RUNTIMES]
