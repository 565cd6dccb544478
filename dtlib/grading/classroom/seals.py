"""Seals: how a rerun tells records that this machine wrote from those that somebody else put in their place.

A checksum would not do, since everybody can compute one. The key lies with the user's data, outside of every results
folder and of what a submission sees. Whoever has it could forge every record, so it is thrown away before anything runs
without the wall around the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

_BYTES = 32
_BEFORE, _AFTER = b',\n "seal": "', b'"\n}\n'
_TAIL_BYTES = len(_BEFORE) + 64 + len(_AFTER)


class Key:
    """What seals records: the key of this machine or, where `why_not` says why that cannot be, one for this run alone.

    It is made on first use. `apart_from` are folders in which it must not lie.
    """

    def __init__(self, apart_from: Collection[Path] = ()) -> None:
        import platformdirs

        self.folder = Path(platformdirs.user_data_dir("dtlib", appauthor=False)).resolve()
        self.path = self.folder / "grade.key"
        self.why_not = ""
        try:
            if inside := [each for each in apart_from if self.folder.is_relative_to(each.resolve())]:
                raise ValueError(f"it would lie in {inside[0]}")
            self._secret = self._kept()
        except (OSError, ValueError) as error:
            self.why_not = f"the key of this machine cannot be used: {error}"
            self._secret = secrets.token_bytes(_BYTES)

    def throw_away(self, why: str) -> None:
        """Have no later run believe what is sealed with this key, or with one that was laid in its place since."""
        self.why_not = self.why_not or why
        with contextlib.suppress(OSError):
            self.path.unlink()

    def sealed(self, record: Mapping[str, Any]) -> str:
        """`record` as JSON whose last field is its seal."""
        body = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}").encode()
        return (body + self._tail(body)).decode()

    def opened(self, data: bytes) -> dict[str, Any] | None:
        """The record in `data`, None where it does not bear this key's seal. Nothing of a forgery is parsed."""
        body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
        if not hmac.compare_digest(tail, self._tail(body)):
            return None
        record: dict[str, Any] = json.loads(data)
        return {name: value for name, value in record.items() if name != "seal"}

    def _tail(self, body: bytes) -> bytes:
        return _BEFORE + hmac.new(self._secret, body, hashlib.sha256).hexdigest().encode() + _AFTER

    def _kept(self) -> bytes:
        if not self.path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder) as file, contextlib.suppress(FileExistsError):
                file.write(secrets.token_bytes(_BYTES))  # in a file for this user alone
                file.flush()
                os.link(file.name, self.path)  # unless another grader was quicker: its key is as good
        with open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            status = os.fstat(opened.fileno())
            secret = opened.read(_BYTES + 1)
        if len(secret) != _BYTES or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            self.path.unlink()  # the next run makes another
            raise ValueError(f"{self.path} was damaged, or others could read it")
        return secret
