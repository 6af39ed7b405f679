"""The machine that serves: its cores and memory as this process may use them, its int8 instructions, its providers.

A container sees the host's cores, but the kernel grants it `quota / period` of them (cgroup v1
`cpu.cfs_quota_us / cpu.cfs_period_us`, cgroup v2 `cpu.max`; Linux `Documentation/scheduler/sched-bwc.rst` and
`Documentation/admin-guide/cgroup-v2.rst`): a thread pool sized by the host then waits for itself.
"""

import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ..transformer.errors import InputError

Provider = Literal["cpu", "cuda"]
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
EXTRAS = {"cpu": "slimformer[cpu]", "cuda": "slimformer[gpu]"}
# name in a report -> name in /proc/cpuinfo
FLAGS = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "amx_int8": "amx_int8",
    "neon_dot": "asimddp",
}
INT8_DOT = ("avx512_vnni", "avx_vnni", "amx_int8", "neon_dot")
PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "onnx", "torch")
HALF_ON_CPU = (
    "on a CPU onnxruntime computes float16 linears in float32, with casts around them: the file is smaller, and "
    "nothing faster"
)
BOTH_RUNTIMES = (
    "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: uninstall both, "
    "then install slimformer[cpu] or slimformer[gpu]"
)


@dataclass(frozen=True)
class SystemFiles:
    """Where Linux describes the machine; elsewhere the files are absent and what they say counts as unknown."""

    cpuinfo: Path = Path("/proc/cpuinfo")
    meminfo: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")


SYSTEM = SystemFiles()


@dataclass(frozen=True)
class Target:
    """A kind of CPU that serves.

    Attributes:
        flags: of `FLAGS`, any of which shows it.
        bits: of int8 weights, most that it multiplies exactly (`int8_weight_bits`).
    """

    flags: tuple[str, ...]
    bits: int


# What `--target` takes. A CPU is of the first of these kinds that it shows.
TARGETS = {
    "amx": Target(("amx_int8",), 8),
    "vnni": Target(("avx512_vnni", "avx_vnni"), 8),
    "neon": Target(("neon_dot",), 8),
    "avx512": Target(("avx512f",), 7),
    "avx2": Target(("avx2",), 7),
}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, *names: str) -> str:
    """The value of the first `name : value` line whose name is one of `names`, or an empty string."""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in names:
            return value.strip()
    return ""


def cpu_flags(files: SystemFiles = SYSTEM) -> dict[str, bool]:
    """Which of the instructions in `FLAGS` the CPU reports; all False where it cannot be read."""
    reported = set(_field(_read(files.cpuinfo), "flags", "Features").split())
    flags = {name: flag in reported for name, flag in FLAGS.items()}
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        flags["neon_dot"] = True  # every Apple silicon CPU has it, and macOS has no /proc/cpuinfo
    return flags


def has_int8_dot(files: SystemFiles = SYSTEM) -> bool:
    """Whether the CPU multiplies u8 by s8 straight into int32 (VNNI, AMX or NEON dot product): nothing saturates."""
    flags = cpu_flags(files)
    return any(flags[name] for name in INT8_DOT)


def machine_kind(files: SystemFiles = SYSTEM) -> str | None:
    """Which of `TARGETS` this CPU is; None: none of them, or unknown."""
    flags = cpu_flags(files)
    return next((name for name, kind in TARGETS.items() if any(flags[flag] for flag in kind.flags)), None)


def int8_weight_bits(target: str | None = None, files: SystemFiles = SYSTEM) -> int:
    """Bits of an int8 weight that the target, one of `TARGETS` (None: this CPU), multiplies exactly.

    This CPU: 8 with `has_int8_dot`, otherwise 7.

    Without such an instruction u8 x s8 products are added in pairs into a saturating int16 (x86 `vpmaddubsw`):
    255 * 127 * 2 = 64770 is above 32767, so 8-bit weights give wrong sums; with |w| <= 64 the largest sum is
    255 * 64 * 2 = 32640, which fits.
    """
    if target is not None:
        return TARGETS[target].bits
    return 8 if has_int8_dot(files) else 7


def require_target(target: str | None, asked: Sequence[int] = (), files: SystemFiles = SYSTEM) -> None:
    """Check that int8 weights for a target can be proven on this CPU; None, this CPU itself, always passes.

    Args:
        target: one of `TARGETS`.
        asked: bits of all int8 weights that there are or will be; 0: those that the target multiplies exactly.

    Raises InputError if the target is unknown, or the sums of such weights saturate on it or here: onnxruntime would
    then compute here what the target does not.
    """
    if target is None:
        return
    if target not in TARGETS:
        raise InputError(f"target {target!r} is unknown: choose {', '.join(TARGETS)}")
    there, here = int8_weight_bits(target), int8_weight_bits(files=files)
    bits = max((one or there for one in asked), default=0)
    if bits > there:
        raise InputError(
            f"int8 weights of {bits} bits saturate on the target {target}: quantize the float model with bits = {there}"
        )
    if bits > here:
        raise InputError(
            f"int8 weights of {bits} bits, for the target {target}, saturate on this CPU, so that nothing could be "
            "proven here: run this on such a machine, or take 7 bits, exact on every CPU, with --target avx2"
        )


