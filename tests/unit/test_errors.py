"""The closed tree and its table."""

import pytest

from tailrace.errors import ERROR_TABLE, LABEL_TO_ERROR, TailraceError


def leaves(cls: type[TailraceError]) -> set[type[TailraceError]]:
    below = cls.__subclasses__()
    return {cls} if not below else set().union(*(leaves(child) for child in below))


def test_every_leaf_of_the_tree_has_a_row_and_no_row_is_left_over() -> None:
    assert leaves(TailraceError) == set(ERROR_TABLE)


def test_labels_are_unique_and_stable_in_form() -> None:
    assert len(LABEL_TO_ERROR) == len(ERROR_TABLE)
    assert all(label.replace("_", "").isalpha() and label.islower() for label in LABEL_TO_ERROR)


def test_status_says_whose_fault_it_is() -> None:
    for row in ERROR_TABLE.values():
        assert 400 <= row.http_status < 600
        assert row.openai_type != "server_error" or row.http_status >= 500
        assert row.openai_type == "server_error" or row.http_status < 500


def test_exit_codes_are_never_success() -> None:
    assert {row.exit_code for row in ERROR_TABLE.values()} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("cls", ERROR_TABLE)
def test_an_error_finds_its_row_and_keeps_its_message(cls: type[TailraceError]) -> None:
    error = cls("do this next", param="field")
    assert error.row is ERROR_TABLE[cls]
    assert (error.message, error.param, str(error)) == ("do this next", "field", "do this next")
