"""Uploads a folder to the Hugging Face Hub, by the package huggingface_hub and whoever is logged in there."""

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
"""Weights of an export, and what tells of them: of an earlier one they would be read in place of ours."""


def push_folder(folder: Path, repository: str) -> str:
    """Upload ``folder`` as the content of the model ``repository``, user/name; a new one is private.

    Weights of before that ``folder`` does not have go from there. Returns its address.

    Raises:
        CheckpointError: it could not be done; no token is in the message.
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
    except Exception as error:  # of many packages: requests of the network, files, rights
        said = one_line(_TOKEN.sub("hf_…", f"{type(error).__name__}: {error}"))
        raise CheckpointError(
            f"{folder} could not be uploaded to {repository}: {said}\n"
            "  It is whole. To upload it: hf auth login, then the same command again, or "
            f"hf upload {repository} {folder}"
        ) from None
    return str(address)
