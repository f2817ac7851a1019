"""Asks a model hub, within a short time and with a clear answer."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from typing import Any

from llamafactory_preflight.errors import Unmodelled, UserError, words
from llamafactory_preflight.phrases import phrase


TIMEOUT_SECONDS = 3.0


def get_json(url: str, *, name: str, token: str | None = None) -> Any:
    """Fetches JSON within the time limit, which a socket's own does not keep: that counts per address and per read.

    Raises:
        UserError: The hub does not have the model called `name`, or not for us.
        Unmodelled: The hub cannot be reached, or answers with something else.
    """
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(_fetch(url, name, token))
        except (UserError, Unmodelled) as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    if not answers:
        seconds = f"{TIMEOUT_SECONDS:.0f}"
        raise Unmodelled(
            phrase("The hub cannot be reached to read {name} within {seconds} seconds", name=name, seconds=seconds)
        )
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _fetch(url: str, name: str, token: str | None) -> Any:
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "llamafactory-preflight"})
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")  # Not for the hosts it redirects to.
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise UserError(
                phrase("{name} does not exist on the hub or needs permission", name=name),
                where=url,
                next_step="Check the name, or set HF_TOKEN",
            ) from None
        if error.code == 404:
            raise UserError(
                phrase("The hub has no {name} with a config.json", name=name), where=url, next_step="Check the name"
            ) from None
        raise Unmodelled(phrase("The hub answered with error {code} for {name}", code=error.code, name=name)) from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        reason = words(reason) if isinstance(reason, Exception) else reason
        raise Unmodelled(
            phrase("The hub cannot be reached to read config.json of {name} ({reason})", name=name, reason=reason)
        ) from None
