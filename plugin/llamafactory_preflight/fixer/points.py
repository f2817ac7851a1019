"""What each hook does. `hooks.py` says where LLaMA-Factory calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llamafactory_preflight.fixer import session
from llamafactory_preflight.settings import Settings


Original = Callable[..., Any]


def _bound(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def parsed(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """After LLaMA-Factory has read its arguments."""
    result = original()
    session.begin(args[0] if args else kwargs.get("args"), result)
    return result


def tokenizer_loaded(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """After the tokenizer was loaded, with the processor of a multimodal model."""
    result = original()
    model_args = _model_args(args, kwargs)
    has_new_tokens = any(getattr(model_args, name, None) for name in ("add_tokens", "add_special_tokens"))
    session.CURRENT.processor = result.get("processor")
    session.CURRENT.num_tokens = 0 if has_new_tokens else len(result["tokenizer"])
    return result


def _model_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("model_args")


def template(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Instead of LLaMA-Factory's choice of a template."""
    from llamafactory_preflight.fixer import choose

    given = _bound(original, args, kwargs)
    return choose.template_for(original, given["tokenizer"], given["data_args"], Settings.from_environment())


def converter(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Instead of LLaMA-Factory's converter of records."""
    from llamafactory_preflight.fixer.convert import RepairingConverter

    made = original(*args, **kwargs)
    name = _bound(original, args, kwargs)["name"]
    if session.CURRENT.repairs and name in ("sharegpt", "openai"):
        return RepairingConverter(inner=made, formatting=name)
    return made


def processor(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Instead of LLaMA-Factory's processor of a dataset."""
    from llamafactory.data.processor import PackedSupervisedDatasetProcessor

    from llamafactory_preflight.fixer import choose, processors
    from llamafactory_preflight.fixer.template import OfficialTemplate

    given = _bound(original, args, kwargs)
    if not isinstance(given["template"], OfficialTemplate):
        return original(*args, **kwargs)
    stage, data_args = given["stage"], given["data_args"]
    given["template"] = choose.for_stage(
        given["template"], stage, do_generate=given["do_generate"], cutoff_len=data_args.cutoff_len
    )
    made = original(**given)
    kind = {"rm": processors.OfficialPairs, "kto": processors.OfficialFeedback, "pt": processors.Documents}.get(stage)
    if isinstance(made, PackedSupervisedDatasetProcessor):
        kind = processors.OfficialPacks
    if kind is None:
        return made
    return kind(template=made.template, tokenizer=made.tokenizer, processor=made.processor, data_args=made.data_args)


def preprocessed(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Instead of LLaMA-Factory's tokenization of a dataset."""
    from llamafactory_preflight.fixer import dataset
    from llamafactory_preflight.fixer.template import OfficialTemplate

    given = _bound(original, args, kwargs)
    samples = given.pop("dataset")
    if samples is None or not isinstance(given["template"], OfficialTemplate):
        return original(*args, **kwargs)
    return dataset.preprocess(original, samples, given)


def model(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around the loading of the weights."""
    from llamafactory_preflight.fixer import saving

    saving.note_tokenized()
    loaded = original(*args, **kwargs)
    if session.CURRENT.repairs:
        given = _bound(original, args, kwargs)
        is_base = saving.is_base(loaded, given["tokenizer"])
        if changes := saving.fix_end_tokens(loaded, given["tokenizer"]):
            session.say("repaired: " + "; ".join(changes))
        if is_base and given["is_trainable"] and session.CURRENT.is_lora and not session.CURRENT.additional_target:
            session.say(
                "this is a base model, and its <|im_end|> was never trained: LoRA leaves it so, and the model may not "
                "stop. Add `additional_target: embed_tokens,lm_head`"
            )
    return loaded


def training(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around a whole run: adds what writes the side file."""
    from llamafactory_preflight.fixer import saving

    given = _bound(original, args, kwargs)
    given["callbacks"] = [*(given["callbacks"] or []), saving.SideFile()]
    return original(**given)
