"""What stands in docs/metrics.md, the board and the scrape configuration is what the services export."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.expositions import Described, described, expositions

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "deploy/grafana/dashboards/libra.json"
PROMETHEUS = ROOT / "deploy/prometheus/prometheus.yml"
PROVISIONING = ROOT / "deploy/grafana/provisioning"
SECTIONS = {
    "Scheduler": "scheduler", "Rollout worker": "rollout", "Trainer worker": "trainer", "Tool environment": "toolenv",
    "Node agent": "node",
}  # fmt: skip
WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "or", "and", "unless", "bool", "offset"}
TARGET_LABELS = {"job", "instance"}
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"


@pytest.fixture
async def exported(tmp_path):
    async with expositions(tmp_path) as made:
        yield {service: described(exposition) for service, exposition in made.items()}


def names_and_labels(expr: str) -> tuple[set[str], set[str]]:
    """Metrics and labels that a PromQL expression names."""
    rest, labels = re.sub(r'"[^"]*"', '""', expr), set()

    def matchers(found: re.Match[str]) -> str:
        labels.update(re.findall(rf"({NAME})\s*(?:=~|!~|!=|=)", found[0]))
        return ""

    def grouping(found: re.Match[str]) -> str:
        labels.update(re.findall(NAME, found[1]))
        return ""

    rest = re.sub(r"\{[^}]*\}", matchers, rest)
    rest = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", grouping, rest)
    rest = re.sub(r"\[[^\]]*\]", "", rest)
    return set(re.findall(rf"(?<![\w:.])({NAME})(?!\s*\(|[\w:])", rest)) - WORDS, labels


def test_the_reader_of_expressions_reads():
    expr = 'histogram_quantile(0.5, sum by (le, a) (rate(x_bucket{b="c", d=~"e|f"}[1m]))) / on(g) y_total > 0 or 2 * z'
    assert names_and_labels(expr) == ({"x_bucket", "y_total", "z"}, {"le", "a", "b", "d", "g"})


async def test_every_exposition_parses_and_names_each_family_once(tmp_path):
    async with expositions(tmp_path) as made:
        for service, exposition in made.items():
            text = generate_latest(exposition.registry).decode()
            families = [f.name for f in text_string_to_metric_families(text)]
            assert len(families) == len(set(families)), service
            assert "libra_build_info" in families
            own = [f for f in families if not f.startswith("process_")]
            assert all(re.fullmatch(r"libra_[a-z0-9_]+", f) for f in own)
            # in OpenMetrics a counter's family goes without _total, so that another family may not bear that name
            kinds = [(d.name.removesuffix("_total"), d.type) for d in described(exposition)]
            assert len({name for name, _ in kinds}) == len(kinds)


async def test_no_two_services_export_the_same_name_and_counters_are_totals(exported):
    seen: dict[str, str] = {}
    for service, metrics in exported.items():
        for metric in metrics:
            assert (metric.type == "counter") == metric.name.endswith("_total")
            if metric.name.startswith("libra_") and metric.name != "libra_build_info":
                assert seen.setdefault(metric.name, service) == service


async def test_the_document_lists_exactly_what_is_exported(exported):
    listed: dict[str, set[Described]] = {}
    section = ""
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if line.startswith("## "):
            section = SECTIONS[line.removeprefix("## ")]
        row = re.fullmatch(r"\| `(\w+)` \| (\w+) \| ([\w, ]*) ?\| (.+) \|", line)
        if row:
            labels = tuple(re.findall(r"\w+", row[3]))
            listed.setdefault(section, set()).add(Described(row[1], row[2], labels))
    common = listed.pop("")
    for service, metrics in exported.items():
        own = {m for m in metrics if not m.name.startswith("process_")}
        assert own - common == listed[service], service
        assert common <= own


async def test_the_board_asks_for_what_is_exported(exported):
    every = {s: m for metrics in exported.values() for m in metrics for s in m.series}
    jobs = {job["job_name"] for job in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]}
    board = json.loads(BOARD.read_text())
    used = set()
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names, labels = names_and_labels(target["expr"])
            assert names, target["expr"]
            unknown = names - every.keys() - {"up"}
            assert not unknown, f"{panel['title']}: {unknown}"
            known = {label for n in names - {"up"} for label in every[n].labels} | TARGET_LABELS | {"le"}
            shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
            assert labels | shown <= known, target["expr"]
            assert set(re.findall(r'job="([^"]*)"', target["expr"])) <= jobs
            used |= names
    for needed in (
        "libra_accelerators", "libra_accelerator_role", "libra_queue_trajectories", "libra_generated_tokens_total",
        "libra_trained_tokens_total", "libra_reward_mean", "libra_step_staleness_versions",
        "libra_staleness_bound_versions", "libra_preemptions_total", "libra_reassignments_total",
        "libra_reassignment_seconds_sum", "libra_toolenv_call_seconds_bucket", "libra_toolenv_calls_total",
        "libra_sessions", "libra_commit_seconds_bucket", "up",
    ):  # fmt: skip
        assert needed in used


def test_the_board_is_well_made():
    board = json.loads(BOARD.read_text())
    assert board["title"] == "Libra"
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        assert panel["datasource"]["uid"] == "prometheus"


def test_grafana_finds_prometheus_and_the_board():
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["uid"], source["url"]) == ("prometheus", "prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/libra.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def test_the_scrape_configuration_knows_all_services_of_the_cluster():
    config = yaml.safe_load(PROMETHEUS.read_text())
    assert config["global"]["scrape_interval"] == "5s"
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == {"prometheus", "scheduler", "toolenv", "node", "rollout", "trainer"}
    fixed = {name: job["static_configs"][0]["targets"] for name, job in jobs.items() if "static_configs" in job}
    assert fixed["scheduler"] == ["scheduler:9100"]
    found = {n: j["dns_sd_configs"][0] for n, j in jobs.items() if "dns_sd_configs" in j}
    assert {n: (sorted(d["names"]), d["port"]) for n, d in found.items()} == {
        "node": (["hybrid", "rollout", "trainer"], 9100),
        "rollout": (["hybrid", "rollout"], 9101),
        "trainer": (["hybrid", "trainer"], 9102),
        "toolenv": (["toolenv", "toolenv-python"], 9100),
    }
    assert {(d["type"], d["refresh_interval"]) for d in found.values()} == {("A", "5s")}
