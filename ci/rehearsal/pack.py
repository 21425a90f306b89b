"""
Pack the rehearsal of stack 2026.11 in parts, for a host with Python 3.12 and a GPU of SM 9.0, and
without a network.

    pack.py --dist DIST --model MODEL --store STORE --work WORK --output OUTPUT [--part MIB]

    DIST    the wheel of the stack for 9.0a, with its verdicts and attempts
            (`build --arch 9.0a`, `gate --only G0 --only G1`)
    MODEL   the small model: tests/server/trained.py in an environment with torch and transformers
    STORE   the store of DIST, with its audits and the official wheel
    WORK    archives; those that are here are not made again, but for our wheel and the model
    OUTPUT  the kit: host.py with what it needs, and parts of MIB (default: 53)

Copy the kit to the host, in as many goes as it takes, and begin each there with
``python3 KIT/host.py take KIT``; host.py has the other verbs.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from sparkwright.builder.wheel import elf, gpu_target
from sparkwright.forks.stack import Project, read_lock

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "ci" / "rehearsal" / "requirements"
#: The GPU of the host, and its Python.
CAPABILITY, PYTHON = (
    (9, 0),
    ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39"],
)
#: What no start needs: headers, programs, tables, static libraries, and code for other GPUs.
UNUSED = (
    "torch/include",
    "torch/share",
    "torch/bin/protoc*",
    "triton/backends/nvidia/lib/cupti*",
    "triton/backends/nvidia/bin/ptxas-blackwell",
    "**/*.a",
    "pycountry/locales",
    "bin/z3",
    "**/__pycache__",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/third_party/fmha_sm100",
)
#: What the steps take of this checkout.
PROGRAM = ("ci", "forks", "build", "cherry_picks", "tests/server", "pyproject.toml", "README.md")


def main() -> None:
    """Make what is missing in the work folder, and the kit."""
    parser = argparse.ArgumentParser(usage=__doc__)
    for name in ("dist", "model", "store", "work", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--part", type=int, default=53, metavar="MIB")
    arguments = parser.parse_args()
    work, output = arguments.work, arguments.output
    work.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    official = read_lock(Project(ROOT, "2026.11")).forks["vllm"].bases["x86_64"]
    pack_sites(work)
    stock = arguments.store / "downloads" / official.sha256 / official.filename
    pack_stock(stock, work)
    pack_model(arguments.model, work)
    pack_candidate(arguments.dist, arguments.store, work)
    archives = [
        ("model", "."),
        *((name, "sites.new/torch") for name in ("torch", "triton", "nccl")),
        ("sites", "sites.new"),
        ("stock", "stocktree"),
        ("candidate", "."),
    ]
    names = {"stock": official.filename, "generator": f"vllm-rs-{official.sha256[:16]}"}
    write_kit(archives, names, work, output, arguments.part << 20)


def pack_sites(work: Path) -> None:
    """Pack the packages that the host lacks, the large ones apart, to be unpacked at once."""
    # The last one that is made.
    if (work / "sites.tar.zst").exists():
        return
    sites = work / "sites"
    for name in ("torch", "serve", "tool", "harness"):
        install(sites / name, "--requirements", str(REQUIREMENTS / f"{name}.txt"))
        reduce(sites / name)
    torch = sites / "torch"
    apart = {"triton": list(torch.glob("triton*")), "nccl": list(torch.glob("nvidia*"))}
    taken = {path for paths in apart.values() for path in paths}
    apart["torch"] = [path for path in torch.iterdir() if path not in taken]
    for name, paths in apart.items():
        compress(work / f"{name}.tar.zst", torch, sorted(path.name for path in paths))
    compress(work / "sites.tar.zst", sites, ["serve", "tool", "harness"])
    shutil.rmtree(sites)


def install(target: Path, *packages: str) -> None:
    """Install packages for the host's Python; as copies, since they are stripped."""
    options = ["--quiet", "--link-mode", "copy", "--no-deps", "--target", str(target)]
    subprocess.run(["uv", "pip", "install", *options, *PYTHON, *packages], check=True)


