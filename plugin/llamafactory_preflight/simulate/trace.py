"""One shallow model through loading, training and evaluation, with every storage followed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from llamafactory_preflight.memory.estimate import Card, cublas_workspace, evaluates
from llamafactory_preflight.run import RunDescription
from llamafactory_preflight.simulate import kernels, liger, loop, model, optimizer, replay
from llamafactory_preflight.simulate.arguments import model_arguments
from llamafactory_preflight.simulate.autocast import CudaAutocast
from llamafactory_preflight.simulate.card import CARD, CardMode, cuda_properties
from llamafactory_preflight.simulate.pictures import Pictures
from llamafactory_preflight.simulate.storage import StorageTracker


def trace(
    run: RunDescription,
    config: Any,
    *,
    card: Card,
    front: int,
    back: int,
    patches: Sequence[int] = (),
    recordings: replay.Recordings | None = None,
) -> StorageTracker:
    """Simulates loading, optimizer steps and an evaluation batch.

    Args:
        run: The run.
        config: The transformers config of a model shallow enough to be simulated as a whole.
        card: The card.
        front: First layers that are stretches of their own.
        back: Last layers that are.
        patches: Patches of each image of a sample.
        recordings: What `replay` has recorded for another depth of the same run; more is added.

    Returns:
        The tracker with its whole log.
    """
    text = config.get_text_config()
    autocast = CudaAutocast()
    with ExitStack() as stack:
        if run.enable_liger_kernel:
            stack.enter_context(liger.applied_without_launches(run, config))
        network = model.skeleton(config, model_arguments(run))
        tracker = StorageTracker(vocab_size=text.vocab_size, replacements=kernels.replacements())
        stack.enter_context(cuda_properties(card.compute_capability))
        stack.enter_context(kernels.cuda_kernels(autocast, padded=loop.is_padded(run)))
        stack.enter_context(optimizer.on_paper(run))
        for mode in (CardMode(), tracker, autocast):
            stack.enter_context(mode)

        tracker.stretch("load/load")
        tracker.allocating("weights")
        # Weights are cut out of one block that transformers reserves for all of them (caching_allocator_warmup).
        tracker.expandable_segments = True
        model.put_on_card(network)
        tracker.expandable_segments = card.expandable_segments
        tracker.allocating("adapters" if run.finetuning_type in ("lora", "oft") else "weights")
        network = model.prepare(network, config, run)
        tracker.stretch("load/ready")

        tracker.stretch("forward_backward/start")
        tracker.allocating("buffers")
        size = cublas_workspace(card.compute_capability)
        workspaces = [torch.empty(size, dtype=torch.uint8, device=CARD) for _ in ("main thread", "autograd's thread")]
        tracker.allocating("activations")
        if run.neftune_noise_alpha is not None:
            from transformers.integrations.neftune import activate_neftune  # of transformers 5 alone

            activate_neftune(network, run.neftune_noise_alpha)  # type: ignore[no-untyped-call]
        loop.wrap_forward(network, run)
        stack.enter_context(replay.loops_replayed(network, tracker, {} if recordings is None else recordings))
        steps = optimizer.build(network, run)
        layers = model.decoder_layers(network, text.num_hidden_layers)
        stack.enter_context(loop.watched_layers(layers, tracker, front=front, back=back))
        pictures = Pictures.of(config, patches) if patches else None
        batches = loop.train(network, steps, run, tracker, first=liger.tunes_kernels(run, text), pictures=pictures)
        if evaluates(run):
            loop.evaluate(network, run, tracker, pictures)
        tracker.stretch("end/end")
        del workspaces, batches
    return tracker
