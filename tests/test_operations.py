"""docs/operations/ keeps its word: dashboard and alerts ask for metrics that exist, and the pages tell of all."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from runnel.broker.monitoring.exposed_metrics import NodeMetrics
from runnel.cli.main import run
from runnel.protocols.http.encoding.exposition import Exposition
from tests.protocols.http.busy_broker import Scraped, running, scrape_at_work

FOLDER = Path(__file__).parents[1] / "docs" / "operations"
# Prometheus' own.
_OF_PROMETHEUS = {"up"}
_SELECTOR = re.compile(r"\b((?:runnel|process)_\w+|up)\b(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
# Those that a scrape adds, and that of several processes.
_LABELS_OF_SCRAPES = {"job", "instance", "node"}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Scraped:
    async def main() -> Scraped:
        async with running(tmp_path_factory.mktemp("data")) as (server, client):
            scraped = await scrape_at_work(server, client)
            of_several = b"".join(Exposition("").encode([NodeMetrics("node-1", [])])).decode()
            families = list(text_string_to_metric_families(of_several))
            return Scraped(scraped.text + of_several, scraped.families + families)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def known(scraped: Scraped) -> dict[str, set[str]]:
    """The series of a real scrape by name, and their labels."""
    found: dict[str, set[str]] = {}
    for family in scraped.families:
        found.setdefault(family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return loaded


def check_expression(expression: str, known: dict[str, set[str]]) -> None:
    """Every metric exists, and has the labels by which it is chosen."""
    found = _SELECTOR.findall(expression)
    assert found, expression
    for name, selector in found:
        if name in _OF_PROMETHEUS:
            continue
        assert name in known, f"{name} of: {expression}"
        labels = set(_LABEL.findall(re.sub(r'"[^"]*"', "", selector)))
        assert labels <= known[name] | _LABELS_OF_SCRAPES, f"{labels} of {name} in: {expression}"


# --- The alerts ---


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_asks_for_metrics_that_exist(
    rule: dict[str, Any], known: dict[str, set[str]]
) -> None:
    check_expression(rule["expr"], known)
    for opening, closing in ("()", "[]", "{}"):
        assert rule["expr"].count(opening) == rule["expr"].count(closing)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_says_what_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("Runnel")
    assert rule["labels"]["severity"] in ("page", "ticket")
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "action", "runbook"}
    page, _, anchor = annotations["runbook"].partition("#")
    headings = re.findall(r"^### (\w+)$", (FOLDER / page).read_text(), re.MULTILINE)
    assert rule["alert"] in headings
    assert anchor == rule["alert"].lower()


def test_runbook_has_no_alert_that_does_not_exist() -> None:
    headings = re.findall(r"^### (\w+)$", (FOLDER / "runbook.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules()]


def test_what_somebody_must_be_woken_for_has_an_alert() -> None:
    asked = " ".join(rule["expr"] for rule in rules())
    for metric in (
        "up", "runnel_node_up", "runnel_ready", "runnel_disk_free_bytes", "runnel_subscription_backlog",
        "runnel_subscription_oldest_age_seconds", "runnel_dead_letters_total", "runnel_cursor_lag_messages",
        "runnel_limit_used", "runnel_loop_lag_seconds_bucket", "runnel_sync_time_seconds_bucket",
        "runnel_tokens_refused_total", "runnel_damage",
    ):  # fmt: skip
        assert re.search(rf"\b{metric}\b", asked), metric


# --- The dashboard ---


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panel_asks_for_metrics_that_exist(
    panel: dict[str, Any], known: dict[str, set[str]]
) -> None:
    assert panel["description"]
    for target in panel["targets"]:
        check_expression(target["expr"], known)
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            names = [name for name, _ in _SELECTOR.findall(target["expr"])]
            assert all(label in known[name] | _LABELS_OF_SCRAPES for name in names), target


def test_dashboard_can_be_imported_anywhere() -> None:
    board = dashboard()
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    sources = re.findall(r'"uid": "([^"]*)"', (FOLDER / "grafana-dashboard.json").read_text())
    assert set(sources) == {"${datasource}", "runnel"}
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == [
        "Overview",
        "Traffic",
        "Latency",
        "Storage",
        "Acknowledged work",
        "Cursors and live readers",
        "Limits",
        "Process",
    ]


def test_panels_do_not_lie_upon_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies upon {taken.get((x, y))}"
                taken[x, y] = panel["title"]


# --- The pages ---


def test_table_of_metrics_is_complete_and_right(scraped: Scraped) -> None:
    told = re.findall(
        r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| (.+) \|$",
        (FOLDER / "metrics.md").read_text(),
        re.MULTILINE,
    )
    table = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in told
    }
    assert len(table) == len(told)
    helped = dict(re.findall(r"^# HELP (\S+) (.+)\.$", scraped.text, re.MULTILINE))
    assert table.keys() ^ helped.keys() == set()
    for family in scraped.families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind, labels, text = table[name]
        assert kind == family.type
        assert text == helped[name], name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, name


def test_commands_of_the_runbook_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = (FOLDER / "runbook.md").read_text() + (FOLDER / "alerts.yml").read_text()
    commands = set(re.findall(r"`runnel ((?:[a-z-]+ ?){1,2})", text))
    assert len(commands) > 8
    for command in commands:
        words = command.split()
        assert any(run([*words[:length], "--help"]) == 0 for length in range(len(words), 0, -1)), (
            command
        )
    capsys.readouterr()
