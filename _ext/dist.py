"""What a release is made of: ``make dist`` fills ``_build/dist``, and the release workflow publishes that.

The version stands in ``pyproject.toml`` and nowhere else. ``python _ext/dist.py notes v0.1.0`` prints what the
changelog says of the version, and fails where the tag is of another one.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = ("LICENSE", "CITATION.cff", "CHANGELOG.md")
"""What goes into each archive beside its folder."""
SINCE = (2020, 1, 1, 0, 0, 0)
"""The date of each file in an archive: the same files always give the same bytes."""


def version(root: Path = ROOT) -> str:
    """The version of the course."""
    return str(tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def notes(tag: str, root: Path = ROOT) -> str:
    """The changelog's section of the version that `tag` names. ``SystemExit`` for another one, or none."""
    here = version(root)
    if tag != f"v{here}":
        raise SystemExit(f"the tag must be v{here}, as pyproject.toml has it, not {tag}")
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    found = {section.split()[0]: section.partition("\n")[2].strip() for section in sections}
    if not found.get(here):
        raise SystemExit(f"CHANGELOG.md must have a section '## {here}' that says something")
    return found[here]


def pack(folder: Path, archive: Path, beside: tuple[Path, ...] = ()) -> None:
    """Write `archive`: one folder, named as the archive, with the files of `folder` and those `beside` it."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    files |= {path.name: path for path in beside}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for name in sorted(name for name in files if not any(part[0] == "." for part in name.split("/"))):
            entry = zipfile.ZipInfo(f"{archive.stem}/{name}", SINCE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            out.writestr(entry, files[name].read_bytes())


def checksums(folder: Path) -> str:
    """SHA-256 of each file of `folder`, as ``sha256sum --check`` reads it."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def build(root: Path, out: Path) -> None:
    """Put the wheel, and the source that it was built of, into `out`."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, root]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the wheel was not built:\n{done.stdout}{done.stderr}")


def make(book: Path, out: Path, root: Path = ROOT) -> list[Path]:
    """Fill `out`: wheel and source, the book, also as the PDF beside it, the exercises, checksums; return the files."""
    if not (book / "index.html").is_file():
        raise SystemExit(f"there is no book in {book}: run `make book` first")
    here = version(root)
    notes(f"v{here}", root)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    build(root, out)
    beside = tuple(root / name for name in BESIDE)
    pack(book, out / f"dtlib-book-{here}.zip", beside)
    pack(root / "exercises", out / f"dtlib-exercises-{here}.zip", (*beside, root / "requirements.txt"))
    shutil.copy(book.parent / "book.pdf", out / f"dtlib-book-{here}.pdf")
    (out / "SHA256SUMS").write_text(checksums(out), "utf-8")
    return sorted(out.iterdir())


if __name__ == "__main__":
    if sys.argv[1:2] == ["notes"]:
        print(notes(sys.argv[2]))
    else:
        for path in make(ROOT / "_build" / "html", ROOT / "_build" / "dist"):
            print(f"{path.stat().st_size / 1e6:8.1f} MB  {path.relative_to(ROOT)}")
