"""The Grafana dashboard's panels run on the views, and compose provisions it with the data source it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import clickhouse_connect
import pytest

from consumers.clickhouse.migrate import migrate

GRAFANA = Path(__file__).parents[3] / "infra" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "rollstream.json").read_text())
QUERIES = {panel["title"]: target["rawSql"] for panel in DASHBOARD["panels"] for target in panel["targets"]}
QUERIES["variable run"] = DASHBOARD["templating"]["list"][0]["query"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The embedded engine with all migrations applied to the database the dashboard names."""
    client = clickhouse_connect.get_client(interface="chdb", path=str(tmp_path_factory.mktemp("chdb")))
    client.command("CREATE DATABASE rollstream")
    client.database = "rollstream"
    client.command("USE rollstream")
    migrate(client)
    yield client
    client.close()


@pytest.mark.parametrize("title", QUERIES)
def test_a_panel_runs_on_the_views(client: Any, title: str) -> None:
    assert client.query(QUERIES[title].replace("${run}", "no such run")).result_rows == []


def test_trend_panels_have_their_x_field(client: Any) -> None:
    trends = [p for p in DASHBOARD["panels"] if p["type"] in ("trend", "barchart")]
    assert trends
    for panel in trends:
        described = client.query(f"DESCRIBE ({panel['targets'][0]['rawSql']})").result_rows
        assert panel["options"]["xField"] in {row[0] for row in described}, panel["title"]


def test_every_panel_names_the_provisioned_data_source() -> None:
    provisioned = (GRAFANA / "provisioning" / "datasources" / "clickhouse.yaml").read_text()
    for panel in DASHBOARD["panels"]:
        for part in (panel, *panel["targets"]):
            assert f"uid: {part['datasource']['uid']}\n" in provisioned
            assert f"type: {part['datasource']['type']}\n" in provisioned
