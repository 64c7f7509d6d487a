"""A picture of every page, of a real run; `make screenshots` puts them where the deploy docs show them."""

import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

STEPS = 60
"""Of the run, before the first picture: curves should have a shape."""
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
ONE = "trajectories-one"
PICTURES = {
    "overview": ("light", WIDE), "timeline": ("light", WIDE), "staleness": ("dark", WIDE), "rollouts": ("light", WIDE),
    "weights": ("light", WIDE), "trajectories": ("light", WIDE), ONE: ("light", WIDE), "alerts": ("light", WIDE),
    "config": ("light", WIDE), "logs": ("dark", WIDE), "overview-phone": ("light", PHONE),
    "timeline-phone": ("light", PHONE),
}  # fmt: skip
LONG = ("config", "logs", "trajectories")
"""Pages of which the top is enough."""

SCROLL_TO = """(heading) => {
    const text = document.querySelector("main pre").firstChild, range = document.createRange();
    const place = Math.max(0, text.data.indexOf(heading));
    range.setStart(text, place); range.setEnd(text, place + 1);
    scrollTo(0, range.getBoundingClientRect().top - 120);
}"""


@pytest.fixture(scope="session")
def gallery(tmp_path_factory):
    """Where pictures go: the folder that `LAMINAR_SCREENSHOTS` names, or one that is thrown away."""
    named = os.environ.get("LAMINAR_SCREENSHOTS")
    return Path(named) if named else tmp_path_factory.mktemp("screenshots")


def fill(page, name):
    """Wait until a page shows what it has."""
    if name.startswith("trajectories"):
        page.wait_for_selector("tbody tr a")
        if name == ONE:
            page.select_option('select[name="outcome"]', "trained")
            mixed = page.locator("tbody tr", has_text=re.compile(r"\d to \d"))  # sampled by several versions
            mixed.first.locator("a").click()
            page.wait_for_selector("#tokens span.fill1")
    elif name in ("config", "logs"):
        page.wait_for_function("() => document.querySelector('main pre').textContent.length > 200")
        if name == "config":
            page.evaluate(SCROLL_TO, "[rollout]")
        else:
            page.get_by_label("Lines that contain").fill("laminar")
    elif name.startswith("timeline"):
        page.wait_for_selector(".legend .swatch")
        for role in ("trainer-0", "rollout-1", "relay-0"):
            page.locator("tbody tr", has_text=role).wait_for()
    elif name != "alerts":
        page.wait_for_function(
            "() => { const plots = [...document.querySelectorAll('.plot[role=img]')]; return plots.length > 0"
            " && plots.every((plot) => plot.querySelector('canvas') && /now .*\\d/.test(plot.ariaLabel)); }"
        )


@pytest.mark.parametrize("name", PICTURES)
def test_every_page_shows_what_it_has_and_is_pictured(page, live, gallery, name):
    live.wait_for_step(STEPS)
    theme, size = PICTURES[name]
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size(size)
    page.goto(f"{live.url}/#/{name.partition('-')[0]}")
    fill(page, name)
    page.mouse.move(1, 1)
    page.screenshot(path=gallery / f"{name}.png", full_page=name not in LONG and size is WIDE)
    assert (gallery / f"{name}.png").stat().st_size > 8000
