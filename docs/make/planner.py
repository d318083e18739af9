"""Build the planner that runs in a browser, from pinned files.

`python docs/make/planner.py OUTPUT [--downloads FOLDER] [--numpy WHEEL]` writes a folder for any
static file server. planner.lock.toml pins every file by its hash: the runtime comes from npm, the
wheels from PyPI, and numpy's from Pyodide's distribution: by default the browser fetches it from
there, with `--numpy` it is part of the folder.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.spec.version import __version__
from shardwise.web.site import offline_script, page_files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOCK = HERE / "planner.lock.toml"
# Parts of the package that planning never imports.
LEFT_OUT = ("checkpoint", "cli", "engine", "integrations", "runs", "train")
# Of every entry of an archive, so that two builds are equal.
_DATE = (2020, 1, 1, 0, 0, 0)


class File(NamedTuple):
    """A file of the page: where a browser finds it, and whether its worker fetches it itself."""

    url: str
    data: bytes
    fetched: bool

    def record(self) -> dict[str, Any]:
        sha256 = hashlib.sha256(self.data).hexdigest()
        return {"url": self.url, "bytes": len(self.data), "sha256": sha256, "fetched": self.fetched}


def build(output: Path, downloads: Path, numpy: Path | None) -> list[File]:
    """Write the folder; return its files."""
    lock = tomllib.loads(LOCK.read_text(encoding="utf-8"))
    downloads.mkdir(parents=True, exist_ok=True)
    runtime = _runtime(lock["runtime"], downloads)
    info = json.loads(runtime.pop("pyodide-lock.json"))["info"]
    files = [
        File(f"runtime/{name}", data, not name.endswith("mjs")) for name, data in runtime.items()
    ]
    packages: dict[str, Any] = {}
    for package in lock["package"]:
        files += _package(package, downloads, numpy, lock["distribution"], packages)
    files += _own_package(packages, [one["name"] for one in lock["package"]])
    listed = {"info": info, "packages": packages}
    files.append(File("packages.json", _json(listed), True))
    elsewhere = "" if numpy else lock["distribution"]
    page = page_files("browser", docs="../", connects=elsewhere)
    files += [File(name, data, False) for name, data in page.items()]
    records = sorted((file.record() for file in files), key=lambda one: one["url"])
    version = hashlib.sha256(_json(records)).hexdigest()[:16]
    local = [file for file in files if "://" not in file.url]
    local.append(File("files.json", _json({"version": version, "files": records}), False))
    local.append(File("offline.js", offline_script(version), False))
    for file in local:
        path = output / file.url
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
    return local


def _runtime(pinned: Mapping[str, Any], downloads: Path) -> dict[str, bytes]:
    """The files of the runtime, out of its npm package."""
    archive = downloads / f"{pinned['name']}-{pinned['version']}.tgz"
    if not archive.exists():
        wanted = f"{pinned['name']}@{pinned['version']}"
        subprocess.run(["npm", "pack", wanted, "--silent"], cwd=downloads, check=True)
    with tarfile.open(archive) as tar:
        found = {name: _member(tar, f"package/{name}") for name in pinned["files"]}
    for name, data in found.items():
        _check(name, data, pinned["files"][name])
    return found


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    member = tar.extractfile(name)
    assert member is not None, name
    return member.read()


def _package(
    package: Mapping[str, Any],
    downloads: Path,
    numpy: Path | None,
    distribution: str,
    packages: dict[str, Any],
) -> Iterator[File]:
    """The wheel of a package, and its entry in the list that the runtime reads."""
    name, file = package["name"], package["file"]
    if package["from"] == "distribution" and numpy is None:
        url = f"{distribution}{file}"
        packages[name] = _entry(package, url, package["sha256"])
        return
    if package["from"] == "distribution":
        assert numpy is not None
        data = numpy.read_bytes()
    else:
        data = _from_pypi(package, downloads)
    _check(file, data, package["sha256"])
    if package["from"] == "compiled":
        file = f"{name.replace('-', '_')}-{package['version']}-py3-none-any.whl"
        data = _pure(name, package["version"], data)
    packages[name] = _entry(package, file, hashlib.sha256(data).hexdigest())
    yield File(f"runtime/{file}", data, True)


def _from_pypi(package: Mapping[str, Any], downloads: Path) -> bytes:
    path = downloads / package["file"]
    if not path.exists():
        platform = package["file"].removesuffix(".whl").rpartition("-")[2].split(".")[0]
        asked = [f"{package['name']}=={package['version']}", "--no-deps", "-q"]
        if platform != "any":
            asked += ["--platform", platform, "--implementation", "cp", "--abi", "cp314"]
            asked += ["--python-version", "314"]
        command = [sys.executable, "-m", "pip", "download", "--only-binary", ":all:", *asked]
        subprocess.run([*command, "-d", str(downloads)], check=True)
    return path.read_bytes()


def _pure(name: str, version: str, wheel: bytes) -> bytes:
    """A wheel without its compiled part, which these packages can do without."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        files = {
            entry: archive.read(entry)
            for entry in archive.namelist()
            if ".dist-info/" not in entry and not entry.endswith((".so", ".c", ".pyi"))
        }
        licenses = {
            entry.partition(".dist-info/")[2]: archive.read(entry)
            for entry in archive.namelist()
            if ".dist-info/licenses/" in entry
        }
    return _wheel(name, version, files, licenses)