def _cgroup_folders(files: SystemFiles, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups for `controller`, v1 and v2, from the leaf to the mount.

    A container without its own cgroup namespace sees the host's path but not its folder: the mount is then its own.
    """
    for line in _read(files.membership).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            mounts = [files.cgroup, files.cgroup / "unified"]
        elif controller in controllers.split(","):
            mounts = [files.cgroup / controller, files.cgroup / controllers]
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        levels = [inner, *inner.parents] if ".." not in inner.parts else [PurePosixPath(".")]
        yield from (mount / level for mount in mounts for level in levels)


def _numbers(path: Path) -> list[int]:
    """The leading whitespace-separated integers of a file; none for `max` or a missing file."""
    numbers = []
    for word in _read(path).split():
        if not word.lstrip("-").isdigit():
            break
        numbers.append(int(word))
    return numbers


def cpu_quota(files: SystemFiles = SYSTEM) -> float | None:
    """CPUs that the cgroup grants (1.5: one and a half), the tightest of all levels, or None without a limit."""
    quotas = []
    for folder in _cgroup_folders(files, "cpu"):
        grant = _numbers(folder / "cpu.max")
        grant = grant or _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        if len(grant) == 2 and grant[0] > 0 and grant[1] > 0:  # v1 writes -1 for no limit
            quotas.append(grant[0] / grant[1])
    return min(quotas, default=None)


def memory_bytes(files: SystemFiles = SYSTEM) -> int | None:
    """Bytes of memory that the process may use: the machine's, or the cgroup's limit where that is lower."""
    total = _field(_read(files.meminfo), "MemTotal").split()
    limits = [int(total[0]) * 1024] if total else []
    for folder in _cgroup_folders(files, "memory"):
        limits += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
    return min(limits, default=None)


def affinity() -> int:
    """Logical CPUs on which this process may be scheduled."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_threads(wish: int | None = None, files: SystemFiles = SYSTEM) -> int:
    """Threads to give onnxruntime: the least of the affinity, the cgroup quota rounded up, and `wish` (None: no wish).

    Raises InputError if `wish` is less than 1. A wish above what there is is cut, because more threads than CPUs
    wait for each other: compare the result with the wish to report it.
    """
    if wish is not None and wish < 1:
        raise InputError(f"threads is {wish}: at least 1 is needed")
    quota = cpu_quota(files)
    limits = [affinity(), wish, None if quota is None else math.ceil(quota)]
    return min(limit for limit in limits if limit is not None)


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, read from its metadata and never by importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def available_providers() -> list[str]:
    """onnxruntime's names of the providers its package was built with; empty if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return list(onnxruntime.get_available_providers())


def cuda_devices() -> list[str]:
    """Names of the NVIDIA devices as `nvidia-smi` lists them; empty where it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _both_runtimes() -> bool:
    return None not in (installed_version("onnxruntime"), installed_version("onnxruntime-gpu"))


def require_provider(name: str) -> str:
    """onnxruntime's name of the provider `name` ("cpu" or "cuda").

    Raises InputError, which names what is available and the package that brings it, if the name is unknown or the
    installed onnxruntime was built without the provider. A listed CUDA provider can still lack its driver or device:
    whoever opens a session compares `session.get_providers()[0]` with the name given here.
    """
    if name not in PROVIDERS:
        raise InputError(f"provider {name!r} is unknown: choose {' or '.join(PROVIDERS)}")
    available = available_providers()
    if PROVIDERS[name] in available:
        return PROVIDERS[name]
    if not available:
        raise InputError(f"provider {name} needs onnxruntime, which cannot be imported: install {EXTRAS[name]}")
    if _both_runtimes():
        raise InputError(f"provider {name} is not available: {BOTH_RUNTIMES}")
    there = ", ".join(short for short, full in PROVIDERS.items() if full in available) or ", ".join(available)
    raise InputError(
        f"provider {name} is not in the installed onnxruntime, which has {there}: "
        f"uninstall it and install {EXTRAS[name]}, or choose {there}"
    )


def describe_machine(files: SystemFiles = SYSTEM) -> dict[str, Any]:
    """What a measurement's reader must know of the machine, ready for JSON; None or empty where unknown or absent."""
    memory = memory_bytes(files)
    providers = available_providers()
    return {
        "cpu": _field(_read(files.cpuinfo), "model name", "Model") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "flags": cpu_flags(files),
        "int8_weight_bits": int8_weight_bits(files=files),
        "cores_affinity": affinity(),
        "cores_quota": cpu_quota(files),
        "threads": available_threads(None, files),
        "memory_gib": None if memory is None else round(memory / 2**30, 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: installed_version(package) for package in PACKAGES},
        "providers": providers,
        "cuda_devices": cuda_devices() if PROVIDERS["cuda"] in providers else [],
    }


def advice(target: str | None = None, files: SystemFiles = SYSTEM) -> list[str]:
    """One line for each property of the target (None: this machine) and of this machine that changes what is gained."""
    lines = []
    if int8_weight_bits(target, files) < 8:
        lines.append(
            f"{'' if target is None else f'the target {target} has '}no VNNI, AMX or NEON dot product: expect about "
            "1.5x from int8 over fp32, where VNNI gives 2.5x; int8 weights need 7 bits to be exact"
        )
    if target not in (None, own := machine_kind(files)):
        lines.append(f"times are those of this machine ({own or 'of an unknown kind'}), not of the target {target}")
    quota, cores = cpu_quota(files), affinity()
    if quota is not None and quota < cores:
        threads = available_threads(None, files)
        lines.append(f"the cgroup grants {quota:g} of {cores} CPUs: give onnxruntime {threads} thread(s), not {cores}")
    if _both_runtimes():
        lines.append(BOTH_RUNTIMES)
    return lines
