from __future__ import annotations

import pytest

from llamafactory_preflight.errors import UserError
from llamafactory_preflight.units import GIB, MIB, gib, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24GB", 24 * GIB),
        ("24g", 24 * GIB),
        (" 21.5 GiB ", int(21.5 * GIB)),
        ("512MiB", 512 * MIB),
        ("1TB", 1024 * GIB),
    ],
)
def test_amounts(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 apples", "-3GiB", "24GiB extra", "0GiB", "1e3GiB"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(UserError):
        parse_memory(text)


def test_a_bare_number_is_refused_and_told_how_to_write_it() -> None:
    with pytest.raises(UserError, match=r"'24' has no unit \(--gpu\)\. Write 24GiB\."):
        parse_memory("24", where="--gpu")


def test_gib_is_the_inverse() -> None:
    assert gib(parse_memory("21.5GiB")) == 21.5
