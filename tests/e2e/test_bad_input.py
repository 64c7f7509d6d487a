"""Bad input: one sentence with the value and the remedy, a telling exit code, nothing half-started left behind."""

import shutil
import subprocess
import sys

import pytest

from laminar.experience.server import EmbeddedServer

pytestmark = pytest.mark.e2e


def fails(run, code, *words, seconds=60):
    """The run ended with this code and one sentence that holds these words, and left nothing."""
    assert run.wait(seconds) == code, run.text()
    (sentence,) = [line for line in run.text().splitlines() if line.startswith("laminar: ")]
    assert "Traceback" not in run.text()
    for word in words:
        assert word in sentence, sentence
    if any(path.is_dir() for path in run.directory.iterdir()):
        assert run.leftovers() == []


@pytest.fixture
def assets(tmp_path_factory):
    """A copy of the tiny model's folder, to be damaged."""
    from pathlib import Path

    source = Path(__file__).resolve().parents[2] / "models" / "tiny"
    folder = tmp_path_factory.mktemp("assets") / "tiny"
    shutil.copytree(source, folder)
    return folder


def test_a_missing_model_folder(start):
    fails(start("model.path=models/not-there"), 2, "model.path", "models/not-there")


def test_an_unknown_setting(start):
    fails(start("staleness.max_stalness=1"), 2, "staleness.max_stalness", "max_staleness")


def test_a_malformed_row_is_named_by_file_and_line(start, assets):
    data = assets / "train.jsonl"
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:4], '{"prompt": "1', *lines[5:]]))
    fails(start(f"data.path={data}"), 2, "train.jsonl", "5")


def test_a_redis_that_is_not_there(start):
    fails(start("experience.redis_url=redis://localhost:1/0"), 3, "redis://localhost:1/0")


def test_a_redis_that_evicts(start, tmp_path_factory):
    with EmbeddedServer(tmp_path_factory.mktemp("evicting")) as server:
        import redis

        client = redis.Redis.from_url(server.url)
        client.config_set("maxmemory-policy", "allkeys-lru")
        fails(start(f"experience.redis_url={server.url}"), 3, "allkeys-lru", "noeviction")
        client.close()


def test_a_port_that_something_else_listens_on(start):
    listener = subprocess.Popen(
        [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        port = listener.stdout.readline().split("port ")[1].split()[0]
        fails(start(f"experience.redis_url=redis://127.0.0.1:{port}/0"), 3, port)
    finally:
        listener.kill()
        listener.wait()


def test_no_space_in_shared_memory_stops_before_training(start):
    fails(start("relay.keep_versions=1000000000"), 3, "/dev/shm", seconds=120)


def test_a_reward_that_returns_nan_stops_the_run_with_its_text(start, assets):
    (assets / "my_rewards.py").write_text("def broken(prompt, completion):\n    return float('nan')\n")
    recipe = assets / "recipe.toml"
    from pathlib import Path

    text = (Path(__file__).resolve().parents[2] / "deploy" / "recipes" / "tiny.toml").read_text()
    recipe.write_text(text.replace("rollout.tiny:reward", "my_rewards:broken"))
    fails(start("eval.path=''", recipe=recipe), 4, "user_bug", "nan", seconds=120)
