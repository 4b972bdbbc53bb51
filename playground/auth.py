"""Who may sign in: a text file with one ``name:argon2-hash`` a line, and the check of a password against it.

Blank lines and lines that start with # are skipped. Everything else that is not a name and an argon2 hash is refused
with its line number, so that a typing error never silently locks somebody out or lets somebody in.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from decoder.errors import RedlineError

if TYPE_CHECKING:
    from pwdlib import PasswordHash

MAX_NAME = 64


class AuthError(RedlineError):
    """A password file that cannot be used, or a password that cannot be hashed."""


@functools.cache
def _hasher() -> PasswordHash:
    from pwdlib import PasswordHash
    from pwdlib.hashers.argon2 import Argon2Hasher

    return PasswordHash((Argon2Hasher(),))


def check_name(name: str) -> str | None:
    """Why ``name`` cannot be a user name, or None when it can."""
    if not name:
        return "the name is empty"
    if len(name) > MAX_NAME:
        return f"the name is longer than {MAX_NAME} characters"
    if name != name.strip():
        return "the name starts or ends with a space"
    if ":" in name or any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in name):
        return "the name holds a colon or an invisible character"
    return None


def hash_password(password: str) -> str:
    """The argon2 hash of ``password``; raises AuthError when it is empty."""
    if not password:
        raise AuthError("the password is empty")
    return _hasher().hash(password)


def password_line(name: str, password: str) -> str:
    """The line of the password file for one user; raises AuthError for a name that cannot be used."""
    problem = check_name(name)
    if problem:
        raise AuthError(problem)
    return f"{name}:{hash_password(password)}"


def read_password_file(path: Path) -> dict[str, str]:
    """Names and hashes of ``path``; raises AuthError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise AuthError(f"the password file {path} cannot be read: {reason}") from None
    users: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, digest = line.rstrip().partition(":")
        problem = check_name(name) if separator else "it is not of the form name:hash"
        problem = problem or _check_hash(digest)
        if not problem and name in users:
            problem = "the name was given before"
        if problem:
            raise AuthError(f"{path}, line {number}: {problem}; make lines with `python app.py hash-password`")
        users[name] = digest
    if not users:
        raise AuthError(f"the password file {path} names nobody; make lines with `python app.py hash-password`")
    return users


def _check_hash(digest: str) -> str | None:
    from argon2 import extract_parameters
    from argon2.exceptions import InvalidHashError

    try:
        extract_parameters(digest)
    except (InvalidHashError, ValueError):
        return "what follows the name is not an argon2 hash"
    return None


def verifier(users: Mapping[str, str]) -> Callable[[str, str], bool]:
    """A function of name and password for Gradio's sign-in page. Unknown names take as long as known ones."""
    decoy = hash_password("nobody has this password")

    def verify(name: str, password: str) -> bool:
        digest = users.get(name)
        try:
            right = _hasher().verify(password, digest or decoy)
        except Exception:  # a hash that the library cannot read must never let anyone in
            return False
        return right and digest is not None

    return verify
