"""`runnel top` adds up what several nodes report."""

from __future__ import annotations

import msgspec

from runnel.cli.render.node_reports import ReportsByNode
from runnel.cli.render.top_view import head_lines, tables
from tests.cli.test_top_view import DOCUMENTS


def reports_of(*nodes: str) -> ReportsByNode:
    reports = ReportsByNode()
    for node in nodes:
        for name, document in DOCUMENTS.items():
            payload = msgspec.json.encode({**document, "node": node})
            assert reports.take(f"!system/metrics/{name}", payload) == node
    return reports


def test_one_node_is_shown_as_it_reports_itself() -> None:
    reports = reports_of("node-1")
    assert reports.added_up(()) is reports.by_node["node-1"]


def test_rates_and_totals_are_sums() -> None:
    latest = reports_of("node-1", "node-2", "node-3").added_up(())
    assert latest.broker is not None
    assert latest.broker.node == "3 nodes"
    assert latest.broker.rates["messages_in"] == 3 * 1234.4
    assert latest.broker.totals == {"messages_in": 15_000, "messages_out": 36}
    assert latest.broker.gauges["stored_bytes"] == 3 << 20
    assert latest.broker.gauges["topics_kept"] == 1  # all nodes know the same topics
    assert latest.broker.histograms["sync_time"].interval.count == 9
    assert latest.broker.histograms["sync_time"].interval.p99_ns == 2_000_000


def test_rows_of_one_name_become_one() -> None:
    latest = reports_of("node-1", "node-2").added_up(())
    assert latest.topics is not None
    assert [row.topic for row in latest.topics.topics] == ["t0", "t1", "t2"]
    assert {row.rates.messages_out for row in latest.topics.topics} == {20}
    assert latest.journals is not None
    main = next(row for row in latest.journals.journals if row.journal == "main")
    assert (main.segments, main.read_only_shards, main.sync_time_mean_ns) == (4, 2, 1_500_000)
    assert latest.work is not None
    billing = latest.work.subscriptions[0]
    assert (billing.subscription, billing.backlog, billing.dead) == ("billing", 3000, 4)
    assert billing.consumers == 4  # each has a part at both nodes
    assert latest.connections is not None
    assert latest.connections.count == 4
    assert head_lines(latest)[0].startswith("2 nodes")
    assert tables(latest, 10)


def test_nodes_that_have_gone_do_not_count() -> None:
    reports = reports_of("node-1", "node-2")
    assert reports.added_up({"node-2"}) is reports.by_node["node-2"]


def test_all_living_nodes_have_to_report() -> None:
    reports = reports_of("node-1")
    assert reports.is_complete({"node-1"})
    assert not reports.is_complete({"node-1", "node-2"})
    assert not ReportsByNode().is_complete(())
