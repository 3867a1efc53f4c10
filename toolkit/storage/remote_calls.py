"""Calls to object storage with retries and clear errors.

A call that fails because of a lost connection, a timeout or a temporary error is retried with exponential
backoff for ``PATIENCE`` seconds, or ``FIRST_PATIENCE`` if the store has never answered. Credentials come from
the backend's usual sources (environment, profile, role); messages never contain them.
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
"""Maximum seconds to retry a call."""
TIMEOUT = 60.0
"""Timeout of one attempt in seconds; an attempt transfers at most ``PART`` bytes."""
_RETRYABLE = re.compile(
    "(ClientConnection|ClientPayload|Connection|EndpointConnection|FSTimeout|HTTPClient|IncompleteRead|"
    "ResponseParser|ResponseStreaming|ServerTimeout|ServiceRequest|ServiceResponse|Timeout)Error|IncompleteRead"
)
"""Names of error classes, of any backend, for errors that may be temporary."""
_RETRYABLE_CODES = (
    "RequestTimeout",
    "SlowDown",
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "Throttling",
)
_PERMANENT = {
    "NoSuchBucket": ("the bucket does not exist", "create it, or correct its name"),
    "RequestTimeTooSkewed": ("the clock of this machine is wrong", "set it (timedatectl, chrony)"),
    "ExpiredToken": ("the credentials have expired", "renew them"),
    "AccessDenied": (
        "the credentials lack permission",
        "grant them permission to list, read, write and delete there",
    ),
}
_QUOTA = re.compile(r"quota|storage.?full|insufficient.?storage|no space", re.IGNORECASE)
_LOGIN = (
    "the credentials are missing or wrong",
    "set them for the store (for S3 AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
)
_answered = False


class StorageError(DataError):
    """Object storage cannot be reached or denies access; never raised for a missing file."""


def retry(call: Callable[[], Any], place: str, *, patience: float | None = None) -> Any:
    """Return the result of ``call``, with retries as described in the module docstring.

    Raises:
            FileNotFoundError, FileExistsError: a file is missing, or already exists.
        StorageError: any other error.
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
            if not _is_retryable(error, code):
                raise _error(error, code, place) from None
            if passed + pause > limit:
                raise _error(error, code, place, passed) from None
            time.sleep(pause * random.uniform(0.5, 1))  # jitter, so that not all ranks retry at the same time
            pause = min(2 * pause, 10)
        else:
            _answered = True
            return result


def run_call(fs: Any, method: str, *args: Any, **options: Any) -> Any:
    """Call a method of a file system, with ``TIMEOUT`` if it is asynchronous."""
    if not fs.async_impl:
        return getattr(fs, method)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=TIMEOUT, **options)


@lru_cache
def file_system(scheme: str, process: int, tries: int = 1) -> Any:
    """Open the file system of a scheme in this process; on S3, with ``tries`` attempts per request."""
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"{scheme}:// needs a package that is not installed ({error})\n"
            f"  fix:  {install_command('remote')}"
        ) from None
    options: dict[str, Any] = {}
    if hasattr(kind, "call_s3"):  # s3fs retries only some errors by default
        from s3fs.core import set_custom_error_handler

        set_custom_error_handler(lambda error: _is_retryable(error, _code(error)))
        timeouts = {"connect_timeout": 10, "read_timeout": TIMEOUT / 2, "max_pool_connections": 32}
        options = {"config_kwargs": {**timeouts, "retries": {"max_attempts": 0}}}
    fs = kind(use_listings_cache=False, skip_instance_cache=True, **options)
    if options:
        fs.retries = tries
    return fs


def _response(error: BaseException) -> dict[str, Any]:
    """Return the S3 response for which s3fs raised an error, or {}."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _status(error: BaseException) -> int:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    for name in ("status_code", "status", "code"):
        status = status or getattr(error, name, None)
    return status if isinstance(status, int) else 0


def _is_retryable(error: BaseException, code: str) -> bool:
    """Return whether the same call may succeed later."""
    if _QUOTA.search(code) or _status(error) == 507:
        return False
    chain = [error, *([error.__cause__] if error.__cause__ else [])]
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    return (
        any(map(_RETRYABLE.fullmatch, names))
        or code in _RETRYABLE_CODES
        or _status(error) in (408, 429, *range(500, 600))
    )


def _error(error: BaseException, code: str, place: str, seconds: float | None = None) -> StorageError:
    """Build a clear error without credentials."""
    name = type(error).__name__
    if code in _PERMANENT:
        rule, fix = _PERMANENT[code]
    elif _QUOTA.search(code) or _status(error) == 507 or _QUOTA.search(str(error)):
        rule, fix = "the quota of the store is exceeded", "delete unneeded files, or have the quota increased"
    elif "Credentials" in name or code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"):
        rule, fix = _LOGIN
    elif isinstance(error, PermissionError) or _status(error) in (401, 403):
        detail = f" ({code})" if code and not code.isdigit() else ""
        rule, fix = f"the store rejects these credentials{detail}", _LOGIN[1] + ", and grant them permission"
    elif seconds is not None:
        rule = f"it did not answer for {seconds:.0f} s ({code or name}: {_redacted(error)})"
        fix = "check that the store is up and that its address is correct (for S3 AWS_ENDPOINT_URL)"
    else:
        rule, fix = f"{code or name}: {_redacted(error)}", "correct it, or use another location"
    return StorageError(f"{place} cannot be used: {rule}\n  fix:  {fix}")


def _redacted(error: BaseException) -> str:
    """Return the message of an error in one line, without credentials."""
    text = redact(" ".join(str(error).split()))[:300]
    for key, value in os.environ.items():
        if value and len(value) > 3 and re.search("KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING", key):
            text = text.replace(value, "***")
    return text or type(error).__name__
