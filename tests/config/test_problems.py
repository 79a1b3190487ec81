"""What is refused, in which words, and that all of it is said at once."""

from __future__ import annotations

import pytest

from tests.config.sources import merged, problems

SIZE_HINT = (
    'not a size; write a number and a unit, such as "256MiB" or "10MB", or a number of bytes'
)


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        (
            "[limits]\nmesage_bytes_max = 5",
            "unknown key limits.mesage_bytes_max = 5 (runnel.toml:2); "
            "did you mean limits.message_bytes_max?",
        ),
        (
            "message_bytes_max = 5",
            "unknown key message_bytes_max = 5 (runnel.toml:1); "
            "did you mean limits.message_bytes_max?",
        ),
        ("[limit]\ntags_max = 5", "unknown table limit (runnel.toml:1); did you mean limits?"),
        ("[topic]\nmatch = 'a'", "unknown table topic (runnel.toml:1); did you mean topics?"),
        (
            "zzzzzz = 5",
            "unknown key zzzzzz = 5 (runnel.toml:1); `runnel config show` lists all keys",
        ),
        (
            "[[topics]]\nmatch = 'a'\nretain.aeg = '7d'",
            'unknown key topics[0].retain.aeg = "7d" (runnel.toml:3); '
            "did you mean topics[0].retain.age?",
        ),
        (
            "[http]\nport = 80",
            'unknown key http.port = 80 (runnel.toml:2); did you mean http.listen = "127.0.0.1:80"?',
        ),
        (
            "port = 80",
            'unknown key port = 80 (runnel.toml:1); did you mean native.listen = "127.0.0.1:80"?',
        ),
        (
            "[broker]\nlisten = '127.0.0.1:80'",
            'unknown key broker.listen = "127.0.0.1:80" (runnel.toml:2); did you mean native.listen?',
        ),
        (
            "[native]\nhost = '0.0.0.0'",
            'unknown key native.host = "0.0.0.0" (runnel.toml:2); did you mean native.listen?',
        ),
        # That all keys of a table begin alike makes none of them near.
        (
            "[http]\nqwerty = 80",
            "unknown key http.qwerty = 80 (runnel.toml:2); `runnel config show` lists all keys",
        ),
        (
            "[[topics]]\nmatch = 'a'\nretention = '7d'",
            'unknown key topics[0].retention = "7d" (runnel.toml:3); '
            'did you mean retain = { age = "7d" }?',
        ),
        (
            "[[topics]]\nmatch = 'a'\nretention = '7GiB'",
            'unknown key topics[0].retention = "7GiB" (runnel.toml:3); '
            'did you mean retain = { bytes = "7GiB" }?',
        ),
        (
            "[[topics]]\nmatch = 'a'\n[topics.retian]\nage = '7d'",
            "unknown table topics[0].retian (runnel.toml:3); did you mean topics[0].retain?",
        ),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_right_one(toml: str, problem: str) -> None:
    assert problems(toml) == [problem]


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        (
            "[limits]\nmessage_bytes_max = 'big'",
            f'limits.message_bytes_max = "big" (runnel.toml:2): {SIZE_HINT}',
        ),
        (
            "[limits]\nmessage_bytes_max = 1.5",
            f"limits.message_bytes_max = 1.5 (runnel.toml:2): {SIZE_HINT}",
        ),
        (
            "[limits]\nmessage_bytes_max = true",
            f"limits.message_bytes_max = true (runnel.toml:2): {SIZE_HINT}",
        ),
        (
            "[limits]\nmessage_bytes_max = { a = 1 }",
            f"limits.message_bytes_max = {{…}} (runnel.toml:2): {SIZE_HINT}",
        ),
        (
            "[limits]\nmessage_bytes_max = 0",
            "limits.message_bytes_max = 0 (runnel.toml:2): too small; the least is 1B",
        ),
        (
            "[limits]\nmessage_bytes_max = -1",
            "limits.message_bytes_max = -1 (runnel.toml:2): too small; the least is 1B",
        ),
        (
            "[limits]\nbatch_bytes_max = '2GiB'",
            'limits.batch_bytes_max = "2GiB" (runnel.toml:2): too large; the most is 64MiB',
        ),
        (
            "[limits]\ntags_max = '64'",
            'limits.tags_max = "64" (runnel.toml:2): '
            "not a whole number; write one without quotes, such as 64",
        ),
        (
            "[limits]\ntags_max = 0",
            "limits.tags_max = 0 (runnel.toml:2): too small; the least is 1",
        ),
        (
            "[log]\nretention_interval = 10",
            "log.retention_interval = 10 (runnel.toml:2): "
            'not a duration; write numbers and units, such as "7d", "1h30m" or "500ms"',
        ),
        (
            "[log]\nretention_interval = '1us'",
            'log.retention_interval = "1us" (runnel.toml:2): too small; the least is 1ms',
        ),
        (
            "[log]\nproducer_age_max = '999999w'",
            'log.producer_age_max = "999999w" (runnel.toml:2): '
            "too large; the most is 106751d23h47m16s854ms775us807ns",
        ),
        ("data = 5", "data = 5 (runnel.toml:1): not text; write it in quotes"),
        ("data = ''", 'data = "" (runnel.toml:1): empty; leave the key out for its default'),
        (
            'data = "a\\u0000b"',
            'data = "a\\u0000b" (runnel.toml:1): control characters are not allowed here',
        ),
        (
            "[[topics]]\nmatch = 'a'\nretain = '7d'",
            'topics[0].retain = "7d" (runnel.toml:3): a table of keys, not a value; '
            'write retain = { age = "7d" }',
        ),
        (
            "[[topics]]\nmatch = 'a'\nrotate = '1h'",
            'topics[0].rotate = "1h" (runnel.toml:3): a table of keys, not a value; '
            'write rotate = { every = "1h" }',
        ),
        ("limits = 5", "limits = 5 (runnel.toml:1): a table of keys, not a value"),
        (
            "topics = 5",
            "topics = 5 (runnel.toml:1): not a list of rules; write [[topics]] above each of them",
        ),
        (
            "[topics]\nmatch = 'a'",
            "topics = {…} (runnel.toml:1): "
            "not a list of rules; write [[topics]] above each of them",
        ),
        ("topics = [5]", 'topics[0] = 5 (runnel.toml:1): not a rule; write { match = "…" }'),
        ("[[topics]]\nkeep = 'disk'", "topics[0] (runnel.toml:1): match is missing"),
        (
            "[[topics]]\nmatch = 'a'\nkeep = 'dsk'",
            'topics[0].keep = "dsk" (runnel.toml:3): '
            "use one of none, memory, disk; did you mean disk?",
        ),
        (
            "[[topics]]\nmatch = 'a'\nretain.until = 5",
            "topics[0].retain.until = 5 (runnel.toml:3): use one of acked, none",
        ),
        (
            "[[topics]]\nmatch = 'a'\nlast_value = 'yes'",
            'topics[0].last_value = "yes" (runnel.toml:3): '
            "neither true nor false; write one of them without quotes",
        ),
        (
            "[[topics]]\nmatch = 'a'\nrotate.at = 00:00:00",
            "topics[0].rotate.at = 00:00:00 (runnel.toml:3): not a time of day; "
            'write the UTC time of day as "HH:MM", such as "00:00" or "05:30"',
        ),
        (
            "[[topics]]\nmatch = 'a'\nrotate.every = '1ms'",
            'topics[0].rotate.every = "1ms" (runnel.toml:3): too small; the least is 1s',
        ),
    ],
)
def test_bad_value_is_refused_with_what_would_be_right(toml: str, problem: str) -> None:
    assert problems(toml) == [problem]