def reduce(folder: Path) -> None:
    """Remove what no start needs, symbols, and device code that the GPU does not take."""
    for glob in UNUSED:
        for path in list(folder.glob(glob)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in list(folder.rglob("*")):
        program = ".so" in path.suffixes or path.name == "vllm-rs"
        if program and path.is_file() and not path.is_symlink():
            # Some files of that name are no libraries.
            command = ["strip", "--strip-unneeded", str(path)]
            subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
            with contextlib.suppress(elf.ElfUnreadable):
                with elf.mapped(path) as data:
                    trimmed = gpu_target.trimmed(data, CAPABILITY)
                path.write_bytes(trimmed)


def pack_stock(wheel: Path, work: Path) -> None:
    """Pack the official wheel, reduced, with a RECORD of what is left."""
    if (work / "stock.tar.zst").exists():
        return
    tree = work / "stock"
    subprocess.run(["unzip", "-q", str(wheel), "-d", str(tree)], check=True)
    reduce(tree)
    (information,) = tree.glob("*.dist-info")
    rows = []
    for path in sorted(tree.rglob("*")):
        if path.is_file() and path.name != "RECORD":
            digest = hashlib.sha256(path.read_bytes()).digest()
            encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            rows.append((str(path.relative_to(tree)), f"sha256={encoded}", path.stat().st_size))
    with (information / "RECORD").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [*rows, (f"{information.name}/RECORD", "", "")]
        )
    compress(work / "stock.tar.zst", tree, ["."])
    shutil.rmtree(tree)


def pack_model(model: Path, work: Path) -> None:
    """Pack the small model."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        shutil.copytree(model, Path(folder) / "models" / "trained")
        compress(work / "model.tar.zst", Path(folder), ["models"], level=1)


def pack_candidate(dist: Path, store: Path, work: Path) -> None:
    """Pack our wheel, its verdicts and attempts, and the audits, which G0 reads."""
    (wheel,) = dist.glob("vllm-*.whl")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        (Path(folder) / "dist").mkdir()
        for path in (
            wheel,
            wheel.with_suffix(".verdicts.json"),
            wheel.with_suffix(".attempts.jsonl"),
        ):
            shutil.copy(path, Path(folder) / "dist")
        shutil.copytree(store / "records" / "audit", Path(folder) / "store" / "records" / "audit")
        compress(work / "candidate.tar.zst", Path(folder), ["dist", "store"], level=1)


def compress(path: Path, folder: Path, members: list[str], level: int = 10) -> None:
    """Write the archive of *members* of *folder* to *path*, in one step."""
    command = ["tar", "c", "--owner=0", "--group=0", "--sort=name", "--exclude=__pycache__"]
    command += ["-C", str(folder), *members]
    shorter = ["zstd", "--quiet", "-T0", f"-{level}", "--long=27"]
    with (
        path.with_suffix(".new").open("wb") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE) as tar,
    ):
        subprocess.run(shorter, stdin=tar.stdout, stdout=file, check=True)
    if tar.returncode:
        raise SystemExit(f"tar of {folder} ended with {tar.returncode}")
    path.with_suffix(".new").replace(path)
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


def write_kit(
    archives: list[tuple[str, str]], names: dict[str, str], work: Path, output: Path, size: int
) -> None:
    """Cut the archives into parts of *size* bytes, and write what the host needs beside them."""
    for old in output.glob("part-*"):
        old.unlink()
    listed, offset = [], 0
    split = [
        "split",
        f"--bytes={size}",
        "--numeric-suffixes=1",
        "--suffix-length=2",
        "-",
        str(output / "part-"),
    ]
    with subprocess.Popen(split, stdin=subprocess.PIPE) as sink:
        assert sink.stdin
        for name, target in archives:
            path = work / f"{name}.tar.zst"
            listed.append(
                {"name": name, "target": target, "offset": offset, "size": path.stat().st_size}
            )
            offset += path.stat().st_size
            with path.open("rb") as stream:
                shutil.copyfileobj(stream, sink.stdin, 1 << 20)
    parts = []
    for path in sorted(output.glob("part-*")):
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        parts.append({"name": path.name, "size": path.stat().st_size, "sha256": digest})
    text = json.dumps({**names, "archives": listed, "parts": parts}, indent=1)
    (output / "parts.json").write_text(text + "\n", "utf-8")
    for name in ("host.py", "zstandard", "program"):
        shutil.rmtree(output / name, ignore_errors=True)
    shutil.copy(ROOT / "ci" / "rehearsal" / "host.py", output)
    # Of its two implementations in C one is enough.
    with tempfile.TemporaryDirectory(dir=work) as folder:
        install(Path(folder), "zstandard")
        reduce(Path(folder))
        (output / "zstandard").mkdir()
        for path in (Path(folder) / "zstandard").glob("*"):
            if path.name == "__init__.py" or path.name.startswith("backend_c."):
                shutil.copy(path, output / "zstandard")
    write_program(output / "program")
    print(f"{offset:,} bytes in {len(parts)} parts: {output}")


def write_program(folder: Path) -> None:
    """Write the committed program, without which a step does nothing."""
    folder.mkdir()
    with subprocess.Popen(
        ["git", "-C", str(ROOT), "archive", "HEAD", *PROGRAM], stdout=subprocess.PIPE
    ) as git:
        subprocess.run(["tar", "x", "-C", str(folder)], stdin=git.stdout, check=True)


if __name__ == "__main__":
    main()
