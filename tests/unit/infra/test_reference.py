"""The reference pages say what the code says."""

import pytest

from infra.reference import DOCS, PAGES


@pytest.mark.parametrize("file", PAGES)
def test_reference_page_is_current(file: str) -> None:
    assert (DOCS / file).read_text() == PAGES[file](), "run `python -m infra.reference`"
