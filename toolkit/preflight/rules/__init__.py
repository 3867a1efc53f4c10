"""Rules of the preflight, a file for what they check; each is a function that ``@rule`` registers.

``ORDER`` is that in which a reader wants problems: what was asked for, what it is, where it runs, what it
reads.
"""

from toolkit.preflight.rules import (
    attention,
    checkpoint,
    data,
    files,
    fsdp,
    memory,
    mesh,
    metrics,
    mixture,
    model,
    optim,
    options,
    pipeline,
    pipeline_stages,
    tensor_context_parallel,
    weights,
)

ORDER = (
    options,
    optim,
    memory,
    metrics,
    model,
    attention,
    mesh,
    tensor_context_parallel,
    pipeline_stages,
    pipeline,
    fsdp,
    files,
    data,
    mixture,
    checkpoint,
    weights,
)