def test_long_value_is_shortened_in_the_message() -> None:
    (problem,) = problems(f"[limits]\ntags_max = '{'x' * 1000}'")
    assert "xxx… (runnel.toml:2): not a whole number" in problem
    assert len(problem) < 200


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("a = ", "runnel.toml: not valid TOML: Invalid value (at end of document)"),
        ("data = 'x'\ndata = 'y'", "runnel.toml: not valid TOML: Cannot overwrite a value"),
    ],
)
def test_text_that_is_not_toml_is_refused_with_its_place(toml: str, problem: str) -> None:
    (only,) = problems(toml)
    assert only.startswith(problem)


def test_text_nested_beyond_measure_is_refused() -> None:
    (problem,) = problems("a = " + "[" * 100_000)
    assert problem.startswith("runnel.toml: not valid TOML")


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            {"RUNNEL_LIMITS_TAG_MAX": "5"},
            "unknown variable RUNNEL_LIMITS_TAG_MAX; did you mean RUNNEL_LIMITS_TAGS_MAX?",
        ),
        (
            {"RUNNEL_HTTP_PORT": "80"},
            "unknown variable RUNNEL_HTTP_PORT; did you mean RUNNEL_HTTP_LISTEN?",
        ),
        (
            {"RUNNEL_CONFG": "5"},
            "unknown variable RUNNEL_CONFG; did you mean RUNNEL_CONFIG?",
        ),
        (
            {"RUNNEL_XYZZYXYZZY": "5"},
            "unknown variable RUNNEL_XYZZYXYZZY; `runnel config show` lists all keys",
        ),
        (
            {"RUNNEL_TOPICS_0_MATCH": "a"},
            "unknown variable RUNNEL_TOPICS_0_MATCH: rules are set together; "
            "write RUNNEL_TOPICS as a TOML array",
        ),
        (
            {"RUNNEL_LIMITS_TAGS_MAX": "many"},
            'limits.tags_max = "many" (RUNNEL_LIMITS_TAGS_MAX): '
            "not a whole number; write one such as 64",
        ),
        (
            {"RUNNEL_LIMITS_TAGS_MAX": "-3"},
            'limits.tags_max = "-3" (RUNNEL_LIMITS_TAGS_MAX): too small; the least is 1',
        ),
        (
            {"RUNNEL_DATA": ""},
            'data = "" (RUNNEL_DATA): empty; leave the key out for its default',
        ),
        (
            {"RUNNEL_DATA": "a\udcff"},
            'data = "a\\udcff" (RUNNEL_DATA): not valid UTF-8',
        ),
    ],
)
def test_bad_variable_is_refused_by_name(environment: dict[str, str], problem: str) -> None:
    assert problems(environment=environment) == [problem]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sensors/*", '"sensors/*"'),
        ("5", '"5"'),
        ("", '""'),
        ("[]\ndata = 'x'", "\"[]\\ndata = 'x'\""),
        ("[" * 100_000, '"' + "[" * 78 + "…"),
    ],
)
def test_rules_in_a_variable_must_be_a_toml_array(text: str, shown: str) -> None:
    assert problems(environment={"RUNNEL_TOPICS": text}) == [
        f"topics = {shown} (RUNNEL_TOPICS): not a TOML array; "
        'write [{ match = "sensors/*", keep = "memory" }, …]'
    ]


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("limits.tags_max", "--set limits.tags_max: write --set key=value"),
        ("=5", "--set : write --set key=value"),
        ("tags=5", 'unknown key tags = "5" (--set tags); `runnel config show` lists all keys'),
        (
            "tags_max=5",
            'unknown key tags_max = "5" (--set tags_max); did you mean limits.tags_max?',
        ),
        (
            "http.port=80",
            'unknown key http.port = "80" (--set http.port); did you mean http.listen = "127.0.0.1:80"?',
        ),
        ("topcis=[]", 'unknown key topcis = "[]" (--set topcis); did you mean topics?'),
        (
            "topics[0].keep=disk",
            "--set topics[0].keep: rules are set together; "
            "write --set 'topics=[{ match = \"…\" }]'",
        ),
        (
            "limits.tags_max=1.5",
            'limits.tags_max = "1.5" (--set limits.tags_max): '
            "not a whole number; write one such as 64",
        ),
    ],
)
def test_bad_flag_is_refused_by_name(assignment: str, problem: str) -> None:
    assert problems(assignments=[assignment]) == [problem]


def test_problems_of_all_sources_are_reported_at_once() -> None:
    found = problems(
        "dta = 'x'\n[limits]\ntags_max = 'x'\n[log]\nwriters = 0",
        {"RUNNEL_LOG_WRITRS": "2"},
        ["limits.batch_bytes_max=1B"],
    )
    assert [line.split(";")[0] for line in found] == [
        'unknown key dta = "x" (runnel.toml:1)',
        'limits.tags_max = "x" (runnel.toml:3): not a whole number',
        "log.writers = 0 (runnel.toml:5): too small",
        "unknown variable RUNNEL_LOG_WRITRS",
        'limits.message_bytes_max = "1MiB" (default) is more than limits.batch_bytes_max = "1B" '
        "(--set limits.batch_bytes_max): a batch has to hold the largest message",
    ]


def test_overridden_value_is_still_checked() -> None:
    (problem,) = problems("[limits]\ntags_max = 0", {"RUNNEL_LIMITS_TAGS_MAX": "5"})
    assert problem.startswith("limits.tags_max = 0 (runnel.toml:2)")


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        (
            "[limits]\nbatch_bytes_max = '32MiB'\n[native]\nframe_bytes_max = '33MiB'",
            'limits.batch_bytes_max = "32MiB" (runnel.toml:2) is more than '
            'log.group_bytes_max = "16MiB" (default): one write has to hold the largest batch',
        ),
        (
            "[native]\nframe_bytes_max = '4MiB'",
            'native.frame_bytes_max = "4MiB" (runnel.toml:2) is too small for '
            'limits.batch_bytes_max = "4MiB" (default): a frame has to hold the largest batch and '
            "1MiB beside it, 5MiB together",
        ),
        (
            "[log]\nwrite_queue_bytes_max = '8MiB'",
            'log.group_bytes_max = "16MiB" (default) is more than '
            'log.write_queue_bytes_max = "8MiB" (runnel.toml:2): '
            "the queue has to hold one full write",
        ),
        (
            "[log]\nlast_value_bytes_max = '32MiB'",
            'log.last_value_bytes_max = "32MiB" (runnel.toml:2) is more than '
            'log.catalogue_log_bytes_max = "16MiB" (default): '
            "the catalogue's log has to hold the largest last value",
        ),
        (
            "[[topics]]\nmatch = 'a'\npartitions = 2000",
            "topics[0].partitions = 2000 (runnel.toml:3) is more than "
            "limits.partitions_max = 1024 (default): lower the one or raise the other",
        ),
        (
            "[[topics]]\nmatch = 'a'\nretain.bytes = '1MiB'",
            'topics[0].rotate.bytes = "256MiB" (default) is more than '
            'topics[0].retain.bytes = "1MiB" (runnel.toml:3): '
            "retention removes whole segments, so they have to be smaller",
        ),
        (
            "[[topics]]\nmatch = 'a'\nrotate = { every = '1h', at = '05:00' }",
            'topics[0].rotate.at = "05:00" (runnel.toml:3) is more than '
            'topics[0].rotate.every = "1h" (runnel.toml:3): '
            "the times of rotation repeat within it",
        ),
        (
            "[[topics]]\nmatch = 'a'\nkeep = 'none'\nretain.age = '7d'",
            'topics[0].retain.age = "7d" (runnel.toml:4) has no effect with '
            'topics[0].keep = "none" (runnel.toml:3): such messages are not stored',
        ),
        (
            "[[topics]]\nmatch = 'a'\n[[topics]]\nmatch = 'a'",
            'topics[1].match = "a" (runnel.toml:4) can never apply: the first match decides, '
            'and topics[0].match = "a" (runnel.toml:2) comes before it',
        ),
        (
            "[[topics]]\nmatch = '*'\n[[topics]]\nmatch = 'b/*'",
            'topics[1].match = "b/*" (runnel.toml:4) can never apply: the first match decides, '
            'and topics[0].match = "*" (runnel.toml:2) comes before it',
        ),
        (
            "[[topics]]\nmatch = 'a'\njournal = 'live'",
            'topics[0].journal = "live" (runnel.toml:3) is the name for topics that are not kept; '
            "choose another",
        ),
        (
            "[[topics]]\nmatch = 'a'\njournal = 'j'\n"
            "[[topics]]\nmatch = 'b'\njournal = 'j'\nretain.age = '7d'",
            'topics[1].retain.age = "7d" (runnel.toml:7) differs from '
            'topics[0].retain.age = "none" (default), '
            'but both rules share topics[1].journal = "j" (runnel.toml:6)',
        ),
    ],
)
def test_contradiction_is_refused_with_both_sides(toml: str, problem: str) -> None:
    assert problems(toml) == [problem]


def test_rules_may_share_a_journal_when_they_agree() -> None:
    rule = "[[topics]]\nmatch = '{}'\njournal = 'j'\npartitions = {}\nretain.age = '7d'\n"
    assert len(merged(rule.format("a", 1) + rule.format("b", 2)).settings.topics) == 2


def test_rule_for_system_topics_may_follow_one_for_all_others() -> None:
    toml = "[[topics]]\nmatch = '*'\n[[topics]]\nmatch = '!system/*'\nkeep = 'none'"
    assert len(merged(toml).settings.topics) == 2


def test_faulty_value_is_not_blamed_twice() -> None:
    (problem,) = problems("[limits]\nmessage_bytes_max = 'x'\nbatch_bytes_max = '1B'")
    assert problem.startswith('limits.message_bytes_max = "x"')


def test_rules_that_are_none_are_each_named_once() -> None:
    found = problems("topics = [5, {}, 6, {}]")
    assert [line.split(" ")[0] for line in found] == [f"topics[{index}]" for index in range(4)]


def test_rules_that_give_every_topic_its_own_journal_need_not_agree() -> None:
    toml = (
        "[[topics]]\nmatch = 'a/*'\njournal = '{topic}'\nretain.age = '1d'\n"
        "[[topics]]\nmatch = 'b/*'\njournal = '{topic}'\nretain.age = '7d'"
    )
    ages = [rule.retain.age_ns for rule in merged(toml).settings.topics]
    day_ns = 86_400 * 10**9
    assert ages == [day_ns, 7 * day_ns]


def test_what_kubernetes_sets_beside_a_service_called_runnel_is_not_ours() -> None:
    environment = {
        "RUNNEL_SERVICE_HOST": "10.0.0.1",
        "RUNNEL_SERVICE_PORT_NATIVE": "7470",
        "RUNNEL_PORT": "tcp://10.0.0.1:7470",
        "RUNNEL_PORT_7470_TCP_ADDR": "10.0.0.1",
    }
    assert merged("", environment).settings == merged().settings


def test_a_list_of_texts_has_nothing_else() -> None:
    hint = 'not a list of texts; write ["a", "b"]'
    assert problems('[http]\nhosts = "a"') == [f'http.hosts = "a" (runnel.toml:2): {hint}']
    assert problems("[http]\nhosts = [1]") == [f"http.hosts = […] (runnel.toml:2): {hint}"]
    assert problems('[http]\nhosts = [""]') == [
        "http.hosts = […] (runnel.toml:2): empty; leave the key out for its default"
    ]
    assert problems("", {}, ["http.hosts=a,,b"]) == [
        'http.hosts = "a,,b" (--set http.hosts): empty; leave the key out for its default'
    ]
