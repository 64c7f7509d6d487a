"""Prometheus on a real run: every expression of the Grafana dashboard and of the alert rules returns data."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SECONDS = 120.0


def expressions():
    """Those of the dashboard, its variables filled in; and what the alert rules compare with their limits."""
    dashboard = json.loads((DEPLOY / "grafana" / "laminar.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    compared = [
        re.fullmatch(r"(.*?)\s*(?:[<>]=?|[=!]=)\s*[\d.]+", rule["expr"])[1] for group in rules for rule in group["rules"]
    ]
    return [text.replace("$run", ".+").replace("$__rate_interval", "30s") for text in panels + compared]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def prometheus(tmp_path):
    """Start a server with our configuration, scraping a given address every second."""
    program = shutil.which("prometheus")
    assert program, "this test needs a Prometheus server: apt-get install prometheus"
    servers = []

    def start(target):
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
        file, port = tmp_path / "prometheus.yml", free_port()
        file.write_text(yaml.safe_dump(config))
        command = [program, f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        log = (tmp_path / "prometheus.log").open("w")
        servers.append(
            subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT)
        )
        return f"http://127.0.0.1:{port}/api/v1"

    yield start
    for server in servers:
        server.kill()
        server.wait()


def ask(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
    except OSError:
        return {"result": []}


def test_every_expression_of_grafana_and_of_the_alert_rules_returns_data(start, prometheus):
    run = start(
        "run.max_steps=100000", "dashboard.enabled=true", "dashboard.port=0", "eval.path=", "staleness.max_staleness=2"
    )
    run.wait_for_step(3, seconds=300)
    api = prometheus(run.folder.read_state().dashboard_url.removeprefix("http://"))
    wanted = expressions()
    assert len(wanted) > 40
    deadline, missing = time.monotonic() + SECONDS, wanted
    while missing:
        assert time.monotonic() < deadline, f"no data for {missing}"
        time.sleep(1)
        missing = [text for text in missing if not ask(f"{api}/query?query={urllib.parse.quote(text)}")["result"]]
    rules = ask(f"{api}/rules")["groups"]
    assert [rule["health"] for group in rules for rule in group["rules"]] == ["ok"] * 8
