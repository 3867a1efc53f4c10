"""Calls to object storage, tried again for as long as that may help, and what is wrong in the user's words.

A call that fails by a lost connection, a timeout or an answer that says "later" is tried again, after longer
and longer pauses, for ``PATIENCE`` seconds; a store that has not yet answered once gets ``FIRST_PATIENCE``.
Credentials come from where the back end looks for them (environment, profile, role), and no message has them.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from toolkit.errors import DataError, install_command, redact

PATIENCE, FIRST_PATIENCE = 300.0, 30.0
"""Seconds for which a call is tried again."""
TIMEOUT = 60.0
"""Seconds that one try may take; it moves at most ``PART`` bytes."""
_AGAIN = re.compile(
    "(ClientConnection|ClientPayload|Connection|EndpointConnection|FSTimeout|HTTPClient|IncompleteRead|"
    "ResponseParser|ResponseStreaming|ServerTimeout|ServiceRequest|ServiceResponse|Timeout)Error|IncompleteRead"
)
"""Names of the classes of errors, of any back end, after which the same call may go through."""
_AGAIN_CODES = ("RequestTimeout", "SlowDown", "BadDigest", "IncompleteBody", "InternalError", "Throttling")
_REFUSED = {
    "NoSuchBucket": ("the bucket does not exist", "create it, or correct its name"),
    "RequestTimeTooSkewed": ("the clock of this machine is wrong", "set it (timedatectl, chrony)"),
    "ExpiredToken": ("the credentials have expired", "renew them"),
    "AccessDenied": (
        "these credentials may not do that",
        "have them allowed to list, read, write and delete there",
    ),
}
_QUOTA = re.compile(r"quota|storage.?full|insufficient.?storage|no space", re.IGNORECASE)
_LOGIN = (
    "the credentials are missing or wrong",
    "set them for the store (of S3 AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
)
_answered = False


class StorageError(DataError):
    """Object storage that cannot be reached or does not let us; never a file that is not there."""


def again(call: Callable[[], Any], place: str, *, patience: float | None = None) -> Any:
    """Return what ``call`` returns, tried again as the module says.

    Raises:
        FileNotFoundError, FileExistsError: a file is not there, or is.
        StorageError: all else, in the user's words.
    """
    global _answered
    begun, pause = time.monotonic(), 0.2
    while True:
        try:
            result = call()
        except FileExistsError:
            raise
        except Exception as error:
            code = _code(error)
            if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
                _answered = True
                raise FileNotFoundError(errno.ENOENT, "there is no such file", place) from None
            limit = (PATIENCE if _answered else FIRST_PATIENCE) if patience is None else patience
            passed = time.monotonic() - begun
            if not _may_pass(error, code):
                raise _error(error, code, place) from None
            if passed + pause > limit:
                raise _error(error, code, place, passed) from None
            time.sleep(pause * random.uniform(0.5, 1))  # ranks do not come back all at once
            pause = min(2 * pause, 10)
        else:
            _answered = True
            return result


def run_call(fs: Any, method: str, *args: Any, **options: Any) -> Any:
    """Call a method of a file system; of an asynchronous one for at most ``TIMEOUT`` seconds."""
    if not fs.async_impl:
        return getattr(fs, method)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=TIMEOUT, **options)


@lru_cache
def file_system(scheme: str, process: int, tries: int = 1) -> Any:
    """Open the file system of a scheme in this process; that of S3 makes ``tries`` of a request."""
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"{scheme}:// needs a file system that is not here ({error})\n  fix:  {install_command('remote')}"
        ) from None
    options: dict[str, Any] = {}
    if hasattr(kind, "call_s3"):  # which by default tries again after some errors only
        from s3fs.core import set_custom_error_handler

        set_custom_error_handler(lambda error: _may_pass(error, _code(error)))
        timeouts = {"connect_timeout": 10, "read_timeout": TIMEOUT / 2, "max_pool_connections": 32}
        options = {"config_kwargs": {**timeouts, "retries": {"max_attempts": 0}}}
    fs = kind(use_listings_cache=False, skip_instance_cache=True, **options)
    if options:
        fs.retries = tries
    return fs


def _response(error: BaseException) -> dict[str, Any]:
    """The answer of S3 that made an error, which s3fs has put into words."""
    for one in (error, error.__cause__):
        found = getattr(one, "response", None)
        if isinstance(found, dict):
            return found
    return {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _status(error: BaseException) -> int:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    for name in ("status_code", "status", "code"):
        status = status or getattr(error, name, None)
    return status if isinstance(status, int) else 0


def _may_pass(error: BaseException, code: str) -> bool:
    """Say if the same call may go through later."""
    if _QUOTA.search(code) or _status(error) == 507:
        return False
    chain = [error, *([error.__cause__] if error.__cause__ else [])]
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    return (
        any(map(_AGAIN.fullmatch, names))
        or code in _AGAIN_CODES
        or _status(error) in (408, 429, *range(500, 600))
    )


def _error(error: BaseException, code: str, place: str, seconds: float | None = None) -> StorageError:
    """The error in the user's words, without anything that a back end may have told of credentials."""
    name = type(error).__name__
    if code in _REFUSED:
        rule, fix = _REFUSED[code]
    elif _QUOTA.search(code) or _status(error) == 507 or _QUOTA.search(str(error)):
        rule, fix = "the quota of the store is used up", "delete what is not needed, or have it raised"
    elif "Credentials" in name or code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"):
        rule, fix = _LOGIN
    elif isinstance(error, PermissionError) or _status(error) in (401, 403):
        said = f" ({code})" if code and not code.isdigit() else ""
        rule, fix = f"the store refuses these credentials{said}", _LOGIN[1] + ", and have them allowed it"
    elif seconds is not None:
        rule = f"it did not answer for {seconds:.0f} s ({code or name}: {_plain(error)})"
        fix = "see if the store is up, and if its address is right (of S3 AWS_ENDPOINT_URL)"
    else:
        rule, fix = f"{code or name}: {_plain(error)}", "correct it, or name another place"
    return StorageError(f"{place} cannot be used: {rule}\n  fix:  {fix}")


def _plain(error: BaseException) -> str:
    """The text of an error in one line, without credentials."""
    text = redact(" ".join(str(error).split()))[:300]
    for key, value in os.environ.items():
        if value and len(value) > 3 and re.search("KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING", key):
            text = text.replace(value, "***")
    return text or type(error).__name__
