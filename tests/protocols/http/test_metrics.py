"""`/metrics`, checked like promtool does, and for Runnel's own rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from runnel.broker.monitoring.exposed_metrics import exposed_name
from runnel.broker.monitoring.metrics import Description, MetricKind, MetricUnit
from runnel.config import Authentication, SecuritySettings
from runnel.security.rights import Grant
from runnel.security.tokens import TokenFile, new_token
from tests.protocols.http.busy_broker import (
    HOSTILE,
    OPENMETRICS,
    Scraped,
    running,
    scrape,
    scrape_at_work,
    work,
)
from tests.protocols.http.scene import in_loop

_NAME = re.compile(r"(runnel|process)_[a-z0-9]+(_[a-z0-9]+)*")
# As promtool's linter has them: units that are no base units, and abbreviations.
_BAD_WORDS = {
    "ns", "ms", "us", "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "kb", "mb", "kib",
    "mib", "kilobytes", "megabytes", "bits", "percent", "gauge", "counter", "histogram", "summary",
}  # fmt: skip
_SERIES_MAX = 20_000


# --- As promtool would ---


def check_conventions(scraped: Scraped) -> None:
    text, families = scraped.text, scraped.families
    helped = re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE)
    typed = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert [name for name, _ in helped] == [name for name, _ in typed]
    assert len(set(typed)) == len(typed) == len({family.name for family in families})
    for _, words in helped:
        assert words[0].isupper() or words[0].isdigit(), words
        assert words.endswith("."), words
    for family in families:
        check_family(family)
    samples = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families
        for sample in family.samples
    ]
    assert len(samples) == len(set(samples)), "a series is told twice"
    assert len(samples) < _SERIES_MAX


def check_family(family: Metric) -> None:
    assert _NAME.fullmatch(family.name), family.name
    assert not set(family.name.split("_")) & _BAD_WORDS, family.name
    assert family.type in ("counter", "gauge", "histogram"), family
    for unit in ("seconds", "bytes"):  # a unit stands at the end
        assert unit not in family.name.split("_")[:-1] or "per" in family.name, family.name
    names = {sample.name for sample in family.samples}
    match family.type:
        case "counter":
            assert names <= {f"{family.name}_total"}
        case "gauge":
            assert names <= {family.name}
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
        case "histogram":
            check_histogram(family)
    keys = {tuple(sorted(set(sample.labels) - {"le"})) for sample in family.samples}
    assert len(keys) <= 1, f"{family.name}: the labels differ"
    for sample in family.samples:
        assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in sample.labels)


def check_histogram(family: Metric) -> None:
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    bounds = [float(sample.labels["le"]) for sample in buckets]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == float("inf")
    counts = [sample.value for sample in buckets]
    assert counts == sorted(counts), "buckets are cumulative"
    (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
    (total,) = [sample.value for sample in family.samples if sample.name.endswith("_sum")]
    assert counts[-1] == count
    assert bool(total) <= bool(count)


@in_loop
async def test_exposition_keeps_the_conventions(tmp_path: Path) -> None:
    async with running(tmp_path) as (server, client):
        scraped = await scrape_at_work(server, client)
        check_conventions(scraped)
        open_one = await scrape(client, accept=OPENMETRICS)
        assert open_one.text.endswith("\n# EOF\n")
        assert open_one.text.count("# EOF") == 1
        assert {family.name for family in open_one.families} == {
            family.name for family in scraped.families
        }


@in_loop
async def test_counters_and_histograms_never_go_down(tmp_path: Path) -> None:
    async with running(tmp_path) as (server, client):
        before = await scrape_at_work(server, client)
        after = await scrape_at_work(server, client)
        grown = 0
        for family in before.families:
            if family.type == "gauge":
                continue
            for sample in family.samples:
                value = after.value(sample.name, **sample.labels)
                assert value >= sample.value, sample
                grown += value > sample.value
        assert grown > 30


# --- What it says ---


@in_loop
async def test_what_the_broker_did_is_reported(tmp_path: Path) -> None:
    async with running(tmp_path) as (server, client):
        scraped = await scrape_at_work(server, client)
        value = scraped.value
        assert value("runnel_messages_in_total") == 30
        assert value("runnel_journal_messages_in_total", journal="main") == 10
        assert value("runnel_journal_stored_bytes", journal="main") > 1000
        assert value("runnel_journal_syncs_total", journal="main") >= 1
        assert value("runnel_subscription_backlog", subscription=HOSTILE, member="") == 10
        assert value("runnel_subscription_in_flight", subscription=HOSTILE, member="") == 10
        assert value("runnel_subscription_consumers", subscription=HOSTILE, member="") == 1
        assert value("runnel_cursor_lag_messages", cursor=HOSTILE) == 8
        assert value("runnel_listener_connections", listener="http") == 1
        assert value("runnel_door_connections", door="http") == 1  # its former name
        assert value("runnel_limit_used", setting="http.connections_max", at_limit="refused") == 1
        assert value("runnel_limit", setting="http.connections_max", at_limit="refused") == 1000
        assert value("runnel_events_total", kind="subscription_made") == 1
        assert value("runnel_ready") == 1
        assert value("runnel_tokens") == 0
        assert value("runnel_disk_free_bytes") > value("runnel_disk_reserve_bytes")
        assert value("process_cpu_seconds_total") > 0
        assert value("process_open_fds") > 3
        (built,) = scraped.labels("runnel_build_info")
        assert set(built) == {"version", "python", "cluster", "node"}


@in_loop
async def test_ages_at_delivery_are_measured_once_a_batch(tmp_path: Path) -> None:
    async with running(tmp_path) as (server, client):
        scraped = await scrape_at_work(server, client)
        # Three batches for the live reader and one run for the consumer, each a second old when it was published.
        assert scraped.value("runnel_live_age_seconds_count") == 3
        assert scraped.value("runnel_work_age_seconds_count") == 1
        assert 3 <= scraped.value("runnel_live_age_seconds_sum") < 60
        assert 1 <= scraped.value("runnel_work_age_seconds_sum") < 60


@pytest.mark.parametrize("accept", ["", "*/*", "application/openmetrics-text;version=x", ",;,="])
@in_loop
async def test_accept_that_makes_no_sense_is_answered_all_the_same(
    accept: str, tmp_path: Path
) -> None:
    async with running(tmp_path) as (_, client):
        assert (await scrape(client, accept=accept)).families


# --- Access ---


@in_loop
async def test_watching_needs_the_right_and_tells_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    watcher, watcher_text = new_token(
        "prometheus", [Grant.parse("read:!system/metrics/*")], now_ns=1
    )
    reader, reader_text = new_token("sensors", [Grant.parse("read:*")], now_ns=1)
    with TokenFile(file).changing() as tokens:
        tokens += [watcher, reader]
    security = SecuritySettings(authentication=Authentication.TOKEN, tokens_file=str(file))
    async with running(tmp_path / "data", security=security) as (server, client):
        assert (await client.get("/metrics")).status_code == 401
        refused = await client.get("/metrics", headers={"authorization": f"Bearer {reader_text}"})
        assert refused.status_code == 403
        client.headers["authorization"] = f"Bearer {watcher_text}"
        await work(server.broker)
        scraped = await scrape(client)
        assert scraped.value("runnel_tokens") == 2
        assert scraped.value("runnel_tokens_refused_total") == 1
        for secret in (watcher_text, reader_text, watcher.sha256, reader.sha256, str(tmp_path)):
            assert secret not in scraped.text


# --- Names ---


@pytest.mark.parametrize(
    ("name", "kind", "unit", "exposed"),
    [
        ("messages_in", MetricKind.COUNTER, MetricUnit.COUNT, "runnel_messages_in"),
        ("bytes_in", MetricKind.COUNTER, MetricUnit.BYTES, "runnel_in_bytes"),
        ("stored_bytes", MetricKind.GAUGE, MetricUnit.BYTES, "runnel_stored_bytes"),
        (
            "publish_time",
            MetricKind.HISTOGRAM,
            MetricUnit.NANOSECONDS,
            "runnel_publish_time_seconds",
        ),
        ("process_cpu", MetricKind.COUNTER, MetricUnit.NANOSECONDS, "process_cpu_seconds"),
    ],
)
def test_names_end_with_their_unit(
    name: str, kind: MetricKind, unit: MetricUnit, exposed: str
) -> None:
    assert exposed_name(Description(name, kind, "Help.", unit)) == exposed
