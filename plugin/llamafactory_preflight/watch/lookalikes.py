"""Errors that are not out-of-memory but look like it, or that follow from the same mistakes: one sentence each."""

from __future__ import annotations

import re


SENTENCES = (
    (
        r"device-side assert triggered|index out of range in self|srcIndex < srcSelectDimSize",
        "A token id lies beyond the model's embedding, most often because tokens were added: set resize_vocab=true, "
        "and check that tokenizer and model are of the same checkpoint. On the GPU the lines above may show another "
        "place; CUDA_LAUNCH_BLOCKING=1 shows the true one.",
    ),
    (
        r"DataLoader worker .* (killed by signal: Bus error|out of shared memory)|No space left on device.*/dev/shm",
        "The workers that read data ran out of shared memory (/dev/shm), which a container limits to 64 MiB unless "
        "told otherwise: start it with --ipc=host or --shm-size=8g, or set dataloader_num_workers=0.",
    ),
    (
        r"DataLoader worker .* (killed by signal: Killed|exited unexpectedly)",
        "A worker that reads data was killed, most likely because main memory ran out: set dataloader_num_workers=0.",
    ),
    (
        r"One of the subprocesses has abruptly died",
        "A process that tokenizes was killed, most likely because main memory ran out: set "
        "preprocessing_num_workers=1, or streaming=true.",
    ),
    (
        r"(ds_opt_adam|cpu_adam|CPUAdamBuilder|CUDA_HOME does not exist|CUDAMismatchException)",
        "DeepSpeed could not build its CPU optimizer (cpu_adam), which offloading needs. It takes nvcc of the CUDA "
        "version that torch was built with, a C++ compiler and ninja; with DS_SKIP_CUDA_CHECK=1 a minor difference of "
        "versions is accepted. `ds_report` shows what is missing.",
    ),
    (
        r"(pin memory thread|pin_memory|cudaHostAlloc|cudaHostRegister)",
        "Page-locked memory could not be had. Under WSL 2 and small memlock limits there is little of it: set "
        "dataloader_pin_memory=false, and in a DeepSpeed file pin_memory to false.",
    ),
)


def sentence(text: str) -> str | None:
    """What to say about an error with this text, or None."""
    return next((words for pattern, words in SENTENCES if re.search(pattern, text)), None)
