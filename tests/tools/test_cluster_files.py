"""The manifest for Kubernetes, judged by its published schema, and what a run needs of it and the image."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from toolkit.launcher.supervisor import Launch

MANIFEST = Path(__file__).parents[2] / "tools/kubernetes/train.yaml"


DOCKERFILE = MANIFEST.parents[1] / "container/Dockerfile"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def test_manifest_follows_the_schema() -> None:
    for document in documents():
        assert kubernetes_validate.validate(document, "1.31", strict=True) == "1.31"


def test_pods_know_their_number_and_where_the_first_is() -> None:
    service, job = documents()
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    variables = {variable["name"]: variable for variable in container["env"]}
    assert int(variables["NNODES"]["value"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    # A pod of an Indexed Job is called as the Job with its index, in the subdomain of the service.
    assert variables["MASTER_ADDR"]["value"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert int(variables["NGPU"]["value"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_container_has_the_compilers_that_kernels_want() -> None:
    """Debian's g++ has gcc and the C library's headers with it."""
    assert re.search(r"^RUN apt-get .*install .*\bg\+\+", DOCKERFILE.read_text(), re.MULTILINE)


def test_pods_have_the_time_to_save() -> None:
    job = documents()[1]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > Launch(1).shutdown_timeout
