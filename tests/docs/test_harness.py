"""What runs the pages finds what is wrong with one: a block that escapes, an unknown comment, another output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.block_checks import check
from tests.docs.output import difference
from tests.docs.pages import Block, PageError, Remark, Word, parse
from tests.docs.reader import reading
from tests.docs.shell import check_command, plain_words, runnel_commands, statements


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\nls\n```\n", "has to say its language"),
        ("words\n\n    ls\n", "by indentation"),
        ("<!-- not run: lazy -->\n```sh\nls\n```\n", "no comment begins with 'not run'"),
        ("<!-- exit code: 2 -->\n\n```sh\nls\n```\n", "directly above a block"),
    ],
)
def test_block_that_would_escape_is_refused(text: str, problem: str) -> None:
    with pytest.raises(PageError, match=re.escape(problem)):
        list(parse("page.md", text))


def test_language_that_nobody_knows_is_refused() -> None:
    with pytest.raises(PageError, match="nobody knows how to check this language"):
        check(Block("page.md", 1, "cobol", "STOP RUN."))


def test_comments_belong_to_the_block_below_or_stand_alone() -> None:
    text = "<!-- broker: none -->\n\ntext\n\n<!-- file: a.toml -->\n<!-- numbers vary -->\n```toml\n```\n"
    remark, block = parse("page.md", text)
    assert remark == Remark("page.md", 1, Word.BROKER, "none")
    assert isinstance(block, Block)
    assert block.notes == {Word.FILE: "a.toml", Word.NUMBERS_VARY: ""}


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("toml", "[http]\nlisten_on = 1\n", "listen_on"),
        ("sh", "runnel pub --no-such-option\n", "no-such-option"),
        ("sh", "seq 1 3 | runnel pubb a\n", "pubb"),
        ("sh", "bin/no-such-program\n", "no bin/no-such-program"),
        ("ini", "[Service]\nExecStart=/usr/bin/runnel serve --nonsense\n", "nonsense"),
        ("dockerfile", "FROM python\nINSTALL runnel\n", "INSTALL"),
        ("yaml", "scrape_configs: [{job_name: a, interval: 1s}]\n", "interval"),
        ("json", "{", "Expecting"),
    ],
)
def test_block_that_is_not_run_is_wrong_all_the_same(
    language: str, text: str, problem: str
) -> None:
    with pytest.raises(AssertionError, match=problem):
        check(Block("page.md", 1, language, text))


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("a  1", "a 1\n"),
        ("a\n…\nz", "a\nb\nc\nz\n"),
        ("…\nz", "z\n"),
        ("took 3 ms at 12:00:01", "took 4.5 ms at 23:59:59\n"),
        ("runnel_0123456789ab_…", "runnel_fedcba987654_Zm9v-_\n"),
        ("key … end", "key of any kind end\n"),
    ],
)
def test_output_that_differs_where_it_may_is_the_same(expected: str, printed: str) -> None:
    assert difference(expected, printed) is None


@pytest.mark.parametrize(
    ("expected", "printed"),
    [("a", ""), ("", "a\n"), ("a 1", "a 2\n"), ("a", "a\nb\n"), ("a\nb", "a\n")],
)
def test_output_that_differs_elsewhere_is_reported(expected: str, printed: str) -> None:
    assert difference(expected, printed) is not None


def test_numbers_vary_where_the_page_says_so() -> None:
    assert difference("1,024 of 7", "3 of 12", do_numbers_vary=True) is None


def test_statements_are_lines_unless_they_go_on() -> None:
    text = "ls a \\\n  b  # comment\n\n# only a comment\necho 'two\nlines'\n"
    assert list(statements(text)) == ["ls a \\\n  b  # comment", "echo 'two\nlines'"]
    loop = "for a in 1 2; do\n  echo $a\ndone\n"
    assert list(statements(loop)) == [loop]


@pytest.mark.parametrize(
    "statement",
    [
        "runnel pub a $X",
        "seq 3 | runnel pub a",
        "runnel poll a > b",
        "runnel serve",
        "ls",
        "runnel consume a --exec b",
    ],
)
def test_what_needs_a_shell_gets_one(statement: str) -> None:
    assert plain_words(statement) is None


def test_commands_are_found_in_pipes_and_behind_variables() -> None:
    found = list(
        runnel_commands("A=1 runnel topics && seq 3 | runnel pub 'a b' -q  # runnel nothing\n")
    )
    assert found == [["topics"], ["pub", "a b", "-q"]]
    for words in found:
        check_command(words)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of its own repository."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    return tmp_path / "page.md"


def test_terminals_variables_and_files_last_from_block_to_block(page: Path, tmp_path: Path) -> None:
    page.write_text(
        "<!-- broker: none -->\n\n"
        "<!-- file: said.sh -->\n```sh\nwhile read -r line; do echo said $line $WORD; done < pipe\n```\n"
        "```sh\nmkdir place\ncd place\nWORD=aloud\nmkfifo ../pipe\ncd ..\n```\n"
        "<!-- keeps running: talker until said one -->\n```sh\n(echo one; sleep 60) > pipe & bash said.sh\n```\n"
        "<!-- output of: talker -->\n```text\nsaid one aloud\n```\n"
        "```console\n$ ls\n…\nplace\n…\n```\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    with reading("page.md", home) as reader:
        reader.read()


def test_command_that_does_not_keep_running_is_reported(page: Path, tmp_path: Path) -> None:
    page.write_text(
        "<!-- broker: none -->\n\n<!-- keeps running: short until done -->\n```sh\n"
        "trap '' INT; echo done; exit 3\n```\n"
    )
    with (
        reading("page.md", tmp_path) as reader,
        pytest.raises(AssertionError, match=r"did not keep running|ended with 3"),
    ):
        reader.read()