def _own_package(packages: dict[str, Any], depends: list[str]) -> Iterator[File]:
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in sorted(source.glob("shardwise/**/*"))
        if path.is_file() and _is_needed(path.relative_to(source))
    }
    name = f"shardwise-{__version__}-py3-none-any.whl"
    data = _wheel("shardwise", __version__, files, {})
    own = {"name": "shardwise", "version": __version__, "depends": depends}
    packages["shardwise"] = _entry(own, name, hashlib.sha256(data).hexdigest())
    yield File(f"runtime/{name}", data, True)


def _is_needed(path: Path) -> bool:
    folder = path.parts[1]
    return (
        folder not in LEFT_OUT
        and "__pycache__" not in path.parts
        and path.parts[1:3] != ("web", "page")
        and path.suffix in (".py", ".toml", ".css", ".js", ".json")
    )


def _wheel(name: str, version: str, files: Mapping[str, bytes], info: Mapping[str, bytes]) -> bytes:
    """A wheel whose bytes depend on its files alone."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    about = "Wheel-Version: 1.0\nGenerator: shardwise\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    every = {
        **files,
        **{f"{folder}/{entry}": data for entry, data in info.items()},
        f"{folder}/METADATA": metadata.encode(),
        f"{folder}/WHEEL": about.encode(),
    }
    every[f"{folder}/RECORD"] = "".join(f"{entry},,\n" for entry in sorted(every)).encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for entry in sorted(every):
            archive.writestr(zipfile.ZipInfo(entry, _DATE), every[entry], zipfile.ZIP_DEFLATED)
    return written.getvalue()


def _entry(package: Mapping[str, Any], file: str, sha256: str) -> dict[str, Any]:
    """A package as the runtime lists it."""
    return {
        "name": package["name"],
        "version": package["version"],
        "file_name": file,
        "install_dir": "site",
        "sha256": sha256,
        "package_type": "package",
        "imports": [package["name"].replace("-", "_")],
        "depends": package.get("depends", []),
        "unvendored_tests": False,
    }


def _check(name: str, data: bytes, expected: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise SystemExit(f"{name}: its hash is {found}, planner.lock.toml says {expected}")


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--downloads", type=Path, default=ROOT / "site-downloads")
    parser.add_argument("--numpy", type=Path, help="numpy's wheel, to make it part of the folder")
    given = parser.parse_args()
    files = build(given.output, given.downloads, given.numpy)
    size = sum(len(file.data) for file in files)
    sent = sum(min(len(file.data), len(gzip.compress(file.data))) for file in files)
    sys.stdout.write(
        f"{len(files)} files, {size / 1e6:.1f} MB, {sent / 1e6:.1f} MB as servers compress them\n"
    )


if __name__ == "__main__":
    main()
