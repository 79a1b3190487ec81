"""Statements, targets and flags as text, without Spark."""

from __future__ import annotations

import pytest

from runnel.cli.commands.pipeline.sql import pairs
from runnel.errors import ClientFault
from runnel.spark.pipelines.statement import (
    check_query,
    explained,
    name_parts,
    quoted,
    streamed_names,
)
from runnel.spark.pipelines.target import QueryTarget, TargetKind


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("SELECT * FROM STREAM sensors", {"sensors"}),
        ("select * from stream(sensors) s join stream `a/b` on true", {"sensors", "a/b"}),
        ("SELECT * FROM STREAM a, STREAM b", {"a", "b"}),
        ("WITH x AS (SELECT * FROM STREAM a) SELECT * FROM x JOIN b", {"a"}),
        ("SELECT 'FROM STREAM x', \"FROM STREAM y\" -- FROM STREAM z\nFROM a", set()),
        ("SELECT 'it''s' /* FROM STREAM\nx */ FROM STREAM a", {"a"}),
        ("SELECT stream FROM a", set()),
        ("SELECT stream a FROM b", set()),
        ("FROM STREAM", set()),
    ],
)
def test_names_behind_the_word_stream_are_streamed(statement: str, names: set[str]) -> None:
    assert streamed_names(statement) == names


@pytest.mark.parametrize(
    "statement", ["SELECT 1", "/* a */ with x as (select 1) table x", "(SELECT 1)", "FROM a"]
)
def test_queries_are_accepted(statement: str) -> None:
    check_query(statement)


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("", "the statement is empty"),
        (" -- nothing", "the statement is empty"),
        ("DROP TABLE x", "begins with DROP: it must be a query"),
        ("insert into a values (1)", "begins with insert"),
    ],
)
def test_what_is_no_query_is_refused_before_spark_runs_it(statement: str, problem: str) -> None:
    with pytest.raises(ClientFault, match=problem):
        check_query(statement)


@pytest.mark.parametrize("name", ["a", "a b", "a`b", "sensors/a.b"])
def test_a_quoted_name_is_one_part_and_itself_again(name: str) -> None:
    assert name_parts(quoted(name)) == [name]


def test_a_qualified_name_has_parts() -> None:
    assert name_parts("`a`.`b.c`") == ["a", "b.c"]


def test_a_mistake_is_shown_where_it_is_without_plan_or_state() -> None:
    statement = "SELECT topc\nFROM STREAM sensors"
    said = (
        "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `topc` cannot be resolved. Did you mean `topic`? "
        "SQLSTATE: 42703; line 1 pos 7;\n'Project ['topc]\n+- ~SubqueryAlias sensors\n\nJVM stacktrace:\n…"
    )
    assert explained(statement, said).splitlines() == [
        "A column with name `topc` cannot be resolved. Did you mean `topic`?",
        "  line 1: SELECT topc",
        "                 ^",
    ]


def test_a_syntax_error_is_shown_where_it_is() -> None:
    said = (
        "\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'nosuch'. SQLSTATE: 42601 (line 2, pos 5)\n\n"
        "== SQL ==\nSELECT 1\n FRM nosuch\n-----^^^\n"
    )
    assert explained("SELECT 1\n FRM nosuch", said).splitlines() == [
        "Syntax error at or near 'nosuch'.",
        "  line 2:  FRM nosuch",
        "               ^",
    ]


def test_an_error_without_a_place_is_its_first_sentence() -> None:
    assert explained("SELECT 1", "hist is not streaming;\n'Project") == "hist is not streaming"


@pytest.mark.parametrize(
    ("text", "target", "short_name"),
    [
        ("topic:alerts/hot", QueryTarget(TargetKind.TOPIC, "alerts/hot"), "alerts/hot"),
        ("topic", QueryTarget(TargetKind.TOPIC, None), "sql"),
        ("table:/data/hot/", QueryTarget(TargetKind.TABLE, "/data/hot/"), "hot"),
        ("table:s3://bucket/hot", QueryTarget(TargetKind.TABLE, "s3://bucket/hot"), "hot"),
    ],
)
def test_targets(text: str, target: QueryTarget, short_name: str) -> None:
    assert QueryTarget.parse(text) == target
    assert target.short_name == short_name


@pytest.mark.parametrize("text", ["alerts", "topic:", "table", "table:", "kafka:x"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ClientFault):
        QueryTarget.parse(text)


def test_pairs_are_cut_at_the_first_equals_sign() -> None:
    assert pairs("--json", ["a = b double", "c=d=e"], "x=y") == {"a": "b double", "c": "d=e"}
    for wrong, problem in ((["a"], "NAME=VALUE, as x=y"), (["a=1", "a=2"], "a is given twice")):
        with pytest.raises(ClientFault, match=problem):
            pairs("--json", wrong, "x=y")
