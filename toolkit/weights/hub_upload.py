"""Upload a folder to the Hugging Face Hub with huggingface_hub and its stored login."""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.errors import CheckpointError, one_line

_TOKEN = re.compile(r"hf_\w+")
_WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
)
"""Files of an earlier export to delete, because they might be read instead of the new ones."""


def push_folder(folder: Path, repository: str) -> str:
    """Upload ``folder`` to the model ``repository`` (user/name); a missing repository is created as private.

    Earlier weights in the repository that are not in ``folder`` are deleted. Returns the repository's URL.

    Raises:
        CheckpointError: the upload failed; the message does not contain the token.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            commit_message=f"Upload {folder.name} of a training run",
            delete_patterns=[*_WEIGHTS],
        )
    except Exception as error:  # several packages raise their own errors: network, files, permissions
        reason = one_line(_TOKEN.sub("hf_…", f"{type(error).__name__}: {error}"))
        raise CheckpointError(
            f"{folder} could not be uploaded to {repository}: {reason}\n"
            "  The folder is complete. To upload it, log in with hf auth login, then run the same command "
            f"again, or hf upload {repository} {folder}"
        ) from None
    return str(address)
